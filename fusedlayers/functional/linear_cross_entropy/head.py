"""What the paths of a loss head read: its operands as matrices of rows, padded as products take them."""

from typing import NamedTuple

import torch
from torch import Tensor

from ...kernels.cross_entropy import LossArithmetic
from ...kernels.tuning.cross_entropy import RowTiles
from ...planning.linear_cross_entropy import LossPlan
from ..operands import rows as rows_of
from ..operation import Tensors


class Head(NamedTuple):
    """The operands of the logits, the targets, and class weights with their sum, both float32.

    Weight ``[P, K]`` and bias ``[P]`` are padded as products read them.
    """

    input: Tensor
    linear_weight: Tensor
    linear_bias: Tensor | None
    target: Tensor
    weight: Tensor | None
    weight_sum: Tensor | None
    plan: LossPlan
    arithmetic: LossArithmetic

    @classmethod
    def of(cls, operands: Tensors, plan: LossPlan, arithmetic: LossArithmetic) -> "Head":
        """The head of the operands of a call: input, linear_weight, target, linear_bias and weight."""
        input, linear_weight, target, linear_bias, weight = operands
        weights = None if weight is None else weight.to(torch.float32).contiguous()
        total = None if weights is None else weights.sum()
        if plan.pads_weight:
            linear_weight = padded(linear_weight, plan.problem.padded_columns)
            linear_bias = None if linear_bias is None else padded(linear_bias, plan.problem.padded_columns)
        return cls(rows_of(input), linear_weight, linear_bias, target.contiguous(), weights, total, plan, arithmetic)

    @property
    def classes(self) -> int:
        """V."""
        return self.plan.problem.V

    def of_rows(self, rows: slice) -> tuple[Tensor, Tensor | None, Tensor | None, LossArithmetic, RowTiles]:
        """What kernels read of these tokens besides their logits."""
        assert self.plan.tiles is not None
        return self.target[rows], self.weight, self.weight_sum, self.arithmetic, self.plan.tiles

    def counted(self) -> Tensor:
        """What a mean divides by: the tokens that count, or the sum of the weights of their classes; float32."""
        counts = self.target != self.arithmetic.ignore_index
        if self.weight is None:
            return counts.sum().to(torch.float32)
        # Clamped for indexing: the kernel makes the loss NaN where a target is no class.
        classes = self.target.clamp(0, self.weight.shape[0] - 1)
        return torch.where(counts, self.weight[classes], 0.0).sum()


def padded(tensor: Tensor, rows: int) -> Tensor:
    """A copy, zero-padded to ``rows`` rows."""
    copy = tensor.new_empty(rows, *tensor.shape[1:])
    copy[: len(tensor)] = tensor
    copy[len(tensor) :].zero_()
    return copy
