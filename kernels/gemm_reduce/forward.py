"""Forward: the reduction of a product, each tile of which is reduced in registers and never stored."""

import torch
from torch import Tensor

from ..activations import activate
from ..device import tl, triton
from ..launching import Launch, ceil_div, prepared
from ..matmul.generic.operands import Bias, Operand, strides
from ..tiles import split_range, store_tile
from ..tuning import ReduceConfig
from . import sm90
from .operands import ReduceOperands, add_biases, aligned_operand, entry_rows, exponential, scores
from .reduction import Results, State, finite, identity, larger, reduce_tile, result_of, store_state, summed, wins

_COMBINED = 128  # elements of the result that one program combines from their partials


@triton.jit(do_not_specialize=["stride_split", "P", "R", "splits", "zero"])
def _reduce_kernel(
    kept_ptr, reduced_ptr, kept_bias_ptr, reduced_bias_ptr, mask_ptr, lengths_ptr, offsets_ptr,
    counts_ptr, values_ptr, index_ptr, sums_ptr, product_ptr,
    strides, product_strides, stride_split, P, R, splits, zero,
    OP: tl.constexpr, K: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr,
    EVEN: tl.constexpr, OUTPUT: tl.constexpr, LAYOUTS: tl.constexpr, ARITHMETIC: tl.constexpr,
):  # fmt: skip
    ACTIVATION: tl.constexpr = ARITHMETIC.activation
    ACCURACY: tl.constexpr = ARITHMETIC.accuracy
    INPUT_PRECISION: tl.constexpr = ARITHMETIC.input_precision
    stride_kz, stride_kp, stride_kk, P = aligned_operand(strides.kept, P, LAYOUTS.kept_transposed, LAYOUTS.kept_unit)
    stride_rz, stride_rr, stride_rk, R = aligned_operand(
        strides.reduced, R, LAYOUTS.reduced_transposed, LAYOUTS.reduced_unit
    )  # fmt: skip
    program = tl.program_id(0)
    tiles = tl.cdiv(P, BLOCK_P)
    split = program % splits
    batch = (program // splits // tiles).to(tl.int64)
    rows = (program // splits % tiles) * BLOCK_P + tl.arange(0, BLOCK_P)
    first_row, active_rows, entry = entry_rows(batch, lengths_ptr, offsets_ptr, strides.entries, R)
    end = active_rows
    if product_ptr is not None:
        end = entry  # the product has all columns, inactive ones too
    kept = Operand(kept_ptr + batch * stride_kz, 0, stride_kp, stride_kk, P, K)
    reduced = Operand(reduced_ptr + batch * stride_rz + first_row * stride_rr, 0, stride_rr, stride_rk, entry, K)
    kept_bias = Bias(kept_bias_ptr, 0, strides.bias[0], P)
    reduced_bias = Bias(reduced_bias_ptr, 0, strides.bias[1], entry)
    start, stop = split_range(split, end, splits, BLOCK_R)
    zeros = tl.zeros([BLOCK_P], tl.float32)
    state = State(tl.full([BLOCK_P], identity(OP), tl.float32), zeros, tl.zeros([BLOCK_P], tl.int32) + start)
    for r in tl.range(start, stop, BLOCK_R):
        cols = r + tl.arange(0, BLOCK_R)
        c = scores(kept, reduced, rows, cols, zero, K, BLOCK_K, EVEN[0], EVEN[1], INPUT_PRECISION)
        c = add_biases(c, rows, cols, kept_bias, reduced_bias)
        if ACTIVATION != "identity":
            c, _ = activate(c, ACTIVATION, ACCURACY)
        if product_ptr is not None:
            stride_cz, stride_cp, stride_cr = product_strides
            store_tile(product_ptr + batch * stride_cz, c, rows, cols, stride_cp, stride_cr, P, entry)
        state = reduce_tile(
            c, state, cols, batch, active_rows, not EVEN[1], mask_ptr, strides.mask, OP, index_ptr is not None, ACCURACY
        )
    at = split.to(tl.int64) * stride_split + batch * P + rows
    results = Results(values_ptr, index_ptr, sums_ptr, counts_ptr)
    store_state(state, results, at, rows < P, batch, OP, OUTPUT)


@triton.jit(do_not_specialize=["P", "total", "splits"])
def _combine_kernel(
    values_ptr, index_ptr, sums_ptr, counts_ptr, out_ptr, out_index_ptr, shares_ptr,
    P, total, splits,
    OP: tl.constexpr, BLOCK: tl.constexpr, ACCURACY: tl.constexpr,
):  # fmt: skip
    # Partials are [splits, total], combined in a fixed order.
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < total
    value = tl.load(values_ptr + at, mask=inside, other=0.0)
    exponentials = value
    if OP == "logsumexp":
        exponentials = tl.load(sums_ptr + at, mask=inside, other=1.0)
    if index_ptr is not None:
        index = tl.load(index_ptr + at, mask=inside, other=0)
    here = at
    for _ in range(1, splits):
        here += total
        other = tl.load(values_ptr + here, mask=inside, other=0.0)
        if summed(OP):
            value += other
        else:
            best = larger(value, other)
            if OP == "logsumexp":
                shift = finite(best)
                more = tl.load(sums_ptr + here, mask=inside, other=0.0)
                exponentials = exponentials * exponential(value - shift, ACCURACY)
                exponentials += more * exponential(other - shift, ACCURACY)
            if index_ptr is not None:
                index = tl.where(wins(other, value), tl.load(index_ptr + here, mask=inside, other=0), index)
            value = best
    divisor = 1.0
    if OP == "mean":
        divisor = tl.load(counts_ptr + at // P, mask=inside, other=1.0)
    result = result_of(value, exponentials, divisor, OP)
    if shares_ptr is not None:
        # If D is not finite, the shares are not either, as exp(C - D).
        shared = tl.abs(result) < float("inf")
        tl.store(shares_ptr + at, tl.where(shared, value, result), mask=inside)
        tl.store(shares_ptr + total + at, tl.where(shared, exponentials, 1.0), mask=inside)
    tl.store(out_ptr + at, result.to(out_ptr.dtype.element_ty), mask=inside)
    if index_ptr is not None:
        tl.store(out_index_ptr + at, index, mask=inside)


def reduce(
    operands: ReduceOperands,
    *,
    indices: bool,
    out_dtype: torch.dtype,
    splits: int,
    tiles: ReduceConfig,
    atomic: bool = False,
    product: Tensor | None = None,
    shares: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """(values ``[Z, P]`` in ``out_dtype``, int32 indices ``[Z, P]`` if requested), both contiguous.

    An index counts all rows of its entry, active or not; it is 0 if none is active.

    ``atomic`` adds the float32 sums of the splits in any order. ``product``, ``[Z, P, R]`` of any strides, is filled
    with C. For logsumexp, ``shares``, float32 ``[2, Z, P]``, is filled with the largest C and the sum of exponentials
    relative to it, from which D follows without rounding.
    """
    arithmetic, like = operands.arithmetic, operands.kept
    shape = like.shape[:2]
    name = ("reduce", indices, out_dtype, shares is None)
    launch, combine = prepared(
        operands.ready, name, _prepare, operands, splits, tiles, atomic, product, shares is not None
    )  # fmt: skip
    counts = operands.counts() if arithmetic.op == "mean" else None
    found = like.new_empty(shape, dtype=torch.int32) if indices else None
    values = like.new_zeros(shape, dtype=torch.float32) if atomic else like.new_empty(shape, dtype=out_dtype)
    if combine is None:
        launch((*operands.pointers(), counts, values, found, None, product))
    else:
        parts = like.new_empty((splits, *shape), dtype=torch.float32)
        indices_of_parts = like.new_empty((splits, *shape), dtype=torch.int32) if indices else None
        sums = torch.empty_like(parts) if arithmetic.op == "logsumexp" else None
        launch((*operands.pointers(), None, parts, indices_of_parts, sums, product))
        combine((parts, indices_of_parts, sums, counts, values, found, shares))
    return values.to(out_dtype), found


def _prepare(
    operands: ReduceOperands, splits: int, tiles: ReduceConfig, atomic: bool, product: Tensor | None, in_shares: bool
) -> tuple[Launch, Launch | None]:
    """The launch, and the one that combines the partials of all splits, if there are any."""
    batch, kept, reduced, width = operands.sizes()
    arithmetic, count = operands.arithmetic, batch * kept
    combine = None
    if in_shares or (splits > 1 and not atomic):
        combine = Launch(
            _combine_kernel,
            ceil_div(count, _COMBINED),
            (),
            (kept, count, splits),
            (arithmetic.op, _COMBINED, arithmetic.accuracy),
        )
    if tiles.sm90 is not None and product is None and not atomic and not in_shares:
        matrices = sm90.takes(operands, tiles.sm90)
        if matrices is not None:
            return sm90.prepare_reduce(operands, matrices, splits, tiles.sm90), combine
    output = "atomic" if atomic else "result" if combine is None else "partial"
    # Ragged or split entries may end inside a block; not compiling an even variant for splits saves one.
    even = operands.whole and splits == 1 and reduced % tiles.block_r == 0
    launch = Launch(
        _reduce_kernel,
        batch * ceil_div(kept, tiles.block_p) * splits,
        (operands.strides(), strides(product, 3)),
        (0 if combine is None else count, kept, reduced, splits, 0.0),
        (
            arithmetic.op, width, tiles.block_p, tiles.block_r, tiles.block_k, (kept % tiles.block_p == 0, even),
            output, operands.layouts(), arithmetic.constants,
        ),
        tiles.num_warps,
        tiles.num_stages,
    )  # fmt: skip
    return launch, combine
