"""Gradient of an FFN's pre-activations with its bias gradients: the public function and its autograd Function."""

from typing import Any

import torch
from torch import Tensor

from .. import reference
from ..kernels import gemm_epilogue as kernels
from ..kernels.activations import canonical_activation
from ..planning import HiddenGradientPlan, HiddenGradientProblem
from .arguments import check_hidden_gradient
from .compiled import Composite, KernelCall, Result, Results
from .dispatch import (
    autocast,
    compute_dtype,
    hidden_gradient_problem,
    planned,
    ran_as_kernels,
    recalled,
    rows,
    with_leading_dims,
    without_autocast,
)
from .signatures import signature
from .tracing import traced

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
    """Gradient of an FFN's pre-activations ``y = act(z) W_downᵀ``, and its sums over the rows, from one kernel.

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
    if torch.compiler.is_dynamo_compiling():
        listed = COMPOSITE(dy, w_down, z, z_gate, activation, bias)
        # By position: what is not there is not in the list.
        gates = 0 if z_gate is None else 1
        db_up = listed[1 + gates] if bias else None
        return listed[0], listed[1] if gates else None, db_up, listed[3] if bias and gates else None
    tensors = (dy, w_down, z, z_gate)
    call = signature("hidden_gradient", tensors, activation, bias)
    known = None if call is None else recalled(call, dy.device)
    if known is None:
        activation = canonical_activation(activation)
        check_hidden_gradient(dy, w_down, z, z_gate, bias)
        problem = hidden_gradient_problem(dy, w_down, z, z_gate, activation=activation, bias=bias)
        known = planned(call, problem, dy.device)
    problem, plan = known
    operands = autocast(tensors, compute_dtype(dy))
    if plan.path == "torch":
        with without_autocast(dy.device):
            return reference.hidden_gradient(*operands, activation=problem.activation, bias=bias)
    if call is None and traced():
        return KERNELS(operands, problem, plan)
    if not problem.training and call is not None:
        dy, w_down, z, z_gate = operands
        found = _gradients(dy, w_down, z, z_gate, plan)
    else:
        found = HiddenGradientFunction.apply(*operands, plan)
    ran_as_kernels(problem, dy.device)
    return found


def _gradients(dy: Tensor, w_down: Tensor, z: Tensor, z_gate: Tensor | None, plan: HiddenGradientPlan) -> _Gradients:
    assert plan.tiles is not None
    problem = plan.problem
    dz, dz_gate, db_up, db_gate, *_ = kernels.hidden_gradient(
        rows(dy), w_down, rows(z), None if z_gate is None else rows(z_gate), problem.bias, plan.row_tiles,
        problem.activation, plan.accuracy, problem.input_precision, plan.tiles, plan.pipeline,
    )  # fmt: skip
    return with_leading_dims(dz, z), None if dz_gate is None else with_leading_dims(dz_gate, z), db_up, db_gate


class HiddenGradientFunction(torch.autograd.Function):
    """dz, dz_gate, db_up, db_gate of dy, w_down, z, z_gate; their gradients go through the reference."""

    @staticmethod
    def forward(
        ctx: Any, dy: Tensor, w_down: Tensor, z: Tensor, z_gate: Tensor | None, plan: HiddenGradientPlan
    ) -> _Gradients:
        ctx.plan = plan
        ctx.save_for_backward(dy, w_down, z, z_gate)
        ctx.set_materialize_grads(False)
        return _gradients(dy, w_down, z, z_gate, plan)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor | None) -> tuple[Tensor | None, ...]:
        problem, wanted = ctx.plan.problem, ctx.needs_input_grad[:4]
        again = torch.is_grad_enabled()
        # One tensor may play several roles; views, or leaves of a graph of their own, tell them apart.
        tensors = [
            t if t is None or not want else t.view_as(t) if again else t.detach().requires_grad_()
            for t, want in zip(ctx.saved_tensors, wanted, strict=True)
        ]
        with torch.enable_grad(), without_autocast(tensors[0].device):
            found = reference.hidden_gradient(*tensors, activation=problem.activation, bias=problem.bias)
            # An output may depend on nothing that a gradient is wanted of, or have none of its own.
            pairs = [
                (out, gradient)
                for out, gradient in zip(found, upstream, strict=True)
                if out is not None and gradient is not None and out.requires_grad
            ]
            if not pairs:
                return None, None, None, None, None
            chosen = [tensor for tensor, want in zip(tensors, wanted, strict=True) if want]
            outputs, gradients = zip(*pairs, strict=True)
            results = iter(torch.autograd.grad(outputs, chosen, gradients, create_graph=again, allow_unused=True))
        return *(next(results) if want else None for want in wanted), None


def _results(
    tensors: tuple[Any, ...], problem: HiddenGradientProblem, path: str, options: Any, saving: bool
) -> Results:
    z, gated, bias = tensors[2], problem.gated, problem.bias
    matrix, sums = Result(z.shape, z.dtype), Result((z.shape[-1],), z.dtype)
    return [matrix, matrix if gated else None, sums if bias else None, sums if bias and gated else None], []


COMPOSITE = Composite(hidden_gradient)
KERNELS = KernelCall(
    "hidden_gradient",
    HiddenGradientFunction,
    HiddenGradientProblem,
    tensors="dy w_down z z_gate?",
    saved=(0, 1, 2, 3),
    arguments=lambda plan: {"plan": plan},
    results=_results,
    plain_backward=True,
)
