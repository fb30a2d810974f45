"""The feed-forward block: the public function, and its operation, which takes one of several paths."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ... import reference
from ...kernels.activations import ACTIVATIONS, canonical_activation
from ...kernels.column_sums import column_sums
from ...kernels.gemm_gemm import Arithmetic
from ...kernels.tuning import COLUMN_SUM_TILES
from ...planning import KERNEL_PATHS, Device, Float8Plan, Float8Problem, Plan, Problem, ffn_epilogue, recomputing
from ...planning.float8 import IN_16_BITS
from .. import dispatch
from ..custom_ops import Result, Results
from ..float8 import note_sources
from ..last_call import at_places
from ..operands import rows, with_leading_dims, without_autocast
from ..operation import Operation, Tensors, formula
from ..precision import Float8, precision_word
from ..prepared import Prepared
from ..sums import summed_rows
from . import chunked, dropping, epilogue, float8, fused
from .arguments import check_ffn, check_recompute, checked_dropout, ffn_problem


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
    return FFN(
        x, w_up, w_down, b_up, b_down, w_gate, b_gate, activation, dropout_p, recompute, residual, dropout_seed,
        precision_word(precision),
    )  # fmt: skip


# Operands whose gradients need the hidden; further positions; which operands the backward kernels read.
_THROUGH_HIDDEN = (0, 1, 2, 3, 5, 6)
_those_through_hidden = at_places(_THROUGH_HIDDEN)
_B_UP, _B_DOWN, _B_GATE, _RESIDUAL = 3, 4, 6, 7
_weights = at_places((1, 2, 5))
_READ = (True, True, True, True, False, True, True, False, True)


class _FFN(Operation):
    """The FFN of x ``[*B, M, K]``.

    It saves only its inputs, and recomputes the hidden in the backward pass; the epilogue path saves the
    pre-activations, too.
    """

    problem_type = Problem
    operands = "x w_up w_down b_up? b_down? w_gate? b_gate? residual? seed?"
    row_operands = ("x",)
    added = _RESIDUAL

    def check(self, tensors: Tensors, options: tuple[Any, ...]) -> tuple[Any, ...]:
        activation, dropout_p, recompute, precision = options
        activation = canonical_activation(activation)
        precision = None if precision is None else precision_word(precision)
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

    def reference(self, **arguments: Any) -> Tensor:
        return super().reference(**arguments, seed=arguments["dropout_seed"])

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
            hidden = dropping.dropped(hidden, dropout_p, self._seed(call, tensors))
        y = F.linear(hidden, w_down, b_down)
        return y if residual is None else y + residual

    def cast(self, call: Prepared, tensors: Tensors) -> Tensors:
        residual = tensors[_RESIDUAL]
        if residual is not None and residual.dtype != call.dtype:
            # Autocast casts products, not sums: a residual of another dtype is added as it is, outside the kernel.
            tensors = *tensors[:_RESIDUAL], None, *tensors[_RESIDUAL + 1 :]
        return super().cast(call, tensors)

    def flattened(self, call: Prepared, tensors: Tensors) -> Tensors:
        return *tensors[:-1], self._seed(call, tensors)

    def _seed(self, call: Prepared, tensors: Tensors) -> Tensor | None:
        """The seed of the mask, drawn the same way on every path.

        A checkpoint may run one path without gradients and another one with them, and both must drop the same elements
        and leave the generator in the same state.
        """
        if not call.extras["dropout_p"]:
            return None
        given: Tensor | None = tensors[-1]
        return dropping.draw_seed(*tensors) if given is None else given

    def finished(self, call: Prepared, tensors: Tensors, results: Tensor) -> Tensor:
        residual = tensors[_RESIDUAL]
        apart = residual is not None and call.dtype is not None and residual.dtype != call.dtype
        return results + residual if apart else results

    def extras(self, options: tuple[Any, ...]) -> dict[str, Any]:
        return {"dropout_p": float(options[1])}

    def details(self, plan: Plan, extras: dict[str, Any]) -> Arithmetic:
        problem = plan.problem
        return Arithmetic(problem.activation, extras["dropout_p"], problem.input_precision, plan.accuracy)

    def kept(self, wanted: Sequence[bool]) -> tuple[bool, ...]:
        # Without a gradient through the hidden nothing is recomputed.
        return _READ if _through_hidden(wanted) else (False,) * len(_READ)

    def unread(self, call: Prepared, wanted: Sequence[bool]) -> Sequence[int]:
        # The pre-activations, which include these biases, are saved.
        return (_B_UP, _B_GATE) if call.plan.path == "epilogue" and _through_hidden(wanted) else ()

    def forward(self, call: Prepared, operands: Tensors, wanted: Sequence[bool]) -> tuple[Tensors, Tensors]:
        z = z_gate = None
        if call.plan.path == "epilogue":
            y, z, z_gate = epilogue.forward(call, operands, bool(wanted) and _through_hidden(wanted))
        elif call.plan.path == "chunked":
            y = chunked.forward(call, operands)
        else:
            y = fused.forward(call, operands)
        return (with_leading_dims(y, operands[0]),), (z, z_gate)

    def backward(
        self, call: Prepared, operands: Tensors, made: Tensors, wanted: Sequence[bool], upstream: Tensors
    ) -> Tensors:
        return self._gradients(call, operands, made, wanted, upstream, False)

    def last_backward(
        self, call: Prepared, operands: Tensors, made: Tensors, wanted: Sequence[bool], upstream: Tensors
    ) -> Tensors:
        return self._gradients(call, operands, made, wanted, upstream, True)

    def _gradients(
        self,
        call: Prepared,
        operands: Tensors,
        made: Tensors,
        wanted: Sequence[bool],
        upstream: Tensors,
        in_place: bool,
    ) -> Tensors:
        [dy], plan = upstream, call.plan
        dy_rows = rows(dy)
        gradients: list[Tensor | None] = [None] * 7
        through_hidden = _through_hidden(wanted)
        if through_hidden:
            path: Any = {"epilogue": epilogue, "chunked": chunked}.get(plan.path, fused)
            if path is epilogue:
                gradients = epilogue.gradients(call, operands, made, wanted, dy_rows, in_place)
            else:
                gradients = path.gradients(call, operands, wanted, dy_rows)
            x = operands[0]
            if gradients[0] is not None and x.dim() != 2:
                gradients[0] = gradients[0].view(x.shape)
        if wanted[_B_DOWN] and gradients[_B_DOWN] is None:
            launches = through_hidden and (plan.path in KERNEL_PATHS or plan.epilogue is not None)
            summed = column_sums(dy_rows, COLUMN_SUM_TILES, call.ready) if launches else summed_rows(dy_rows)
            gradients[_B_DOWN] = summed.to(dy.dtype)
        return *gradients, dy if wanted[_RESIDUAL] else None, None

    def differentiable_gradients(
        self, call: Prepared, operands: Tensors, wanted: Sequence[bool], upstream: Tensors
    ) -> Tensors:
        [dy] = upstream
        through = [want and place in _THROUGH_HIDDEN for place, want in enumerate(wanted)]
        found = list(
            super().differentiable_gradients(call, operands, through, upstream) if any(through) else [None] * 9
        )
        # b_down and the residual are not saved, nor needed for their gradients.
        if wanted[_B_DOWN]:
            with without_autocast(dy.device):
                found[_B_DOWN] = dy.sum(tuple(range(dy.dim() - 1))) if dy.dim() > 1 else dy
        if wanted[_RESIDUAL]:
            found[_RESIDUAL] = dy
        return found

    def expression(self, call: Prepared, operands: Tensors) -> Tensors:
        *given, residual, seed = operands
        details = call.details
        return (
            reference.ffn(
                *given, activation=details.activation, dropout_p=details.dropout_p, residual=residual, seed=seed
            ),
        )

    def results(self, operands: Tensors, problem: Any, path: str, extras: dict[str, Any], saving: bool) -> Results:
        # A backward pass for b_down alone has no other operand.
        first = next(operand for operand in operands if operand is not None)
        leading = (problem.M,) if operands[0] is None else operands[0].shape[:-1]
        kept = None
        if path == "epilogue" and problem.training:
            columns = ffn_epilogue.kept_columns(problem, dispatch.describe(first.device))
            kept = Result((problem.M, columns), first.dtype)
        return [Result((*leading, problem.O), first.dtype)], [kept, kept if problem.gated else None]


def _plus(name: str, given: Tensor | None) -> str:
    """The term that an operand adds to a formula, if it is given."""
    return "" if given is None else f" + {name}"


def _through_hidden(wanted: Sequence[bool]) -> bool:
    """Whether any wanted gradient needs the hidden."""
    return any(_those_through_hidden(wanted))


class _Float8FFN(_FFN):
    """The FFN in 8 bits, or where that is not possible or not faster, the FFN itself; it saves the pre-activations."""

    problem_type = Float8Problem

    def variant(self, options: tuple[Any, ...]) -> Operation:
        return self

    def instead(self, plan: Any, options: tuple[Any, ...]) -> tuple[Operation, tuple[Any, ...]] | None:
        return (FFN, (*options[:3], None)) if plan.path == IN_16_BITS else None

    def problem(self, tensors: Tensors, options: tuple[Any, ...]) -> Problem:
        return Float8Problem(**super().problem(tensors, options).__getstate__(), recipe=options[3])

    def cast(self, call: Prepared, tensors: Tensors) -> Tensors:
        found = super().cast(call, tensors)
        note_sources(_weights(tensors), _weights(found))
        return found

    def facts(self, plan: Any, device: Device) -> list[tuple[str, str]]:
        found: Float8Plan = plan
        return found.facts(device)

    def unread(self, call: Prepared, wanted: Sequence[bool]) -> Sequence[int]:
        return (_B_UP, _B_GATE) if _through_hidden(wanted) else ()

    def forward(self, call: Prepared, operands: Tensors, wanted: Sequence[bool]) -> tuple[Tensors, Tensors]:
        y, saved = float8.forward(call, operands, bool(wanted) and _through_hidden(wanted))
        return (with_leading_dims(y, operands[0]),), saved

    def _gradients(
        self,
        call: Prepared,
        operands: Tensors,
        made: Tensors,
        wanted: Sequence[bool],
        upstream: Tensors,
        in_place: bool,
    ) -> Tensors:
        [dy], x = upstream, operands[0]
        dy_rows = rows(dy)
        gradients: list[Tensor | None] = [None] * 7
        if _through_hidden(wanted):
            gradients = float8.gradients(call, operands, made, wanted, dy_rows)
            if gradients[0] is not None and x.dim() != 2:
                gradients[0] = gradients[0].view(x.shape)
        if wanted[_B_DOWN]:
            gradients[_B_DOWN] = column_sums(dy_rows, COLUMN_SUM_TILES, call.ready)
        return *gradients, dy if wanted[_RESIDUAL] else None, None

    def results(self, operands: Tensors, problem: Any, path: str, extras: dict[str, Any], saving: bool) -> Results:
        first = next(operand for operand in operands if operand is not None)
        leading = (problem.M,) if operands[0] is None else operands[0].shape[:-1]
        kept = Result((problem.M, problem.N), first.dtype) if problem.training else None
        scales = Result((problem.M,), torch.float32)
        x_scale = scales if kept and problem.up_gradient_in_8_bits else None
        hidden_scale = scales if kept and problem.down_gradient_in_8_bits else None
        saved = [kept, kept if problem.gated else None, x_scale, hidden_scale]
        return [Result((*leading, problem.O), first.dtype)], saved


FFN = _FFN(ffn)
FLOAT8_FFN = _Float8FFN(ffn, "float8_")
