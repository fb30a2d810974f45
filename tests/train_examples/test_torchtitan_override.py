"""The recipe for torchtitan: names, initial values, shardings and results are those of its own blocks."""

from __future__ import annotations

import warnings
from dataclasses import fields
from typing import Any

import pytest
import torch

from fusedlayers.functional.dispatch import decisions
from tests.support.processes import Processes

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of what torchtitan imports
    pytest.importorskip("torchtitan.config.override", reason="the recipe is for torchtitan")
    from torchtitan.components.lora import LoRAConverter
    from torchtitan.config.override import OverrideConfig, apply_overrides
    from torchtitan.models.llama3 import model_registry
    from torchtitan.models.llama3.sharding import set_llama3_sharding_config

    from tests.support import torchtitan_checks as checks
    from train_examples.recipes.torchtitan_override import FusedFeedForward

OVERRIDE = OverrideConfig(imports=["train_examples.recipes.torchtitan_override.fused_feed_forward"])


def llama(**options: Any) -> Any:
    """The configuration of torchtitan's smallest Llama, with its shardings."""
    config = model_registry("debugmodel", **options).model
    set_llama3_sharding_config(config, enable_sp=True)
    return config


def test_a_llama_keeps_its_names_and_shardings() -> None:
    plain, fused = llama(), llama()
    lines = apply_overrides(OVERRIDE, fused)
    assert len(lines) == len(plain.layers)
    for before, after in zip(plain.layers, fused.layers, strict=True):
        assert type(after.feed_forward) is FusedFeedForward.Config
        for field in fields(before.feed_forward):
            mine, theirs = getattr(after.feed_forward, field.name), getattr(before.feed_forward, field.name)
            assert repr(mine) == repr(theirs), field.name
    with torch.device("meta"):
        models = [config.build() for config in (plain, fused)]
    models[1].verify_module_protocol()
    shapes = [{name: tensor.shape for name, tensor in model.state_dict().items()} for model in models]
    assert list(shapes[0].items()) == list(shapes[1].items())


def test_a_block_computes_the_same_from_the_same_initial_values() -> None:
    found = []
    for config in (checks.block_config(), checks.fused_feed_forward(checks.block_config())):
        torch.manual_seed(1)
        block = config.build()
        block.init_states()
        x = torch.randn(5, 16, requires_grad=True)
        with decisions() as paths:
            y = block(x)
        found.append([y, *torch.autograd.grad(y.square().sum(), [x, *block.parameters()])])
    assert sum(paths.values()) == 1
    torch.testing.assert_close(found[0], found[1])


def test_blocks_with_adapters_stay() -> None:
    config = llama(converters=[LoRAConverter.Config(rank=4, alpha=8.0)])
    before = [layer.feed_forward for layer in config.layers]
    apply_overrides(OVERRIDE, config)
    assert [layer.feed_forward for layer in config.layers] == before


@pytest.mark.xdist_group("two processes")
@pytest.mark.parametrize(
    ("backend", "tensor_parallel", "fsdp"),
    # FSDP of the backend spmd_types needs a newer torch than 2.13.
    [("partial_dtensor", 1, True), ("partial_dtensor", 2, False), ("spmd_types", 1, False), ("spmd_types", 2, False)],
)
def test_in_two_processes(processes: Processes, backend: str, tensor_parallel: int, fsdp: bool) -> None:
    processes.run(checks.check_parallel, backend, tensor_parallel, fsdp)
