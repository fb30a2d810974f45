"""Experts of transformers on a GPU: each family's in kernels, against float64; models compiled and by name."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import fusedlayers as fl
from fusedlayers.closeness import assert_close
from fusedlayers.functional.dispatch import decisions
from tests.models.expert_families import FAMILIES, LAYERS, TOP_K, build, experts, replaced, text
from tests.models.small import InFloat64
from tests.support.operands import DEVICE, ON_GPU

pytest.importorskip("transformers", reason="transformers is not installed: pip install '.[models]'")

# Widths of which the warp-specialised kernels take every operand, beside the tails of the small models.
SIZES = {"hidden_size": 256, "intermediate_size": 192, "moe_intermediate_size": 192, "head_dim": 64}
TOKENS = 700 if ON_GPU else 9


def module_of(name: str, wide: bool, dtype: torch.dtype) -> Any:
    module = experts(build(name, **SIZES) if wide else build(name))[0]
    return module.to(DEVICE, dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("wide", [False, True], ids=["tails", "wide"])
@pytest.mark.parametrize("name", FAMILIES)
def test_in_the_kernels(name: str, wide: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    module = module_of(name, wide, dtype)
    with torch.no_grad():
        for parameter in module.parameters():
            nn.init.normal_(parameter, 0.0, parameter.shape[-1] ** -0.5)
    assert replaced(module)
    width = module.down_proj.shape[2 if module.is_transposed else 1]
    number = module.down_proj.shape[0]
    x = torch.randn(TOKENS, width, device=DEVICE, dtype=dtype)
    weights, index = torch.randn(TOKENS, number, device=DEVICE).softmax(-1).topk(TOP_K, -1)
    monkeypatch.setenv("FUSEDLAYERS_BACKEND", "triton")
    found = fl.verify(module, x, index, weights.to(dtype))
    assert "moe_ffn torch" not in found.paths
    assert found.ok, found


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning:torch")
@pytest.mark.parametrize("name", ["Mixtral", "gpt-oss"])
def test_whole_models(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled in one graph, and by name, they are as close to torch as launched."""
    torch._dynamo.reset()
    model: Any = build(name, **SIZES, experts_implementation="eager").to(DEVICE)
    inputs = {key: tensor.to(DEVICE) for key, tensor in text().items()}
    tokens = inputs["input_ids"].numel()
    expected = model(**inputs).logits
    with InFloat64():
        exact = copy.deepcopy(model).double()(**inputs).logits
    monkeypatch.setenv("FUSEDLAYERS_BACKEND", "triton")
    assert replaced(model)
    compiled: Any = torch.compile(model, fullgraph=True, backend="inductor" if ON_GPU else "aot_eager")
    for run in (model, compiled):
        assert_close(run(**inputs).logits, expected, exact, independent=tokens)
    fl.restore(model)
    model.set_experts_implementation("fusedlayers")
    with decisions() as paths:
        assert_close(model(**inputs).logits, expected, exact, independent=tokens)
    assert sum(count for path, count in paths.items() if path.startswith("moe_ffn ")) == LAYERS
    assert "moe_ffn torch" not in paths
