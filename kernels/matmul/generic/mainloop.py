"""The mainloop of the generic kernels."""

from ...device import tl, triton
from ...tiles import add_compensated, add_product, load_tile
from .operands import Operand


@triton.jit
def mainloop(
    acc, other_acc, left, right, other, summed, rows, cols, batch, first, end, zero, BLOCK_INNER: tl.constexpr,
    INPUT_PRECISION: tl.constexpr,
):  # fmt: skip
    """(``acc + left rightᵀ``, ``other_acc + left otherᵀ``, sums of ``summed``) for the tile ``[rows, cols]``.

    The inner axis runs from ``first`` to ``end``. ``right`` and ``other`` are entry ``batch`` of their batches; without
    ``other``, ``other_acc`` is returned unchanged. ``summed`` is the left operand again, or absent: its sums along the
    inner axis are float32 ``[BLOCK_INNER, rows]``, still to be reduced. ``zero``: see ``add_product``.
    """
    sums = 0.0
    if summed.ptr is not None:
        sums = tl.zeros([BLOCK_INNER, rows.shape[0]], tl.float32)
        lost = tl.zeros([BLOCK_INNER, rows.shape[0]], tl.float32)
    right_ptr = right.ptr + batch * right.stride_batch
    if other.ptr is not None:
        other_ptr = other.ptr + batch * other.stride_batch
    for start in tl.range(first, end, BLOCK_INNER):
        inner = start + tl.arange(0, BLOCK_INNER)
        if summed.ptr is not None:
            # A load of its own: on Hopper a product still runs while the next copies start, and Triton's pipeliner
            # adds the buffer that this needs only to tiles that nothing but products read.
            summed_tile = load_tile(
                summed.ptr, inner, rows, summed.stride_inner, summed.stride_row, summed.inner, summed.rows
            )  # fmt: skip
        left_tile = load_tile(left.ptr, rows, inner, left.stride_row, left.stride_inner, left.rows, left.inner)
        right_tile = load_tile(right_ptr, inner, cols, right.stride_inner, right.stride_row, right.inner, right.rows)
        acc = add_product(acc, left_tile, right_tile, zero, INPUT_PRECISION)
        if other.ptr is not None:
            other_tile = load_tile(
                other_ptr, inner, cols, other.stride_inner, other.stride_row, other.inner, other.rows
            )  # fmt: skip
            other_acc = add_product(other_acc, left_tile, other_tile, zero, INPUT_PRECISION)
        if summed.ptr is not None:
            if summed_tile.dtype == tl.float32:
                sums, lost = add_compensated(sums, lost, summed_tile)
            else:
                sums += summed_tile.to(tl.float32)
    return acc, other_acc, sums


@triton.jit
def multiply(
    acc, left, right, rows, cols, batch, first, end, zero, BLOCK_INNER: tl.constexpr, INPUT_PRECISION: tl.constexpr
):  # fmt: skip
    """The mainloop of a single product: ``acc + left rightᵀ``."""
    absent = Operand(None, 0, 0, 0, 0, 0)
    acc, _, _ = mainloop(
        acc, acc, left, right, absent, absent, rows, cols, batch, first, end, zero, BLOCK_INNER, INPUT_PRECISION
    )  # fmt: skip
    return acc
