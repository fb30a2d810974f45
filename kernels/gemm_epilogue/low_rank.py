"""A product of low rank that joins another one on chip: ``x Wᵀ + u Bᵀ``, what an adapted linear layer computes."""

from typing import NamedTuple

import torch

from ..hopper import ALIGNMENT, Geometry, Matrix, matrix, untransposed


class LowRank(NamedTuple):
    """``left @ right``, which joins the product of a weight, and ``left @ other``, which joins that of a gate.

    ``right`` and ``other`` lie as their weights do, ``[N, R]`` beside ``[N, K]`` or ``[R, N]`` beside ``[O, N]``. The
    first columns of ``left`` ``[M, R]`` belong to ``right``, the last ones to ``other``; what is missing of either
    counts as zeros.
    """

    left: torch.Tensor
    right: torch.Tensor
    other: torch.Tensor | None = None

    def joined(
        self, left: torch.Tensor, right: torch.Tensor, other: torch.Tensor | None, axis: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Operands of one product that is the sum of both, whose inner ``axis`` is that of a weight."""
        rank = self.left.shape[1]
        behind = _extended(self.right, rank, axis, last=False)
        both = None if other is None or self.other is None else torch.cat(
            (other, _extended(self.other, rank, axis, last=True)), axis
        )  # fmt: skip
        return torch.cat((left, self.left), 1), torch.cat((right, behind), axis), both

    def copied(self, transposed: bool) -> "LowRank":
        """The same, with ``right`` and ``other`` as TMA reads weights that are ``transposed`` or not."""
        other = None if self.other is None else _readable(self.other, transposed)
        return LowRank(self.left, _readable(self.right, transposed), other)


def aligned_columns(like: torch.Tensor, columns: int) -> int:
    """As many columns or a few more, so that each row starts where TMA can read it."""
    unit = ALIGNMENT // like.element_size()
    return -(-columns // unit) * unit


class LowRankCopies(NamedTuple):
    """How TMA copies the operands of a :class:`LowRank`, and what a kernel is told of them."""

    geometries: tuple[Geometry | None, Geometry | None, Geometry | None] = (None, None, None)
    rank: int = 0
    other_first: int = 0  # the column of ``left`` that is the first one of ``other``

    @property
    def numbers(self) -> tuple[int, int]:
        """The last arguments among a kernel's numbers."""
        return self.rank, self.other_first


def low_rank_copies(
    low_rank: LowRank | None, transposed: bool, axis: int, left_block: tuple[int, int], right_block: tuple[int, int]
) -> LowRankCopies | None:
    """The copies in blocks of these sizes; None where ``left`` does not lie as TMA wants it."""
    if low_rank is None:
        return LowRankCopies()
    left = untransposed(low_rank.left)
    if left is None:
        return None
    operands = low_rank.copied(transposed)
    rank = left.columns
    first = 0 if low_rank.other is None else rank - low_rank.other.shape[axis]
    rights = [None if each is None else _matrix(each).geometry(*right_block) for each in operands[1:]]
    return LowRankCopies((left.geometry(*left_block), rights[0], rights[1]), rank, first)


def _matrix(tensor: torch.Tensor) -> Matrix:
    found = matrix(tensor)
    assert found is not None, "laid out for TMA"
    return found


def _extended(factor: torch.Tensor, rank: int, axis: int, last: bool) -> torch.Tensor:
    """The factor with zeros along the axis, before it if it is the ``last`` one."""
    shape = list(factor.shape)
    shape[axis] = rank - shape[axis]
    zeros = factor.new_zeros(shape)
    return torch.cat((zeros, factor) if last else (factor, zeros), axis)


def _readable(factor: torch.Tensor, transposed: bool) -> torch.Tensor:
    """The factor, or a copy whose rows, or columns if ``transposed``, start where TMA can read them."""
    found = matrix(factor)
    if found is not None and found.transposed == transposed:
        return factor
    rows = factor.t() if transposed else factor
    copy = rows.new_empty(rows.shape[0], aligned_columns(rows, rows.shape[1]))[:, : rows.shape[1]].copy_(rows)
    return copy.t() if transposed else copy
