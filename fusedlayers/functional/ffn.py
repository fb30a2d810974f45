"""The feed-forward block: the public function and the autograd Function of its fused and chunked paths."""

from typing import Any

import torch
from torch import Tensor

from .. import reference
from ..kernels import gemm_gemm as kernels
from ..kernels.activations import canonical_activation
from ..kernels.column_sums import column_sums
from ..kernels.dropout import Dropout
from ..kernels.gemm_gemm import Arithmetic, Operands, WeightGradients
from ..kernels.tuning import COLUMN_SUM_TILES
from ..planning import KERNEL_PATHS, Plan, Problem
from . import dropping, ffn_chunked, ffn_epilogue
from .arguments import autocast_dtype, check_dropout_seed, check_ffn
from .compiled import Composite, KernelCall, Result, Results
from .dispatch import (
    autocast,
    compute_dtype,
    ffn_problem,
    planned,
    ran_as_kernels,
    recalled,
    rows,
    wants_gradient,
    with_leading_dims,
    without_autocast,
)
from .layouts import portable_operand
from .signatures import signature
from .sums import summed_rows
from .tracing import traced


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
        dropout_p: probability of dropping an element of the hidden, in [0, 1); pass 0 in inference. The nearest
            multiple of 2⁻¹⁶ is taken, and what is kept is scaled by that. The mask follows from one seed, the same on
            every path, with and without gradients.
        recompute: ``True`` guarantees that no tensor of size tokens × N is allocated, forward or backward, and at most
            64 MiB (``FUSEDLAYERS_WORKSPACE_MIB``) beside results, gradients and one copy of operands that are not laid
            out in rows; x alone is kept, of frozen layers too. dx is rounded twice at most, gradients of weights once.
            Tensor subclasses, ``torch.func`` and forward-mode derivatives are excepted: torch's expression runs.
            ``"auto"`` and ``False`` take the fastest path, whose backward pass may need such tensors while it runs. An
            int above 1 is a budget: the bytes that this call may keep for its backward pass (``saved bytes`` of
            ``explain``, x included); where the fastest path keeps more, the call runs as with ``True``.
        residual: ``[*B, M, O]`` or None, added to the result.
        dropout_seed: int64 ``[1]`` on the device of x, from which alone the mask of the dropout follows; None draws one
            from the default generator. A DTensor's mask is drawn by DTensor itself instead.

    Returns:
        ``[*B, M, O]`` in the dtype of x (under autocast: in autocast's dtype). float16, bfloat16 and float32 can run in
        Triton kernels; every floating dtype runs through torch.

    Raises:
        TypeError: an argument of the wrong type, a dtype that is not real floating or differs from that of x.
        ValueError: shapes that do not fit together, tensors on different devices, an unknown activation or
            ``recompute``, ``dropout_p`` outside [0, 1).
        RuntimeError: ``FUSEDLAYERS_BACKEND=triton`` or ``FUSEDLAYERS_STRICT=1`` where the kernels cannot run.
    """
    if torch.compiler.is_dynamo_compiling():
        return COMPOSITE(
            x, w_up, w_down, b_up, b_down, w_gate, b_gate, activation, dropout_p, recompute, residual, dropout_seed
        )[0]  # fmt: skip
    tensors = (x, w_up, w_down, b_up, b_down, w_gate, b_gate, residual)
    check_dropout_seed(x, dropout_seed)
    portable = portable_operand(x, w_up, w_down, b_up, w_gate, b_gate)
    call = signature("ffn", tensors, activation, dropout_p, recompute, portable)
    known = None if call is None else recalled(call, x.device)
    if known is None:
        activation = canonical_activation(activation)
        check_ffn(x, w_up, w_down, b_up, b_down, w_gate, b_gate, dropout_p, recompute, residual)
        problem = ffn_problem(
            x, w_up, w_down, b_up, b_down, w_gate, b_gate,
            activation=activation, dropout_p=dropout_p, recompute=recompute, residual=residual,
        )  # fmt: skip
        known = planned(call, problem, x.device)
    problem, plan = known
    activation = problem.activation
    # Drawn before the path matters: a checkpoint may run one path without gradients and another one with them, and both
    # must drop the same elements and leave the generator alike.
    seed = None
    if dropout_p:
        seed = dropping.draw_seed(*tensors) if dropout_seed is None else dropout_seed
    if plan.path == "torch":
        if seed is not None:
            return dropping.ffn(*tensors, activation, dropout_p, seed)
        return reference.ffn(
            x, w_up, w_down, b_up, b_down, w_gate, b_gate,
            activation=activation, dropout_p=dropout_p, residual=residual,
        )  # fmt: skip
    operands: tuple[Any, ...] = tensors
    apart = False
    if autocast_dtype(x.device) is not None:
        dtype = compute_dtype(x)
        # Autocast casts products, not sums: a residual of another dtype is added as it is, outside the kernel.
        apart = residual is not None and residual.dtype != dtype
        operands = autocast((*operands[:7], None if apart else residual), dtype)
    operands = (*operands, seed)
    with without_autocast(x.device):
        if call is None and traced():
            y: Tensor = KERNELS(operands, problem, plan, dropout_p=dropout_p)
        else:
            # Without a wanted gradient, that of b_down or the residual either, autograd has nothing to record. Tensors
            # that are not plain tell it themselves.
            run = FFNFunction.apply if wants_gradient(*tensors) or call is None else _forward
            y = run(*operands, *_arguments(plan, dropout_p).values())
    if _launches(plan) and not problem.training:
        ran_as_kernels(problem, x.device)
    return y + residual if apart and residual is not None else y


def _arguments(plan: Plan, dropout_p: float) -> dict[str, Any]:
    """What :class:`FFNFunction` takes besides the tensors."""
    problem = plan.problem
    arithmetic = Arithmetic(problem.activation, float(dropout_p), problem.input_precision, plan.accuracy)
    return {"arithmetic": arithmetic, "plan": plan}


def _launches(plan: Plan) -> bool:
    """Whether the plan launches kernels of ours."""
    return plan.path in KERNEL_PATHS or plan.epilogue is not None


def _forward(*arguments: Any) -> Tensor:
    """The FFN on any path but torch's, without autograd: the first result of :func:`_forward_and_kept`."""
    return _forward_and_kept(*arguments)[0]


def _forward_and_kept(
    x: Tensor,
    w_up: Tensor,
    w_down: Tensor,
    b_up: Tensor | None,
    b_down: Tensor | None,
    w_gate: Tensor | None,
    b_gate: Tensor | None,
    residual: Tensor | None,
    seed: Tensor | None,
    arithmetic: Arithmetic,
    plan: Plan,
    *,
    keep: bool = False,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """y, and the pre-activations that the epilogue path is to ``keep``, on any path but torch's."""
    x_rows = rows(x)
    residual_rows = None if residual is None else rows(residual)
    z: Tensor | None = None
    z_gate: Tensor | None = None
    if plan.path == "epilogue":
        dropout = Dropout(seed, arithmetic.dropout_p)
        y, z, z_gate = ffn_epilogue.forward(
            x_rows, w_up, w_down, b_up, b_down, w_gate, b_gate, residual_rows, dropout, plan, keep
        )
    elif plan.path == "chunked":
        weights = ffn_chunked.Weights(w_up, w_down, b_up, b_down, w_gate, b_gate)
        y = ffn_chunked.forward(x_rows, weights, residual_rows, seed, arithmetic, plan)
    else:
        operands = Operands(x_rows, w_up, w_down, b_up, w_gate, b_gate, seed, arithmetic)
        y = kernels.forward(operands, b_down, residual_rows, plan.forward_tiles)
    return with_leading_dims(y, x), z, z_gate


class FFNFunction(torch.autograd.Function):
    """The FFN of x ``[*B, M, K]``.

    It keeps its inputs alone, and computes the hidden again in the backward pass; on the epilogue path it keeps the
    pre-activations, too.
    """

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Tensor:
        """The arguments of :func:`_forward_and_kept`."""
        x, w_up, w_down, b_up, _, w_gate, b_gate, _, seed, ctx.arithmetic, ctx.plan = arguments
        # Without a wanted gradient that goes through the hidden there is nothing to recompute, so nothing is kept.
        keep = any(_through_hidden(ctx.needs_input_grad))
        y, z, z_gate = _forward_and_kept(*arguments, keep=keep)
        if keep:
            ctx.save_for_backward(x, w_up, w_down, b_up, w_gate, b_gate, seed, z, z_gate)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        dy = dy.resolve_neg()  # kernels read memory as it is
        wanted = ctx.needs_input_grad
        gradients: list[Tensor | None] = [None] * 7
        through_hidden = _through_hidden(wanted)
        launches = any(through_hidden) and not torch.is_grad_enabled() and _launches(ctx.plan)
        if any(through_hidden):
            x, w_up, w_down, b_up, w_gate, b_gate, seed, z, z_gate = ctx.saved_tensors
            if torch.is_grad_enabled():
                tensors = (x, w_up, w_down, b_up, None, w_gate, b_gate)
                with without_autocast(dy.device):
                    gradients = _differentiable_gradients(tensors, through_hidden, dy, seed, ctx.arithmetic)
            elif ctx.plan.path == "chunked":
                weights = ffn_chunked.Weights(w_up, w_down, b_up, None, w_gate, b_gate)
                with without_autocast(dy.device):
                    gradients = ffn_chunked.gradients(
                        rows(x), weights, seed, through_hidden, rows(dy), ctx.arithmetic, ctx.plan
                    )
            elif ctx.plan.path == "epilogue":
                with without_autocast(dy.device):
                    dropout = Dropout(seed, ctx.arithmetic.dropout_p)
                    gradients = ffn_epilogue.gradients(
                        (rows(x), w_up, w_down, w_gate), (z, z_gate), wanted, rows(dy), dropout, ctx.plan
                    )
            else:
                operands = Operands(rows(x), w_up, w_down, b_up, w_gate, b_gate, seed, ctx.arithmetic)
                gradients = _fused_gradients(operands, wanted, rows(dy), ctx.plan)
            if gradients[0] is not None and gradients[0].shape != x.shape:
                gradients[0] = gradients[0].view(x.shape)
        if wanted[4] and gradients[4] is None:
            summed = column_sums(rows(dy), COLUMN_SUM_TILES) if launches else summed_rows(rows(dy))
            gradients[4] = summed.to(dy.dtype)
        if launches:
            ran_as_kernels(ctx.plan.problem, dy.device)
        return *gradients, dy if wanted[7] else None, None, None, None


def _results(tensors: tuple[Any, ...], problem: Problem, path: str, options: Any, saving: bool) -> Results:
    """What the Function gives, and the pre-activations that it makes and keeps on the epilogue path."""
    x = tensors[0]
    kept = Result((problem.M, problem.N), x.dtype) if path == "epilogue" and problem.training else None
    return [Result((*x.shape[:-1], problem.O), x.dtype)], [kept, kept if problem.gated else None]


COMPOSITE = Composite(ffn)
KERNELS = KernelCall(
    "ffn",
    FFNFunction,
    Problem,
    tensors="x w_up w_down b_up? b_down? w_gate? b_gate? residual? seed?",
    saved=(0, 1, 2, 3, 5, 6, 8),
    arguments=_arguments,
    results=_results,
    added=7,
)


def _through_hidden(wanted: tuple[bool, ...]) -> tuple[bool, ...]:
    """Which of (x, w_up, w_down, b_up, b_down, w_gate, b_gate) want a gradient that needs the hidden: not b_down."""
    return (*wanted[:4], False, *wanted[5:7])


def _fused_gradients(operands: Operands, wanted: tuple[bool, ...], dy: Tensor, plan: Plan) -> list[Tensor | None]:
    """Gradients of (x, w_up, w_down, b_up, b_down, w_gate, b_gate) by the backward kernels.

    That of b_down only where a kernel yields it on the way.
    """
    dx: Tensor | None = None
    db_down: Tensor | None = None
    if plan.stored is not None and all(wanted[:3]) and (operands.gate is None or wanted[5]):
        everything = kernels.stored_gradients(
            operands, dy, wanted[3], wanted[6], wanted[4], plan.stored_splits, plan.stored
        )
        if everything is not None:
            dx, found, db_down = everything
            return [dx, found.up, found.down, found.up_bias, db_down, found.gate, found.gate_bias]
    if wanted[0]:
        dx, db_down = kernels.data_gradient(operands, dy, plan.data_gradient_tiles, column_sums=wanted[4])
    asked = WeightGradients(up=wanted[1], gate=wanted[5], down=wanted[2], up_bias=wanted[3], gate_bias=wanted[6])
    if not any(asked):
        return [dx, None, None, None, db_down, None, None]
    found = kernels.weight_gradients(operands, dy, asked, plan.splits, plan.weight_gradient_tiles)
    return [dx, found.up, found.down, found.up_bias, db_down, found.gate, found.gate_bias]


def _differentiable_gradients(
    tensors: tuple[Any, ...],
    wanted: tuple[bool, ...],
    dy: Tensor,
    seed: Tensor | None,
    arithmetic: Arithmetic,
) -> list[Tensor | None]:
    """The same gradients through the reference, for ``create_graph=True``: they can be differentiated again."""
    # One tensor may play several roles; views tell them apart.
    tensors = tuple(None if tensor is None else tensor.view_as(tensor) for tensor in tensors)
    y = reference.ffn(*tensors, activation=arithmetic.activation, dropout_p=arithmetic.dropout_p, seed=seed)
    chosen = [position for position, want in enumerate(wanted) if want]
    found = torch.autograd.grad(y, [tensors[position] for position in chosen], dy, create_graph=True)
    gradients: list[Tensor | None] = [None] * len(tensors)
    for position, gradient in zip(chosen, found, strict=True):
        gradients[position] = gradient
    return gradients
