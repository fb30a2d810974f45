"""Forward: the reduction of a product, each tile of which lives in registers until it is reduced."""

from typing import NamedTuple

import torch

from ..activations import activate
from ..device import tl, triton
from ..launching import Launch, ceil_div, prepared
from ..tiles import split_range, store_tile
from ..tuning import ReduceConfig
from . import sm90
from .operands import ReduceOperands, add_biases, entry_rows, exponential, operand_in_units, scores

_COMBINED = 128  # elements of the result that one program combines from their partials


@triton.jit
def _larger(left, right):
    return tl.maximum(left, right, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _wins(value, best):
    """Whether a later value replaces the best one so far: it is larger, or the first NaN."""
    return (value > best) | ((value != value) & (best == best))


@triton.jit
def _finite(maximum):
    """The number to subtract before exponentials: an infinite maximum would leave only NaN."""
    return tl.where(tl.abs(maximum) == float("inf"), 0.0, maximum)


@triton.jit
def _value(c, OP: tl.constexpr):
    """What the kernels maximise for a minimum and a largest absolute value, and what they add up for squares."""
    if OP == "min":
        return -c
    elif OP == "absmax":
        return tl.abs(c)
    elif OP == "sumsq":
        return c * c
    else:
        return c


@triton.jit(do_not_specialize=["stride_split", "P", "R", "splits", "zero"])
def _reduce_kernel(
    kept_ptr, reduced_ptr, kept_bias_ptr, reduced_bias_ptr, mask_ptr, lengths_ptr, offsets_ptr,
    counts_ptr, values_ptr, index_ptr, sums_ptr, product_ptr,
    kept_strides, reduced_strides, bias_strides, mask_strides, entry_strides, product_strides,
    stride_split, P, R, splits, zero,
    OP: tl.constexpr, K: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr,
    EVEN: tl.constexpr, END: tl.constexpr, LAYOUTS: tl.constexpr, ARITHMETIC: tl.constexpr,
):  # fmt: skip
    # ``END`` is that of ``matmul.generic.epilogues.finish``.
    EVEN_P: tl.constexpr = EVEN[0]
    EVEN_R: tl.constexpr = EVEN[1]
    ACTIVATION: tl.constexpr = ARITHMETIC[0]
    ACCURACY: tl.constexpr = ARITHMETIC[1]
    INPUT_PRECISION: tl.constexpr = ARITHMETIC[2]
    stride_kz, stride_kp, stride_kk, P = operand_in_units(kept_strides, P, LAYOUTS[0], LAYOUTS[1])
    stride_rz, stride_rr, stride_rk, R = operand_in_units(reduced_strides, R, LAYOUTS[2], LAYOUTS[3])
    stride_kept_bias, stride_reduced_bias = bias_strides
    stride_mask_z, stride_mask_r = mask_strides
    stride_lengths, stride_offsets = entry_strides
    stride_cz, stride_cp, stride_cr = product_strides
    program = tl.program_id(0)
    tiles = tl.cdiv(P, BLOCK_P)
    split = program % splits
    batch = (program // splits // tiles).to(tl.int64)
    rows = (program // splits % tiles) * BLOCK_P + tl.arange(0, BLOCK_P)
    SUMMED: tl.constexpr = OP == "sum" or OP == "mean" or OP == "sumsq"
    LOGARITHM: tl.constexpr = OP == "logsumexp"

    first_row, taking_rows, entry = entry_rows(batch, lengths_ptr, offsets_ptr, stride_lengths, stride_offsets, R)
    end = taking_rows
    if product_ptr is not None:
        end = entry  # the product has all columns, also those that do not take part
    kept_ptr += batch * stride_kz
    reduced_ptr += batch * stride_rz + first_row * stride_rr
    start, stop = split_range(split, end, splits, BLOCK_R)
    total = tl.zeros([BLOCK_P], tl.float32)  # sum, or sum of exponentials relative to the best
    best = tl.full([BLOCK_P], float("-inf"), tl.float32)
    index = tl.zeros([BLOCK_P], tl.int32) + start
    for r in tl.range(start, stop, BLOCK_R):
        cols = r + tl.arange(0, BLOCK_R)
        c = scores(
            kept_ptr, reduced_ptr, rows, cols, stride_kp, stride_kk, stride_rr, stride_rk, P, entry, zero,
            K, BLOCK_K, EVEN_P, EVEN_R, INPUT_PRECISION,
        )  # fmt: skip
        c = add_biases(c, rows, cols, kept_bias_ptr, reduced_bias_ptr, stride_kept_bias, stride_reduced_bias, P, entry)
        if ACTIVATION != "identity":
            c, _ = activate(c, ACTIVATION, ACCURACY)
        if product_ptr is not None:
            store_tile(product_ptr + batch * stride_cz, c, rows, cols, stride_cp, stride_cr, P, entry)
        c = _value(c, OP)
        if mask_ptr is not None:
            mask_at = mask_ptr + batch * stride_mask_z + cols.to(tl.int64) * stride_mask_r
            taking = tl.load(mask_at, mask=cols < taking_rows, other=0) != 0
            c = tl.where(taking[None, :], c, 0.0 if SUMMED else float("-inf"))
        elif not EVEN_R:
            c = tl.where((cols < taking_rows)[None, :], c, 0.0 if SUMMED else float("-inf"))
        if SUMMED:
            total += tl.sum(c, 1)
        else:
            value = tl.reduce(c, 1, _larger)
            if LOGARITHM:
                larger = _larger(best, value)
                shift = _finite(larger)
                exponentials = exponential(c - shift[:, None], ACCURACY)
                total = total * exponential(best - shift, ACCURACY) + tl.sum(exponentials, 1)
                best = larger
            else:
                if index_ptr is not None:
                    # Of a row with NaN only NaN can be found, of another one only its maximum.
                    hit = (c == value[:, None]) | (c != c)
                    # Infinitely small, a column past the end is found where all others are so too: never before them.
                    found = tl.min(tl.where(hit, cols[None, :], 2147483647), 1)
                    index = tl.where(_wins(value, best), found, index)
                best = _larger(best, value)

    out = split.to(tl.int64) * stride_split + batch * P + rows
    row_ok = rows < P
    if SUMMED:
        if counts_ptr is not None:
            total = tl.div_rn(total, tl.zeros([BLOCK_P], tl.float32) + tl.load(counts_ptr + batch))
        if END == "atomic":
            tl.atomic_add(values_ptr + out, total, mask=row_ok)
        else:
            tl.store(values_ptr + out, total.to(values_ptr.dtype.element_ty), mask=row_ok)
    elif LOGARITHM:
        if END == "partial":
            tl.store(sums_ptr + out, total, mask=row_ok)
            tl.store(values_ptr + out, best, mask=row_ok)
        else:
            tl.store(values_ptr + out, (_finite(best) + tl.log(total)).to(values_ptr.dtype.element_ty), mask=row_ok)
    else:
        if OP == "min" and END != "partial":
            best = -best
        tl.store(values_ptr + out, best.to(values_ptr.dtype.element_ty), mask=row_ok)
        if index_ptr is not None:
            tl.store(index_ptr + out, index, mask=row_ok)


@triton.jit(do_not_specialize=["P", "total", "splits"])
def _combine_kernel(
    values_ptr, index_ptr, sums_ptr, counts_ptr, out_ptr, out_index_ptr, shares_ptr,
    P, total, splits,
    OP: tl.constexpr, BLOCK: tl.constexpr, ACCURACY: tl.constexpr,
):  # fmt: skip
    # Partials lie as [splits, total]: one split after the other, always in the same order.
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < total
    SUMMED: tl.constexpr = OP == "sum" or OP == "mean" or OP == "sumsq"
    result = tl.load(values_ptr + at, mask=inside, other=0.0)
    if OP == "logsumexp":
        exponentials = tl.load(sums_ptr + at, mask=inside, other=1.0)
    if index_ptr is not None:
        index = tl.load(index_ptr + at, mask=inside, other=0)
    here = at
    for _ in range(1, splits):
        here += total
        value = tl.load(values_ptr + here, mask=inside, other=0.0)
        if SUMMED:
            result += value
        else:
            larger = _larger(result, value)
            if OP == "logsumexp":
                shift = _finite(larger)
                more = tl.load(sums_ptr + here, mask=inside, other=0.0)
                exponentials = exponentials * exponential(result - shift, ACCURACY)
                exponentials += more * exponential(value - shift, ACCURACY)
            if index_ptr is not None:
                other = tl.load(index_ptr + here, mask=inside, other=0)
                index = tl.where(_wins(value, result), other, index)
            result = larger
    if OP == "mean":
        result = tl.div_rn(result, tl.load(counts_ptr + at // P, mask=inside, other=1.0))
    elif OP == "min":
        result = -result
    elif OP == "logsumexp":
        if shares_ptr is not None:
            # Where D is not finite neither are the shares, in the way of exp(C - D).
            largest = result
            result = _finite(result) + tl.log(exponentials)
            finite = tl.abs(result) < float("inf")
            tl.store(shares_ptr + at, tl.where(finite, largest, result), mask=inside)
            tl.store(shares_ptr + total + at, tl.where(finite, exponentials, 1.0), mask=inside)
        else:
            result = _finite(result) + tl.log(exponentials)
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
    product: torch.Tensor | None = None,
    shares: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(values ``[Z, P]`` in ``out_dtype``, int32 indices ``[Z, P]`` if asked for), both contiguous.

    An index counts from the first row of its entry, taking part or not; where none takes part it is 0.

    ``atomic`` adds the float32 sums of the splits in whatever order they arrive. ``product``, ``[Z, P, R]`` of any
    strides, is filled with C. ``shares``, float32 ``[2, Z, P]``, is filled with the largest C and the sum of
    exponentials relative to it, of which D is the logarithm before it is rounded: for logsumexp.
    """
    arithmetic, like = operands.arithmetic, operands.kept
    shape = like.shape[:2]
    name = ("reduce", indices, out_dtype, shares is None)
    made = prepared(operands.ready, name, _prepare, operands, splits, tiles, atomic, product, shares is not None)
    counts = operands.counts() if arithmetic.op == "mean" else None
    found = like.new_empty(shape, dtype=torch.int32) if indices else None
    if atomic:
        values = like.new_zeros(shape, dtype=torch.float32)
    else:
        values = like.new_empty(shape, dtype=out_dtype)
    target, target_index, sums = values, found, None
    if made.combine is not None:
        target = like.new_empty((splits, *shape), dtype=torch.float32)
        target_index = like.new_empty((splits, *shape), dtype=torch.int32) if indices else None
        sums = torch.empty_like(target) if arithmetic.op == "logsumexp" else None
    divisors = None if made.combine is not None else counts
    if made.sm90:
        kept, reduced, _, _, *taking = operands.pointers()
        made.launch((kept, reduced, divisors, target, sums, target_index, *taking))
    else:
        made.launch((*operands.pointers(), divisors, target, target_index, sums, product))
    if made.combine is not None:
        made.combine((target, target_index, sums, counts, values, found, shares))
    return values.to(out_dtype), found


class _Prepared(NamedTuple):
    """What all executions of one prepared call share; ``combine`` makes the results from the partials of all splits."""

    launch: Launch
    sm90: bool
    combine: Launch | None


def _prepare(
    operands: ReduceOperands,
    splits: int,
    tiles: ReduceConfig,
    atomic: bool,
    product: torch.Tensor | None,
    in_shares: bool,
) -> _Prepared:
    batch, kept, reduced, width = operands.sizes()
    arithmetic, count = operands.arithmetic, batch * kept
    partial = in_shares or (splits > 1 and not atomic)
    combine = None
    if partial:
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
            launch = sm90.prepare_reduce(operands, matrices, splits, tiles.sm90)
            return _Prepared(launch, True, combine)
    end = "atomic" if atomic else "partial" if partial else "result"
    # Split or of lengths of its own, an entry ends anywhere; with splits one variant less is compiled, too.
    even = operands.whole and splits == 1 and reduced % tiles.block_r == 0
    launch = Launch(
        _reduce_kernel,
        batch * ceil_div(kept, tiles.block_p) * splits,
        (*operands.strides(), (0, 0, 0) if product is None else product.stride()),
        (count if partial else 0, kept, reduced, splits, 0.0),
        (
            arithmetic.op, width, tiles.block_p, tiles.block_r, tiles.block_k, (kept % tiles.block_p == 0, even),
            end, operands.units(), arithmetic.names,
        ),
        tiles.num_warps,
        tiles.num_stages,
    )  # fmt: skip
    return _Prepared(launch, False, combine)
