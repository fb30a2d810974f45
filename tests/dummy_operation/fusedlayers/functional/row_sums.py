"""The sums of the rows of a matrix: the public function, and its operation."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from .. import reference
from ..kernels import row_sums as kernels
from ..planning.row_sums import RowSumsProblem
from .call import call_facts, wants_gradient
from .custom_ops import Result, Results
from .operands import autocast, compute_dtype
from .operation import Operation, Prepared, Tensors
from .shapes import Shapes


def row_sums(x: Tensor) -> Tensor:
    """``y = Σ_n x``: x ``[M, N]`` -> ``[M]``."""
    return ROW_SUMS.call((x,), ())


class _RowSums(Operation):
    """y of x."""

    problem_type = RowSumsProblem
    shapes = Shapes("x: M N")
    operands = "x"

    def check(self, tensors: Tensors, options: tuple[Any, ...]) -> tuple[Any, ...]:
        self.shapes.check(*tensors)
        return options

    def problem(self, tensors: Tensors, options: tuple[Any, ...]) -> RowSumsProblem:
        [x] = tensors
        return RowSumsProblem(M=x.shape[0], N=x.shape[1], training=wants_gradient(x), **call_facts(x))

    def title(self, problem: RowSumsProblem, tensors: Tensors, options: tuple[Any, ...]) -> str:
        return "row_sums: y = Σ_n x"

    def through_torch(self, call: Prepared, tensors: Tensors) -> Tensor:
        [x] = autocast(tuple(tensors), compute_dtype(tensors[0]))
        return reference.row_sums(x)

    def forward(self, call: Prepared, operands: Tensors, wanted: Sequence[bool]) -> tuple[Tensors, Tensors]:
        return [kernels.row_sums(operands[0], call.plan.tiles)], ()

    def backward(
        self, call: Prepared, operands: Tensors, made: Tensors, wanted: Sequence[bool], upstream: Tensors
    ) -> Tensors:
        return [upstream[0][:, None].expand_as(operands[0]).contiguous()]

    def expression(self, call: Prepared, operands: Tensors) -> Tensors:
        return [reference.row_sums(operands[0])]

    def results(self, operands: Tensors, problem: Any, path: str, extras: dict[str, Any], saving: bool) -> Results:
        return [Result((problem.M,), operands[0].dtype)], []


ROW_SUMS = _RowSums(row_sums)
