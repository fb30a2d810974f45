"""dZ, and with a gate dZg, from dy and the pre-activations, with the sums over their rows, and H once more."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from ..activations import activation_unit, hidden_and_slopes, through_activation
from ..column_sums import column_partials
from ..device import tl, triton
from ..dropout import NO_DROPOUT, Dropout, keep_factor
from ..hopper import ALIGNMENT, Matrix, matrix, untransposed
from ..launching import Launch, ceil_div, empty_rows, layout_of, prepared, vector_unit
from ..matmul import sm90
from ..matmul.low_rank import LowRank
from ..partials import ReduceBlocks, reduce_partials
from ..tiles import add_product, grouped_tile, in_units, load_tile, store_tile
from ..tuning import BAND_BLOCKS, ColumnSumTiles, EpiloguePipeline, EpilogueTiles, gradients_joined, hidden_stride

_GROUP = 8  # programs below one another, before those to their right: they share columns of w_down in the cache
_BAND_BLOCKS = ReduceBlocks(*BAND_BLOCKS)


@triton.jit
def _stored_and_summed(ptr, gradient, rows, cols, stride_m, M, N, UNIT: tl.constexpr, SUMMED: tl.constexpr):
    """Stores a tile of an ``[M, N]`` gradient, and returns it or, ``SUMMED``, its sum over the rows."""
    # Past M the product is 0, but 0 times an infinite weight is NaN.
    gradient = tl.where((rows < M)[:, None], gradient * UNIT, 0.0)
    store_tile(ptr, gradient, rows, cols, stride_m, 1, M, N)
    if SUMMED:
        return tl.sum(gradient, 0)
    else:
        return gradient


@triton.jit(do_not_specialize=["M", "row_tiles", "zero", "drop_limit", "keep_scale", "mask_row", "mask_column"])
def _hidden_gradient_kernel(
    dy_ptr, down_ptr, z_ptr, gate_ptr, dz_ptr, d_gate_ptr, hidden_ptr, sums_ptr, seed_ptr, added_ptr,
    stride_dym, stride_dyo, stride_do, stride_dn, stride_zm, stride_zn, stride_gm, stride_gn, stride_out,
    stride_hidden, O, N,
    M, row_tiles, zero, drop_limit, keep_scale, mask_row, mask_column,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_INNER: tl.constexpr, GROUP: tl.constexpr,
    VECTOR: tl.constexpr, ACTIVATION: tl.constexpr, ACCURACY: tl.constexpr, INPUT_PRECISION: tl.constexpr,
):  # fmt: skip
    # A program has ``row_tiles`` tiles below one another. ``zero`` is 0, which only the caller knows. With a
    # BLOCK_INNER of 0 the product lies where dz will, and is summed up by element before it is by column.
    MULTIPLIES: tl.constexpr = BLOCK_INNER != 0
    GATED: tl.constexpr = gate_ptr is not None
    UNIT: tl.constexpr = activation_unit(ACTIVATION, ACCURACY)
    bands = tl.cdiv(tl.cdiv(M, BLOCK_M), row_tiles)
    band, column = grouped_tile(tl.program_id(0), bands, tl.cdiv(N, BLOCK_N), GROUP)
    cols = column * BLOCK_N + tl.arange(0, BLOCK_N)
    N, stride_out = in_units(N, VECTOR), in_units(stride_out, VECTOR)
    stride_zm, stride_gm = in_units(stride_zm, VECTOR), in_units(stride_gm, VECTOR)
    stride_hidden = in_units(stride_hidden, VECTOR)
    if MULTIPLIES:
        sums = tl.zeros([BLOCK_N], tl.float32)
        gate_sums = tl.zeros([BLOCK_N], tl.float32)
    else:
        sums = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        gate_sums = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    first_row = (band.to(tl.int64) * row_tiles * BLOCK_M).to(tl.int32)
    for index in range(tl.minimum(row_tiles, tl.cdiv(M - first_row, BLOCK_M))):
        rows = first_row + index * BLOCK_M + tl.arange(0, BLOCK_M)
        if added_ptr is None:
            d_hidden = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        else:
            d_hidden = load_tile(added_ptr, rows, cols, N, 1, M, N).to(tl.float32)
        if MULTIPLIES:
            for o in tl.range(0, O, BLOCK_INNER):
                outer = o + tl.arange(0, BLOCK_INNER)
                dy_tile = load_tile(dy_ptr, rows, outer, stride_dym, stride_dyo, M, O)
                down_tile = load_tile(down_ptr, outer, cols, stride_do, stride_dn, O, N)
                d_hidden = add_product(d_hidden, dy_tile, down_tile, zero, INPUT_PRECISION)
        else:
            d_hidden += load_tile(dz_ptr, rows, cols, stride_out, 1, M, N).to(tl.float32)
        if seed_ptr is not None:
            factor = keep_factor((seed_ptr, drop_limit, keep_scale, mask_row, mask_column), rows, cols)
            d_hidden *= factor
        z = load_tile(z_ptr, rows, cols, stride_zm, stride_zn, M, N).to(tl.float32)
        if GATED:
            z_gate = load_tile(gate_ptr, rows, cols, stride_gm, stride_gn, M, N).to(tl.float32)
            hidden, slope, gate_slope = hidden_and_slopes(z, z_gate, True, ACTIVATION, ACCURACY)
            sums += _stored_and_summed(dz_ptr, d_hidden * slope, rows, cols, stride_out, M, N, UNIT, MULTIPLIES)
            d_gate = through_activation(d_hidden, gate_slope, z_gate, ACTIVATION)
            gate_sums += _stored_and_summed(d_gate_ptr, d_gate, rows, cols, stride_out, M, N, UNIT, MULTIPLIES)
        else:
            hidden, slope, _ = hidden_and_slopes(z, z, False, ACTIVATION, ACCURACY)
            dz = through_activation(d_hidden, slope, z, ACTIVATION)
            sums += _stored_and_summed(dz_ptr, dz, rows, cols, stride_out, M, N, UNIT, MULTIPLIES)
        if hidden_ptr is not None:
            if seed_ptr is not None:
                hidden *= factor
            store_tile(hidden_ptr, hidden * UNIT, rows, cols, stride_hidden, 1, M, N)
    if sums_ptr is not None:
        if not MULTIPLIES:
            sums, gate_sums = tl.sum(sums, 0), tl.sum(gate_sums, 0)
        if GATED:
            partial = sums_ptr + band.to(tl.int64) * 2 * N
            tl.store(partial + N + cols, gate_sums, mask=cols < N)
        else:
            partial = sums_ptr + band.to(tl.int64) * N
        tl.store(partial + cols, sums.to(sums_ptr.dtype.element_ty), mask=cols < N)


class HiddenGradients(NamedTuple):
    """dz and dz_gate ``[M, N]``, db_up and db_gate ``[N]``, the hidden ``[M, N]``, db_down ``[O]``; None for what was
    not asked."""

    dz: torch.Tensor
    dz_gate: torch.Tensor | None
    db_up: torch.Tensor | None
    db_gate: torch.Tensor | None
    hidden: torch.Tensor | None
    db_down: torch.Tensor | None


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
    tiles: EpilogueTiles,
    pipeline: EpiloguePipeline | None = None,
    keep_hidden: bool = False,
    for_products: bool = False,
    in_place: bool = False,
    sums_into: Sequence[torch.Tensor] = (),
    partials_into: torch.Tensor | None = None,
    hidden_into: torch.Tensor | None = None,
    dropout: Dropout = NO_DROPOUT,
    column_sums: ColumnSumTiles | None = None,
    ready: dict[Any, Any] | None = None,
    low_rank: LowRank | None = None,
    added: torch.Tensor | None = None,
) -> HiddenGradients:
    """The gradients of the pre-activations, with ``bias`` their sums, and the hidden if it is to be kept.

    With ``column_sums`` the sums of dy, too, by these tiles; with ``low_rank`` its product is part of dH, and so is
    ``added``, which is like dH and contiguous. Where ``tiles`` have no inner axis, torch computes dH where dz will be,
    which is not in place.

    Operands ``[M, *]`` of any strides. Results are contiguous, unless they are ``for_products`` alone: then rows begin
    with a sector of memory, and dz and dz_gate may be the halves of one ``[M, 2 N]``: see ``gradients_joined``.
    ``in_place``, they replace z and z_gate, whose rows are contiguous and start alike then.
    The sums fill ``sums_into``, of up and of the gate, or new tensors of dy's dtype; partial ones before them lie in
    ``partials_into``, a float32 vector, if that is large enough. The hidden, if it is to be kept, is a new tensor or
    ``hidden_into``, which is contiguous. A program of the portable kernel computes ``row_tiles`` tiles.

    ``ready`` belongs to one prepared call (see ``gemm_gemm.Operands``), whose options are all but those that say what
    is asked for and where; dy may lie differently from call to call.
    """
    keep_hidden = keep_hidden or hidden_into is not None
    name = ("hidden gradient", bias, keep_hidden, column_sums is not None, bool(sums_into), in_place, *layout_of(dy))
    made = prepared(
        ready, name, _prepare, dy, w_down, z, z_gate, bias, row_tiles, activation, accuracy, input_precision, tiles,
        pipeline, keep_hidden, for_products, in_place, bool(sums_into), dropout, low_rank,
    )  # fmt: skip
    if made.copied:
        # What autograd gives may be expanded, or transposed: a copy costs less than the portable kernel does.
        dy = dy.contiguous()
    rows, columns, _ = made.shape
    d_gate: torch.Tensor | None = None
    if in_place:
        assert tiles.block_inner, "dH needs memory of its own"
        dz, d_gate = z, z_gate
    elif made.side_by_side:
        dz, d_gate = dy.new_empty(rows, 2 * columns).split(columns, 1)
    else:
        dz = empty_rows(dy, *made.shape)
        d_gate = None if z_gate is None else empty_rows(dy, *made.shape)
    hidden = empty_rows(dy, *made.shape) if keep_hidden and hidden_into is None else hidden_into
    # Of few rows the kernel's sums are the result.
    complete = made.sums is not None and len(made.sums) == 1
    sums = None
    if made.sums is not None:
        sums = dy.new_empty(made.sums) if complete else _partials(dy, made.sums, partials_into)
    # First, so that the kernel behind it finds dy in the cache.
    dy_sums = None if column_sums is None else column_partials(dy, column_sums, made.ready)
    if made.pipelined:
        more = (None, None) if low_rank is None else low_rank.copied(w_down.stride(1) != 1)[:2]
        sm90.launch_hidden_gradient(
            made.launch, (dy, w_down, z, z_gate, dz, d_gate, hidden, *more), (sums, dropout.seed, added)
        )
    else:
        if low_rank is not None:
            dy, w_down, _ = low_rank.joined(dy, w_down, None, 0)
        if not tiles.block_inner:
            torch.mm(dy, w_down, out=dz)
        made.launch((dy, w_down, z, z_gate, dz, d_gate, hidden, sums, dropout.seed, added))
    other: tuple[torch.Tensor, torch.Tensor] | None = None
    db_down = dy_sums
    if dy_sums is not None and dy_sums.dim() == 2:
        db_down = dy.new_empty(dy_sums.shape[1])
        other = dy_sums, db_down
    if sums is None or complete:
        if other is not None:
            reduce_partials(other[0], [other[1]], blocks=_BAND_BLOCKS, ready=made.ready)
        return HiddenGradients(dz, d_gate, sums, None, hidden, db_down)
    parts = 1 if z_gate is None else 2
    found = list(sums_into) or [dy.new_empty(columns) for _ in range(parts)]
    reduce_partials(sums, found, blocks=_BAND_BLOCKS, other=other, ready=made.ready)
    return HiddenGradients(dz, d_gate, found[0], found[1] if parts == 2 else None, hidden, db_down)


class _Prepared(NamedTuple):
    """What all executions of one prepared call share: rows, columns and row stride of the hidden, the sums' shape.

    ``sums`` are partial ones of bands, or, where there is a single one, complete.
    """

    shape: tuple[int, int, int]
    sums: tuple[int, ...] | None
    copied: bool
    side_by_side: bool
    pipelined: bool
    launch: Launch
    ready: dict[Any, Any]


def _prepare(
    dy: torch.Tensor,
    w_down: torch.Tensor,
    z: torch.Tensor,
    z_gate: torch.Tensor | None,
    bias: bool,
    row_tiles: int,
    activation: str,
    accuracy: str,
    input_precision: str,
    tiles: EpilogueTiles,
    pipeline: EpiloguePipeline | None,
    keep_hidden: bool,
    for_products: bool,
    in_place: bool,
    given_sums: bool,
    dropout: Dropout,
    low_rank: LowRank | None,
) -> _Prepared:
    copied = pipeline is not None and dropout.in_whole_draws and untransposed(dy) is None
    if copied:
        dy = dy.contiguous()
    rows, columns = dy.shape[0], w_down.shape[1]
    stride = hidden_stride(columns, dy.element_size()) if for_products else columns
    shape = rows, columns, stride
    joined = for_products and z_gate is not None and gradients_joined(rows, columns, dy.element_size())
    side_by_side = joined and not in_place
    parts = 1 if z_gate is None else 2
    row_stride = z.stride(0) if in_place else stride * (2 if side_by_side else 1)
    pipeline = pipeline if dropout.in_whole_draws else None
    matrices = None if pipeline is None else _matrices(dy, w_down, z, z_gate)
    if pipeline is not None and matrices is not None:
        bands = pipeline.bands(rows, columns, z_gate is not None)
        sums = _sums(bands, columns, parts, given_sums) if bias else None
        made = sm90.prepare_hidden_gradient(
            *matrices, (row_stride, stride), keep_hidden, bias, activation, accuracy, pipeline, dropout, low_rank
        )
        if made is not None:
            return _Prepared(shape, sums, copied, side_by_side, True, made, {})
    if low_rank is not None:
        dy, w_down, _ = low_rank.joined(dy, w_down, None, 0)
    bands = ceil_div(ceil_div(rows, tiles.block_m), row_tiles)
    gate_strides = (0, 0) if z_gate is None else z_gate.stride()
    # Beside a product's tiles there are no registers for more than one piece of a row at a time.
    vector = 1 if tiles.block_inner else vector_unit(z, columns, row_stride, stride, z.stride(0), gate_strides[0])
    launch = Launch(
        _hidden_gradient_kernel,
        bands * ceil_div(columns, tiles.block_n),
        (*dy.stride(), *w_down.stride(), *z.stride(), *gate_strides, row_stride, stride, dy.shape[1], columns),
        (rows, row_tiles, 0.0, *dropout.numbers()),
        (
            tiles.block_m, tiles.block_n, tiles.block_inner, _GROUP, vector, activation, accuracy, input_precision,
        ),
        tiles.num_warps,
        tiles.num_stages,
    )  # fmt: skip
    sums = _sums(bands, columns, parts, given_sums) if bias else None
    return _Prepared(shape, sums, copied, side_by_side, False, launch, {})


def _partials(dy: torch.Tensor, shape: tuple[int, ...], memory: torch.Tensor | None) -> torch.Tensor:
    """An empty float32 tensor of this shape, in a vector's memory if that is large enough."""
    size = torch.Size(shape).numel()
    if memory is None or memory.shape[0] < size:
        return dy.new_empty(shape, dtype=torch.float32)
    return memory[:size].view(shape)


def _sums(bands: int, columns: int, parts: int, given: bool) -> tuple[int, ...]:
    # What is given may lie anywhere, of any dtype; and no two gradients share memory.
    return (columns,) if bands == 1 and parts == 1 and not given else (bands, columns * parts)


def _matrices(
    dy: torch.Tensor, w_down: torch.Tensor, z: torch.Tensor, z_gate: torch.Tensor | None
) -> tuple[Matrix, Matrix, Matrix, Matrix | None] | None:
    """The operands as TMA sees them, or None where one does not lie as it needs them.

    w_down may be transposed.
    """
    left, right, first = untransposed(dy), matrix(w_down), untransposed(z)
    gate = None if z_gate is None else untransposed(z_gate)
    if left is None or right is None or first is None or (z_gate is not None and gate is None):
        return None
    # The results' rows, too.
    if w_down.shape[1] * dy.element_size() % ALIGNMENT:
        return None
    return left, right, first, gate
