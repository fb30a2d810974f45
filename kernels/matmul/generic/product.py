"""act(Σ a wᵀ + b) over one or two pairs of operands, or the partial sums of ranges of the inner axis."""

from typing import NamedTuple

import torch

from ...device import tl, triton
from ...launching import Launch, ceil_div
from ...tiles import assume_aligned, assume_multiple, split_range, wait_for_previous_grid
from ...tuning.grouped_gemm import GroupedTiles
from ..arithmetic import Arithmetic
from .epilogues import store_product
from .mainloop import multiply
from .operands import DENSE, Bias, Operand, ProductOutput, RowOrder, strides
from .schedules import end_of_rows, expert_of, swizzled_tile


class _Strides(NamedTuple):
    """The strides of the operands; both left operands have the same."""

    a: tuple[int, ...]
    w: tuple[int, ...]
    w_other: tuple[int, ...]
    bias: tuple[int, ...]


class _Variant(NamedTuple):
    """What the kernel is compiled for, besides tiles and arithmetic; ``block`` is that of a ``RowOrder``."""

    swapped: bool
    output: str
    block: int
    w_transposed: bool
    unit: int
    dependent: bool


@triton.jit(do_not_specialize=["M", "splits", "zero"])
def _product_kernel(
    a_ptr, w_ptr, other_ptr, w_other_ptr, out_ptr, bias_ptr, tile_expert_ptr, slots_ptr, strides, N, K, M, splits, zero,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_INNER: tl.constexpr, VARIANT: tl.constexpr,
    ARITHMETIC: tl.constexpr,
):  # fmt: skip
    # The result is contiguous. ``zero`` is 0 at run time only (``add_product``).
    OUTPUT: tl.constexpr = VARIANT.output
    INPUT_PRECISION: tl.constexpr = ARITHMETIC.input_precision
    wait_for_previous_grid(VARIANT.dependent)
    stride_am, stride_ak = strides.a
    K, stride_am = assume_multiple(K, VARIANT.unit), assume_multiple(stride_am, VARIANT.unit)
    _, stride_wn, stride_wk = assume_aligned(strides.w, VARIANT.w_transposed, VARIANT.unit)
    if VARIANT.w_transposed:
        N = assume_multiple(N, VARIANT.unit)
    split = 0
    first = 0
    end = K
    if tile_expert_ptr is None:
        # With few rows, loading the weights takes the time: tiles of one column, which share them, come first.
        row_tiles = tl.cdiv(M, BLOCK_M)
        tiles = row_tiles * tl.cdiv(N, BLOCK_N)
        split = tl.program_id(0) // tiles
        row, column = tl.program_id(0) % tiles % row_tiles, tl.program_id(0) % tiles // row_tiles
        first, end = split_range(split, K, splits, BLOCK_INNER)
    else:
        row, column = swizzled_tile(tl.program_id(0), M, N, BLOCK_M, BLOCK_N)
    first_row = row * BLOCK_M
    expert = expert_of(tile_expert_ptr, slots_ptr, first_row, VARIANT.block)
    # Tiles of padding only are never read.
    if expert >= 0:
        rows = first_row + tl.arange(0, BLOCK_M)
        cols = column * BLOCK_N + tl.arange(0, BLOCK_N)
        row_limit = end_of_rows(slots_ptr, first_row, M, BLOCK_M)
        a = Operand(a_ptr, 0, stride_am, stride_ak, row_limit, K)
        w = Operand(w_ptr, strides.w[0], stride_wn, stride_wk, N, K)
        if VARIANT.swapped:
            # With the smaller operand second, the larger one fills the rows of an MMA instruction.
            acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
            acc = multiply(acc, w, a, cols, rows, 0, first, end, zero, BLOCK_INNER, INPUT_PRECISION).T
        else:
            acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
            acc = multiply(acc, a, w, rows, cols, expert, first, end, zero, BLOCK_INNER, INPUT_PRECISION)
        if other_ptr is not None:
            other = Operand(other_ptr, 0, stride_am, stride_ak, row_limit, K)
            w_other = Operand(w_other_ptr, *strides.w_other, N, K)
            acc = multiply(
                acc, other, w_other, rows, cols, expert, first, end, zero, BLOCK_INNER, INPUT_PRECISION
            )  # fmt: skip
        bias, out = Bias(bias_ptr, *strides.bias, N), ProductOutput(out_ptr, M, N, row_limit)
        store_product(acc, out, bias, expert, rows, cols, split, OUTPUT, ARITHMETIC)


def prepare_product(
    a: torch.Tensor,
    weights: tuple[torch.Tensor, torch.Tensor | None],
    bias: torch.Tensor | None,
    arithmetic: Arithmetic,
    tiles: GroupedTiles,
    *,
    order: RowOrder = DENSE,
    splits: int = 1,
    output: str = "result",
    swapped: bool = False,
    units: tuple[bool, int] = (False, 1),
    dependent: bool = False,
) -> Launch:
    """The launch for a ``[M, K]`` and a weight ``[N, K]`` or ``[E, N, K]``, or for two such pairs of equal layout.

    ``output`` is that of ``epilogues.store_product``. ``units`` are whether the weight is transposed, and the alignment
    hint of both operands (``tiles.assume_multiple``). Its tensors are a, the weight, the other pair, the result, the
    bias, experts of tiles and slots: None for those that are absent.
    """
    (rows, inner), columns = a.shape, weights[0].shape[-2]
    w, w_other = [strides(weight, 3) for weight in weights]
    return Launch(
        _product_kernel,
        ceil_div(rows, tiles.block_m) * ceil_div(columns, tiles.block_n) * splits,
        (_Strides(a.stride(), w, w_other, strides(bias, 2)), columns, inner),
        (rows, splits, 0.0),
        (
            tiles.block_m, tiles.block_n, tiles.block_inner,
            _Variant(swapped, output, order.block, *units, dependent), arithmetic.constants,
        ),
        tiles.num_warps,
        tiles.num_stages,
        dependent=dependent,
    )  # fmt: skip
