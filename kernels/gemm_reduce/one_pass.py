"""Both gradients of a reduced product in one pass over the reduced rows, if one tile holds all kept rows.

``backward`` computes the tiles of W once for each gradient. Here a program keeps all kept rows of an entry on chip,
loops over a range of reduced rows, and computes each tile of W, transposed, once:

    d_reduced = Wᵀ kept     complete, because the program has all kept rows
    d_kept    = W reduced   summed over the range; float32 partials of the ranges are added up in a fixed order
"""

import torch

from ..device import tl, triton
from ..launching import Launch, prepared
from ..matmul.generic.operands import Bias
from ..partials import split_size, summed_over_splits
from ..tiles import add_product, load_tile, product, split_range, store_tile
from ..tuning import ReduceConfig
from .operands import (
    ReduceOperands,
    add_biases,
    aligned_operand,
    entry_rows,
    gradient_weights,
    of_kept_rows,
    unmasked,
)


@triton.jit(do_not_specialize=["P", "R", "splits", "split_elements", "zero"])
def _one_pass_kernel(
    kept_ptr, reduced_ptr, kept_bias_ptr, reduced_bias_ptr, mask_ptr, lengths_ptr, offsets_ptr,
    g_ptr, result_ptr, d_kept_ptr, d_reduced_ptr,
    strides, P, R, splits, split_elements, zero,
    OP: tl.constexpr, K: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr,
    EVEN_R: tl.constexpr, LAYOUTS: tl.constexpr, ARITHMETIC: tl.constexpr,
):  # fmt: skip
    INPUT_PRECISION: tl.constexpr = ARITHMETIC.input_precision
    stride_kz, stride_kp, stride_kk, P = aligned_operand(strides.kept, P, LAYOUTS.kept_transposed, LAYOUTS.kept_unit)
    stride_rz, stride_rr, stride_rk, R = aligned_operand(
        strides.reduced, R, LAYOUTS.reduced_transposed, LAYOUTS.reduced_unit
    )  # fmt: skip
    batch = (tl.program_id(0) // splits).to(tl.int64)
    split = tl.program_id(0) % splits
    _, active_rows, _ = entry_rows(batch, lengths_ptr, offsets_ptr, strides.entries, R)
    reduced_ptr += batch * stride_rz
    d_reduced_ptr += batch * R * K
    reduced_bias = Bias(reduced_bias_ptr, 0, strides.bias[1], active_rows)
    kept_bias = Bias(kept_bias_ptr, 0, strides.bias[0], P)
    rows, inner = tl.arange(0, BLOCK_P), tl.arange(0, BLOCK_K)
    kept = load_tile(kept_ptr + batch * stride_kz, rows, inner, stride_kp, stride_kk, P, K, False, K == BLOCK_K)
    g = of_kept_rows(g_ptr, batch * P, rows, P, 0)
    result = 0.0
    if OP == "logsumexp":
        result = of_kept_rows(result_ptr, batch * P, rows, P, 0)
    start, stop = split_range(split, R, splits, BLOCK_R)
    d_kept = tl.zeros([BLOCK_K, BLOCK_P], tl.float32)
    for first in tl.range(start, stop, BLOCK_R):
        cols = first + tl.arange(0, BLOCK_R)
        tile = load_tile(reduced_ptr, cols, inner, stride_rr, stride_rk, active_rows, K, EVEN_R, K == BLOCK_K)
        z = add_biases(product(tile, kept.T, INPUT_PRECISION), cols, rows, reduced_bias, kept_bias)
        inside = cols < active_rows
        included = inside & unmasked(mask_ptr, strides.mask, batch, cols, inside)
        w = gradient_weights(z, g, result, OP, ARITHMETIC)
        w = tl.where(included[:, None] & (rows < P)[None, :], w, 0.0).to(tile.dtype)
        # Inactive rows have gradient 0, even if kept is not finite.
        d_tile = tl.where(inside[:, None], product(w, kept, INPUT_PRECISION), 0.0)
        store_tile(d_reduced_ptr, d_tile, cols, inner, K, 1, R, K)
        d_kept = add_product(d_kept, tile.T, w, zero, INPUT_PRECISION)
    d_kept_ptr += split.to(tl.int64) * split_elements + batch * P * K
    store_tile(d_kept_ptr, d_kept, inner, rows, 1, K, K, P)


def both_gradients(
    operands: ReduceOperands, g: torch.Tensor, result: torch.Tensor | None, *, tiles: ReduceConfig, splits: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """For sum, mean, sumsq and logsumexp: (d_kept ``[Z, P, K]``, d_reduced ``[Z, R, K]``); rows are not packed.

    P is at most ``tiles.block_p`` and K at most ``tiles.block_k``; ``splits`` are ranges of the reduced rows. g and
    result are those of ``backward.kept_gradient``.
    """
    batch, kept, reduced, width = operands.sizes()
    d_reduced = operands.kept.new_empty(batch, reduced, width)

    def prepare() -> Launch:
        layouts = operands.layouts()
        stages = tiles.num_stages
        # Sums of 64 × 128 in four warps leave no registers for a third stage beside masks and row addresses.
        crowded = tiles.block_p * tiles.block_k >= 64 * 32 * tiles.num_warps
        if crowded and (operands.mask is not None or not layouts.reduced_transposed):
            stages = min(stages, 2)
        even = operands.whole and reduced % tiles.block_r == 0
        return Launch(
            _one_pass_kernel,
            batch * splits,
            (operands.strides(),),
            (kept, reduced, splits, split_size([(batch, kept, width)], splits), 0.0),
            (
                operands.arithmetic.op, width, tiles.block_p, tiles.block_r, tiles.block_k, even, layouts,
                operands.arithmetic.constants,
            ),
            tiles.num_warps,
            stages,
        )  # fmt: skip

    launch = prepared(operands.ready, "both gradients", prepare)

    def fill(targets: list[torch.Tensor | None], _: int) -> None:
        launch((*operands.pointers(), g, result, targets[0], d_reduced))

    [d_kept] = summed_over_splits(operands.kept, [(batch, kept, width)], splits, fill, operands.ready)
    assert d_kept is not None
    return d_kept, d_reduced
