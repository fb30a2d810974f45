"""Sums of a matrix over its rows: against float64, in exact integers, of any strides."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from fusedlayers.closeness import assert_all_close
from fusedlayers.kernels.column_sums import column_sums
from fusedlayers.kernels.tuning import COLUMN_SUM_TILES, ColumnSumTiles
from tests.support.operands import DEVICE, DTYPES, ON_GPU, assert_equal, infinities, needs_kernels

pytestmark = needs_kernels

SMALL = ColumnSumTiles(16, 16, 100)
SIZES = [(1, 1), (5, 16), (16, 3), (33, 17), (1300, 10), (1000, 200)]


def integers(rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    """Their sums stay below what the dtype counts to."""
    sparse = torch.rand(rows, columns) < 0.1
    return (torch.randint(-2, 3, (rows, columns)) * sparse).to(DEVICE, dtype)


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tiles", [SMALL, COLUMN_SUM_TILES], ids=["small", "shipped"])
@pytest.mark.parametrize("size", SIZES + ([(70_000, 520)] if ON_GPU else []), ids=str)
def test_exact_integers(size: tuple[int, int], tiles: ColumnSumTiles, dtype: torch.dtype) -> None:
    """One band and many, more than are added up at once; ragged ends of both axes."""
    dy = integers(*size, dtype)
    assert_equal({"db": column_sums(dy, tiles)}, {"db": dy.double().sum(0).to(dtype)})


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_as_close_as_torch(dtype: torch.dtype) -> None:
    dy = torch.randn(3000, 200).to(DEVICE, dtype)
    ours, theirs = {"db": column_sums(dy, COLUMN_SUM_TILES)}, {"db": dy.sum(0)}
    assert_all_close(ours, theirs, {"db": dy.double().sum(0)})


def test_strides_of_any_kind() -> None:
    dy = integers(70, 90, torch.float16)
    for view in (dy.T, dy[::3], dy[:, 1::2], dy[:1].expand(50, 90), dy[:, :1].expand(70, 20)):
        assert_equal({"db": column_sums(view, SMALL)}, {"db": view.double().sum(0).to(dy.dtype)})


@infinities
def test_no_columns() -> None:
    assert column_sums(torch.empty(5, 0, device=DEVICE), SMALL).shape == (0,)


@infinities
def test_special_values_stay_in_their_column() -> None:
    dy = torch.zeros(40, 20, dtype=torch.float16, device=DEVICE)
    dy[3, 2], dy[7, 5], dy[8, 5], dy[9, 11] = math.inf, math.inf, -math.inf, math.nan
    found = column_sums(dy, SMALL)
    assert found[2] == math.inf
    assert bool(found[[5, 11]].isnan().all())
    rest = [column for column in range(20) if column not in (2, 5, 11)]
    assert not bool(found[rest].any())


@pytest.mark.parametrize("rows", [5, 3000])
def test_values_in_8_bits_beside_another_dtype_of_the_same_layout(rows: int) -> None:
    """In float32, times the scales of rows; a prepared launch is not that of the other dtype."""
    numbers = integers(rows, 64, torch.float16)
    values = numbers.to(torch.float8_e4m3fn)
    scales = torch.randint(-2, 3, (rows,), device=DEVICE).float().exp2()
    ready: dict[object, object] = {}
    for _ in range(2):
        found = column_sums(values, SMALL, ready, scales)
        assert found.dtype == torch.float32
        assert torch.equal(found, (numbers.float() * scales[:, None]).sum(0))
        assert torch.equal(column_sums(numbers, SMALL, ready), numbers.double().sum(0).half())
    assert len(ready) == 2
