"""A product of low rank that joins another one on chip: ``x Wᵀ + u Bᵀ``, what an adapted linear layer computes."""

from typing import NamedTuple

import torch

from ..hopper import ALIGNMENT, Geometry, Matrix, matrix, untransposed


class LowRank(NamedTuple):
    """``left @ right``, which joins the product of a weight, and ``left @ other``, which joins that of a gate.

    ``right`` and ``other`` lie as their weights do, ``[N, R]`` beside ``[N, K]`` or ``[R, N]`` beside ``[O, N]``.
    ``right`` takes the columns of ``left`` ``[M, *]`` from the first one on, ``other`` those from ``first`` on; the
    other columns count as zeros, and so do those of ``left`` that are behind both, which hold zeros.
    """

    left: torch.Tensor
    right: torch.Tensor
    other: torch.Tensor | None = None
    first: int = 0

    def joined(
        self, left: torch.Tensor, right: torch.Tensor, other: torch.Tensor | None, axis: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Operands of one product that is the sum of both, whose inner ``axis`` is that of a weight."""
        columns = self.left.shape[1]
        behind = _placed(self.right, 0, columns, axis)
        both = None
        if other is not None and self.other is not None:
            both = torch.cat((other, _placed(self.other, self.first, columns, axis)), axis)
        return torch.cat((left, self.left), 1), torch.cat((right, behind), axis), both

    def copied(self, transposed: bool) -> "LowRank":
        """The same, with ``right`` and ``other`` as TMA reads weights that are ``transposed`` or not."""
        other = None if self.other is None else _readable(self.other, transposed)
        return LowRank(self.left, _readable(self.right, transposed), other, self.first)


def aligned_columns(like: torch.Tensor, columns: int) -> int:
    """As many columns or a few more, so that each row starts and ends where TMA can copy it."""
    unit = ALIGNMENT // like.element_size()
    return -(-columns // unit) * unit


class LowRankCopies(NamedTuple):
    """How TMA copies the operands of a :class:`LowRank`, and what a kernel is told of them."""

    geometries: tuple[Geometry | None, Geometry | None, Geometry | None] = (None, None, None)
    columns: int = 0  # of ``left``
    first: int = 0

    def whole(self, inner: int, step: int) -> int:
        """The inner axis of both products: the second one begins with a step of its own."""
        return -(-inner // step) * step + self.columns if self.columns else inner


def low_rank_copies(
    low_rank: LowRank | None, transposed: bool, left_block: tuple[int, int], right_block: tuple[int, int]
) -> LowRankCopies | None:
    """The copies in blocks of these sizes; None where ``left`` does not lie as TMA wants it.

    Coordinates and extents along rows are whole units of 16 bytes: in between, TMA was seen to stop the kernel.
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
    return LowRankCopies((left.geometry(*left_block), rights[0], rights[1]), left.columns, low_rank.first)


def _matrix(tensor: torch.Tensor) -> Matrix:
    found = matrix(tensor)
    assert found is not None, "laid out for TMA"
    return found


def _placed(factor: torch.Tensor, first: int, size: int, axis: int) -> torch.Tensor:
    """The factor from ``first`` on along an axis of this size, and zeros elsewhere."""
    shape = list(factor.shape)
    shape[axis] = size
    whole = factor.new_zeros(shape)
    whole.narrow(axis, first, factor.shape[axis]).copy_(factor)
    return whole


def _readable(factor: torch.Tensor, transposed: bool) -> torch.Tensor:
    """The factor, or a copy as TMA reads it: rows, or columns if ``transposed``, of whole units filled with zeros."""
    found = matrix(factor)
    if found is not None and found.transposed == transposed and found.columns == aligned_columns(factor, found.columns):
        return factor
    rows = factor.t() if transposed else factor
    copy = _placed(rows, 0, aligned_columns(rows, rows.shape[1]), 1)
    return copy.t() if transposed else copy
