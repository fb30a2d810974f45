"""Weight gradients with the bias gradients of the hidden, in one pass over x and dy, split over tokens."""

from typing import Any, NamedTuple, TypeAlias

import torch

from ..activations import activation_unit, hidden_and_slopes, through_activation
from ..device import tl, triton
from ..dropout import keep
from ..launching import Launch, ceil_div, layout_of, prepared
from ..matmul.generic.operands import Operand
from ..partials import split_size, summed_over_splits
from ..tiles import (
    add_product,
    assume_aligned,
    assume_multiple,
    load_vector,
    only_before,
    product,
    split_range,
    store_tile,
)
from ..tuning import TileConfig
from . import sm90
from .blocks import load, load_transposed, up_gradient
from .operands import Operands


@triton.jit(do_not_specialize=["M", "dropout", "splits"])
def _weight_gradient_kernel(
    x_ptr, dy_ptr, up_ptr, gate_ptr, down_ptr, up_bias_ptr, gate_bias_ptr, seed_ptr,
    d_up_ptr, d_gate_ptr, d_down_ptr, d_up_bias_ptr, d_gate_bias_ptr, strides, N, M, dropout, splits,
    CONFIG: tl.constexpr, ARITHMETIC: tl.constexpr,
):  # fmt: skip
    K: tl.constexpr = CONFIG.k
    O: tl.constexpr = CONFIG.o
    BLOCK_M: tl.constexpr = CONFIG.block_m
    BLOCK_N: tl.constexpr = CONFIG.block_n
    BLOCK_K: tl.constexpr = CONFIG.block_k
    BLOCK_O: tl.constexpr = CONFIG.block_o
    EVEN_M: tl.constexpr = CONFIG.even
    INPUT_PRECISION: tl.constexpr = ARITHMETIC.input_precision
    GATED: tl.constexpr = gate_ptr is not None
    UP: tl.constexpr = (d_up_ptr is not None) or (d_up_bias_ptr is not None)
    GATE: tl.constexpr = (d_gate_ptr is not None) or (d_gate_bias_ptr is not None)
    # Gradients are dense, one batch entry after another, once per split; the two strides within an entry are free.
    stride_split, stride_d_up_n, stride_d_up_k, stride_d_down_o, stride_d_down_n = strides.results
    N = assume_multiple(N, CONFIG.unit)
    x = Operand(x_ptr, *assume_aligned(strides.x, False, CONFIG.unit), rows=M, inner=K)
    dy = Operand(dy_ptr, *assume_aligned(strides.rows, False, CONFIG.unit), rows=M, inner=O)
    up = Operand(up_ptr, *assume_aligned(strides.up, CONFIG.up_transposed, CONFIG.unit), rows=N, inner=K)
    gate = Operand(gate_ptr, *assume_aligned(strides.gate, CONFIG.up_transposed, CONFIG.unit), rows=N, inner=K)
    down = Operand(down_ptr, *assume_aligned(strides.down, CONFIG.down_transposed, CONFIG.unit), rows=O, inner=N)
    drop_limit, keep_scale = dropout
    zero = keep_scale - keep_scale
    program = tl.program_id(0)
    column_tiles = tl.cdiv(N, BLOCK_N)
    split = program % splits
    batch = (program // splits // column_tiles).to(tl.int64)
    cols = (program // splits % column_tiles) * BLOCK_N + tl.arange(0, BLOCK_N)
    inner, outer = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_O)

    # The weights of this program's columns stay on chip; x and dy stream by.
    up_tile = load(up, batch, cols, inner)
    if up_bias_ptr is not None:
        up_bias = load_vector(up_bias_ptr, cols, strides.bias[0], N)[:, None]
    if GATED:
        gate_tile = load(gate, batch, cols, inner)
        if gate_bias_ptr is not None:
            gate_bias = load_vector(gate_bias_ptr, cols, strides.bias[1], N)[:, None]
    if UP or GATE:
        down_tile = load_transposed(down, batch, cols, outer)
    d_up = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    d_gate = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    d_down = tl.zeros([BLOCK_N, BLOCK_O], tl.float32)
    d_up_bias = tl.zeros([BLOCK_N], tl.float32)
    d_gate_bias = tl.zeros([BLOCK_N], tl.float32)

    first_row, end_row = split_range(split, M, splits, BLOCK_M)
    for row_start in tl.range(first_row, end_row, BLOCK_M):
        rows = row_start + tl.arange(0, BLOCK_M)
        x_tile, dy_tile = load(x, batch, rows, inner), load(dy, batch, rows, outer)
        # Everything hidden is kept transposed, [BLOCK_N, BLOCK_M]: it is the left operand of each gradient product.
        z = product(up_tile, x_tile.T, INPUT_PRECISION)
        if up_bias_ptr is not None:
            z += up_bias
        z_gate = z
        if GATED:
            z_gate = product(gate_tile, x_tile.T, INPUT_PRECISION)
            if gate_bias_ptr is not None:
                z_gate += gate_bias
        hidden, slope, gate_slope = hidden_and_slopes(z, z_gate, GATED, ARITHMETIC)
        if seed_ptr is not None:
            kept = keep(tl.load(seed_ptr), rows.to(tl.int64)[None, :], cols.to(tl.int64)[:, None], drop_limit)
            kept = kept * keep_scale
            hidden = hidden * kept
        if d_down_ptr is not None:
            # Past M, x and dy load as 0, but 0 times an infinite weight or bias is NaN.
            hidden = only_before(hidden, rows, M, EVEN_M)
            d_down = add_product(d_down, hidden.to(dy_tile.dtype), dy_tile, zero, INPUT_PRECISION)
        if UP or GATE:
            d_hidden = product(down_tile, dy_tile.T, INPUT_PRECISION)
            if seed_ptr is not None:
                d_hidden = d_hidden * kept
        if UP:
            dz = only_before(up_gradient(d_hidden, slope, z, GATED, ARITHMETIC), rows, M, EVEN_M)
            if d_up_ptr is not None:
                d_up = add_product(d_up, dz.to(x_tile.dtype), x_tile, zero, INPUT_PRECISION)
            if d_up_bias_ptr is not None:
                d_up_bias += tl.sum(dz, 1)
        if GATE:
            dz_gate = through_activation(d_hidden, gate_slope, z_gate, ARITHMETIC)
            dz_gate = only_before(dz_gate, rows, M, EVEN_M)
            if d_gate_ptr is not None:
                d_gate = add_product(d_gate, dz_gate.to(x_tile.dtype), x_tile, zero, INPUT_PRECISION)
            if d_gate_bias_ptr is not None:
                d_gate_bias += tl.sum(dz_gate, 1)

    unit = activation_unit(ARITHMETIC.activation, ARITHMETIC.accuracy)
    d_up_bias *= unit
    d_gate_bias *= unit
    partial = split.to(tl.int64) * stride_split
    weight = partial + batch * N * K
    bias = partial + batch * N
    if d_up_ptr is not None:
        store_tile(d_up_ptr + weight, d_up * unit, cols, inner, stride_d_up_n, stride_d_up_k, N, K)
    if d_gate_ptr is not None:
        store_tile(d_gate_ptr + weight, d_gate * unit, cols, inner, stride_d_up_n, stride_d_up_k, N, K)
    if d_down_ptr is not None:
        own_ptr = d_down_ptr + partial + batch * N * O
        store_tile(own_ptr, d_down * unit, cols, outer, stride_d_down_n, stride_d_down_o, N, O)
    if d_up_bias_ptr is not None:
        tl.store(d_up_bias_ptr + bias + cols, d_up_bias.to(d_up_bias_ptr.dtype.element_ty), mask=cols < N)
    if d_gate_bias_ptr is not None:
        tl.store(d_gate_bias_ptr + bias + cols, d_gate_bias.to(d_gate_bias_ptr.dtype.element_ty), mask=cols < N)


class WeightGradients(NamedTuple):
    """Which gradients are requested (bools), or the gradients (tensors or None)."""

    up: Any = None
    gate: Any = None
    down: Any = None
    up_bias: Any = None
    gate_bias: Any = None


# Which gradients each launch computes, by the number of launches.
_PASSES: dict[int, tuple[tuple[str, ...], ...]] = {
    1: (WeightGradients._fields,),
    2: (("down",), ("up", "gate", "up_bias", "gate_bias")),
    3: (("down",), ("up", "up_bias"), ("gate", "gate_bias")),
}
Shapes: TypeAlias = tuple[tuple[int, ...] | None, ...]


def weight_gradients(
    operands: Operands,
    dy: torch.Tensor,
    wanted: WeightGradients,
    splits: int,
    tiles: TileConfig,
    transposed: bool = False,
) -> WeightGradients:
    """The wanted gradients, contiguous: up and gate ``[Z, N, K]``, down ``[Z, O, N]``, biases ``[Z, N]``.

    Gradients of operands without a batch have none. ``transposed`` matrices have the layout of a batched GEMM-GEMM's
    operands: ``[Z, K, N]`` and ``[Z, N, O]``. If the accumulators of all gradients exceed the registers, several
    launches compute some of them each.
    """
    name = ("weight gradients", *wanted, *layout_of(dy))
    shapes, passes, ready = prepared(operands.ready, name, _prepare, operands, dy, wanted, splits, tiles, transposed)
    given = operands.tensors(dy)

    def fill(targets: list[torch.Tensor | None], _: int) -> None:
        for launch, yields in passes:
            own = [target if each else None for target, each in zip(targets, yields, strict=True)]
            launch((*given, *own))

    # One workspace and one sum for all launches.
    return WeightGradients(*summed_over_splits(operands.x, shapes, splits, fill, ready))


def gradient_shapes(operands: Operands, wanted: WeightGradients, transposed: bool = False) -> Shapes:
    """The shapes of the wanted gradients, None of the others."""
    _, _, width, hidden, out_width = operands.sizes()
    up_shape = (width, hidden) if transposed else (hidden, width)
    down_shape = (hidden, out_width) if transposed else (out_width, hidden)
    batch = operands.x.shape[:-2]
    shapes = [(*batch, *shape) for shape in (up_shape, up_shape, down_shape, (hidden,), (hidden,))]
    return tuple([shape if want else None for shape, want in zip(shapes, wanted, strict=True)])


def _prepare(
    operands: Operands, dy: torch.Tensor, wanted: WeightGradients, splits: int, tiles: TileConfig, transposed: bool
) -> tuple[Shapes, list[tuple[Launch, tuple[bool, ...]]], dict[Any, Any]]:
    """The gradients' shapes, each launch with the gradients it computes, and the cache of their reduction's launch."""
    batch, rows, width, hidden, out_width = operands.sizes()
    shapes = gradient_shapes(operands, wanted, transposed)
    size = split_size(shapes, splits)
    programs = batch * ceil_div(hidden, tiles.block_n) * splits
    inner_strides = (1, hidden, 1, out_width) if transposed else (width, 1, hidden, 1)
    # A single split has few rows: treating them as ragged saves a compiled variant.
    even = splits > 1 and rows % tiles.block_m == 0
    config = tiles.sm90
    matrices = None if config is None else operands.matrices(dy)
    passes: list[tuple[Launch, tuple[bool, ...]]] = []
    for names in _PASSES[tiles.passes if config is None or matrices is None else config.passes]:
        yields = tuple([name in names and bool(getattr(wanted, name)) for name in WeightGradients._fields])
        if not any(yields):
            continue
        if config is None or matrices is None:
            results = (size, *inner_strides)
            launch = operands.launch(
                _weight_gradient_kernel, programs, tiles, even, dy, results, free_numbers=(splits,)
            )  # fmt: skip
        else:
            launch = sm90.prepare_weight_gradient(operands, matrices, size, transposed, splits, config)
        passes.append((launch, yields))
    return shapes, passes, {}
