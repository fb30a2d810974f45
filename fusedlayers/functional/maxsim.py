"""Late interaction: the public function and the autograd Function of its fused path."""

from typing import Any

import torch
from torch import Tensor

from .. import reference
from ..kernels import maxsim as kernels
from ..kernels.maxsim import MaxSimOperands
from ..planning import MaxSimPlan, MaxSimProblem
from .arguments import check_maxsim, check_offsets
from .compiled import Composite, KernelCall, Result, Results
from .dispatch import (
    autocast,
    compute_dtype,
    maxsim_problem,
    planned,
    ran_as_kernels,
    recalled,
    without_autocast,
)
from .signatures import signature
from .tracing import traced


def maxsim(
    queries: Tensor,
    documents: Tensor,
    query_mask: Tensor | None = None,
    document_mask: Tensor | None = None,
    *,
    cu_seqlens_queries: Tensor | None = None,
    cu_seqlens_documents: Tensor | None = None,
) -> Tensor:
    """Late-interaction scores of all pairs: ``scores[q, e] = Σ_i max_j queries[q, i] · documents[e, j]``.

    Khattab and Zaharia, "ColBERT", 2020. The similarities, ``[Q, D, Lq, Ld]``, are never written. Each side is either
    padded, with or without a mask, or packed: all tokens behind one another, and the offsets where a query or document
    starts. The documents are shared by all queries.

    Args:
        queries: ``[Q, Lq, d]``, or ``[total, d]`` with ``cu_seqlens_queries``; any strides.
        documents: ``[D, Ld, d]``, or ``[total, d]`` with ``cu_seqlens_documents``.
        query_mask: boolean ``[Q, Lq]``, True where a token takes part, or None. What is masked may hold anything.
        document_mask: boolean ``[D, Ld]``, or None.
        cu_seqlens_queries: int32 or int64 ``[Q + 1]``: 0, the ends of the queries, the last of which is the total.
        cu_seqlens_documents: the same for documents, ``[D + 1]``.

    Returns:
        ``[Q, D]`` in the dtype of queries (under autocast: in autocast's dtype). A masked query token adds 0; a query
        with tokens scores -inf against a document without any, and neither gets a gradient from that. Of equal
        similarities the first gets the gradient, as with ``torch.max(dim)``.

    Raises:
        TypeError: an argument that is no tensor, a dtype that is not real floating or differs from that of queries, a
            mask that is not boolean, offsets that are not integers.
        ValueError: shapes that do not fit together, tensors on different devices, a mask beside offsets, offsets that
            do not start at 0, decrease, or do not end at the total. Offsets on a GPU are copied to the host for that,
            which waits for what was launched before, except while a CUDA graph is captured or torch.compile traces:
            then nobody looks at their values.
        RuntimeError: ``FUSEDLAYERS_BACKEND=triton`` or ``FUSEDLAYERS_STRICT=1`` where the kernels cannot run.
    """
    tensors = (queries, documents, query_mask, document_mask, cu_seqlens_queries, cu_seqlens_documents)
    if torch.compiler.is_dynamo_compiling():
        return COMPOSITE(*tensors)[0]
    call = signature("maxsim", tensors)
    reading = call is None and traced()
    known = None if call is None else recalled(call, queries.device)
    if known is None:
        check_maxsim(*tensors)
        problem = maxsim_problem(
            queries, documents, query_mask, document_mask,
            cu_seqlens_queries=cu_seqlens_queries, cu_seqlens_documents=cu_seqlens_documents,
        )  # fmt: skip
        known = planned(call, problem, queries.device)
    problem, plan = known
    # Their values may be wrong in a call whose shapes were right before.
    if not (reading or queries.is_meta or problem.captured):
        check_offsets("cu_seqlens_queries", cu_seqlens_queries, queries)
        check_offsets("cu_seqlens_documents", cu_seqlens_documents, documents)
    # How far to pad packed tokens only data knows, which nobody can ask while tracing: that stays inside an operation.
    opaque = reading and (plan.path != "torch" or not (cu_seqlens_queries is None and cu_seqlens_documents is None))
    if plan.path == "torch" and not opaque:
        return _reference(*tensors)
    operands = autocast(tensors[:2], compute_dtype(queries))
    if opaque:
        scores: Tensor = KERNELS((*operands, *tensors[2:]), problem, plan)
    elif problem.training or call is None:
        scores = MaxSimFunction.apply(*operands, *tensors[2:], plan)
    else:
        scores, _ = _forward(_operands((*operands, *tensors[2:]), plan), plan, indices=False)
    if not problem.training:
        ran_as_kernels(problem, queries.device)
    return scores


