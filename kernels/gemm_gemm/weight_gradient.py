"""Weight gradients with the bias gradients of the hidden, in one pass over x and dy, split over tokens."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from ..activations import activation_unit, hidden_and_slopes, through_activation
from ..device import tl, triton
from ..dropout import keep
from ..launching import Launch, ceil_div, layout_of, prepared
from ..partials import split_size, summed_over_splits
from ..tiles import add_product, in_units, load_tile, load_vector, product, split_range, store_tile, strides_in_units
from ..tuning import TileConfig
from . import sm90
from .operands import Operands, rows_of, strides


@triton.jit(do_not_specialize=["M", "dropout", "splits"])
def _weight_gradient_kernel(
    x_ptr, up_ptr, gate_ptr, down_ptr, up_bias_ptr, gate_bias_ptr, seed_ptr, dy_ptr,
    d_up_ptr, d_gate_ptr, d_down_ptr, d_up_bias_ptr, d_gate_bias_ptr,
    x_strides, up_strides, gate_strides, down_strides, bias_strides, dy_strides, gradient_strides,
    N, stride_split, M, dropout, splits,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, WIDTHS: tl.constexpr, EVEN_M: tl.constexpr,
    ARITHMETIC: tl.constexpr, LAYOUT: tl.constexpr,
):  # fmt: skip
    K: tl.constexpr = WIDTHS[0]
    O: tl.constexpr = WIDTHS[1]
    BLOCK_K: tl.constexpr = WIDTHS[2]
    BLOCK_O: tl.constexpr = WIDTHS[3]
    ACTIVATION: tl.constexpr = ARITHMETIC[0]
    ACCURACY: tl.constexpr = ARITHMETIC[1]
    INPUT_PRECISION: tl.constexpr = ARITHMETIC[2]
    UP_TRANSPOSED: tl.constexpr = LAYOUT[0]
    DOWN_TRANSPOSED: tl.constexpr = LAYOUT[1]
    UNIT: tl.constexpr = LAYOUT[2]
    # Gradients are dense, one batch entry behind the other, and there once per split; their two inner strides are free.
    stride_d_up_n, stride_d_up_k, stride_d_down_o, stride_d_down_n = gradient_strides
    stride_xz, stride_xm, stride_xk = strides_in_units(x_strides, False, UNIT)
    N = in_units(N, UNIT)
    stride_up_bias, stride_gate_bias = bias_strides
    stride_uz, stride_un, stride_uk = strides_in_units(up_strides, UP_TRANSPOSED, UNIT)
    stride_gz, stride_gn, stride_gk = strides_in_units(gate_strides, UP_TRANSPOSED, UNIT)
    stride_dz, stride_do, stride_dn = strides_in_units(down_strides, DOWN_TRANSPOSED, UNIT)
    stride_dyz, stride_dym, stride_dyo = strides_in_units(dy_strides, False, UNIT)
    program = tl.program_id(0)
    column_tiles = tl.cdiv(N, BLOCK_N)
    split = program % splits
    batch = (program // splits // column_tiles).to(tl.int64)
    cols = (program // splits % column_tiles) * BLOCK_N + tl.arange(0, BLOCK_N)
    inner = tl.arange(0, BLOCK_K)
    drop_limit, keep_scale = dropout
    zero = keep_scale - keep_scale
    outer = tl.arange(0, BLOCK_O)
    GATED: tl.constexpr = gate_ptr is not None
    UP: tl.constexpr = (d_up_ptr is not None) or (d_up_bias_ptr is not None)
    GATE: tl.constexpr = (d_gate_ptr is not None) or (d_gate_bias_ptr is not None)

    # The weights of this program's columns stay on chip; x and dy stream by.
    x_ptr += batch * stride_xz
    dy_ptr += batch * stride_dyz
    up_tile = load_tile(up_ptr + batch * stride_uz, cols, inner, stride_un, stride_uk, N, K)
    if up_bias_ptr is not None:
        up_bias = load_vector(up_bias_ptr, cols, stride_up_bias, N)[:, None]
    if GATED:
        gate_tile = load_tile(gate_ptr + batch * stride_gz, cols, inner, stride_gn, stride_gk, N, K)
        if gate_bias_ptr is not None:
            gate_bias = load_vector(gate_bias_ptr, cols, stride_gate_bias, N)[:, None]
    if UP or GATE:
        down_tile = load_tile(down_ptr + batch * stride_dz, cols, outer, stride_dn, stride_do, N, O)
    d_up = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    d_gate = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    d_down = tl.zeros([BLOCK_N, BLOCK_O], tl.float32)
    d_up_bias = tl.zeros([BLOCK_N], tl.float32)
    d_gate_bias = tl.zeros([BLOCK_N], tl.float32)

    first_row, end_row = split_range(split, M, splits, BLOCK_M)
    for row_start in tl.range(first_row, end_row, BLOCK_M):
        rows = row_start + tl.arange(0, BLOCK_M)
        x_tile = load_tile(x_ptr, rows, inner, stride_xm, stride_xk, M, K)
        dy_tile = load_tile(dy_ptr, rows, outer, stride_dym, stride_dyo, M, O)
        # Everything hidden is kept transposed, [BLOCK_N, BLOCK_M]: it is the left operand of each gradient product.
        z = product(up_tile, x_tile.T, INPUT_PRECISION)
        if up_bias_ptr is not None:
            z += up_bias
        z_gate = z
        if GATED:
            z_gate = product(gate_tile, x_tile.T, INPUT_PRECISION)
            if gate_bias_ptr is not None:
                z_gate += gate_bias
        hidden, slope, gate_slope = hidden_and_slopes(z, z_gate, GATED, ACTIVATION, ACCURACY)
        if seed_ptr is not None:
            kept = keep(tl.load(seed_ptr), rows.to(tl.int64)[None, :], cols.to(tl.int64)[:, None], drop_limit)
            kept = kept * keep_scale
            hidden = hidden * kept
        if not EVEN_M:
            # Past M, x and dy load as 0, but 0 times an infinite weight or bias is NaN.
            row_ok = (rows < M)[None, :]
            hidden = tl.where(row_ok, hidden, 0.0)
        if d_down_ptr is not None:
            d_down = add_product(d_down, hidden.to(dy_tile.dtype), dy_tile, zero, INPUT_PRECISION)
        if UP or GATE:
            d_hidden = product(down_tile, dy_tile.T, INPUT_PRECISION)
            if seed_ptr is not None:
                d_hidden = d_hidden * kept
            if UP:
                if GATED:
                    dz = d_hidden * slope
                else:
                    dz = through_activation(d_hidden, slope, z, ACTIVATION)
                if not EVEN_M:
                    dz = tl.where(row_ok, dz, 0.0)
                if d_up_ptr is not None:
                    d_up = add_product(d_up, dz.to(x_tile.dtype), x_tile, zero, INPUT_PRECISION)
                if d_up_bias_ptr is not None:
                    d_up_bias += tl.sum(dz, 1)
            if GATE:
                dz_gate = through_activation(d_hidden, gate_slope, z_gate, ACTIVATION)
                if not EVEN_M:
                    dz_gate = tl.where(row_ok, dz_gate, 0.0)
                if d_gate_ptr is not None:
                    d_gate = add_product(d_gate, dz_gate.to(x_tile.dtype), x_tile, zero, INPUT_PRECISION)
                if d_gate_bias_ptr is not None:
                    d_gate_bias += tl.sum(dz_gate, 1)

    unit = activation_unit(ACTIVATION, ACCURACY)
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
        store_tile(
            d_down_ptr + partial + batch * N * O, d_down * unit, cols, outer, stride_d_down_n, stride_d_down_o, N, O
        )
    if d_up_bias_ptr is not None:
        tl.store(d_up_bias_ptr + bias + cols, d_up_bias.to(d_up_bias_ptr.dtype.element_ty), mask=cols < N)
    if d_gate_bias_ptr is not None:
        tl.store(d_gate_bias_ptr + bias + cols, d_gate_bias.to(d_gate_bias_ptr.dtype.element_ty), mask=cols < N)


@dataclass(frozen=True)
class WeightGradients:
    """What the weight-gradient kernel is asked for (bools) or has returned (tensors or None), by name."""

    up: Any = None
    gate: Any = None
    down: Any = None
    up_bias: Any = None
    gate_bias: Any = None

    def __iter__(self) -> Iterator[Any]:
        return iter((self.up, self.gate, self.down, self.up_bias, self.gate_bias))


_GRADIENT_NAMES = ("up", "gate", "down", "up_bias", "gate_bias")
# Which gradients each launch yields, by the number of launches.
_PASSES: dict[int, tuple[tuple[str, ...], ...]] = {
    1: (_GRADIENT_NAMES,),
    2: (("down",), ("up", "gate", "up_bias", "gate_bias")),
    3: (("down",), ("up", "up_bias"), ("gate", "gate_bias")),
}


def weight_gradients(
    operands: Operands,
    dy: torch.Tensor,
    wanted: WeightGradients,
    splits: int,
    tiles: TileConfig,
    transposed: bool = False,
) -> WeightGradients:
    """The wanted gradients, contiguous: up and gate ``[Z, N, K]``, down ``[Z, O, N]``, biases ``[Z, N]``.

    Operands without a batch give gradients without one.

    ``transposed`` gives the matrices the layout of a batched GEMM-GEMM's operands: ``[Z, K, N]`` and ``[Z, N, O]``.
    Where the accumulators of all of them exceed the registers, several launches share them out.
    """
    name = ("weight gradients", *wanted, *layout_of(dy))
    made = prepared(operands.ready, name, _prepare, operands, dy, wanted, splits, tiles, transposed)

    def fill(targets: list[torch.Tensor | None], _: int) -> None:
        for launch, yields in made.passes:
            own = [target if each else None for target, each in zip(targets, yields, strict=True)]
            if made.sm90:
                weights = operands.up, operands.gate, operands.down
                launch((operands.x, dy, *weights, operands.up_bias, operands.gate_bias, *own))
            else:
                launch((*operands.pointers(), dy, *own))

    # One workspace and one sum for all launches.
    return WeightGradients(*summed_over_splits(operands.x, made.shapes, splits, fill, made.ready))


class _Prepared(NamedTuple):
    """What all executions of one prepared call share: the gradients' shapes, and which ones each launch yields."""

    shapes: tuple[tuple[int, ...] | None, ...]
    passes: list[tuple[Launch, tuple[bool, ...]]]
    sm90: bool
    ready: dict[Any, Any]


