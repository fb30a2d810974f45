"""A low-rank product that is added to another one on chip: ``x Wᵀ + u Bᵀ``, as in a linear layer with LoRA."""

from typing import NamedTuple

import torch

from ..hopper import ALIGNMENT, Geometry, Matrix, matrix, untransposed


class LowRank(NamedTuple):
    """``left @ right``, added to the product with a weight, and ``left @ other``, added to that with a gate's weight.

    ``right`` and ``other`` are laid out like their weights: ``[N, R]`` for ``[N, K]``, or ``[R, N]`` for ``[O, N]``.
    ``right`` multiplies the columns of ``left`` ``[M, *]`` from 0 on, ``other`` those from ``first`` on. Columns of
    ``left`` past both are padding and hold zeros.
    """

    left: torch.Tensor
    right: torch.Tensor
    other: torch.Tensor | None = None
    first: int = 0

    def joined(
        self, left: torch.Tensor, right: torch.Tensor, other: torch.Tensor | None, axis: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Operands (left, right, other) of one product equal to the sum of both; ``axis`` is a weight's inner axis."""
        columns = self.left.shape[1]
        behind = _placed(self.right, 0, columns, axis)
        both = None
        if other is not None and self.other is not None:
            both = torch.cat((other, _placed(self.other, self.first, columns, axis)), axis)
        return torch.cat((left, self.left), 1), torch.cat((right, behind), axis), both

    def divided(self, left: torch.Tensor, right: torch.Tensor, other: torch.Tensor | None, axis: int) -> "LowRank":
        """The same for a product of 8-bit values, which is multiplied by these scales of rows and columns afterwards.

        Scales are powers of two, so nothing is rounded; bfloat16 has the range for any of them. ``axis`` is that of
        ``right``'s columns of the result.
        """
        return LowRank(
            _divided(self.left, left, 0), _divided(self.right, right, axis),
            None if self.other is None or other is None else _divided(self.other, other, axis), self.first,
        )  # fmt: skip

    def copied(self, transposed: bool) -> "LowRank":
        """The same, with ``right`` and ``other`` readable by TMA, and ``transposed`` as their weights are."""
        other = None if self.other is None else _readable(self.other, transposed)
        return LowRank(self.left, _readable(self.right, transposed), other, self.first)


def aligned_columns(like: torch.Tensor, columns: int) -> int:
    """``columns`` rounded up to whole units of 16 bytes, in which TMA copies rows."""
    unit = ALIGNMENT // like.element_size()
    return -(-columns // unit) * unit


def columns_of_step(columns: int, step: int) -> int:
    """How many of a step's columns are multiplied if a low-rank product has ``columns``: all, or the first 16 or 32."""
    return next((few for few in (16, 32) if columns <= few), step)


class LowRankCopies(NamedTuple):
    """The TMA geometries of a :class:`LowRank`'s operands, and the sizes that a kernel takes."""

    geometries: tuple[Geometry | None, Geometry | None, Geometry | None] = (None, None, None)
    columns: int = 0  # of ``left``
    first: int = 0
    step: int = 0  # of the mainloop: as many bytes as of the other product

    def whole(self, inner: int, step: int) -> int:
        """The length of the inner axis of both products: the second one begins with a new step of the mainloop."""
        return -(-inner // step) * step + self.columns * step // self.step if self.columns else inner

    def used(self, step: int) -> int:
        """:func:`columns_of_step` of operands that have more bits than those of a ``step`` of the mainloop, or 0."""
        return columns_of_step(self.columns, self.step) if 0 < self.step < step else 0


def low_rank_copies(
    low_rank: LowRank | None, transposed: bool, left_block: tuple[int, int], right_block: tuple[int, int]
) -> LowRankCopies | None:
    """The geometries for blocks of these sizes; None if TMA cannot read ``left``.

    Coordinates and extents along rows are multiples of 16 bytes: others gave an illegal instruction on an H200.
    """
    if low_rank is None:
        return LowRankCopies()
    left = untransposed(low_rank.left)
    if left is None or {left.columns, low_rank.first} != {
        aligned_columns(low_rank.left, n) for n in (left.columns, low_rank.first)
    }:
        return None
    operands = low_rank.copied(transposed)
    rights = [
        None if each is None else _matrix(each).geometry(*right_block) for each in (operands.right, operands.other)
    ]
    return LowRankCopies(
        (left.geometry(*left_block), rights[0], rights[1]), left.columns, low_rank.first, left_block[1]
    )


def _matrix(tensor: torch.Tensor) -> Matrix:
    found = matrix(tensor)
    assert found is not None, "operands of LowRank.copied are readable by TMA"
    return found


def _placed(factor: torch.Tensor, first: int, size: int, axis: int) -> torch.Tensor:
    """The factor, padded with zeros along ``axis`` to ``size`` such that it begins at ``first``."""
    shape = list(factor.shape)
    shape[axis] = size
    whole = factor.new_zeros(shape)
    whole.narrow(axis, first, factor.shape[axis]).copy_(factor)
    return whole


def _divided(factor: torch.Tensor, scale: torch.Tensor, axis: int) -> torch.Tensor:
    """The factor in bfloat16, divided by scales along ``axis``, whose elements along the other axis are contiguous."""
    lines = factor.t() if axis else factor
    found = torch.empty_like(lines, dtype=torch.bfloat16, memory_format=torch.contiguous_format)
    torch.div(lines, scale[:, None], out=found)
    return found.t() if axis else found


def _readable(factor: torch.Tensor, transposed: bool) -> torch.Tensor:
    """The factor, or a copy for TMA: rows, or columns if ``transposed``, zero-padded to whole units of 16 bytes."""
    found = matrix(factor)
    if found is not None and found.transposed == transposed and found.columns == aligned_columns(factor, found.columns):
        return factor
    rows = factor.t() if transposed else factor
    copy = _placed(rows, 0, aligned_columns(rows, rows.shape[1]), 1)
    return copy.t() if transposed else copy
