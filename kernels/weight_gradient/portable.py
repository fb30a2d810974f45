"""dW and db on any GPU, from operands of any strides."""

import torch

from ..device import tl, triton
from ..launching import Launch, ceil_div
from ..tiles import add_product, grouped_tile, load_tile, store_tile
from ..tuning import WeightGradientTiles

_GROUP = 8  # tiles below one another, computed before those to their right: they share columns of x in the cache


@triton.jit(do_not_specialize=["M", "splits", "zero"])
def _weight_and_bias_gradient_kernel(
    dy_ptr, x_ptr, dw_ptr, db_ptr,
    stride_dym, stride_dyo, stride_xm, stride_xk, stride_split, O, K, M, splits, zero,
    BLOCK_M: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
    INPUT_PRECISION: tl.constexpr,
):  # fmt: skip
    # Gradients are dense, and there once per split. ``zero`` is 0, which only the caller knows.
    tiles = tl.cdiv(O, BLOCK_O) * tl.cdiv(K, BLOCK_K)
    split = tl.program_id(0) // tiles
    tile_o, tile_k = grouped_tile(tl.program_id(0) % tiles, tl.cdiv(O, BLOCK_O), tl.cdiv(K, BLOCK_K), GROUP)
    outer = tile_o * BLOCK_O + tl.arange(0, BLOCK_O)
    inner = tile_k * BLOCK_K + tl.arange(0, BLOCK_K)
    acc = tl.zeros([BLOCK_O, BLOCK_K], tl.float32)
    sums = tl.zeros([BLOCK_M, BLOCK_O], tl.float32)
    lost = tl.zeros([BLOCK_M, BLOCK_O], tl.float32)
    split_rows = tl.cdiv(tl.cdiv(M, BLOCK_M), splits) * BLOCK_M
    first_row = split * split_rows
    for row_start in tl.range(first_row, tl.minimum(first_row + split_rows, M), BLOCK_M):
        rows = row_start + tl.arange(0, BLOCK_M)
        dy_tile = load_tile(dy_ptr, rows, outer, stride_dym, stride_dyo, M, O)
        x_tile = load_tile(x_ptr, rows, inner, stride_xm, stride_xk, M, K)
        acc = add_product(acc, dy_tile.T, x_tile, zero, INPUT_PRECISION)
        if db_ptr is not None:
            if dy_tile.dtype == tl.float32:
                # What an addition rounds away is part of the next term (Kahan's summation), as torch loses little too.
                term = dy_tile - lost
                longer = sums + term
                lost = (longer - sums) - term
                # Infinities leave no remainder: it would be NaN.
                lost = tl.where(tl.abs(longer) < float("inf"), lost, 0.0)
                sums = longer
            else:
                sums += dy_tile.to(tl.float32)
    partial = split.to(tl.int64) * stride_split
    store_tile(dw_ptr + partial, acc, outer, inner, K, 1, O, K)
    if db_ptr is not None:
        total = tl.sum(sums, 0).to(db_ptr.dtype.element_ty)
        tl.store(db_ptr + partial + outer, total, mask=(outer < O) & (tile_k == 0))


def prepare_weight_gradient(
    dy: torch.Tensor,
    x: torch.Tensor,
    split_size: int,
    splits: int,
    input_precision: str,
    tiles: WeightGradientTiles,
) -> Launch:
    """The launch for operands of these layouts."""
    (rows, units), columns = dy.shape, x.shape[1]
    return Launch(
        _weight_and_bias_gradient_kernel,
        ceil_div(units, tiles.block_o) * ceil_div(columns, tiles.block_k) * splits,
        (*dy.stride(), *x.stride(), split_size, units, columns),
        (rows, splits, 0.0),
        (tiles.block_m, tiles.block_o, tiles.block_k, _GROUP, input_precision),
        tiles.num_warps,
        tiles.num_stages,
    )


def launch_weight_gradient(
    dy: torch.Tensor, x: torch.Tensor, targets: list[torch.Tensor | None], prepared: Launch
) -> None:
    """Fills ``targets``, dW and db (or None), or the first split's partials of them."""
    prepared((dy, x, *targets))
