"""What every process of a group checks of the recipe for Lightning."""

from __future__ import annotations

from unittest import mock

import torch
from lightning.pytorch.strategies import ModelParallelStrategy

import fusedlayers as fl
from fusedlayers.functional.dispatch import decisions
from train_examples.recipes.lightning_trainer import main

STEPS, LAYERS = 3, 2


def check_strategy(name: str, folder: str) -> None:
    """The losses are those of the model as it was, and every block of every step is fused."""

    def losses(kind: str) -> list[float]:
        sharded = ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)
        return main(STEPS, f"{folder}/{kind}", strategy="ddp" if name == "ddp" else sharded, devices=2)

    with mock.patch.object(fl, "replace", return_value="as it is"):
        plain = losses("plain")
    with decisions() as paths:
        fused = losses("fused")
    assert sum(count for path, count in paths.items() if path.startswith("ffn")) == STEPS * LAYERS
    torch.testing.assert_close(fused, plain)
