"""Epilogues: what is done to a float32 accumulator in registers before it is rounded once and stored."""

from ...activations import activated, activation_unit, limited_hidden_and_slopes
from ...device import tl, triton
from ...dropout import keep_factor
from ...tiles import load_vector, store_tile


@triton.jit
def add_bias(acc, bias, batch, cols):
    """``acc`` plus the bias of entry ``batch``, if there is one."""
    if bias.ptr is not None:
        acc += load_vector(bias.ptr + batch * bias.stride_batch, cols, bias.stride, bias.columns)[None, :]
    return acc


@triton.jit
def store_product(acc, out, bias, batch, rows, cols, split, OUTPUT: tl.constexpr, ARITHMETIC: tl.constexpr):
    """Store act(acc + bias) or, with split K, this split's part of the sum without bias and activation.

    ``OUTPUT`` is "result", "partial" (a workspace of all splits, summed in a fixed order later), or "atomic".
    """
    ACTIVATION: tl.constexpr = ARITHMETIC.activation
    ACCURACY: tl.constexpr = ARITHMETIC.accuracy
    if OUTPUT == "result":
        acc = add_bias(acc, bias, batch, cols)
        if ACTIVATION != "identity":
            acc = activated(acc, ACTIVATION, ACCURACY)
        store_tile(out.ptr, acc, rows, cols, out.columns, 1, out.row_limit, out.columns)
    elif OUTPUT == "partial":
        own_ptr = out.ptr + split.to(tl.int64) * out.rows * out.columns
        store_tile(own_ptr, acc, rows, cols, out.columns, 1, out.row_limit, out.columns)
    else:
        tl.static_assert(OUTPUT == "atomic", "a product is stored as a result, a partial, or atomically")
        offsets = rows.to(tl.int64)[:, None] * out.columns + cols.to(tl.int64)[None, :]
        inside = (rows < out.row_limit)[:, None] & (cols < out.columns)[None, :]
        tl.atomic_add(out.ptr + offsets, acc, mask=inside, sem="relaxed")


@triton.jit
def activate(
    z, z_gate, out, rows, cols, dropout, limits, GATED: tl.constexpr, KEPT: tl.constexpr, ARITHMETIC: tl.constexpr
):  # fmt: skip
    """Store H = act(Z) or act(Zg) ⊙ Z, with dropout; also Z and Zg if they are ``KEPT`` and have pointers."""
    UNIT: tl.constexpr = activation_unit(ARITHMETIC.activation, ARITHMETIC.accuracy)
    if KEPT and out.z_ptr is not None:
        store_tile(out.z_ptr, z, rows, cols, out.width, 1, out.row_limit, out.width)
        if GATED:
            store_tile(out.gate_ptr, z_gate, rows, cols, out.width, 1, out.row_limit, out.width)
    hidden, _, _ = limited_hidden_and_slopes(z, z_gate, limits, GATED, ARITHMETIC)
    if dropout.seed_ptr is not None:
        hidden *= keep_factor(dropout, rows, cols)
    store_tile(out.hidden_ptr, hidden * UNIT, rows, cols, out.width, 1, out.row_limit, out.width)
