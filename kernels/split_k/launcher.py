"""The choice between the two kernels, the workspace, and what is launched behind them."""

import torch

from ..launching import ceil_div, launch
from ..partials import Epilogue, ReduceBlocks, reduce_partials
from ..tuning import SplitTiles, reduce_blocks
from .row_product import row_product_kernel
from .tiles_product import tiles_product_kernel


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
) -> torch.Tensor:
    """``act(left rightᵀ + bias)`` ``[M, N]``, contiguous, in the dtype of its operands.

    left ``[M, K]``, right ``[N, K]`` and bias ``[N]`` have any strides. K is cut into ``splits`` ranges of whole
    blocks; a range that would be empty is not launched. ``atomic`` adds the float32 partials of the ranges in whatever
    order they arrive. ``dependent``: the GPU starts a kernel while the one before it still runs.
    """
    (rows, inner), columns = left.shape, right.shape[0]
    blocks = ceil_div(inner, tiles.block_k)
    splits = ceil_div(blocks, ceil_div(blocks, splits))
    out = torch.empty(rows, columns, dtype=left.dtype, device=left.device)
    epilogue = Epilogue(bias, columns, activation, accuracy)
    if atomic:
        target = torch.zeros(rows, columns, dtype=torch.float32, device=left.device)
    elif splits > 1:
        target = torch.empty(splits, rows, columns, dtype=torch.float32, device=left.device)
    else:
        target = out
    apart = target is not out
    end = (apart, atomic, "identity" if apart else activation, accuracy)
    inside = None if apart else bias
    stride_b = 0 if inside is None else inside.stride(0)
    pointers = (left, right, inside, target)
    if tiles.block_m == 1:
        launch(
            row_product_kernel,
            ceil_div(columns, tiles.block_n) * splits,
            pointers,
            (left.stride(1), *right.stride(), stride_b, columns, inner),
            (splits,),
            (tiles.block_n, tiles.block_k, *end, dependent),
            tiles.num_warps,
            dependent=dependent,
        )
    else:
        launch(
            tiles_product_kernel,
            ceil_div(rows, tiles.block_m) * ceil_div(columns, tiles.block_n) * splits,
            pointers,
            (*left.stride(), *right.stride(), stride_b, columns, inner),
            (rows, splits, 0.0),
            (tiles.block_m, tiles.block_n, tiles.block_k, tiles.swapped, *end, input_precision, dependent),
            tiles.num_warps,
            tiles.num_stages,
            dependent=dependent,
        )
    if apart:
        partials = 1 if atomic else splits
        blocks_of_sum = ReduceBlocks(*reduce_blocks(rows * columns, partials))
        reduce_partials(target.view(partials, -1), [out], epilogue, blocks_of_sum, dependent)
    return out
