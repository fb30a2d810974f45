"""The feed-forward block: the public function, and its operation, which takes one of several paths."""

from dataclasses import replace
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from ... import reference
from ...kernels.activations import ACTIVATIONS, canonical_activation
from ...kernels.gemm_gemm import Arithmetic
from ...planning import Device, Float8Problem, Plan, Problem, recomputing
from ..custom_ops import Results
from ..float8 import Float8Operation
from ..operation import Operation, Tensors, formula
from ..precision import Float8, precision_word
from ..prepared import Prepared
from . import dropping, float8
from .arguments import check_ffn, check_recompute, checked_dropout, ffn_problem
from .passes import RESIDUAL, FFNOperation


def ffn(
    x: Tensor,
    w_up: Tensor,
    w_down: Tensor,
    b_up: Tensor | None = None,
    b_down: Tensor | None = None,
    w_gate: Tensor | None = None,
    b_gate: Tensor | None = None,
    *,
    activation: str = "gelu",
    dropout_p: float = 0.0,
    recompute: bool | int | str = "auto",
    residual: Tensor | None = None,
    dropout_seed: Tensor | None = None,
    precision: str | Float8 | None = None,
) -> Tensor:
    """Feed-forward block: ``dropout(act(x W_upᵀ + b_up)) W_downᵀ + b_down + residual``.

    With ``w_gate`` the hidden is ``act(x W_gateᵀ + b_gate) ⊙ (x W_upᵀ + b_up)`` (Shazeer, "GLU variants improve
    Transformer", 2020); any activation can gate.

    Args:
        x: ``[*B, M, K]`` or ``[K]``: any leading dims, any strides.
        w_up: ``[N, K]``, ``nn.Linear``'s layout.
        w_down: ``[O, N]``.
        b_up: ``[N]`` or None.
        b_down: ``[O]`` or None.
        w_gate: ``[N, K]`` or None (no gate).
        b_gate: ``[N]`` or None.
        activation: a name of ``fusedlayers.kernels.activations.ACTIVATIONS``, or Hugging Face's name of one.
        dropout_p: probability of dropping an element of the hidden, in [0, 1); pass 0 in inference. It is rounded to
            the nearest multiple of 2⁻³², which also sets the scale. The mask follows from one seed, and is the same on
            every path, with and without gradients.
        recompute: ``True`` guarantees that no tensor of size tokens × N is allocated, forward or backward, and beside
            results, gradients and one copy of operands that are no matrices of rows at most eight times the bytes of x,
            or 256 MiB if that is more. Only x is saved, also for frozen layers. Every gradient is rounded once.
            Tensor subclasses, ``torch.func`` and forward-mode derivatives are excepted: torch's expression runs.
            ``"auto"`` and ``False`` take the fastest path, whose backward pass may need such tensors while it runs. An
            int above 1 is a budget: the bytes that this call may save for its backward pass (``saved bytes`` of
            ``explain``, x included); where the fastest path saves more, the call runs as with ``True``.
        residual: ``[*B, M, O]`` or None, added to the result.
        dropout_seed: int64 ``[1]`` on the device of x, which alone determines the dropout mask; None draws one from the
            default generator. DTensors draw their own masks instead.
        precision: None, or "fp8" or a :class:`fusedlayers.Float8`: products run in 8 bits where they can and where
            that is faster, else as with None; ``explain`` says which.

    Returns:
        ``[*B, M, O]`` in the dtype of x (under autocast: in autocast's dtype, promoted with that of a residual: float32
        if the residual is). float16, bfloat16 and float32 can run in Triton kernels; every floating dtype runs through
        torch.

    Raises:
        TypeError: an argument of the wrong type, a dtype that is not real floating or differs from that of x.
        ValueError: shapes that do not fit together, tensors on different devices, an unknown activation,
            ``recompute`` or ``precision``, ``dropout_p`` outside [0, 1).
        RuntimeError: ``FUSEDLAYERS_BACKEND=triton`` or ``FUSEDLAYERS_STRICT=1`` where the kernels cannot run.
    """
    tensors = x, w_up, w_down, b_up, b_down, w_gate, b_gate, residual, dropout_seed
    return FFN.call(tensors, (activation, dropout_p, recompute, precision))


