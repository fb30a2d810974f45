"""dx of one group of hidden units after the other: the sum that is carried between them."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from fusedlayers.kernels import gemm_epilogue as kernels
from fusedlayers.kernels.tuning import EpiloguePipeline, EpilogueTiles
from tests.operands import DEVICE, DTYPES, infinities, needs_kernels

pytestmark = needs_kernels

SIXTEEN_BITS = [dtype for dtype in DTYPES if dtype.itemsize == 2]
TILES = EpilogueTiles(32, 32, 32, 4, 1)
PARTS = pytest.mark.parametrize("parts", [1, 2], ids=["plain", "gated"])
NAN = float("nan")
Terms = list[tuple[Tensor, Tensor]]


def drawn(size: tuple[int, int, int], dtype: torch.dtype, parts: int) -> Terms:
    """Gradients of pre-activations ``[M, N]`` and weights ``[N, K]``, by part."""
    M, N, K = size
    return [
        (torch.randn(M, N, device=DEVICE).to(dtype), (torch.randn(N, K, device=DEVICE) / N**0.5).to(dtype))
        for _ in range(parts)
    ]


def integers(size: tuple[int, int, int], dtype: torch.dtype, parts: int) -> Terms:
    """Sums of their products need more bits than the dtype has, and not more than are carried."""
    M, N, K = size
    most = {torch.float16: 2**15, torch.bfloat16: 2**12}[dtype]
    # Products are up to 6 times a value, and their sums a random walk of N steps.
    value = int(most / (4 * 4 * (parts * N) ** 0.5))
    return [
        (
            torch.randint(-value, value + 1, (M, N), device=DEVICE).to(dtype),
            torch.randint(-6, 7, (N, K), device=DEVICE).to(dtype),
        )
        for _ in range(parts)
    ]


def total(terms: Terms) -> Tensor:
    return sum((d_pre.double() @ weight.double() for d_pre, weight in terms), torch.tensor(0.0).double())


def in_groups(
    terms: Terms, units: int, pipeline: EpiloguePipeline | None = None, tiles: EpilogueTiles = TILES
) -> Tensor:
    """dx of groups of so many hidden units; nothing beside it, and beside what is carried, is written."""
    (M, N), K, dtype = terms[0][0].shape, terms[0][1].shape[1], terms[0][0].dtype
    around = torch.full((M + 2, K + 8), NAN, dtype=dtype, device=DEVICE)
    carried = torch.full((M + 2, -(-K // 2)), 77, dtype=torch.int8, device=DEVICE)
    dx, rest = around[1:-1, :K], carried[1:-1]
    for first in range(0, N, units):
        group = slice(first, min(first + units, N))
        part = [(d_pre[:, group], weight[group]) for d_pre, weight in terms]
        kernels.data_gradient(part, dx, rest, first == 0, group.stop == N, "ieee", tiles, pipeline)
    assert bool(around[0].isnan().all() & around[-1].isnan().all() & around[:, K:].isnan().all())
    assert bool((carried[0] == 77).all() & (carried[-1] == 77).all())
    return dx


def assert_rounded_once(dx: Tensor, terms: Terms, groups: int) -> None:
    """As far from the truth as one rounding of it, and what that many roundings to four bits more add."""
    truth = total(terms)
    error = (dx.double() - truth).square().mean().sqrt()
    once = (truth.to(dx.dtype).double() - truth).square().mean().sqrt()
    assert error < once * (1 + groups / 16**2) ** 0.5


@PARTS
@pytest.mark.parametrize("dtype", SIXTEEN_BITS, ids=str)
@pytest.mark.parametrize(("size", "units"), [((70, 96, 50), 32), ((33, 41, 31), 7), ((1, 9, 1), 2)], ids=str)
def test_sums_beyond_the_dtype_are_exact(
    size: tuple[int, int, int], units: int, dtype: torch.dtype, parts: int
) -> None:
    terms = integers(size, dtype, parts)
    truth = total(terms)
    if truth.numel() > 1:
        assert not torch.equal(truth.to(dtype).double(), truth), "every sum fits the dtype"
    assert torch.equal(in_groups(terms, units), truth.to(dtype))


@PARTS
@pytest.mark.parametrize("dtype", SIXTEEN_BITS, ids=str)
def test_many_groups_are_as_exact_as_one(dtype: torch.dtype, parts: int) -> None:
    terms = drawn((64, 320, 66), dtype, parts)
    assert_rounded_once(in_groups(terms, 16), terms, 20)
    # The check does tell sums that are rounded for each group.
    rounded = torch.zeros(64, 66, dtype=dtype, device=DEVICE)
    for first in range(0, 320, 16):
        part = [(d_pre[:, first : first + 16], weight[first : first + 16]) for d_pre, weight in terms]
        rounded = (rounded.double() + total(part)).to(dtype)
    with pytest.raises(AssertionError):
        assert_rounded_once(rounded, terms, 20)


@pytest.mark.parametrize("dtype", SIXTEEN_BITS, ids=str)
def test_the_smallest_numbers_are_rounded_as_the_dtype_rounds_them(dtype: torch.dtype) -> None:
    """Also below the normal numbers of float16, where it has fewer bits than four more could follow."""
    numbers = torch.tensor([[2.0**-24, 3 * 2.0**-24, 2.0**-14, 2.0**-20, 0.0, 1.0, -(2.0**-15), 2.0**-9]])
    d_pre = torch.stack((numbers, numbers), 2).reshape(1, -1).to(DEVICE, dtype)
    weight = torch.eye(8, device=DEVICE, dtype=dtype).repeat_interleave(2, 0)
    assert torch.equal(in_groups([(d_pre, weight)], 4), (2 * numbers).to(DEVICE, dtype))


def planted(values: Sequence[float], dtype: torch.dtype) -> Terms:
    """In row i and the hidden unit 5 i, each of the values; all other gradients are 0."""
    d_pre = torch.zeros(len(values) + 1, 32, device=DEVICE, dtype=dtype)
    for row, value in enumerate(values):
        d_pre[row, 5 * row] = value
    return [(d_pre, torch.ones(32, 6, device=DEVICE, dtype=dtype))]


@infinities
@pytest.mark.parametrize("dtype", SIXTEEN_BITS, ids=str)
def test_what_is_no_number_stays(dtype: torch.dtype) -> None:
    """From the group on that it comes with, whatever the groups behind it add."""
    values = (float("inf"), -float("inf"), NAN, -NAN, torch.finfo(dtype).max, 0.0)
    terms = planted(values, dtype)
    dx = in_groups(terms, 8)
    for row, value in enumerate((*values, 0.0)):
        expected = torch.full((6,), value, dtype=dtype, device=DEVICE)
        assert torch.equal(dx[row].nan_to_num(7.0, 8.0, 9.0), expected.nan_to_num(7.0, 8.0, 9.0)), value
