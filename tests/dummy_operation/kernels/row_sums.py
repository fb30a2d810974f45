"""The sums of the rows of a matrix, ``y = Σ_n x``: float32 sums, rounded once."""

import torch

from .device import tl, triton
from .launching import ceil_div, launch
from .tiles import load_tile
from .tuning.row_sums import RowSumTiles


@triton.jit(do_not_specialize=["M"])
def _row_sums_kernel(
    x_ptr, y_ptr, stride_m, stride_n, N, M, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    sums = tl.zeros([BLOCK_M], tl.float32)
    for first in tl.range(0, N, BLOCK_N):
        cols = first + tl.arange(0, BLOCK_N)
        sums += tl.sum(load_tile(x_ptr, rows, cols, stride_m, stride_n, M, N).to(tl.float32), 1)
    tl.store(y_ptr + rows, sums, mask=rows < M)


def row_sums(x: torch.Tensor, tiles: RowSumTiles) -> torch.Tensor:
    """The sums ``[M]`` of x ``[M, N]``, of any strides, in its dtype."""
    y = x.new_empty(x.shape[0])
    programs = ceil_div(x.shape[0], tiles.block_m)
    numbers = (*x.stride(), x.shape[1])
    launch(_row_sums_kernel, programs, (x, y), numbers, (x.shape[0],), (tiles.block_m, tiles.block_n))
    return y