class _FFN(FFNOperation):
    """The FFN of x ``[*B, M, K]``."""

    problem_type = Problem
    added = RESIDUAL

    def check(self, tensors: Tensors, options: tuple[Any, ...]) -> tuple[Any, ...]:
        activation, dropout_p, recompute, precision = options
        activation = canonical_activation(activation)
        precision = precision_word(precision)
        check_ffn(tensors)
        checked_dropout("dropout_p", dropout_p)
        check_recompute(recompute)
        return activation, dropout_p, recompute, precision

    def variant(self, options: tuple[Any, ...]) -> Operation:
        return self if options[3] is None else FLOAT8_FFN

    def problem(self, tensors: Tensors, options: tuple[Any, ...]) -> Problem:
        *operands, residual, _ = tensors
        activation, dropout_p, recompute, _ = options
        return ffn_problem(
            *operands, activation=activation, dropout_p=dropout_p, recompute=recompute, residual=residual
        )

    def title(self, problem: Problem, tensors: Tensors, options: tuple[Any, ...]) -> str:
        _, _, _, b_up, b_down, w_gate, b_gate, residual, _ = tensors
        dropout_p = options[1]
        up = "x W_upᵀ" + _plus("b_up", b_up)
        hidden = f"act({up})" if w_gate is None else f"act(x W_gateᵀ{_plus('b_gate', b_gate)}) ⊙ ({up})"
        if dropout_p:
            hidden = f"dropout({hidden})"
        elif w_gate is not None:
            hidden = f"({hidden})"
        result = f"{hidden} W_downᵀ{_plus('b_down', b_down)}{_plus('residual', residual)}"
        return f"ffn: {result}, act = {formula(problem.activation)}"

    def facts(self, plan: Plan, device: Device) -> list[tuple[str, str]]:
        return recomputing.facts(plan, device)

    def through_torch(self, call: Prepared, tensors: Tensors) -> Tensor:
        x, w_up, w_down, b_up, b_down, w_gate, b_gate, residual, _ = tensors
        activation, dropout_p, *_ = call.options
        activate = ACTIVATIONS[activation].torch
        hidden = F.linear(x, w_up, b_up)
        hidden = activate(hidden) if w_gate is None else activate(F.linear(x, w_gate, b_gate)) * hidden
        if dropout_p:
            hidden = dropping.dropped(hidden, dropout_p, self._seed(tensors))
        y = F.linear(hidden, w_down, b_down)
        return y if residual is None else y + residual

    def cast(self, call: Prepared, tensors: Tensors) -> Tensors:
        residual = tensors[RESIDUAL]
        if residual is not None and residual.dtype != call.dtype:
            # Autocast casts products, not sums: a residual of another dtype is added as it is, outside the kernel.
            tensors = *tensors[:RESIDUAL], None, *tensors[RESIDUAL + 1 :]
        return super().cast(call, tensors)

    def flattened(self, call: Prepared, tensors: Tensors) -> Tensors:
        return *tensors[:-1], self._seed(tensors) if call.extras["dropout_p"] else None

    def _seed(self, tensors: Tensors) -> Tensor | None:
        """The seed of the mask, drawn the same way on every path.

        A checkpoint may run one path without gradients and another one with them, and both must drop the same elements
        and leave the generator in the same state.
        """
        given: Tensor | None = tensors[-1]
        return dropping.draw_seed(*tensors) if given is None else given

    def finished(self, call: Prepared, tensors: Tensors, results: Tensor) -> Tensor:
        residual = tensors[RESIDUAL]
        apart = residual is not None and call.dtype is not None and residual.dtype != call.dtype
        return results + residual if apart else results

    def extras(self, options: tuple[Any, ...]) -> dict[str, Any]:
        return {"dropout_p": float(options[1])}

    def details(self, plan: Plan, extras: dict[str, Any]) -> Arithmetic:
        problem = plan.problem
        return Arithmetic(problem.activation, extras["dropout_p"], problem.input_precision, plan.accuracy)

    def expression(self, call: Prepared, operands: Tensors) -> Tensors:
        *given, residual, seed = operands
        details = call.details
        return (
            reference.ffn(
                *given, activation=details.activation, dropout_p=details.dropout_p, residual=residual, seed=seed
            ),
        )


def _plus(name: str, given: Tensor | None) -> str:
    """The term that an operand adds to a formula, if it is given."""
    return "" if given is None else f" + {name}"


class _Float8FFN(Float8Operation, _FFN):
    """The FFN in 8 bits."""

    problem_type = Float8Problem

    @property
    def plain(self) -> Operation:
        return FFN

    def problem(self, tensors: Tensors, options: tuple[Any, ...]) -> Float8Problem:
        found: Float8Problem = super().problem(tensors, options)
        _, _, _, b_up, _, _, b_gate, *_ = tensors
        return found if b_up is None and b_gate is None else replace(found, biased=True)

    def results(self, operands: Tensors, problem: Any, path: str, extras: dict[str, Any], saving: bool) -> Results:
        results, pre_activations = super().results(operands, problem, path, extras, saving)
        return results, [*pre_activations, *float8.saved(problem)]


FFN = _FFN(ffn)
FLOAT8_FFN = _Float8FFN(ffn, "float8_")
