"""Batched GEMM-reduce: the public function, and its operation."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ... import reference
from ...kernels import gemm_reduce as kernels
from ...kernels.activations import canonical_activation
from ...kernels.gemm_reduce import ReduceArithmetic, ReduceOperands
from ...planning import ReducePlan, ReduceProblem
from ...reference.reductions import signed_lengths
from ..call import call_facts, wants_gradient
from ..custom_ops import Result, Results
from ..operands import flat_batch, leading_dims
from ..operation import Operation, Tensors, formula
from ..prepared import Prepared
from .arguments import INDEXED, OPERATIONS, check_gemm_reduce


def gemm_reduce(
    a: Tensor,
    b: Tensor,
    *,
    op: str = "sum",
    dim: int = -2,
    mask: Tensor | None = None,
    lengths: Tensor | None = None,
    bias: Tensor | None = None,
    activation: str | None = None,
    return_indices: bool = False,
    return_product: bool = False,
    atomic: bool = False,
) -> Any:
    """A batched product reduced over its rows or its columns, without writing it: ``⊕ act(a @ b + bias)``.

    Args:
        a: ``[*B, M, K]``, any strides.
        b: ``[*B, K, N]``. Leading dims broadcast as in ``torch.matmul``.
        op: sum, mean, max, min, absmax (the largest absolute value), sumsq (the sum of squares), logsumexp, argmax or
            argmin.
        dim: -2 reduces over M to ``[*B, N]``, -1 over N to ``[*B, M]``.
        mask: boolean, broadcasts to ``[*B, M]`` or ``[*B, N]``, the axis that is reduced: True takes part.
        lengths: integers that broadcast to ``[*B]``: only the first ``lengths`` rows of the axis take part. Values are
            clamped to 0 and its size. With a mask, rows take part that both include.
        bias: ``[N]``, added to the product.
        activation: a name of ``fusedlayers.kernels.activations.ACTIVATIONS``, Hugging Face's name of one, or None.
        return_indices: for max, min and absmax, return int64 indices too.
        return_product: return ``act(a @ b + bias)`` ``[*B, M, N]`` too, unmasked. It is written by the same kernel.
        atomic: for sum, mean and sumsq, add up the parts of the reduced axis atomically, in float32 but in no fixed
            order, so that results may differ in their last bits from call to call. By default they never do.

    Returns:
        D in the dtype of a (under autocast: in autocast's dtype); ``(D, indices)``, ``(D, product)`` or
        ``(D, indices, product)`` where these are asked for. For argmax and argmin the int64 indices take the place of D.

        Of equal values the first index is returned, and it gets the whole gradient, as in ``torch.max(dim)``
        (``torch.amax`` divides it among them). NaN wins over everything; of several the first. Masked elements count as
        0 for sum and sumsq, as -inf for max, absmax and logsumexp and as inf for min; mean divides by the number of the
        others. So where everything is masked, sum and sumsq are 0, mean is NaN, the others are infinite with index 0,
        and gradients are 0. An axis of size 0 has the same sum, sumsq, mean and logsumexp.

        float16, bfloat16 and float32 can run in Triton kernels; every floating dtype runs through torch.
        A sum or mean without an activation is computed as ``(Σ a) @ b``. In kernels the gradient of max, min and absmax
        gathers rows of the reduced operand: non-finite values in other rows do not reach it, as they do (0 · inf) in
        torch's product.

    Raises:
        TypeError: an argument that is no tensor, a dtype that is not real floating or differs from that of a, a mask
            that is not boolean, lengths that are not integers.
        ValueError: shapes that do not fit together, tensors on different devices, an unknown op, dim or activation,
            ``return_indices`` or ``atomic`` with an op that has none, a maximum or minimum over an axis of size 0.
        RuntimeError: ``atomic=True`` under ``torch.use_deterministic_algorithms(True)``, or ``FUSEDLAYERS_BACKEND=triton``
            or ``FUSEDLAYERS_STRICT=1`` where the kernels cannot run.
    """  # noqa: E501
    options = op, dim, activation, return_indices, return_product, atomic
    return GEMM_REDUCE.call((a, b, mask, lengths, bias), options)


@dataclass(frozen=True)
class _Reduction:
    """The arithmetic, which operand the bias belongs to, what is wanted beside D, and the plan."""

    arithmetic: ReduceArithmetic
    bias_of_kept: bool
    indices: bool
    product: bool
    plan: ReducePlan


def _operands(call: Prepared, tensors: Tensors) -> ReduceOperands:
    kept, reduced, bias, mask, lengths = tensors
    kept_bias, reduced_bias = (bias, None) if call.details.bias_of_kept else (None, bias)
    return ReduceOperands(
        kept, reduced, kept_bias, reduced_bias, mask, lengths, None, call.details.arithmetic, call.ready
    )


class _GemmReduce(Operation):
    """D and what is wanted beside it, of kept ``[Z, P, K]`` and reduced ``[Z, R, K]``; the product is not kept."""

    problem_type = ReduceProblem
    operands = "kept reduced bias? mask? lengths?"
    torch_paths = ("torch", "algebraic")
    torch_takes_cast = True

    def check(self, tensors: Tensors, options: tuple[Any, ...]) -> tuple[Any, ...]:
        op, dim, activation, *rest = options
        activation = canonical_activation(activation)
        check_gemm_reduce(tensors, options)
        return op, dim, activation, *rest

    def may_be_repeated(self, options: tuple[Any, ...]) -> bool:
        # torch.use_deterministic_algorithms, which forbids atomic addition, may change between calls.
        return not options[-1]

    def problem(self, tensors: Tensors, options: tuple[Any, ...]) -> ReduceProblem:
        a, b, mask, lengths, bias = tensors
        op, dim, activation, return_indices, return_product, atomic = options
        kept, reduced = (b.shape[-1], a.shape[-2]) if dim == -2 else (a.shape[-2], b.shape[-1])
        # Indices have no gradient; the product beside them has one.
        index_alone = op.startswith("arg")
        differentiable = return_product or not index_alone
        wants_a, wants_b = (differentiable and wants_gradient(tensor) for tensor in (a, b))
        return ReduceProblem(
            batch=math.prod(leading_dims(a, b)),
            kept=kept,
            reduced=reduced,
            K=a.shape[-1],
            op=OPERATIONS[op],
            activation=activation,
            masked=mask is not None or lengths is not None,
            biased=bias is not None,
            indices=return_indices or index_alone,
            product=return_product,
            atomic=atomic,
            needs_kept_gradient=wants_b if dim == -2 else wants_a,
            needs_reduced_gradient=wants_a if dim == -2 else wants_b,
            needs_bias_gradient=differentiable and wants_gradient(bias),
            **call_facts(*tensors),
        )

    def title(self, problem: ReduceProblem, tensors: Tensors, options: tuple[Any, ...]) -> str:
        op, dim, activation, *_ = options
        product = "a @ b" if tensors[-1] is None else "a @ b + bias"
        plain = activation == "identity"
        inner, act = (product, "") if plain else (f"act({product})", f", act = {formula(activation)}")
        return f"gemm_reduce: {op} of {inner} over {'M' if dim == -2 else 'N'}{act}"

    def through_torch(self, call: Prepared, tensors: Tensors) -> Any:
        a, b, mask, lengths, bias = tensors
        op, dim, activation, return_indices, return_product, _ = call.options
        if call.plan.path == "algebraic":
            return reference.gemm_sum(a, b, op=op, dim=dim, mask=mask, lengths=lengths, bias=bias)
        return reference.gemm_reduce(
            a, b, op=op, dim=dim, mask=mask, lengths=lengths, bias=bias, activation=activation,
            return_indices=return_indices, return_product=return_product,
            without_index=not (call.problem.training or call.problem.subclass),
            # torch's autocast runs logsumexp in float32. Its gradient reads D, whose rounding to 16 bits would show.
            wide_exponentials=call.dtype is not None,
        )  # fmt: skip

    def flattened(self, call: Prepared, tensors: Tensors) -> Tensors:
        a, b, mask, lengths, bias = tensors
        batch = leading_dims(a, b)
        kept, reduced = (b.mT, a) if call.details.bias_of_kept else (a, b.mT)
        flat_mask = None if mask is None else mask.expand(*batch, reduced.shape[-2]).reshape(-1, reduced.shape[-2])
        return flat_batch(kept, batch), flat_batch(reduced, batch), bias, flat_mask, _flat_lengths(lengths, batch)

    def finished(self, call: Prepared, tensors: Tensors, results: Any) -> Any:
        op, dim, _, return_indices, return_product, _ = call.options
        batch = leading_dims(*tensors[:2])
        d, index, product = results
        if len(batch) != 1:
            d, index, product = (None if each is None else each.reshape(*batch, *each.shape[1:]) for each in results)
        if product is not None and dim == -2:
            product = product.mT
        first = (index,) if op.startswith("arg") else (d, index) if return_indices else (d,)
        given = (*first, product) if return_product else first
        return given if len(given) > 1 else given[0]

    def extras(self, options: tuple[Any, ...]) -> dict[str, Any]:
        # The bias has N elements, an axis that is kept where M is reduced.
        return {"bias_of_kept": options[1] == -2}

    def details(self, plan: ReducePlan, extras: dict[str, Any]) -> _Reduction:
        p = plan.problem
        arithmetic = ReduceArithmetic(p.op, p.activation, p.input_precision, plan.accuracy)
        return _Reduction(arithmetic, extras["bias_of_kept"], p.indices, p.product, plan)

    def forward(self, call: Prepared, operands: Tensors, wanted: Sequence[bool]) -> tuple[Tensors, Tensors]:
        reduction, saving = call.details, any(wanted)
        given = _operands(call, operands)
        kept, plan, op = operands[0], reduction.plan, reduction.arithmetic.op
        batch, rows, columns, _ = given.sizes()
        product = None
        if reduction.product and reduction.bias_of_kept:
            # Column-major, but not as a view: autograd forbids in-place changes of views made inside a Function.
            shape, strides = (batch, rows, columns), (rows * columns, 1, rows)
            product = torch.empty_strided(shape, strides, dtype=kept.dtype, device=kept.device)
        elif reduction.product:
            product = torch.empty(batch, rows, columns, dtype=kept.dtype, device=kept.device)
        exact = saving and op == "logsumexp"  # its gradient reads D before it is rounded
        shares = None
        if exact and kept.dtype == torch.float32:
            shares = torch.empty(2, batch, rows, dtype=torch.float32, device=kept.device)
        d, index = kernels.reduce(
            given,
            indices=reduction.indices or (saving and op in INDEXED),
            out_dtype=torch.float32 if exact else kept.dtype,
            splits=plan.splits,
            tiles=plan.forward_tiles,
            atomic=plan.problem.atomic,
            product=product,
            shares=shares,
        )
        wide = index.to(torch.int64) if index is not None and reduction.indices else None
        saved = d if exact else index if saving else None
        return (d.to(kept.dtype), wide, product), (saved if shares is None else shares,)

    def backward(
        self, call: Prepared, operands: Tensors, made: Tensors, wanted: Sequence[bool], upstream: Tensors
    ) -> Tensors:
        if upstream[2] is not None:
            # The returned product has an upstream gradient, too, which only torch's operations take.
            return self.differentiable_gradients(call, operands, wanted, upstream)
        reduction, [saved], dd = call.details, made, upstream[0]
        given = _operands(call, operands)
        return *_gradients(reduction, given, wanted, dd, saved), None, None

    def expression(self, call: Prepared, operands: Tensors) -> Tensors:
        kept, reduced, bias, mask, lengths = operands
        reduction = call.details
        shaped = bias if bias is None or not reduction.bias_of_kept else bias.unsqueeze(-1)
        d, product = reference.gemm_reduce(
            kept, reduced.mT, op=reduction.arithmetic.op, dim=-1, mask=mask, lengths=lengths, bias=shaped,
            activation=reduction.arithmetic.activation, return_product=True,
        )  # fmt: skip
        return d, None, product

    def results(self, operands: Tensors, problem: Any, path: str, extras: dict[str, Any], saving: bool) -> Results:
        kept, reduced = operands[:2]
        shape = kept.shape[:2]
        product = Result((*shape, reduced.shape[1]), kept.dtype, transposed=extras["bias_of_kept"])
        made = None
        if saving and problem.op == "logsumexp":
            made = Result((2, *shape) if kept.dtype == torch.float32 else shape, torch.float32)
        elif saving and problem.indexed:
            made = Result(shape, torch.int32)
        given = (
            Result(shape, kept.dtype),
            Result(shape, torch.int64) if problem.indices else None,
            product if problem.product else None,
        )
        return given, [made]


def _flat_lengths(lengths: Tensor | None, batch: torch.Size) -> Tensor | None:
    if lengths is None:
        return None
    lengths = signed_lengths(lengths)
    # Clamped before the cast to int32 truncates.
    most = 2**31 - 1 if lengths.dtype is torch.int64 else None
    return lengths.clamp(0, most).expand(batch).reshape(-1).to(torch.int32)


def _gradients(
    reduction: _Reduction, operands: ReduceOperands, wanted: Sequence[bool], dd: Tensor, saved: Any
) -> tuple[Any, ...]:
    """The wanted gradients of kept, reduced and bias, by kernels or in closed form."""
    arithmetic, plan = operands.arithmetic, reduction.plan
    of_kept, of_reduced, of_bias = wanted[:3]
    kept_bias, reduced_bias = of_bias and reduction.bias_of_kept, of_bias and not reduction.bias_of_kept
    g = dd.to(torch.float32).contiguous()
    if arithmetic.op == "mean":
        counts = operands.counts().unsqueeze(-1)
        g = torch.where(counts > 0, g / counts, 0.0)
    elif arithmetic.op == "logsumexp" and saved.dim() == 3:
        saved, exponentials = saved
        g = g / exponentials
    if plan.one_pass_tiles is not None:
        return *kernels.both_gradients(operands, g, saved, tiles=plan.one_pass_tiles, splits=plan.one_pass_splits), None
    tiles = plan.gradient_tiles
    assert tiles is not None
    d_kept = d_reduced = kept_sums = reduced_sums = None
    if arithmetic.op in INDEXED:
        g, d_kept = kernels.route(operands, g, saved, kept_gradient=of_kept)
        kept_sums = g
    elif plan.problem.linear:
        return _linear_gradients(operands, wanted, g, reduction.bias_of_kept)
    elif of_kept or kept_bias:
        d_kept, kept_sums = kernels.kept_gradient(operands, g, saved, matrix=of_kept, bias=kept_bias, tiles=tiles)
    if of_reduced or reduced_bias:
        d_reduced, reduced_sums = kernels.reduced_gradient(
            operands, g, saved, matrix=of_reduced, bias=reduced_bias, tiles=tiles
        )
    sums = kept_sums if kept_bias else reduced_sums
    return d_kept, d_reduced, sums.sum(0).to(operands.kept.dtype) if of_bias and sums is not None else None


def _linear_gradients(
    operands: ReduceOperands, wanted: Sequence[bool], g: Tensor, bias_of_kept: bool
) -> tuple[Any, ...]:
    """Gradients of a sum or mean without an activation; g is float32 ``[Z, P]``, divided by the counts for a mean."""
    kept, reduced, dtype = operands.kept, operands.reduced, operands.kept.dtype
    taking = operands.taking()
    d_kept = d_reduced = d_bias = None
    if wanted[0]:
        rows = reduced if taking is None else torch.where(taking.unsqueeze(-1), reduced, 0)
        d_kept = (g.unsqueeze(-1) * rows.sum(1, dtype=torch.float32).unsqueeze(1)).to(dtype)
    if wanted[1]:
        total = torch.bmm(g.to(dtype).unsqueeze(1), kept)
        total = total if taking is None else torch.where(taking.unsqueeze(-1), total, 0)
        # Not an expanded view, so that the gradient may be changed in place, as torch's may.
        d_reduced = total.expand(reduced.shape).contiguous()
    if wanted[2]:
        if bias_of_kept:
            d_bias = (g * operands.counts().unsqueeze(-1)).sum(0)
        else:
            totals = g.sum(1, keepdim=True)
            d_bias = (totals if taking is None else torch.where(taking, totals, 0)).expand(reduced.shape[:2]).sum(0)
        d_bias = d_bias.to(dtype)
    return d_kept, d_reduced, d_bias


GEMM_REDUCE = _GemmReduce(gemm_reduce)
