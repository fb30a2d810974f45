"""dZ, and with a gate dZg, from dy and the pre-activations, with the sums over their rows."""

import torch

from ..activations import activation_unit, hidden_and_slopes, through_activation
from ..device import tl, triton
from ..launching import launch
from ..partials import reduce_partials
from ..tiles import add_product, grouped_tile, load_tile, store_tile
from ..tuning import HiddenGradientTiles

_GROUP = 8  # programs below one another, before those to their right: they share columns of w_down in the cache


@triton.jit
def _stored_and_summed(
    ptr, gradient, rows, cols, M, N, UNIT: tl.constexpr,
):  # fmt: skip
    """Stores a tile of a dense ``[M, N]`` gradient, and returns its sum over the rows."""
    # Past M the product is 0, but 0 times an infinite weight is NaN.
    gradient = tl.where((rows < M)[:, None], gradient * UNIT, 0.0)
    store_tile(ptr, gradient, rows, cols, N, 1, M, N)
    return tl.sum(gradient, 0)


@triton.jit(do_not_specialize=["M", "row_tiles", "zero"])
def _hidden_gradient_kernel(
    dy_ptr, down_ptr, z_ptr, gate_ptr, dz_ptr, d_gate_ptr, sums_ptr,
    stride_dym, stride_dyo, stride_do, stride_dn, stride_zm, stride_zn, stride_gm, stride_gn, O, N,
    M, row_tiles, zero,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_O: tl.constexpr, GROUP: tl.constexpr,
    ACTIVATION: tl.constexpr, ACCURACY: tl.constexpr, INPUT_PRECISION: tl.constexpr,
):  # fmt: skip
    # A program has ``row_tiles`` tiles below one another. ``zero`` is 0, which only the caller knows.
    GATED: tl.constexpr = gate_ptr is not None
    UNIT: tl.constexpr = activation_unit(ACTIVATION, ACCURACY)
    bands = tl.cdiv(tl.cdiv(M, BLOCK_M), row_tiles)
    band, column = grouped_tile(tl.program_id(0), bands, tl.cdiv(N, BLOCK_N), GROUP)
    cols = column * BLOCK_N + tl.arange(0, BLOCK_N)
    sums = tl.zeros([BLOCK_N], tl.float32)
    gate_sums = tl.zeros([BLOCK_N], tl.float32)
    first_row = (band.to(tl.int64) * row_tiles * BLOCK_M).to(tl.int32)
    for index in range(tl.minimum(row_tiles, tl.cdiv(M - first_row, BLOCK_M))):
        rows = first_row + index * BLOCK_M + tl.arange(0, BLOCK_M)
        d_hidden = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for o in tl.range(0, O, BLOCK_O):
            outer = o + tl.arange(0, BLOCK_O)
            dy_tile = load_tile(dy_ptr, rows, outer, stride_dym, stride_dyo, M, O)
            down_tile = load_tile(down_ptr, outer, cols, stride_do, stride_dn, O, N)
            d_hidden = add_product(d_hidden, dy_tile, down_tile, zero, INPUT_PRECISION)
        z = load_tile(z_ptr, rows, cols, stride_zm, stride_zn, M, N).to(tl.float32)
        if GATED:
            z_gate = load_tile(gate_ptr, rows, cols, stride_gm, stride_gn, M, N).to(tl.float32)
            _, slope, gate_slope = hidden_and_slopes(z, z_gate, True, ACTIVATION, ACCURACY)
            sums += _stored_and_summed(dz_ptr, d_hidden * slope, rows, cols, M, N, UNIT)
            d_gate = through_activation(d_hidden, gate_slope, z_gate, ACTIVATION)
            gate_sums += _stored_and_summed(d_gate_ptr, d_gate, rows, cols, M, N, UNIT)
        else:
            _, slope, _ = hidden_and_slopes(z, z, False, ACTIVATION, ACCURACY)
            dz = through_activation(d_hidden, slope, z, ACTIVATION)
            sums += _stored_and_summed(dz_ptr, dz, rows, cols, M, N, UNIT)
    if sums_ptr is not None:
        if GATED:
            partial = sums_ptr + band.to(tl.int64) * 2 * N
            tl.store(partial + N + cols, gate_sums, mask=cols < N)
        else:
            partial = sums_ptr + band.to(tl.int64) * N
        tl.store(partial + cols, sums, mask=cols < N)


def hidden_gradient(
    dy: torch.Tensor,
    w_down: torch.Tensor,
    z: torch.Tensor,
    z_gate: torch.Tensor | None,
    bias: bool,
    row_tiles: int,
    activation: str,
    accuracy: str,
    input_precision: str,
    tiles: HiddenGradientTiles,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """dz, dz_gate (or None) ``[M, N]``, contiguous, and with ``bias`` their sums db_up, db_gate (or None) ``[N]``.

    Operands ``[M, *]`` of any strides; each program computes ``row_tiles`` tiles.
    """
    (rows, out), columns = dy.shape, w_down.shape[1]
    gated = z_gate is not None

    def empty(*shape: int, dtype: torch.dtype = dy.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=dy.device)

    dz = empty(rows, columns)
    d_gate = empty(rows, columns) if gated else None
    bands = triton.cdiv(triton.cdiv(rows, tiles.block_m), row_tiles)
    sums = empty(bands, columns * (2 if gated else 1), dtype=torch.float32) if bias else None
    launch(
        _hidden_gradient_kernel,
        bands * triton.cdiv(columns, tiles.block_n),
        (dy, w_down, z, z_gate, dz, d_gate, sums),
        (*dy.stride(), *w_down.stride(), *z.stride(), *((0, 0) if z_gate is None else z_gate.stride()), out, columns),
        (rows, row_tiles, 0.0),
        (tiles.block_m, tiles.block_n, tiles.block_o, _GROUP, activation, accuracy, input_precision),
        tiles.num_warps,
        tiles.num_stages,
    )
    if sums is None:
        return dz, d_gate, None, None
    db_up = empty(columns)
    db_gate = empty(columns) if gated else None
    reduce_partials(sums, [db_up] if db_gate is None else [db_up, db_gate])
    return dz, d_gate, db_up, db_gate
