"""Rows sorted by expert: a stable sort, in blocks, whatever the routing, in one launch or in three."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fusedlayers.kernels import grouped_gemm
from fusedlayers.kernels.grouped_gemm import SortedRows, sorting
from tests.support.operands import DEVICE, needs_kernels
from tests.support.selection import draws

pytestmark = needs_kernels


def expected(index: Tensor, experts: int, k: int, block: int, like: SortedRows) -> SortedRows:
    """The same from torch's own stable sort, expert by expert."""
    slots, rows_of = torch.full_like(like.slots, -1), torch.full_like(like.rows_of, -1)
    tile_expert, starts = torch.full_like(like.tile_expert, -1), torch.zeros_like(like.starts)
    row = 0
    for expert in range(experts):
        starts[expert] = row
        own = (index == expert).nonzero().flatten()
        slots[row : row + len(own)] = own.int()
        rows_of[own] = torch.arange(row, row + len(own), device=index.device, dtype=torch.int32)
        end = row + (len(own) + block - 1) // block * block
        tile_expert[row // block : end // block] = expert
        row = end
    starts[experts] = row
    return SortedRows(slots, rows_of, tile_expert, starts, block, k)


def assert_sorted(index: Tensor, experts: int, block: int) -> None:
    packed, rows = grouped_gemm.sort(index, experts, 1, block)
    right = expected(index, experts, 1, block, rows)
    used = int(right.starts[-1])
    assert torch.equal(rows.slots[:used], right.slots[:used])
    for name in ("rows_of", "tile_expert", "starts"):
        assert torch.equal(getattr(rows, name), getattr(right, name)), name
    # What a backward pass finds in the one tensor that is kept.
    again = grouped_gemm.rows_of(packed, index.shape[0], experts, block, 1)
    assert all(torch.equal(mine, other) for mine, other in zip(again[:4], rows[:4], strict=True))
    assert all(part.data_ptr() % 16 == 0 for part in again[:4])


@pytest.mark.sampled(together=2)
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32], ids=str)
@pytest.mark.parametrize("experts", [1, 2, 5, 16, 33])
@pytest.mark.parametrize("slots", [1, 7, 200])
def test_random_routing(dtype: torch.dtype, experts: int, slots: int) -> None:
    for _ in range(draws(2, 10)):
        index = torch.randint(-2, experts + 2, (slots,), device=DEVICE, dtype=dtype)
        assert_sorted(index, experts, 16)
        assert_sorted(index.clamp(0, experts - 1), experts, 64)


@pytest.mark.parametrize("expert", [-1, 0, 3, 7, 8])
def test_all_rows_are_one_experts(expert: int) -> None:
    assert_sorted(torch.full((150,), expert, device=DEVICE), 8, 128)


def test_numbers_far_from_any_expert() -> None:
    index = torch.tensor([2**40, -(2**40), 2**32, 2**31, 1, 0, -1], device=DEVICE)
    assert_sorted(index, 2, 16)


def test_many_slots_are_counted_by_kernels_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of slots whose counts are added up by expert, more of them than a program takes at once."""
    monkeypatch.setattr(sorting, "_SLOTS", 16)
    monkeypatch.setattr(sorting, "_CHUNKS_AT_ONCE", 16)
    for slots in (16 * 16, 16 * 16 + 1, 700):
        assert_sorted(torch.randint(-1, 6, (slots,), device=DEVICE), 5, 16)


def test_the_number_of_rows_is_bounded_by_sizes_alone() -> None:
    for block in (16, 64, 128):
        for slots, experts in ((1, 1), (1, 9), (5, 3), (300, 7), (129, 2)):
            _, rows = grouped_gemm.sort(torch.arange(slots, device=DEVICE) % experts, experts, 1, block)
            assert int(rows.starts[-1]) <= rows.capacity
            assert rows.capacity % block == 0
            assert rows.capacity <= slots + experts * (block - 1)


@pytest.mark.parametrize("experts", [1, 2, 16, 17, 130])
def test_experts_with_the_most_rows_come_first(experts: int) -> None:
    """Those with as many rows in their own order, those without any last."""
    rows = torch.randint(0, 4, (experts,), device=DEVICE) * 16
    starts = torch.cat((rows.new_zeros(1), rows.cumsum(0))).int()
    assert grouped_gemm.longest_first(starts).tolist() == rows.argsort(descending=True, stable=True).tolist()
