"""Gradient of an FFN's pre-activations with its bias gradients: the public function, and its operation."""

import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from .. import reference
from ..kernels import gemm_epilogue as kernels
from ..kernels.activations import canonical_activation
from ..kernels.matmul.arithmetic import Arithmetic
from ..planning import HiddenGradientProblem
from .call import call_facts, wants_gradient
from .custom_ops import Result, Results
from .operands import rows, with_leading_dims
from .operation import Operation, Tensors, formula
from .options import checked_flag
from .prepared import Prepared
from .shapes import Shapes

_Gradients = tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]


def hidden_gradient(
    dy: Tensor,
    w_down: Tensor,
    z: Tensor,
    z_gate: Tensor | None = None,
    *,
    activation: str | None,
    bias: bool = True,
) -> _Gradients:
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
    return HIDDEN_GRADIENT(dy, w_down, z, z_gate, activation, bias)


class _HiddenGradient(Operation):
    """dz, dz_gate, db_up, db_gate of dy, w_down, z, z_gate; their gradients go through the reference."""

    problem_type = HiddenGradientProblem
    shapes = Shapes("dy: *B M? O, w_down: O N, z: *B M? N, z_gate?: *B M? N", sparse="dy w_down")
    operands = "dy w_down z z_gate?"
    row_operands = ("dy", "z", "z_gate")
    has_backward = False
    torch_takes_cast = True

    def check(self, tensors: Tensors, options: tuple[Any, ...]) -> tuple[Any, ...]:
        activation, bias = options
        activation = canonical_activation(activation)
        self.shapes.check(*tensors)
        return activation, checked_flag("bias", bias)

    def problem(self, tensors: Tensors, options: tuple[Any, ...]) -> HiddenGradientProblem:
        (dy, w_down, _, z_gate), (activation, bias) = tensors, options
        return HiddenGradientProblem(
            M=math.prod(dy.shape[:-1]),
            N=w_down.shape[1],
            O=w_down.shape[0],
            activation=activation,
            gated=z_gate is not None,
            bias=bias,
            training=wants_gradient(*tensors),
            **call_facts(*tensors),
        )

    def title(self, problem: HiddenGradientProblem, tensors: Tensors, options: tuple[Any, ...]) -> str:
        gate = "dH ⊙ act(z_gate), dH ⊙ z ⊙ act'(z_gate)" if problem.gated else "dH ⊙ act'(z)"
        return f"hidden_gradient: {gate}, dH = dy W_down, act = {formula(problem.activation)}"

    def through_torch(self, call: Prepared, tensors: Tensors) -> _Gradients:
        return self.expression(call, tensors)

    def forward(self, call: Prepared, operands: Tensors, wanted: Sequence[bool]) -> tuple[Tensors, Tensors]:
        dy, w_down, z, z_gate = operands
        plan, problem = call.plan, call.problem
        dz, dz_gate, db_up, db_gate, *_ = kernels.hidden_gradient(
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

    def expression(self, call: Prepared, operands: Tensors) -> _Gradients:
        dy, w_down, z, z_gate = operands
        problem = call.problem
        return reference.hidden_gradient(dy, w_down, z, z_gate, activation=problem.activation, bias=problem.bias)

    def results(self, operands: Tensors, problem: Any, path: str, extras: dict[str, Any], saving: bool) -> Results:
        z, gated, bias = operands[2], problem.gated, problem.bias
        matrix, sums = Result(z.shape, z.dtype), Result((z.shape[-1],), z.dtype)
        return [matrix, matrix if gated else None, sums if bias else None, sums if bias and gated else None], []

    def unpacked(self, found: list[Tensor], options: Sequence[Any], tensors: Tensors) -> Any:
        remaining = iter(found)
        gated, bias = tensors[3] is not None, options[1]
        return tuple(next(remaining) if there else None for there in (True, gated, bias, bias and gated))


HIDDEN_GRADIENT = _HiddenGradient(hidden_gradient)
