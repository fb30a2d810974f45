"""Gradients for backward passes of one's own, with bias gradients: of a linear layer, and of an FFN's pre-activations.

    dW = dyᵀ x,                 db = Σ dy             weight_gradient
    dz = (dy W_down) ⊙ act'(z), db_up = Σ dz          hidden_gradient

The sums over the rows are taken along with the products, by the kernels that a backward pass of this library runs. The
results can be differentiated: their own gradients are products of torch's.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .. import reference
from ..kernels import gemm_epilogue
from ..kernels import weight_gradient as weight_gradient_kernels
from ..kernels.activations import canonical_activation
from ..kernels.column_sums import column_sums
from ..kernels.matmul.arithmetic import Arithmetic
from ..kernels.tuning import COLUMN_SUM_TILES
from ..planning import HiddenGradientProblem, WeightGradientPlan, WeightGradientProblem
from .call import call_facts, wants_gradient
from .custom_ops import Result, Results
from .operands import rows, with_leading_dims, without_autocast
from .operation import Operation, Tensors, formula
from .options import checked_flag
from .prepared import Prepared
from .shapes import Shapes


def weight_gradient(dy: Tensor, x: Tensor, *, bias: bool = True) -> tuple[Tensor, Tensor | None]:
    """Weight and bias gradient of ``y = x Wᵀ + b``: ``dW = dyᵀ x`` and ``db = Σ dy``, in one pass over dy if faster.

    Args:
        dy: ``[*B, M, O]`` or ``[O]``: any leading dims, any strides; the gradients are sums over all of these rows.
        x: ``[*B, M, K]`` or ``[K]``, with the leading dims of dy.
        bias: whether db is wanted.

    Returns:
        dW ``[O, K]``, and db ``[O]`` or None, in the dtype of dy (under autocast: in autocast's dtype), summed in
        float32 and rounded once. float16, bfloat16 and float32 can run in Triton kernels; every floating dtype runs
        through torch. Both are differentiable in dy and x.

    Raises:
        TypeError: an argument of the wrong type, a dtype that is not real floating or differs from that of dy.
        ValueError: leading dims that differ, tensors without a dimension or on different devices.
        RuntimeError: ``FUSEDLAYERS_BACKEND=triton`` or ``FUSEDLAYERS_STRICT=1`` where the kernels cannot run.
    """
    return WEIGHT_GRADIENT.call((dy, x), (bias,))


def hidden_gradient(
    dy: Tensor,
    w_down: Tensor,
    z: Tensor,
    z_gate: Tensor | None = None,
    *,
    activation: str | None,
    bias: bool = True,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """Gradient of the pre-activations z of ``y = act(z) W_downᵀ``, and its sums over the rows, in one kernel.

    ``dz = (dy W_down) ⊙ act'(z)`` and ``db_up = Σ dz``. With a gate the hidden is ``act(z_gate) ⊙ z``, so that
    ``dz = (dy W_down) ⊙ act(z_gate)`` and ``dz_gate = (dy W_down) ⊙ z ⊙ act'(z_gate)``, each with its sum.

    Args:
        dy: ``[*B, M, O]`` or ``[O]``: any leading dims, any strides.
        w_down: ``[O, N]``, ``nn.Linear``'s layout.
        z: ``[*B, M, N]``, before the activation; with a gate, what the gate multiplies.
        z_gate: ``[*B, M, N]`` or None (no gate), before the activation.
        activation: a name of ``fusedlayers.kernels.activations.ACTIVATIONS``, Hugging Face's name of one, or None.
        bias: whether the sums are wanted.

    Returns:
        dz and dz_gate like z, db_up and db_gate ``[N]``, None for what is not wanted or has no gate; in the dtype of
        dy (under autocast: in autocast's dtype). Sums are taken in float32, before dz is rounded. float16, bfloat16 and
        float32 can run in a Triton kernel; every floating dtype runs through torch. All can be differentiated.

    Raises:
        TypeError: an argument of the wrong type, a dtype that is not real floating or differs from that of dy.
        ValueError: shapes that do not fit together, tensors on different devices, an unknown activation.
        RuntimeError: ``FUSEDLAYERS_BACKEND=triton`` or ``FUSEDLAYERS_STRICT=1`` where the kernels cannot run.
    """
    return HIDDEN_GRADIENT.call((dy, w_down, z, z_gate), (activation, bias))


def planned_weight_gradient(
    dy: Tensor, x: Tensor, plan: WeightGradientPlan, ready: dict[Any, Any]
) -> tuple[Tensor, Tensor | None]:
    """dW and db (or None) of dy ``[M, O]`` and x ``[M, K]``, as planned; ``ready`` as in :class:`.Prepared`."""
    problem = plan.problem
    if plan.path == "sums":
        return torch.mm(dy.T, x), column_sums(dy, COLUMN_SUM_TILES, ready)
    if plan.tiles is None:
        return reference.weight_gradient(dy, x, bias=problem.bias)
    return weight_gradient_kernels.weight_gradient(
        dy, x, problem.bias, plan.splits, problem.input_precision, plan.tiles, plan.pipeline, ready
    )


class _Gradients(Operation):
    """Gradients of which dy is the first operand; the last option says whether their sums over the rows are wanted."""

    has_backward = False
    torch_takes_cast = True

    def present(self, bias: bool, tensors: Tensors) -> tuple[bool, ...]:
        """Which of the results there are."""
        raise NotImplementedError

    def result_shapes(self, problem: Any, tensors: Tensors) -> tuple[Sequence[int], ...]:
        """The shapes of the results."""
        raise NotImplementedError

    def through_torch(self, call: Prepared, tensors: Tensors) -> Tensors:
        return self.expression(call, tensors)

    def unpacked(self, found: list[Tensor], options: Sequence[Any], tensors: Tensors) -> Any:
        remaining = iter(found)
        return tuple(next(remaining) if there else None for there in self.present(options[-1], tensors))

    def results(self, operands: Tensors, problem: Any, path: str, extras: dict[str, Any], saving: bool) -> Results:
        # In a backward pass an operand that no gradient needs is None.
        dtype = next(operand.dtype for operand in operands if operand is not None)
        possible = zip(self.result_shapes(problem, operands), self.present(problem.bias, operands), strict=True)
        return [Result(shape, dtype) if there else None for shape, there in possible], []


def _facts(tensors: Tensors, bias: bool) -> dict[str, Any]:
    """The facts of both problems."""
    rows_of_dy = math.prod(tensors[0].shape[:-1])
    return {"M": rows_of_dy, "bias": bias, "training": wants_gradient(*tensors), **call_facts(*tensors)}


class _WeightGradient(_Gradients):
    """dW and db (or None) of dy ``[M, O]`` and x ``[M, K]``."""

    problem_type = WeightGradientProblem
    shapes = Shapes("dy: *B M? O, x: *B M? K", sparse="x")
    operands = "dy x"
    row_operands = ("dy", "x")

    def check(self, tensors: Tensors, options: tuple[Any, ...]) -> tuple[Any, ...]:
        self.shapes.check(*tensors)
        checked_flag("bias", *options)
        return options

    def present(self, bias: bool, tensors: Tensors) -> tuple[bool, ...]:
        return True, bias

    def result_shapes(self, problem: WeightGradientProblem, tensors: Tensors) -> tuple[Sequence[int], ...]:
        return (problem.O, problem.K), (problem.O,)

    def problem(self, tensors: Tensors, options: tuple[Any, ...]) -> WeightGradientProblem:
        dy, x = tensors
        return WeightGradientProblem(O=dy.shape[-1], K=x.shape[-1], **_facts(tensors, *options))

    def title(self, problem: WeightGradientProblem, tensors: Tensors, options: tuple[Any, ...]) -> str:
        return "weight_gradient: dW = dyᵀ x" + (", db = Σ dy" if problem.bias else "")

    def runs_eager(self, call: Prepared) -> bool:
        # torch.compile's column sums are as fast as the kernel.
        return super().runs_eager(call) or (call.observed and call.plan.path == "sums")

    def flattened(self, call: Prepared, tensors: Tensors) -> Tensors:
        return [rows(tensor) for tensor in tensors]

    def forward(self, call: Prepared, operands: Tensors, wanted: Sequence[bool]) -> tuple[Tensors, Tensors]:
        dy, x = operands
        return planned_weight_gradient(dy, x, call.plan, call.ready), ()

    def kept(self, wanted: Sequence[bool]) -> tuple[bool, ...]:
        # Each operand is needed for the gradient of the other one.
        return wanted[1], wanted[0]

    def constant(self, problem: Any, wanted: Sequence[bool]) -> Sequence[int]:
        # db is a sum of dy alone.
        return () if wanted[0] else (1,)

    def differentiable_gradients(
        self, call: Prepared, operands: Tensors, wanted: Sequence[bool], upstream: Tensors
    ) -> Tensors:
        (dy, x), (gradient, bias_gradient) = operands, upstream
        d_dy = d_x = None
        first = gradient if gradient is not None else bias_gradient
        with without_autocast(first.device):
            if wanted[0] and gradient is None:
                d_dy = bias_gradient.expand(x.shape[0], -1)
            elif wanted[0] and bias_gradient is None:
                d_dy = x @ gradient.T
            elif wanted[0]:
                d_dy = torch.addmm(bias_gradient, x, gradient.T)
            if wanted[1] and gradient is not None:
                d_x = dy @ gradient
        return d_dy, d_x

    def expression(self, call: Prepared, operands: Tensors) -> Tensors:
        return reference.weight_gradient(*operands, bias=call.problem.bias)


class _HiddenGradient(_Gradients):
    """dz, dz_gate, db_up and db_gate of dy, w_down, z and z_gate; None for what is not wanted or has no gate."""

    problem_type = HiddenGradientProblem
    shapes = Shapes("dy: *B M? O, w_down: O N, z: *B M? N, z_gate?: *B M? N", sparse="dy w_down")
    operands = "dy w_down z z_gate?"
    row_operands = ("dy", "z", "z_gate")

    def check(self, tensors: Tensors, options: tuple[Any, ...]) -> tuple[Any, ...]:
        activation, bias = options
        activation = canonical_activation(activation)
        self.shapes.check(*tensors)
        return activation, checked_flag("bias", bias)

    def present(self, bias: bool, tensors: Tensors) -> tuple[bool, ...]:
        gated = tensors[3] is not None
        return True, gated, bias, bias and gated

    def result_shapes(self, problem: HiddenGradientProblem, tensors: Tensors) -> tuple[Sequence[int], ...]:
        z = tensors[2].shape
        return z, z, z[-1:], z[-1:]

    def problem(self, tensors: Tensors, options: tuple[Any, ...]) -> HiddenGradientProblem:
        (_, w_down, _, z_gate), (activation, bias) = tensors, options
        O, N = w_down.shape
        return HiddenGradientProblem(
            N=N, O=O, activation=activation, gated=z_gate is not None, **_facts(tensors, bias)
        )  # fmt: skip

    def title(self, problem: HiddenGradientProblem, tensors: Tensors, options: tuple[Any, ...]) -> str:
        gate = "dH ⊙ act(z_gate), dH ⊙ z ⊙ act'(z_gate)" if problem.gated else "dH ⊙ act'(z)"
        return f"hidden_gradient: {gate}, dH = dy W_down, act = {formula(problem.activation)}"

    def forward(self, call: Prepared, operands: Tensors, wanted: Sequence[bool]) -> tuple[Tensors, Tensors]:
        dy, w_down, z, z_gate = operands
        plan, problem = call.plan, call.problem
        dz, dz_gate, db_up, db_gate, *_ = gemm_epilogue.hidden_gradient(
            rows(dy), w_down, rows(z), None if z_gate is None else rows(z_gate), problem.bias, plan.row_tiles,
            Arithmetic(problem.activation, plan.accuracy, problem.input_precision), plan.tiles, plan.pipeline,
            ready=call.ready,
        )  # fmt: skip
        dz_gate = None if dz_gate is None else with_leading_dims(dz_gate, z)
        return (with_leading_dims(dz, z), dz_gate, db_up, db_gate), ()

    def constant(self, problem: Any, wanted: Sequence[bool]) -> Sequence[int]:
        dy, w_down, z, z_gate = wanted
        if dy or w_down:
            return ()
        # dz depends on z only through act', which is constant for the identity. With a gate dz depends on z_gate, and
        # dz_gate on z, and through act' on z_gate.
        curved = problem.activation != "identity"
        if not problem.gated:
            return () if curved else (0, 2)
        return (*(() if z_gate else (0, 2)), *(() if z or curved else (1, 3)))

    def expression(self, call: Prepared, operands: Tensors) -> Tensors:
        problem = call.problem
        return reference.hidden_gradient(*operands, activation=problem.activation, bias=problem.bias)


WEIGHT_GRADIENT, HIDDEN_GRADIENT = _WeightGradient(weight_gradient), _HiddenGradient(hidden_gradient)
