"""A matrix product with few rows and columns and a long inner axis, which is split over the SMs.

    Y = act(Σ_s X_s W_sᵀ + b)

Shapes: left [M, K], right [N, K], out [M, N], bias [N]; any strides, so that transposed operands are views. The forward
product of a linear layer is ``x [M, K]`` with ``W [N, K]``; its data gradient ``dx = dz W`` is ``dz [M, N]`` with
``Wᵀ [K, N]``, which sums over N. The weight gradient is in ``kernels.weight_gradient``.

A program multiplies the range s of the inner axis for one tile of the result. If there is more than one range, its
float32 partial goes to a workspace ``[S, M, N]``, and ``kernels.partials`` adds the partials in a fixed order, applies
bias and activation, and rounds once: the same bits every time. The reducing kernel is a dependent launch: its programs
are resident when the last partial is written. On request, partials are added atomically to one float32 ``[M, N]``.

The product is that of ``matmul.generic`` (matrix units). A single row has the kernel here: it is bound by memory, and
multiplies and adds the rows of the right operand as they arrive.
"""

from typing import Any, NamedTuple

import torch

from .device import tl, triton
from .launching import Launch, ceil_div, layout_of, lines, prepared, unit_to_tell
from .matmul import generic
from .matmul.arithmetic import Arithmetic
from .matmul.generic.epilogues import store_product
from .matmul.generic.operands import Bias, ProductOutput, strides
from .partials import Epilogue, ReduceBlocks, reduce_partials
from .tiles import assume_aligned, assume_multiple, load_tile, load_vector, split_range, wait_for_previous_grid
from .tuning import SplitTiles, reduce_blocks


@triton.jit(do_not_specialize=["splits"])
def _row_product_kernel(
    left_ptr, right_ptr, out_ptr, bias_ptr, stride_lk, right_strides, stride_b, N, K, splits,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, OUTPUT: tl.constexpr, ARITHMETIC: tl.constexpr,
    RIGHT_TRANSPOSED: tl.constexpr, UNIT: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    wait_for_previous_grid(DEPENDENT)
    K = assume_multiple(K, UNIT)
    _, stride_rn, stride_rk = assume_aligned(right_strides, RIGHT_TRANSPOSED, UNIT)
    if RIGHT_TRANSPOSED:
        N = assume_multiple(N, UNIT)
    tiles = tl.cdiv(N, BLOCK_N)
    split = tl.program_id(0) // tiles
    cols = tl.program_id(0) % tiles * BLOCK_N + tl.arange(0, BLOCK_N)
    inner = tl.arange(0, BLOCK_K)
    sums = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    first, end = split_range(split, K, splits, BLOCK_K)
    for start in tl.range(first, end, BLOCK_K):
        right = load_tile(right_ptr, cols, start + inner, stride_rn, stride_rk, N, K)
        left = load_vector(left_ptr, start + inner, stride_lk, K)
        sums += right.to(tl.float32) * left[None, :]
    acc = tl.sum(sums, 1)[None, :]
    bias, out = Bias(bias_ptr, 0, stride_b, N), ProductOutput(out_ptr, 1, N, 1)
    store_product(acc, out, bias, 0, tl.arange(0, 1), cols, split, OUTPUT, ARITHMETIC)


def product(
    left: torch.Tensor,
    right: torch.Tensor,
    bias: torch.Tensor | None,
    splits: int,
    tiles: SplitTiles,
    *,
    activation: str = "identity",
    accuracy: str = "exact",
    input_precision: str = "ieee",
    atomic: bool = False,
    dependent: bool = False,
    ready: dict[Any, Any] | None = None,
) -> torch.Tensor:
    """``act(left rightᵀ + bias)`` ``[M, N]``, contiguous, in the dtype of its operands.

    left ``[M, K]``, right ``[N, K]`` and bias ``[N]`` have any strides. K is cut into ``splits`` ranges of whole
    blocks; a range that would be empty is not launched. ``atomic`` adds the float32 partials of the ranges in any
    order. ``dependent``: the GPU has programmatic dependent launch. ``ready`` belongs to this product of one prepared
    call (see ``gemm_gemm.Operands``); left's layout may change between its executions.
    """
    (rows, inner), columns = left.shape, right.shape[0]

    def prepare() -> _Prepared:
        blocks = ceil_div(inner, tiles.block_inner)
        parts = ceil_div(blocks, ceil_div(blocks, splits))
        output = "atomic" if atomic else "partial" if parts > 1 else "result"
        arithmetic, fused_bias = Arithmetic(activation, accuracy, input_precision), bias
        if output != "result":
            # Bias and activation come once, with the sum of the parts.
            arithmetic, fused_bias = arithmetic._replace(activation="identity"), None
        (left_transposed, left_sizes), (transposed, sizes) = lines(left), lines(right)
        unit = 1 if left_transposed else unit_to_tell(left, *left_sizes, *sizes)
        absent: tuple[None, ...] = (None, None)
        if tiles.block_m > 1:
            launch = generic.prepare_product(
                left, (right, None), fused_bias, arithmetic, tiles, splits=parts, output=output, swapped=tiles.swapped,
                units=(transposed, unit), dependent=dependent,
            )  # fmt: skip
        else:
            absent = ()
            launch = Launch(
                _row_product_kernel,
                ceil_div(columns, tiles.block_n) * parts,
                (left.stride(1), (0, *right.stride()), *strides(fused_bias, 1), columns, inner),
                (parts,),
                (tiles.block_n, tiles.block_inner, output, arithmetic.constants, transposed, unit, dependent),
                tiles.num_warps,
                dependent=dependent,
            )
        parts = 1 if atomic else parts
        partials = None if output == "result" else (parts, rows * columns)
        return _Prepared(partials, launch, absent, ReduceBlocks(*reduce_blocks(rows * columns, parts)), {})

    made = prepared(ready, layout_of(left), prepare)
    out = left.new_empty(rows, columns)
    if made.partials is None:
        made.launch((left, right, *made.absent, out, bias, *made.absent))
        return out
    make = left.new_zeros if atomic else left.new_empty
    partials = make(made.partials, dtype=torch.float32)
    made.launch((left, right, *made.absent, partials, None, *made.absent))
    epilogue = Epilogue(bias, columns, activation, accuracy)
    reduce_partials(partials, [out], epilogue, made.blocks, dependent, ready=made.ready)
    return out


class _Prepared(NamedTuple):
    """What all executions of one prepared call share; without partials the product is the result."""

    partials: tuple[int, int] | None
    launch: Launch
    # None for what only the generic kernel takes: a second pair of operands; the experts and slots of sorted rows.
    absent: tuple[None, ...]
    blocks: ReduceBlocks
    ready: dict[Any, Any]
