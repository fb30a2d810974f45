"""Batched GEMM-GEMM: the public function and the autograd Function of its fused path."""

from typing import Any

import torch
from torch import Tensor

from .. import reference
from ..kernels import gemm_gemm as kernels
from ..kernels.activations import canonical_activation
from ..kernels.gemm_gemm import Arithmetic, Operands, WeightGradients
from ..planning import Plan, Problem
from .arguments import check_gemm_gemm
from .compiled import Composite, KernelCall, Result, Results
from .dispatch import (
    autocast,
    compute_dtype,
    flat_batch,
    gemm_gemm_problem,
    leading_dims,
    planned,
    ran_as_kernels,
    recalled,
    without_autocast,
)
from .signatures import signature
from .tracing import traced


def gemm_gemm(a: Tensor, b: Tensor, c: Tensor, *, activation: str | None = None) -> Tensor:
    """Two batched products with an activation between them: ``act(a @ b) @ c``, the middle never written.

    Args:
        a: ``[*B, M, K]``, any strides.
        b: ``[*B, K, N]``.
        c: ``[*B, N, O]``. Leading dims broadcast as in ``torch.matmul``.
        activation: a name of ``fusedlayers.kernels.activations.ACTIVATIONS``, Hugging Face's name of one, or None.

    Returns:
        ``[*B, M, O]`` in the dtype of a (under autocast: in autocast's dtype). float16, bfloat16 and float32 can run in
        Triton kernels; every floating dtype runs through torch.

    Raises:
        TypeError: an argument that is no tensor, a dtype that is not real floating or differs from that of a.
        ValueError: shapes that do not fit together, tensors on different devices, an unknown activation.
        RuntimeError: ``FUSEDLAYERS_BACKEND=triton`` or ``FUSEDLAYERS_STRICT=1`` where the kernels cannot run.
    """
    if torch.compiler.is_dynamo_compiling():
        return COMPOSITE(a, b, c, activation)[0]
    call = signature("gemm_gemm", (a, b, c), activation)
    known = None if call is None else recalled(call, a.device)
    if known is None:
        activation = canonical_activation(activation)
        check_gemm_gemm(a, b, c)
        known = planned(call, gemm_gemm_problem(a, b, c, activation=activation), a.device)
    problem, plan = known
    activation = problem.activation
    if plan.path == "torch":
        return reference.gemm_gemm(a, b, c, activation=activation)
    batch = leading_dims(a, b, c)
    operands = [flat_batch(tensor, batch) for tensor in autocast((a, b, c), compute_dtype(a))]
    arguments = _arguments(plan)
    if call is None and traced():
        e = KERNELS(operands, problem, plan)
    elif problem.training or call is None:
        e = GemmGemmFunction.apply(*operands, *arguments.values())
    else:
        flat_a, flat_b, flat_c = operands
        e = kernels.forward(_operands(flat_a, flat_b, flat_c, arguments["arithmetic"]), None, None, plan.forward_tiles)
    if not problem.training:
        ran_as_kernels(problem, a.device)
    return e if len(batch) == 1 else e.view(*batch, *e.shape[-2:])


def _arguments(plan: Plan) -> dict[str, Any]:
    """What :class:`GemmGemmFunction` takes besides the tensors."""
    problem = plan.problem
    return {"arithmetic": Arithmetic(problem.activation, 0.0, problem.input_precision, plan.accuracy), "plan": plan}


class GemmGemmFunction(torch.autograd.Function):
    """``act(a @ b) @ c`` on a ``[Z, M, K]``, b ``[Z, K, N]``, c ``[Z, N, O]``; backward computes the middle again."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, c: Tensor, arithmetic: Arithmetic, plan: Plan) -> Tensor:
        ctx.arithmetic, ctx.plan = arithmetic, plan
        ctx.save_for_backward(a, b, c)
        return kernels.forward(_operands(a, b, c, arithmetic), None, None, plan.forward_tiles)

    @staticmethod
    def backward(ctx: Any, de: Tensor) -> tuple[Tensor | None, ...]:
        a, b, c = ctx.saved_tensors
        wanted = ctx.needs_input_grad[:3]
        if torch.is_grad_enabled():
            # create_graph=True: through the reference, whose gradients can be differentiated again. One tensor may play
            # several roles; views tell them apart.
            a, b, c = (tensor.view_as(tensor) for tensor in (a, b, c))
            with without_autocast(de.device):
                e = reference.gemm_gemm(a, b, c, activation=ctx.arithmetic.activation)
                chosen = [tensor for tensor, want in zip((a, b, c), wanted, strict=True) if want]
                second_order = iter(torch.autograd.grad(e, chosen, de, create_graph=True))
            return *(next(second_order) if want else None for want in wanted), None, None
        operands, de = _operands(a, b, c, ctx.arithmetic), de.resolve_neg()  # kernels read memory as it is
        da = kernels.data_gradient(operands, de, ctx.plan.data_gradient_tiles)[0] if wanted[0] else None
        db = dc = None
        if wanted[1] or wanted[2]:
            asked = WeightGradients(up=wanted[1], down=wanted[2])
            found = kernels.weight_gradients(
                operands, de, asked, ctx.plan.splits, ctx.plan.weight_gradient_tiles, transposed=True
            )
            db, dc = found.up, found.down
        ran_as_kernels(ctx.plan.problem, de.device)
        return da, db, dc, None, None


def _results(tensors: tuple[Any, ...], problem: Problem, path: str, options: Any, saving: bool) -> Results:
    a, _, c = tensors
    return [Result((*a.shape[:-1], c.shape[-1]), a.dtype)], []


COMPOSITE = Composite(gemm_gemm)
KERNELS = KernelCall(
    "gemm_gemm", GemmGemmFunction, Problem, tensors="a b c", saved=(0, 1, 2), arguments=_arguments, results=_results
)


def _operands(a: Tensor, b: Tensor, c: Tensor, arithmetic: Arithmetic) -> Operands:
    return Operands(a, b.transpose(1, 2), c.transpose(1, 2), None, None, None, None, arithmetic)
