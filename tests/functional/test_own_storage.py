"""Results and gradients have memory of their own size: none keeps alive what pads it, or what it is a part of."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fusedlayers import functional
from fusedlayers.functional.switches import switched
from tests.support.compiled_cases import nothing_compiled  # noqa: F401
from tests.support.contract_cases import BACKENDS, NAMES, made, upstream
from tests.support.loss_operands import CHUNK_ROWS, REDUCTIONS, loss_inputs, on_path, results
from tests.support.operands import DTYPES, infinities, needs_kernels

pytestmark = infinities


def assert_own(name: str, tensor: Tensor) -> None:
    stored, needed = tensor.untyped_storage().nbytes(), tensor.numel() * tensor.element_size()
    assert stored == needed, f"{name} of shape {list(tensor.shape)} keeps {stored} bytes, and has {needed}"
    assert tensor.is_contiguous(), f"{name} of shape {list(tensor.shape)} has the strides {tensor.stride()}"


@pytest.mark.sampled(together=2)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("way", ["eager", "observed"])
@pytest.mark.parametrize("name", NAMES)
def test_results_and_gradients(name: str, way: str, backend: str) -> None:
    with switched({"FUSEDLAYERS_BACKEND": backend}):
        call = made(name, torch.float16, way)
        found = call()
        for place, result in enumerate(found):
            assert_own(f"result {place}", result)
        wanted = [result for result in found if result.requires_grad]
        torch.autograd.backward(wanted, upstream(wanted))
    for key, leaf in zip(call.names, call.leaves, strict=True):
        if leaf.grad is not None:
            assert_own(f"d{key}", leaf.grad)


@pytest.mark.sampled(together=2)
@needs_kernels
@pytest.mark.parametrize("path", ["chunked", "recomputed"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("V", [3, 64, 65, 70, 72, 129])
@pytest.mark.parametrize("rows", [CHUNK_ROWS, 40])
def test_vocabularies_that_are_padded(rows: int, V: int, reduction: str, dtype: torch.dtype, path: str) -> None:
    """Products read copies of the weight that have more rows; in one chunk of tokens and in several."""
    inputs = loss_inputs((29,), 16, V, dtype, bias=True)
    with on_path(path, rows):
        found = results(functional.linear_cross_entropy, inputs, reduction=reduction)
    for name, tensor in found.items():
        assert tensor is not None
        assert_own(name, tensor)
