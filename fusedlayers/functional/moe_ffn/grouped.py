"""Products of sorted rows with the weight of the expert that owns them, ``[S, in]`` with ``[E, in, out]``, by torch.

``ends`` ``[E]`` are the positions after the last row of each expert. Where torch has a grouped product for the operands
the host never synchronises; else a loop reads the ends. In a trace there are no values to read: the product is a custom
operation, which chooses when it runs.
"""

import itertools
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from ...devices import torch_has_grouped_products
from ..call import traced, transformed

_ALIGNMENT = 16  # in bytes, of the strides and addresses of operands of torch's grouped products


def grouped_product(rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """The product of each expert's rows with its weight; after the last end its rows are undefined."""
    compiling = torch.compiler.is_dynamo_compiling()
    if compiling and rows.dtype == torch.bfloat16:
        # Users who compile this expression directly get what torch compiles best.
        return torch._grouped_mm(rows, weight, offs=ends)
    if compiling or rows.is_meta or traced():
        return _product(rows, weight, ends)
    if _torch_groups(rows, weight):
        return torch._grouped_mm(rows, weight, offs=ends)
    if not weight.shape[0]:
        # No row has an expert: zeros that depend on both operands, for autograd.
        return rows @ weight.sum(0)
    return _product_in_masks(rows, weight, ends) if transformed() else product_in_loop(rows, weight, ends)


def runs_in_loop(rows: Tensor, weight: Tensor) -> bool:
    """Whether :func:`grouped_product` is :func:`product_in_loop` here."""
    unknown = rows.is_meta or torch.compiler.is_dynamo_compiling() or traced() or transformed()
    return not unknown and weight.shape[0] > 0 and not _torch_groups(rows, weight)


def product_in_loop(rows: Tensor, weight: Tensor, ends: Tensor, bias: Tensor | None = None) -> Tensor:
    """One product after the other, rounded once with the expert's row of a bias ``[E, out]``; 0 after the last end."""
    parts, start = [], 0
    biases = [None] * weight.shape[0] if bias is None else bias.unbind()
    # Also for experts without rows: the gradients of their weights are zeros.
    for end, matrix, vector in zip(ends.tolist(), weight.unbind(), biases, strict=True):
        part = rows[start:end]
        parts.append(part @ matrix if vector is None else torch.addmm(vector, part, matrix))
        start = end
    return torch.cat([*parts, rows.new_zeros(rows.shape[0] - start, weight.shape[-1])])


def _product_in_masks(rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Every row times the weights of all experts, masked: inside a transform the ends cannot be read."""
    positions = torch.arange(rows.shape[0], device=rows.device).unsqueeze(-1)
    owners = (positions >= ends).sum(-1, keepdim=True)
    return torch.stack([(rows @ each).where(owners == expert, 0) for expert, each in enumerate(weight)]).sum(0)


def _torch_groups(*operands: Tensor) -> bool:
    """Whether torch has a grouped product of these operands, with its gradients, that does not synchronise."""
    first = operands[0]
    if first.dtype != torch.bfloat16 or not torch_has_grouped_products(first.device) or transformed():
        return False
    return all(_is_aligned(each) for each in operands)


def _is_aligned(tensor: Tensor) -> bool:
    # The gradient of a product has rows as long as those of the weight, whatever its strides.
    if 0 in tensor.shape or tensor.data_ptr() % _ALIGNMENT or tensor.shape[-1] * tensor.element_size() % _ALIGNMENT:
        return False
    *_, row, column = tensor.stride()
    if column == 1:
        stride, length = row, tensor.shape[-1]
    elif row == 1:
        stride, length = column, tensor.shape[-2]
    else:
        return False
    # torch takes no rows that overlap, as expanded ones do.
    strides = (stride, *tensor.stride()[:-2])
    return stride >= length and all(each * tensor.element_size() % _ALIGNMENT == 0 for each in strides)


@torch.library.custom_op("fusedlayers::grouped_product", mutates_args=())
def _product(rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    if _torch_groups(rows, weight):
        return torch._grouped_mm(rows, weight, offs=ends)
    return product_in_loop(rows, weight, ends)


@_product.register_fake
def _(rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    return rows.new_empty(rows.shape[0], weight.shape[-1])


@torch.library.custom_op("fusedlayers::grouped_outer_product", mutates_args=())
def _outer_product(left: Tensor, right: Tensor, ends: Tensor) -> Tensor:
    """``leftᵀ right`` over each expert's rows: left ``[S, I]``, right ``[S, O]`` -> ``[E, I, O]``."""
    if _torch_groups(left, right):
        return torch._grouped_mm(left.T, right, offs=ends)
    starts = [0, *ends.tolist()]
    return torch.stack([left[start:end].T @ right[start:end] for start, end in itertools.pairwise(starts)])


@_outer_product.register_fake
def _(left: Tensor, right: Tensor, ends: Tensor) -> Tensor:
    return left.new_empty(ends.shape[0], left.shape[1], right.shape[1])


def _save_operands(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
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


_product.register_autograd(_product_gradients, setup_context=_save_operands)
_outer_product.register_autograd(_outer_product_gradients, setup_context=_save_operands)
# FLOPs as if every row had an expert.
register_flop_formula(torch.ops.fusedlayers.grouped_product)(
    lambda rows, weight, *_, **__: 2 * rows[0] * rows[1] * weight[-1]
)
register_flop_formula(torch.ops.fusedlayers.grouped_outer_product)(
    lambda left, right, *_, **__: 2 * left[0] * left[1] * right[1]
)