class MaxSimFunction(torch.autograd.Function):
    """The scores of queries and documents, padded or packed; keeps which document token each query token chose."""

    @staticmethod
    def forward(
        ctx: Any,
        queries: Tensor,
        documents: Tensor,
        query_mask: Tensor | None,
        document_mask: Tensor | None,
        cu_seqlens_queries: Tensor | None,
        cu_seqlens_documents: Tensor | None,
        plan: MaxSimPlan,
    ) -> Tensor:
        ctx.plan = plan
        tensors = (queries, documents, query_mask, document_mask, cu_seqlens_queries, cu_seqlens_documents)
        wanted = any(ctx.needs_input_grad[:2])
        if plan.path == "torch":
            scores, chosen = _reference(*tensors), None
        else:
            scores, chosen = _forward(_operands(tensors, plan), plan, indices=wanted)
        if wanted:
            ctx.save_for_backward(*tensors, chosen)
        return scores

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        *tensors, chosen = ctx.saved_tensors
        queries, documents = tensors[:2]
        wanted = ctx.needs_input_grad[:2]
        gradients: list[Tensor | None] = [None, None]
        again = torch.is_grad_enabled()
        if again or ctx.plan.path == "torch":
            # create_graph=True: through the reference, whose gradients can be differentiated again. One tensor may play
            # both roles; views, or leaves of a graph of their own, tell them apart.
            views = [
                tensor.view_as(tensor) if again else tensor.detach().requires_grad_(want)
                for tensor, want in zip((queries, documents), wanted, strict=True)
            ]
            with torch.enable_grad(), without_autocast(upstream.device):
                scores = _reference(*views, *tensors[2:])
                chosen_views = [view for view, want in zip(views, wanted, strict=True) if want]
                found = iter(torch.autograd.grad(scores, chosen_views, upstream, create_graph=again))
            gradients = [next(found) if want else None for want in wanted]
        else:
            plan, operands = ctx.plan, _operands(tuple(tensors), ctx.plan)
            upstream = upstream.resolve_neg()  # kernels read memory as it is
            if wanted[0]:
                gradients[0] = kernels.query_gradient(
                    operands, chosen, upstream, plan.query_gradient_splits, plan.query_gradient_tiles
                ).view(queries.shape)
            if wanted[1]:
                gradients[1] = kernels.document_gradient(
                    operands, chosen, upstream, plan.document_gradient_splits, plan.chunk, plan.document_gradient_tiles
                )
            ran_as_kernels(plan.problem, upstream.device)
        return *gradients, None, None, None, None, None


def _forward(operands: MaxSimOperands, plan: MaxSimPlan, *, indices: bool) -> tuple[Tensor, Tensor | None]:
    assert plan.forward_tiles is not None
    return kernels.forward(operands, indices=indices, splits=plan.splits, chunk=plan.chunk, tiles=plan.forward_tiles)


def _results(tensors: tuple[Any, ...], problem: MaxSimProblem, path: str, options: Any, saving: bool) -> Results:
    scores = Result((problem.queries, problem.documents), tensors[0].dtype)
    chosen = None if path == "torch" else Result((problem.documents, problem.query_tokens), torch.int32)
    return [scores], [chosen] if saving else []


COMPOSITE = Composite(maxsim)
KERNELS = KernelCall(
    "maxsim",
    MaxSimFunction,
    MaxSimProblem,
    tensors="queries documents query_mask? document_mask? cu_seqlens_queries? cu_seqlens_documents?",
    saved=(0, 1, 2, 3, 4, 5),
    arguments=lambda plan: {"plan": plan},
    results=_results,
)


def _operands(tensors: tuple[Any, ...], plan: MaxSimPlan) -> MaxSimOperands:
    """The tensors in the order of :func:`maxsim`, their query tokens behind one another: a view where strides allow."""
    queries, documents, query_mask, document_mask, cu_seqlens_queries, cu_seqlens_documents = tensors
    return MaxSimOperands(
        queries=queries if queries.dim() == 2 else queries.reshape(-1, queries.shape[-1]),
        documents=documents,
        query_length=queries.shape[1] if cu_seqlens_queries is None else 1,
        query_mask=None if query_mask is None else query_mask.reshape(-1),
        document_mask=document_mask,
        query_offsets=cu_seqlens_queries,
        document_offsets=cu_seqlens_documents,
        input_precision=plan.problem.input_precision,
    )


def _reference(
    queries: Tensor,
    documents: Tensor,
    query_mask: Tensor | None,
    document_mask: Tensor | None,
    cu_seqlens_queries: Tensor | None,
    cu_seqlens_documents: Tensor | None,
) -> Tensor:
    return reference.maxsim(
        queries, documents, query_mask, document_mask,
        cu_seqlens_queries=cu_seqlens_queries, cu_seqlens_documents=cu_seqlens_documents,
    )  # fmt: skip
