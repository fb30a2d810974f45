"""A training loop with accelerate: ``accelerate launch -m train_examples.recipes.accelerate_loop``, or with python."""

from __future__ import annotations

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader

import fusedlayers as fl
from train_examples.recipes.text_model import TextWindows, small_llama


def main(steps: int = 200, folder: str = "runs/accelerate") -> list[float]:
    """Train, save the state, and return the loss of every step (nats per byte)."""
    accelerator = Accelerator(mixed_precision="bf16" if torch.cuda.is_available() else "no")
    model = small_llama()
    report = fl.replace(model)  # the one line: before prepare(), which may wrap the model
    accelerator.print(report)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    loader = DataLoader(TextWindows(), batch_size=16, shuffle=True, generator=torch.Generator().manual_seed(0))
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    losses: list[float] = []
    for step, batch in zip(range(steps), loader, strict=False):
        loss = model(**batch).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if step % 10 == 0:
            accelerator.print(f"step {step}: loss {losses[-1]:.3f}")
    accelerator.save_state(folder)
    return losses


if __name__ == "__main__":
    main()
