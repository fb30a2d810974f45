"""The choice between the two kernels, the workspace, and what is launched behind them."""

from typing import Any, NamedTuple

import torch

from ..launching import Launch, ceil_div, layout_of, lines, prepared, unit_to_tell
from ..matmul import generic
from ..matmul.arithmetic import Arithmetic
from ..partials import Epilogue, ReduceBlocks, reduce_partials
from ..tuning import SplitTiles, reduce_blocks
from ..tuning.grouped_gemm import GroupedTiles
from .row_product import row_product_kernel


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
    blocks = ceil_div(inner, tiles.block_k)
    splits = ceil_div(blocks, ceil_div(blocks, splits))
    partials = (1 if atomic else splits, rows * columns) if atomic or splits > 1 else None
    apart = partials is not None
    end = ("atomic" if atomic else "partial") if apart else "result"
    arithmetic = Arithmetic("identity" if apart else activation, accuracy, input_precision)
    transposed, unit = _units(left, right)
    given = None if apart else bias
    if tiles.block_m == 1:
        launch = Launch(
            row_product_kernel,
            ceil_div(columns, tiles.block_n) * splits,
            (left.stride(1), (0, *right.stride()), 0 if given is None else given.stride(0), columns, inner),
            (splits,),
            (tiles.block_n, tiles.block_k, end, arithmetic.activation, accuracy, transposed, unit, dependent),
            tiles.num_warps,
            dependent=dependent,
        )
    else:
        blocks_of_product = GroupedTiles(
            tiles.block_m, tiles.block_n, tiles.block_k, tiles.num_warps, tiles.num_stages
        )  # fmt: skip
        launch = generic.prepare_product(
            left, (right, None), given, arithmetic, blocks_of_product, splits=splits, end=end, swapped=tiles.swapped,
            units=(transposed, unit), dependent=dependent,
        )  # fmt: skip
    blocks_of_sum = ReduceBlocks() if partials is None else ReduceBlocks(*reduce_blocks(rows * columns, partials[0]))
    nothing = () if tiles.block_m == 1 else (None, None)
    return _Prepared((rows, columns), partials, launch, nothing, blocks_of_sum, {})


def _units(left: torch.Tensor, right: torch.Tensor) -> tuple[bool, int]:
    """Whether the right operand lies transposed, and in units of how many elements both lie (``tiles.in_units``)."""
    left_transposed, left_sizes = lines(left)
    transposed, sizes = lines(right)
    return transposed, 1 if left_transposed else unit_to_tell(left, *left_sizes, *sizes)
