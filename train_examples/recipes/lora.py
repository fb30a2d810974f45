"""LoRA with peft: ``python -m train_examples.recipes.lora``.

Adapters are on the linear layers of the attention and of the feed-forward blocks; the blocks run fused with their
adapters. Frozen weights have no gradient.
"""

from __future__ import annotations

import torch
from peft import LoraConfig, get_peft_model
from torch.utils.data import DataLoader

import fusedlayers as fl
from train_examples.recipes.text_model import TextWindows, small_llama

TARGETS = ["q_proj", "v_proj", "gate_proj", "up_proj", "down_proj"]


def main(steps: int = 200, folder: str = "runs/lora") -> list[float]:
    """Train the adapters, save them, and return the loss of every step (nats per byte)."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    adapters = LoraConfig(r=8, lora_alpha=16, target_modules=TARGETS, task_type="CAUSAL_LM")
    model = get_peft_model(small_llama(), adapters).to(device)
    print(fl.replace(model))  # the one line
    model.print_trainable_parameters()
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trainable, lr=1e-2)
    loader = DataLoader(TextWindows(), batch_size=16, shuffle=True, generator=torch.Generator().manual_seed(0))
    losses: list[float] = []
    for step, batch in zip(range(steps), loader, strict=False):
        loss = model(**{name: tensor.to(device) for name, tensor in batch.items()}).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if step % 10 == 0:
            print(f"step {step}: loss {losses[-1]:.3f}")
    model.save_pretrained(folder)
    return losses


if __name__ == "__main__":
    main()
