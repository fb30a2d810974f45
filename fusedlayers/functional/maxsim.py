"""Late interaction: the public function, and its operation."""

import functools
import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from .. import reference
from ..kernels import maxsim as kernels
from ..kernels.maxsim import MaxSimOperands
from ..planning import MaxSimProblem
from .call import call_facts, traced, wants_gradient
from .custom_ops import Result, Results
from .operands import describe_tensor
from .operation import Operation, Tensors
from .prepared import Prepared
from .shapes import Shapes, check_absent


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
    padded, with or without a mask, or packed: all tokens concatenated, with the offset where each query or document
    starts. The documents are shared by all queries.

    Args:
        queries: ``[Q, Lq, d]``, or packed ``[ΣLq, d]`` with ``cu_seqlens_queries``; any strides.
        documents: ``[D, Ld, d]``, or packed ``[ΣLd, d]`` with ``cu_seqlens_documents``.
        query_mask: boolean ``[Q, Lq]``, True where a token takes part, or None. Masked tokens may hold anything.
        document_mask: boolean ``[D, Ld]``, or None.
        cu_seqlens_queries: int32 or int64 ``[Q + 1]``: 0, then the end of each query; the last one is the total.
        cu_seqlens_documents: the same for documents, ``[D + 1]``.

    Returns:
        ``[Q, D]`` in the dtype of queries (under autocast: in autocast's dtype). A masked query token adds 0; a query
        with tokens scores -inf against a document without any, and neither gets a gradient from that. Of equal
        similarities the first gets the gradient, as with ``torch.max(dim)``.

    Raises:
        TypeError: an argument that is no tensor, a dtype that is not real floating or differs from that of queries, a
            mask that is not boolean, offsets that are not integers.
        ValueError: shapes that do not fit together, tensors on different devices, a mask beside offsets, offsets that
            do not start at 0, decrease, or do not end at the total. To check offsets on a GPU the host synchronises,
            except while a CUDA graph is captured or torch.compile traces: then their values are not checked.
        RuntimeError: ``FUSEDLAYERS_BACKEND=triton`` or ``FUSEDLAYERS_STRICT=1`` where the kernels cannot run.
    """
    offsets = cu_seqlens_queries, cu_seqlens_documents
    return MAXSIM.call((queries, documents, query_mask, document_mask, *offsets), ())


@functools.cache
def _shapes(packed_queries: bool, packed_documents: bool) -> Shapes:
    """The tensors of a call, each side padded or packed."""
    queries, documents = "ΣLq d" if packed_queries else "Q Lq d", "ΣLd d" if packed_documents else "D Ld d"
    packed = [name for name, is_packed in (("queries", packed_queries), ("documents", packed_documents)) if is_packed]
    return Shapes(
        f"queries: {queries}, documents: {documents}, query_mask?: mask(Q Lq), document_mask?: mask(D Ld), "
        "cu_seqlens_queries?: index(Q+1), cu_seqlens_documents?: index(D+1)",
        note="".join(f", because cu_seqlens_{name} packs {name}" for name in packed),
    )


def check_offsets(name: str, offsets: Tensor | None, tokens: Tensor) -> None:
    """Checks that ``cu_seqlens`` starts at 0, never decreases, ends at the rows of ``tokens``; syncs with a GPU."""
    if offsets is None:
        return
    values, total = offsets.tolist(), tokens.shape[0]
    fall = next((position for position, (one, two) in enumerate(pairwise(values)) if two < one), None)
    if values[0] != 0:
        expected = f"0 first, got {values[0]}"
    elif fall is not None:
        expected = f"values that never decrease, got {values[fall]}, {values[fall + 1]} at {fall} and {fall + 1}"
    elif values[-1] != total:
        expected = f"{total} last, the number of packed tokens, got {values[-1]}"
    else:
        return
    raise ValueError(f"{describe_tensor(name, offsets)}: expected {expected}")


class _MaxSim(Operation):
    """The scores of queries and documents, padded or packed; keeps which document token each query token chose."""

    problem_type = MaxSimProblem
    operands = "queries documents query_mask? document_mask? cu_seqlens_queries? cu_seqlens_documents?"
    row_operands = ("queries",)
    # With d = 1 torch.einsum multiplies elementwise, which autocast leaves in the operands' dtype.
    torch_takes_cast = True

    def check(self, tensors: Tensors, options: tuple[Any, ...]) -> tuple[Any, ...]:
        _, _, query_mask, document_mask, cu_seqlens_queries, cu_seqlens_documents = tensors
        _shapes(cu_seqlens_queries is not None, cu_seqlens_documents is not None).check(*tensors)
        for name, offsets, mask_name, mask in (
            ("queries", cu_seqlens_queries, "query_mask", query_mask),
            ("documents", cu_seqlens_documents, "document_mask", document_mask),
        ):
            if offsets is not None:
                check_absent(mask_name, mask, f"cu_seqlens_{name} packs {name}")
                if not offsets.numel():
                    described = describe_tensor(f"cu_seqlens_{name}", offsets)
                    raise ValueError(f"{described}: expected the offsets 0, …, total")
        return options

    def problem(self, tensors: Tensors, options: tuple[Any, ...]) -> MaxSimProblem:
        queries, documents, query_mask, document_mask, cu_seqlens_queries, cu_seqlens_documents = tensors
        return MaxSimProblem(
            queries=queries.shape[0] if cu_seqlens_queries is None else cu_seqlens_queries.shape[0] - 1,
            documents=documents.shape[0] if cu_seqlens_documents is None else cu_seqlens_documents.shape[0] - 1,
            query_tokens=math.prod(queries.shape[:-1]),
            document_tokens=math.prod(documents.shape[:-1]),
            K=queries.shape[-1],
            query_layout=_layout(query_mask, cu_seqlens_queries),
            document_layout=_layout(document_mask, cu_seqlens_documents),
            needs_query_gradient=wants_gradient(queries),
            needs_document_gradient=wants_gradient(documents),
            **call_facts(*tensors),
        )

    def runs_eager(self, call: Prepared) -> bool:
        # Packed tokens are padded to a data-dependent length, unknown in a trace: the call stays one custom operation.
        packed = "packed" in (call.problem.query_layout, call.problem.document_layout)
        return super().runs_eager(call) and not (call.observed and packed)

    def title(self, problem: MaxSimProblem, tensors: Tensors, options: tuple[Any, ...]) -> str:
        return "maxsim: scores[q, e] = Σ_i max_j queries[q, i] · documents[e, j]"

    def through_torch(self, call: Prepared, tensors: Tensors) -> Tensor:
        _check_values(call, tensors)
        return _reference(*tensors)

    def flattened(self, call: Prepared, tensors: Tensors) -> Tensors:
        _check_values(call, tensors)
        return tensors

    def forward(self, call: Prepared, operands: Tensors, wanted: Sequence[bool]) -> tuple[Tensors, Tensors]:
        plan = call.plan
        if plan.path == "torch":
            return (_reference(*operands),), (None,)
        scores, chosen = kernels.forward(
            _operands(call, operands), indices=any(wanted), splits=plan.splits, chunk=plan.chunk,
            tiles=plan.forward_tiles,
        )  # fmt: skip
        return (scores,), (chosen,)

    def backward(
        self, call: Prepared, operands: Tensors, made: Tensors, wanted: Sequence[bool], upstream: Tensors
    ) -> Tensors:
        plan, [gradient], [chosen] = call.plan, upstream, made
        if plan.path == "torch":
            return self.differentiable_gradients(call, operands, wanted, upstream)
        given = _operands(call, operands)
        d_queries = d_documents = None
        if wanted[0]:
            d_queries = kernels.query_gradient(
                given, chosen, gradient, plan.query_gradient_splits, plan.query_gradient_tiles
            ).view(operands[0].shape)
        if wanted[1]:
            d_documents = kernels.document_gradient(
                given, chosen, gradient, plan.document_gradient_splits, plan.chunk, plan.document_gradient_tiles
            )
        return d_queries, d_documents, None, None, None, None

    def expression(self, call: Prepared, operands: Tensors) -> Tensors:
        return (_reference(*operands),)

    def results(self, operands: Tensors, problem: Any, path: str, extras: dict[str, Any], saving: bool) -> Results:
        scores = Result((problem.queries, problem.documents), operands[0].dtype)
        chosen = Result((problem.documents, problem.query_tokens), torch.int32)
        return [scores], [None if path == "torch" or not saving else chosen]


def _check_values(call: Prepared, tensors: Tensors) -> None:
    """Checks the offsets of every call, on any path: a prepared call fixes their shapes, not their values."""
    queries, documents, *_, cu_seqlens_queries, cu_seqlens_documents = tensors
    if not (traced() or queries.is_meta or call.problem.captured):
        check_offsets("cu_seqlens_queries", cu_seqlens_queries, queries)
        check_offsets("cu_seqlens_documents", cu_seqlens_documents, documents)


def _layout(mask: Tensor | None, cu_seqlens: Tensor | None) -> str:
    return "packed" if cu_seqlens is not None else "padded" if mask is None else "masked"


def _operands(call: Prepared, tensors: Tensors) -> MaxSimOperands:
    """The kernels' operands from the arguments of :func:`maxsim`; query tokens flattened, a view if strides allow."""
    queries, documents, query_mask, document_mask, cu_seqlens_queries, cu_seqlens_documents = tensors
    return MaxSimOperands(
        queries=queries if queries.dim() == 2 else queries.reshape(-1, queries.shape[-1]),
        documents=documents,
        query_length=queries.shape[1] if cu_seqlens_queries is None else 1,
        query_mask=None if query_mask is None else query_mask.reshape(-1),
        document_mask=document_mask,
        query_offsets=cu_seqlens_queries,
        document_offsets=cu_seqlens_documents,
        input_precision=call.problem.input_precision,
        ready=call.ready,
    )


def _reference(*tensors: Any) -> Tensor:
    *padded, queries, documents = tensors
    return reference.maxsim(*padded, cu_seqlens_queries=queries, cu_seqlens_documents=documents)


MAXSIM = _MaxSim(maxsim)
