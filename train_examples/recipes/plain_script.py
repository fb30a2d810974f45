"""A script with its own loop, in the style of nanoGPT: ``python -m train_examples.recipes.plain_script``.

The model (``GPT`` in ``text_model.py``) is plain torch; the script adds one line for its blocks, and one for its loss.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch.utils.data import DataLoader

import fusedlayers as fl
from train_examples.recipes.text_model import GPT, TextWindows


def main(steps: int = 200, folder: str = "runs/plain_script") -> list[float]:
    """Train, save, and return the loss of every step (nats per byte)."""
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = GPT().to(device)
    print(fl.replace(model))  # the first line: before torch.compile and DDP
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    loader = DataLoader(TextWindows(), batch_size=16, shuffle=True, generator=torch.Generator().manual_seed(0))
    losses: list[float] = []
    for step, batch in zip(range(steps), loader, strict=False):
        tokens = batch["input_ids"].to(device)
        x = model(tokens[:, :-1])
        # The second line: instead of F.cross_entropy of the logits x @ wte.weightᵀ.
        loss = fl.functional.linear_cross_entropy(x, model.wte.weight, tokens[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if step % 10 == 0:
            print(f"step {step}: loss {losses[-1]:.3f}")
    Path(folder).mkdir(parents=True, exist_ok=True)
    torch.save(model.state_dict(), f"{folder}/last.pt")
    return losses


if __name__ == "__main__":
    main()