def _prepare(
    operands: Operands,
    dy: torch.Tensor,
    wanted: WeightGradients,
    splits: int,
    tiles: TileConfig,
    transposed: bool,
) -> _Prepared:
    _, _, width, hidden, out_width = operands.sizes()
    up_shape = (width, hidden) if transposed else (hidden, width)
    down_shape = (hidden, out_width) if transposed else (out_width, hidden)
    batch = operands.x.shape[:-2]
    all_shapes = [(*batch, *shape) for shape in (up_shape, up_shape, down_shape, (hidden,), (hidden,))]
    shapes = tuple([shape if want else None for shape, want in zip(all_shapes, wanted, strict=True)])
    config, matrices, dy_rows = tiles.sm90, None, None
    if config is not None and (matrices := operands.matrices) is not None:
        dy_rows = rows_of(dy)
    on_sm90 = dy_rows is not None
    passes: list[tuple[Launch, tuple[bool, ...]]] = []
    for names in _PASSES[config.passes if config is not None and on_sm90 else tiles.passes]:
        yields = tuple([bool(want) and name in names for name, want in zip(_GRADIENT_NAMES, wanted, strict=True)])
        if not any(yields):
            continue
        size = split_size(shapes, splits)
        if config is not None and matrices is not None and dy_rows is not None:
            launch = sm90.prepare_weight_gradient(operands, matrices, dy_rows, size, transposed, splits, config)
        else:
            launch = _prepare_generic(operands, dy, size, transposed, splits, tiles)
        passes.append((launch, yields))
    return _Prepared(shapes, passes, on_sm90, {})


def _prepare_generic(
    operands: Operands, dy: torch.Tensor, stride_split: int, transposed: bool, splits: int, tiles: TileConfig
) -> Launch:
    batch, rows, width, hidden, out_width = operands.sizes()
    inner_strides = (1, hidden, 1, out_width) if transposed else (width, 1, hidden, 1)
    return Launch(
        _weight_gradient_kernel,
        batch * ceil_div(hidden, tiles.block_n) * splits,
        (*operands.strides(), strides(dy), inner_strides, hidden, stride_split),
        (rows, operands.arithmetic.dropout(), splits),
        # Few splits mean few rows: one variant less to compile.
        operands.constants(tiles, splits > 1 and rows % tiles.block_m == 0, dy),
        tiles.num_warps,
        tiles.num_stages,
    )
