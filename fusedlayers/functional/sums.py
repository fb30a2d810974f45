"""Sums of rows, and of products, in torch's own operations, without scratch memory of their operands' size."""

import torch
from torch import Tensor

# One ``torch.sum`` over 131,072 x 128 or 16,384 x 1024 takes 128 MiB of scratch memory on an H200: eight bytes per
# element. From _LONG rows on, sums over _SHORT rows at a time come first, which need almost none.
_LONG, _SHORT = 4096, 512
# On a CPU sum(dtype=...) casts the whole tensor; sum in blocks of this many elements.
_CONVERTED = 2**18


def accumulated(dtype: torch.dtype) -> torch.dtype:
    """The accumulation dtype for sums of ``dtype``: at least float32."""
    return torch.promote_types(dtype, torch.float32)


def summed_rows(matrix: Tensor) -> Tensor:
    """The sums ``[N]`` of ``[M, N]`` over its rows, in at least float32."""
    wide = accumulated(matrix.dtype)
    if matrix.dtype != wide and not matrix.is_cuda:
        parts = matrix.split(max(1, _CONVERTED // max(1, matrix.shape[1])))
        total = torch.zeros(matrix.shape[1], dtype=wide, device=matrix.device)
        for part in parts:
            total += part.sum(0, dtype=wide)
        return total
    if matrix.shape[0] < _LONG:
        return matrix.sum(0, dtype=wide)
    whole = matrix.shape[0] // _SHORT * _SHORT
    parts = matrix[:whole].unflatten(0, (-1, _SHORT)).sum(1, dtype=wide)
    return parts.sum(0) + matrix[whole:].sum(0, dtype=wide)


def add_product(total: Tensor, left: Tensor, right: Tensor, first: bool) -> None:
    """``total += leftᵀ @ right`` in the dtype of the total; the ``first`` product overwrites it."""
    # A CPU has no product of 16-bit operands with a float32 result. Both are converted, in steps that take a quarter
    # of the total's bytes.
    step, wider = max(1, len(left)), {}
    if left.dtype != total.dtype and left.is_cuda:
        wider = {"out_dtype": total.dtype}
    elif left.dtype != total.dtype:
        step = max(1, total.numel() // (4 * max(1, sum(total.shape))))
    for left_part, right_part in zip(left.split(step), right.split(step), strict=True):
        if not left.is_cuda:
            left_part, right_part = left_part.to(total.dtype), right_part.to(total.dtype)
        if first:
            torch.mm(left_part.T, right_part, out=total, **wider)
        else:
            torch.addmm(total, left_part.T, right_part, out=total, **wider)  # type: ignore[call-overload]
        first = False
