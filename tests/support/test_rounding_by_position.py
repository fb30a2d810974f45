# ruff: noqa: ANN001, ANN202 (device code)
"""Products under the interpreter: as exact as NumPy's, the same every time, and otherwise in other places of a tile."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fusedlayers.kernels.device import tl, triton

pytestmark = pytest.mark.interpreter


@triton.jit
def _product_kernel(a_ptr, b_ptr, c_ptr, M: tl.constexpr, K: tl.constexpr, N: tl.constexpr):
    rows, inner, cols = tl.arange(0, M)[:, None], tl.arange(0, K), tl.arange(0, N)[None, :]
    a, b = tl.load(a_ptr + rows * K + inner[None, :]), tl.load(b_ptr + inner[:, None] * N + cols)
    tl.store(c_ptr + rows * N + cols, tl.dot(a, b, input_precision="ieee"))


def product(a: Tensor, b: Tensor) -> Tensor:
    c = torch.empty(a.shape[0], b.shape[1])
    _product_kernel[(1,)](a, b, c, *a.shape, b.shape[1])
    return c


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_row_rounds_otherwise_in_another_place(dtype: torch.dtype) -> None:
    row, b = torch.randn(1, 32).to(dtype), torch.randn(32, 64).to(dtype)
    same_rows = row.expand(32, 32).contiguous()
    found = product(same_rows, b)
    assert len(found.unique(dim=0)) == 32
    assert torch.equal(product(same_rows, b), found)
    torch.testing.assert_close(found, (same_rows.double() @ b.double()).float())


def test_integers_are_exact_and_nan_stays_in_its_row() -> None:
    a, b = torch.randint(-2, 3, (32, 32)).float(), torch.randint(-2, 3, (32, 64)).float()
    assert torch.equal(product(a, b), a @ b)
    a[5, 7], a[6, 0] = torch.nan, torch.inf
    b[0] = 1.0
    found = product(a, b)
    assert bool(found[5].isnan().all())
    assert bool((found[6] == torch.inf).all())
    assert bool(found[7:].isfinite().all())
