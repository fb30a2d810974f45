"""The fused path of the FFN, on rows ``[M, *]``: never writes the hidden; the backward pass recomputes it."""

from collections.abc import Sequence

from torch import Tensor

from ...kernels import gemm_gemm as kernels
from ...kernels.gemm_gemm import Operands, WeightGradients
from ...planning import Plan
from ..operands import rows
from ..operation import Tensors
from ..prepared import Prepared


def forward(call: Prepared, operands: Tensors) -> Tensor:
    """y ``[M, O]`` of (x, w_up, w_down, b_up, b_down, w_gate, b_gate, residual, seed)."""
    _, _, _, _, b_down, _, _, residual, _ = operands
    residual_rows = None if residual is None else rows(residual)
    return kernels.forward(_kernel_operands(call, operands), b_down, residual_rows, call.plan.forward_tiles)


def gradients(call: Prepared, operands: Tensors, wanted: Sequence[bool], dy: Tensor) -> list[Tensor | None]:
    """The wanted gradients of (x, w_up, w_down, b_up, b_down, w_gate, b_gate) by the backward kernels.

    That of b_down only where a kernel computes it along with others.
    """
    plan: Plan = call.plan
    given = _kernel_operands(call, operands)
    dx: Tensor | None = None
    db_down: Tensor | None = None
    if plan.stored is not None and all(wanted[:3]) and (given.gate is None or wanted[5]):
        everything = kernels.stored_gradients(
            given, dy, wanted[3], wanted[6], wanted[4], plan.stored_splits, plan.stored
        )
        if everything is not None:
            dx, found, db_down = everything
            return [dx, found.up, found.down, found.up_bias, db_down, found.gate, found.gate_bias]
    if wanted[0]:
        dx, db_down = kernels.data_gradient(given, dy, plan.data_gradient_tiles, column_sums=wanted[4])
    asked = WeightGradients(up=wanted[1], gate=wanted[5], down=wanted[2], up_bias=wanted[3], gate_bias=wanted[6])
    if not any(asked):
        return [dx, None, None, None, db_down, None, None]
    found = kernels.weight_gradients(given, dy, asked, plan.splits, plan.weight_gradient_tiles)
    return [dx, found.up, found.down, found.up_bias, db_down, found.gate, found.gate_bias]


def _kernel_operands(call: Prepared, operands: Tensors) -> Operands:
    x, w_up, w_down, b_up, _, w_gate, b_gate, _, seed = operands
    return Operands(rows(x), w_up, w_down, b_up, w_gate, b_gate, seed, call.details, call.ready)
