"""Sums over rows in torch's operations: exact, in float32 or wider, however many rows there are."""

from __future__ import annotations

import pytest
import torch

from fusedlayers.functional.sums import summed_rows
from tests.support.allocations import AllocatedBytes
from tests.support.operands import DEVICE


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("rows", [0, 1, 4095, 4096, 4097, 5000, 70_000])
def test_exact_integers(rows: int, dtype: torch.dtype) -> None:
    """Sums beyond what 16 bits count to are not rounded on the way."""
    matrix = torch.randint(0, 3, (rows, 5)).to(DEVICE, dtype)
    found = summed_rows(matrix)
    assert found.dtype == torch.promote_types(dtype, torch.float32)
    assert torch.equal(found.double(), matrix.double().sum(0))


def test_strides_of_any_kind() -> None:
    matrix = torch.randint(-2, 3, (60, 5000)).to(DEVICE, torch.float32).T
    for view in (matrix, matrix[:, ::2], matrix[::1], matrix[:1].expand(4500, 60), matrix[:, :1].expand(5000, 7)):
        assert torch.equal(summed_rows(view), view.double().sum(0).float())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_a_cpu_converts_a_part_at_a_time(dtype: torch.dtype) -> None:
    matrix = torch.ones(3000, 700, dtype=dtype)
    with AllocatedBytes() as found:
        sums = summed_rows(matrix)
    assert found.blocks, "nothing was recorded"
    assert max(found.blocks) <= 2**20 < 4 * matrix.numel()
    assert torch.equal(sums, torch.full_like(sums, 3000))
