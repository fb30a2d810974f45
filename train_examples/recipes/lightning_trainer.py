"""Lightning's ``Trainer``: ``python -m train_examples.recipes.lightning_trainer``."""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader

import fusedlayers as fl
from train_examples.recipes.text_model import TextWindows, small_llama


class ByteModel(L.LightningModule):
    """The small Llama, its feed-forward blocks fused."""

    def __init__(self) -> None:
        super().__init__()
        self.model = small_llama()
        print(fl.replace(self.model))  # the one line: here, before every strategy wraps or shards the model
        self.losses: list[float] = []

    def configure_model(self) -> None:
        if self.device_mesh is not None:  # Lightning's FSDP2, ModelParallelStrategy, leaves the sharding to this
            for part in (*self.model.model.layers, self.model):
                fully_shard(part, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch: dict[str, Tensor], batch_index: int) -> Tensor:
        loss: Tensor = self.model(**batch).loss
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


def main(steps: int = 200, folder: str = "runs/lightning", **options: Any) -> list[float]:
    """Train, save, and return the loss of every step (nats per byte); options of the Trainer, such as a strategy."""
    L.seed_everything(0)
    model = ByteModel()
    trainer = L.Trainer(
        max_steps=steps,
        precision="bf16-mixed" if torch.cuda.is_available() else "32-true",
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=False,  # saved once at the end
        default_root_dir=folder,
        **options,
    )
    trainer.fit(model, DataLoader(TextWindows(), batch_size=16, shuffle=True))
    trainer.save_checkpoint(f"{folder}/last.ckpt")
    return model.losses


if __name__ == "__main__":
    main()
