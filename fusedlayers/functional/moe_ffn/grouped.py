"""The experts in torch's own operations: rows sorted by expert, and products over each expert's rows.

Where torch has a grouped product for the operands the host never synchronises; else a loop reads the counts. In a trace
there are no counts to read: a product is a custom operation, which chooses when it runs.
"""

import itertools
from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from ... import reference
from ...devices import torch_has_grouped_products
from ..call import traced, transformed

_BYTES = 16  # torch's grouped products need strides and addresses that are multiples of this


def experts_by_torch(
    x: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    w_up: Tensor,
    w_down: Tensor,
    w_gate: Tensor | None,
    b_up: Tensor | None,
    b_down: Tensor | None,
    b_gate: Tensor | None,
    *,
    activation: str,
    gate_and_up: str,
    transposed: bool,
    limit: float | None,
    up_offset: float,
) -> Tensor:
    """As ``reference.moe_ffn``, for all experts at once."""
    if not transposed:
        w_up, w_down, w_gate = w_up.mT, w_down.mT, None if w_gate is None else w_gate.mT
    experts, k = w_up.shape[0], top_k_index.shape[-1]
    tokens, flat = x.flatten(0, -2), top_k_index.flatten()
    # Indices that are no expert sort last.
    inside = (flat >= 0) & (flat < experts)
    keys, order = flat.where(inside, experts).sort(stable=True)
    ends = torch.searchsorted(keys, torch.arange(experts, device=x.device, dtype=keys.dtype), right=True)
    ends = ends.to(torch.int32)
    known = (keys < experts).unsqueeze(-1)

    def layer(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if bias is not None and _loops(rows, weight):
            return _product_in_loop(rows, weight, ends, bias)
        product = grouped_product(rows, weight, ends)
        if bias is None:
            return product
        # The gradient of indexing accumulates row by row, so it needs float32. The last row is for what is no expert.
        wide = F.pad(bias.to(torch.promote_types(bias.dtype, torch.float32)), (0, 0, 0, 1))
        # torch leaves rows after the last end uninitialised, and their gradients would reach the bias.
        return (product + wide[keys].to(product.dtype)).where(known, 0)

    rows = tokens[order // k].where(known, 0)
    up, gate = reference.split_gate_and_up(layer(rows, w_up, b_up), gate_and_up)
    if w_gate is not None:
        gate = layer(rows, w_gate, b_gate)
    hidden = reference.clamped_hidden(up, gate, activation=activation, limit=limit, up_offset=up_offset)
    # The weight of an index that is no expert may be NaN, and 0 times NaN is not 0.
    scores = top_k_weights.flatten()[order].unsqueeze(-1).where(known, 0)
    found = layer(hidden, w_down, b_down).where(known, 0) * scores
    back = order.scatter(0, order, torch.arange(order.shape[0], device=x.device))
    return found[back].view(tokens.shape[0], k, tokens.shape[1]).sum(1).to(x.dtype).view(x.shape)


def grouped_product(rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """The product of each expert's rows ``[S, in]`` with its weight, of ``[E, in, out]``.

    Rows of the product after the last end are undefined.
    """
    if torch.compiler.is_dynamo_compiling() and rows.dtype == torch.bfloat16:
        # Users who compile this expression directly get what torch compiles best.
        return torch._grouped_mm(rows, weight, offs=ends)
    if rows.is_meta or torch.compiler.is_dynamo_compiling() or traced():
        return _product(rows, weight, ends)
    if _torch_has_it(rows, weight):
        return torch._grouped_mm(rows, weight, offs=ends)
    return _product_in_loop(rows, weight, ends)


def _torch_has_it(*operands: Tensor) -> bool:
    """Whether torch has a grouped product for these operands, and its gradients, that does not synchronise."""
    first = operands[0]
    known = first.dtype == torch.bfloat16 and torch_has_grouped_products(first.device) and not transformed()
    return known and all(_lies_well(each) for each in operands)


def _lies_well(tensor: Tensor) -> bool:
    # The gradient of a product has rows as long as those of the weight, whatever its strides.
    if 0 in tensor.shape or tensor.data_ptr() % _BYTES or tensor.shape[-1] * tensor.element_size() % _BYTES:
        return False
    *_, row, column = tensor.stride()
    longer, length = (row, tensor.shape[-1]) if column == 1 else (column, tensor.shape[-2]) if row == 1 else (1, 1)
    strides = (longer, *tensor.stride()[:-2])
    # torch takes no expanded rows.
    return longer >= length and all(stride * tensor.element_size() % _BYTES == 0 for stride in strides)


def _loops(rows: Tensor, weight: Tensor) -> bool:
    """Whether :func:`grouped_product` is a loop here, which can add a bias before it rounds."""
    observed = rows.is_meta or torch.compiler.is_dynamo_compiling() or traced() or transformed()
    return not observed and weight.shape[0] > 0 and not _torch_has_it(rows, weight)


def _product_in_loop(rows: Tensor, weight: Tensor, ends: Tensor, bias: Tensor | None = None) -> Tensor:
    if not weight.shape[0]:
        # No row has an expert: zeros that depend on both operands, for autograd.
        return rows @ weight.sum(0)
    if transformed():
        return _product_in_masks(rows, weight, ends)
    parts, start = [], 0
    biases: Iterable[Tensor | None] = itertools.repeat(None) if bias is None else bias.unbind()
    # Experts without rows, too: their weights have gradients of zeros.
    for end, matrix, vector in zip(ends.tolist(), weight.unbind(), biases, strict=False):
        part = rows[start:end]
        # Product and bias are rounded once, as in a linear layer.
        parts.append(part @ matrix if vector is None else torch.addmm(vector, part, matrix))
        start = end
    return torch.cat([*parts, rows.new_zeros(rows.shape[0] - start, weight.shape[-1])])


def _product_in_masks(rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Every row times the weights of all experts, masked: inside a transform the counts cannot be read."""
    places = torch.arange(rows.shape[0], device=rows.device).unsqueeze(-1)
    owners = (places >= ends).sum(-1, keepdim=True)
    return torch.stack([(rows @ each).where(owners == expert, 0) for expert, each in enumerate(weight)]).sum(0)


@torch.library.custom_op("fusedlayers::grouped_product", mutates_args=())
def _product(rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    return torch._grouped_mm(rows, weight, offs=ends) if _torch_has_it(rows, weight) else _in_loop(rows, weight, ends)


@_product.register_fake
def _(rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    return rows.new_empty(rows.shape[0], weight.shape[-1])


def _in_loop(rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    return _product_in_loop(rows, weight, ends).contiguous()


@torch.library.custom_op("fusedlayers::grouped_outer_product", mutates_args=())
def _outer_product(left: Tensor, right: Tensor, ends: Tensor) -> Tensor:
    """``leftᵀ right`` over each expert's rows: left ``[S, I]``, right ``[S, O]`` -> ``[E, I, O]``."""
    if _torch_has_it(left, right):
        return torch._grouped_mm(left.T, right, offs=ends)
    starts = [0, *ends.tolist()]
    return torch.stack([left[start:end].T @ right[start:end] for start, end in itertools.pairwise(starts)])


@_outer_product.register_fake
def _(left: Tensor, right: Tensor, ends: Tensor) -> Tensor:
    return left.new_empty(ends.shape[0], left.shape[1], right.shape[1])


def _keep(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _product_gradients(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
    rows, weight, ends = ctx.saved_tensors
    wanted = ctx.needs_input_grad
    return (
        _product(upstream, weight.mT, ends) if wanted[0] else None,
        _outer_product(rows, upstream, ends) if wanted[1] else None,
        None,
    )


def _outer_product_gradients(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
    left, right, ends = ctx.saved_tensors
    wanted = ctx.needs_input_grad
    return (
        _product(right, upstream.mT, ends) if wanted[0] else None,
        _product(left, upstream, ends) if wanted[1] else None,
        None,
    )


_product.register_autograd(_product_gradients, setup_context=_keep)
_outer_product.register_autograd(_outer_product_gradients, setup_context=_keep)
# FLOPs as if every row had an expert.
register_flop_formula(torch.ops.fusedlayers.grouped_product)(
    lambda rows, weight, *_, **__: 2 * rows[0] * rows[1] * weight[-1]
)
register_flop_formula(torch.ops.fusedlayers.grouped_outer_product)(
    lambda left, right, *_, **__: 2 * left[0] * left[1] * right[1]
)
