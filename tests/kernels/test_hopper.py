"""Which tensors Hopper's TMA takes, and how it sees them: sizes and strides alone, on any machine."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fusedlayers.kernels import hopper
from fusedlayers.kernels.gemm_gemm import Arithmetic, Operands
from fusedlayers.kernels.gemm_gemm.operands import rows_of
from fusedlayers.kernels.hopper import Descriptor, matrix, stacked


def tensor(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.bfloat16)


def seen(found: hopper.Matrix | None) -> tuple[int, int, int, int, bool] | None:
    return None if found is None else (found.rows, found.columns, found.row_stride, found.step, found.transposed)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (tensor(10, 64), (10, 64, 64, 0, False)),
        (tensor(10, 128)[:, :64], (10, 64, 128, 0, False)),
        (tensor(10, 72)[:, 8:], (10, 64, 72, 0, False)),
        (tensor(64, 16).T, (64, 16, 16, 0, True)),
        (tensor(3, 10, 64), (30, 64, 64, 10, False)),
        (tensor(1, 10, 64), (10, 64, 64, 0, False)),
        (tensor(1, 10, 64).expand(3, -1, -1), (10, 64, 64, 0, False)),
        (tensor(3, 64, 16).mT, (192, 16, 16, 64, True)),
        (tensor(3, 10, 128)[:, :, :64], (30, 64, 128, 10, False)),
        # A single row may have any stride.
        (torch.empty_strided((1, 64), (5, 1), dtype=torch.bfloat16), (1, 64, 64, 0, False)),
    ],
    ids=lambda value: f"{tuple(value.shape)}-{value.stride()}" if isinstance(value, Tensor) else "",
)
def test_matrices(given: Tensor, expected: tuple[int, int, int, int, bool]) -> None:
    assert seen(matrix(given)) == expected


@pytest.mark.parametrize(
    "given",
    [
        tensor(10, 65)[:, :64],  # rows 130 bytes apart
        tensor(10, 72)[:, 1:65],  # an address at 2 bytes past a multiple of 16
        tensor(10, 128)[:, ::2],
        tensor(10, 64)[None].expand(3, -1, -1)[:, ::2].permute(1, 0, 2),
        tensor(6, 10, 64)[::2],  # entries further apart than their rows
        tensor(10, 1).expand(10, 64),
        tensor(1, 64).expand(10, 64),  # one row in the place of ten
        tensor(3, 1, 64).expand(3, 10, 64),
    ],
    ids=lambda given: f"{tuple(given.shape)}-{given.stride()}",
)
def test_what_only_the_generic_kernels_take(given: Tensor) -> None:
    assert matrix(given) is None


def test_rows_of_others_may_lie_between() -> None:
    """Of a merged weight, halves behind one another or rows in turn, as they are and transposed."""
    merged = torch.empty(3, 32, 24, dtype=torch.bfloat16)
    for half in (merged[:, :16], merged[:, 16:]):
        found = stacked(half)
        assert found is not None
        assert seen(found) == (2 * 32 + 16, 24, 24, 32, False)
        assert matrix(half) is None
        swapped = stacked(half.mT)
        assert swapped is not None
        assert seen(swapped) == (2 * 32 + 16, 24, 24, 32, True)
    in_turn = stacked(merged[:, 1::2])
    assert in_turn is not None
    assert seen(in_turn) == (3 * 16, 24, 48, 16, False)
    assert stacked(merged[:, :, ::2]) is None
    assert stacked(merged.as_strided((3, 16, 24), (24 * 32 + 8, 24, 1))) is None


def test_coordinates_have_32_bits() -> None:
    assert matrix(torch.empty(2**31, 8, dtype=torch.bfloat16, device="meta")) is None


def test_rows_lie_one_behind_the_other() -> None:
    assert seen(rows_of(tensor(3, 10, 64))) == (30, 64, 64, 10, False)
    assert rows_of(tensor(1, 10, 64).expand(3, -1, -1)) is None, "one matrix for all entries"
    assert rows_of(tensor(64, 16).T) is None, "columns together"


def operands(**changes: Tensor | None) -> Operands:
    given = {"x": tensor(10, 64), "up": tensor(96, 64), "down": tensor(64, 96), "up_bias": tensor(96)}
    given |= {"gate": tensor(96, 64), "gate_bias": None, "seed": None} | changes
    return Operands(**given, arithmetic=Arithmetic("silu", 0.0, "ieee", "coarse"))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "taken"),
    [
        ({}, True),
        ({"gate": None}, True),
        ({"up_bias": tensor(192)[::2]}, False),
        ({"gate": tensor(64, 96).T}, False),  # laid out unlike the other projection
        ({"gate": tensor(64, 96).T, "up": tensor(64, 96).T}, True),
        ({"down": tensor(96, 64).T}, True),
        ({"x": tensor(10, 65)[:, :64]}, False),
        ({"seed": torch.zeros(1, dtype=torch.int64)}, False),
    ],
    ids=lambda value: str(sorted(value)) if isinstance(value, dict) else str(value),
)
def test_operands_are_taken_together(changes: dict[str, Tensor | None], taken: bool) -> None:
    assert (operands(**changes).matrices() is not None) == taken


@pytest.mark.parametrize(
    ("given", "block"), [(tensor(100, 64), [64, 32]), (tensor(64, 104).T, [32, 64])], ids=["rows", "columns"]
)
def test_blocks_are_named_in_the_order_of_memory(given: Tensor, block: list[int]) -> None:
    found = matrix(given)
    descriptor = Descriptor(found.tensor, *found.geometry(64, 32))
    assert (descriptor.shape, descriptor.strides) == ([found.rows, found.columns], [found.row_stride, 1])
    assert descriptor.block_shape == block


@pytest.mark.parametrize(
    ("given", "shape", "strides", "block"),
    [
        # Behind the last column of a transposed entry lies the next one.
        (tensor(3, 72, 104).mT, [3, 72, 104], [72 * 104, 104, 1], [1, 128, 32]),
        (tensor(3, 128, 104).mT, [3 * 128, 104], [104, 1], [128, 32]),
        (tensor(1, 72, 104).mT, [72, 104], [104, 1], [128, 32]),
        (tensor(3, 104, 72), [3 * 104, 72], [72, 1], [32, 128]),
        (tensor(72, 104).mT, [72, 104], [104, 1], [128, 32]),
    ],
    ids=["apart", "whole blocks", "one entry", "rows together", "no entries"],
)
def test_padded_columns_are_not_those_of_the_next_entry(
    given: Tensor, shape: list[int], strides: list[int], block: list[int]
) -> None:
    found = matrix(given)
    padded = found.padded(128)
    assert padded.geometry(32, 128) == hopper.Geometry(shape, strides, block)
    assert padded.step == (1 if len(shape) == 3 else found.step)


@pytest.mark.skipif(not hopper.HAS_GLUON, reason="this Triton has no Gluon")
def test_a_complete_descriptor_has_a_layout() -> None:
    found = matrix(tensor(100, 64))
    complete = Descriptor(found.tensor, *found.geometry(64, 64)).complete()
    assert complete.block_shape == [64, 64]
    assert complete.layout.swizzle_byte_width == 128


@pytest.mark.skipif(not hopper.HAS_GLUON, reason="this Triton has no Gluon")
def test_a_descriptor_like_another_lacks_nothing() -> None:
    """Whatever this Triton's launcher reads of a descriptor, also where an older or newer one has other fields."""
    first, second = matrix(tensor(100, 64)), matrix(tensor(7, 128)[:, :64])
    checked, expected = (
        Descriptor(first.tensor, *first.geometry(64, 64)).complete(),
        Descriptor(second.tensor, *second.geometry(64, 64)).complete(),
    )
    checked.base = None
    made = Descriptor(second.tensor, *second.geometry(64, 64)).like(checked)
    assert type(made) is type(expected)
    assert vars(made).keys() == vars(expected).keys()
    for name, value in vars(expected).items():
        assert getattr(made, name) is value if name == "base" else getattr(made, name) == value, name
    assert checked.base is None
