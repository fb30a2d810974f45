"""A matrix product with few rows and columns and a long inner axis, which is split over the SMs.

    Y = act(Σ_s X_s W_sᵀ + b)

Shapes: left [M, K], right [N, K], out [M, N], bias [N]; any strides, so that transposed operands are views. The forward
product of a linear layer is ``x [M, K]`` with ``W [N, K]``; its data gradient ``dx = dz W`` is ``dz [M, N]`` with
``Wᵀ [K, N]``, which sums over N. The weight gradient is in ``kernels.weight_gradient``.

A program multiplies the range s of the inner axis for one tile of the result. Where there is more than one range, its
float32 partial goes to a workspace ``[S, M, N]``, and ``kernels.partials`` adds the partials in a fixed order, applies
bias and activation, and rounds once: the same bits every time. The reducing kernel is launched as dependent: its
programs are in place when the last partial is written. Atomic addition into one float32 ``[M, N]`` is there on request.

The product is that of ``matmul.generic`` (matrix units), or for one row the kernel here: multiply-adds on rows of the
right operand as they arrive from memory, which is all that such a product waits for.
"""

from typing import Any, NamedTuple

import torch

from .device import tl, triton
from .launching import Launch, ceil_div, layout_of, lines, prepared, unit_to_tell
from .matmul import generic
from .matmul.arithmetic import Arithmetic
from .matmul.generic.epilogues import finish
from .matmul.generic.operands import Bias, ProductOutput
from .partials import Epilogue, ReduceBlocks, reduce_partials
from .tiles import follow_kernel_before, in_units, load_tile, load_vector, split_range, strides_in_units
from .tuning import SplitTiles, reduce_blocks


@triton.jit(do_not_specialize=["splits"])
def _row_product_kernel(
    left_ptr, right_ptr, out_ptr, bias_ptr,
    stride_lk, right_strides, stride_b, N, K, splits,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    END: tl.constexpr, ACTIVATION: tl.constexpr, ACCURACY: tl.constexpr,
    RIGHT_TRANSPOSED: tl.constexpr, UNIT: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    follow_kernel_before(DEPENDENT)
    K = in_units(K, UNIT)
    _, stride_rn, stride_rk = strides_in_units(right_strides, RIGHT_TRANSPOSED, UNIT)
    if RIGHT_TRANSPOSED:
        N = in_units(N, UNIT)
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
    finish(acc, out, bias, 0, tl.arange(0, 1), cols, split, END, ACTIVATION, ACCURACY)


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
    blocks; a range that would be empty is not launched. ``atomic`` adds the float32 partials of the ranges in whatever
    order they arrive. ``dependent``: the GPU starts a kernel while the one before it still runs. ``ready`` belongs to
    this product of one prepared call (see ``gemm_gemm.Operands``); left may lie differently from call to call.
    """
    made = prepared(
        ready, layout_of(left), _prepare, left, right, bias, splits, tiles, activation, accuracy, input_precision,
        atomic, dependent,
    )  # fmt: skip
    dtype, device = left.dtype, left.device
    out = torch.empty(made.shape, dtype=dtype, device=device)
    if made.partials is None:
        made.launch((left, right, *made.nothing, out, bias, *made.nothing))
        return out
    rows, columns = made.shape
    if atomic:
        target = torch.zeros(rows, columns, dtype=torch.float32, device=device).view(1, -1)
    else:
        target = torch.empty(made.partials, dtype=torch.float32, device=device)
    made.launch((left, right, *made.nothing, target, None, *made.nothing))
    epilogue = Epilogue(bias, columns, activation, accuracy)
    reduce_partials(target, [out], epilogue, made.blocks, dependent, ready=made.ready)
    return out


class _Prepared(NamedTuple):
    """What all executions of one prepared call share; without partials the product is the result."""

    shape: tuple[int, int]
    partials: tuple[int, int] | None
    launch: Launch
    # A kernel of tiles could take two tensors more, twice: another pair of operands, and the experts of sorted rows.
    nothing: tuple[None, ...]
    blocks: ReduceBlocks
    ready: dict[Any, Any]


def _prepare(
    left: torch.Tensor,
    right: torch.Tensor,
    bias: torch.Tensor | None,
    splits: int,
    tiles: SplitTiles,
    activation: str,
    accuracy: str,
    input_precision: str,
    atomic: bool,
    dependent: bool,
) -> _Prepared:
    (rows, inner), columns = left.shape, right.shape[0]
    blocks = ceil_div(inner, tiles.block_inner)
    splits = ceil_div(blocks, ceil_div(blocks, splits))
    parts, end = (1, "atomic") if atomic else (splits, "partial" if splits > 1 else "result")
    if end != "result":
        # Bias and activation come once, with the sum of the parts.
        bias, activation = None, "identity"
    # Whether the right operand lies transposed, and in units of how many elements both lie.
    (left_transposed, left_sizes), (transposed, sizes) = lines(left), lines(right)
    unit = 1 if left_transposed else unit_to_tell(left, *left_sizes, *sizes)
    nothing: tuple[None, ...] = (None, None)
    if tiles.block_m > 1:
        launch = generic.prepare_product(
            left, (right, None), bias, Arithmetic(activation, accuracy, input_precision), tiles, splits=splits,
            end=end, swapped=tiles.swapped, units=(transposed, unit), dependent=dependent,
        )  # fmt: skip
    else:
        nothing = ()
        launch = Launch(
            _row_product_kernel,
            ceil_div(columns, tiles.block_n) * splits,
            (left.stride(1), (0, *right.stride()), 0 if bias is None else bias.stride(0), columns, inner),
            (splits,),
            (tiles.block_n, tiles.block_inner, end, activation, accuracy, transposed, unit, dependent),
            tiles.num_warps,
            dependent=dependent,
        )
    partials = None if end == "result" else (parts, rows * columns)
    blocks_of_sum = ReduceBlocks(*reduce_blocks(rows * columns, parts))
    return _Prepared((rows, columns), partials, launch, nothing, blocks_of_sum, {})
