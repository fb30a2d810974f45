"""The dtypes of results under autocast: what the docstrings say, at the sizes where torch's own product is none."""

from __future__ import annotations

import pytest
import torch

from fusedlayers import functional
from tests.support.operands import DEVICE, needs_kernels

BACKENDS = ["torch", pytest.param("triton", marks=needs_kernels)]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("width", [1, 2])
def test_late_interaction_of_any_width(width: int, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSEDLAYERS_BACKEND", backend)
    queries = torch.randn(2, 3, width, device=DEVICE, requires_grad=True)
    documents = torch.randn(4, 5, width, device=DEVICE)
    lengths = torch.tensor([0, 8, 20], device=DEVICE)
    with torch.autocast(DEVICE.type, torch.float16):
        scores = functional.maxsim(queries, documents)
        packed = functional.maxsim(queries, documents.flatten(0, 1), cu_seqlens_documents=lengths)
    assert scores.dtype == packed.dtype == torch.float16
    [gradient] = torch.autograd.grad(scores.sum(), queries)
    assert gradient.dtype == torch.float32
