"""dZ and dZg on Hopper, their sums over bands of rows, and H once more, from the product dy W_down.

A warp of its own copies the pre-activations of a tile, a quarter at a time, while its product is computed. Every thread
adds up what it has of a column; threads are asked for theirs only where the sums of a band are complete.
"""

import torch

from ...activations import activation_unit, limited_hidden_and_slopes, through_activation
from ...dropout import Dropout
from ...hopper import Matrix, copy_in, dense, fence_async_shared, gl, gluon, mbarrier, tma
from ...launching import Launch
from ...pipeline import init_barriers, specialize, stage_of
from ...tiles import only_before
from ...tuning import EpiloguePipeline
from ..low_rank import LowRank, low_rank_copies
from .products import (
    HALF,
    TILE,
    column_halves,
    columns_at_once,
    copy_operands,
    draw,
    dropped,
    make_ring,
    multiply,
    rows_in_use,
    send,
    tile_of,
)


@gluon.jit
def _copy_quarter(desc, row, column, tiles, full, empty, consumer, position, STAGES: gl.constexpr):
    stage, phase = stage_of(position, STAGES)
    stage += consumer * STAGES
    mbarrier.wait(empty.index(stage), phase ^ 1)
    mbarrier.expect(full.index(stage), desc.block_type.nbytes)
    copy_in(desc, [row, column], full.index(stage), tiles.index(stage))
    return position + 1


@gluon.jit
def _copy_pre_activations(
    z_desc, gate_desc, tiles, full, empty, tile_rows, tile_columns, experts, group, STAGES: gl.constexpr,
):  # fmt: skip
    PARTS: gl.constexpr = 1 if gate_desc is None else 2
    count = 0
    for index in range(gl.program_id(0), tile_rows * tile_columns, gl.num_programs(0)):
        tile_row, tile_column, _ = tile_of(index, tile_rows, tile_columns, experts, group)
        consumer = count % 2
        position = count // 2 * (4 * PARTS)
        for quarter in gl.static_range(4):
            row = tile_row * TILE + quarter // 2 * HALF
            column = tile_column * TILE + quarter % 2 * HALF
            position = _copy_quarter(z_desc, row, column, tiles, full, empty, consumer, position, STAGES)
            if gate_desc is not None:
                position = _copy_quarter(gate_desc, row, column, tiles, full, empty, consumer, position, STAGES)
        count += 1


@gluon.jit
def _take(consumer: gl.constexpr, tiles, full, position, STAGES: gl.constexpr, layout: gl.constexpr):
    stage, phase = stage_of(position, STAGES)
    stage += consumer * STAGES
    mbarrier.wait(full.index(stage), phase)
    return tiles.index(stage).load(layout).to(gl.float32)


@gluon.jit
def _release(consumer: gl.constexpr, empty, position, PARTS: gl.constexpr, STAGES: gl.constexpr):
    """Gives the places of pre-activations back.

    Only once all that was made of them is stored: the next copy must not overtake a read that is still under way.
    """
    for part in gl.static_range(PARTS):
        mbarrier.arrive(empty.index(consumer * STAGES + (position + part) % STAGES))


@gluon.jit
def _own_sums(gradient, valid_rows):
    """Each thread's sums of the rows it has, ``[warps, rows of threads, columns]``: no thread asks another."""
    COLUMNS: gl.constexpr = gradient.shape[1]
    if valid_rows < gradient.shape[0]:
        # Past M the product is 0, but 0 times an infinite weight is NaN.
        rows = gl.arange(0, gradient.shape[0], gl.SliceLayout(1, gradient.type.layout))
        gradient = gl.where(gl.expand_dims(rows < valid_rows, 1), gradient, 0.0)
    return gl.sum(gradient.reshape([4, 2, 8, COLUMNS]), 1)


@gluon.jit
def _store_sums(sums_ptr, sums, column, N):
    """Adds up the sums of all threads, and stores those of the columns."""
    total = gl.sum(gl.sum(sums, 1), 0)
    cols = column + gl.arange(0, total.shape[0], total.type.layout)
    gl.store(sums_ptr + cols, total.to(sums_ptr.dtype.element_ty), mask=cols < N)


@gluon.jit
def _weights_of(weights_ptr, rows):
    if weights_ptr is None:
        return gl.full([HALF], 1.0, gl.float32, rows.type.layout)
    else:
        return gl.load(weights_ptr + rows)


@gluon.jit
def _finish(
    consumer: gl.constexpr, d_hidden, row, column, M, N, dz_desc, d_gate_desc, hidden_desc, sums_ptr, dropout, limits,
    tiles, tile_full, tile_empty, position, places, sent, sums, weights, weight_sums, WEIGHTED: gl.constexpr,
    WHOLE_COLUMNS: gl.constexpr, Z_STAGES: gl.constexpr, PLACES: gl.constexpr, GATED: gl.constexpr,
    LIMITED: gl.constexpr, ACTIVATION: gl.constexpr, ACCURACY: gl.constexpr,
):  # fmt: skip
    """The results of a quarter of a tile; ``sums`` with its own added. With a gate, they are stored at once instead.

    Where rows are ``WEIGHTED``, ``d_hidden`` is not yet, and the hidden is stored weighted; ``weight_sums`` come back
    with what the quarter adds to the gradient of each row's weight.
    """
    layout: gl.constexpr = d_hidden.type.layout
    WHOLE: gl.constexpr = activation_unit(ACTIVATION, ACCURACY)
    # The weights of rows come in that unit.
    UNIT: gl.constexpr = 1.0 if WEIGHTED else WHOLE
    PARTS: gl.constexpr = 2 if GATED else 1
    # In float32, what waits for its turn to be sent takes more registers than there are.
    BOTH_FIRST: gl.constexpr = GATED and sums_ptr is None
    if WEIGHTED:
        # Here, where little else is in registers; the hidden behind N is that of zeros.
        cols = column + gl.arange(0, HALF, gl.SliceLayout(0, layout))
        d_hidden = only_before(d_hidden, cols, N, WHOLE_COLUMNS)
    if dropout[0] is not None:
        kept = draw(dropout, row, column, layout)
        d_hidden = dropped(d_hidden, kept, dropout[2])
    z = _take(consumer, tiles, tile_full, position, Z_STAGES, layout)
    if GATED:
        z_gate = _take(consumer, tiles, tile_full, position + 1, Z_STAGES, layout)
    else:
        z_gate = z
    limit, offset = limits
    hidden, slope, gate_slope = limited_hidden_and_slopes(
        z, z_gate, limit, offset, GATED, LIMITED, ACTIVATION, ACCURACY
    )
    if WEIGHTED:
        weight_sums += gl.sum(d_hidden * hidden, 1) * WHOLE
        weights = gl.expand_dims(weights * WHOLE, 1)
        hidden *= weights
        d_hidden *= weights
    if BOTH_FIRST:
        dz = d_hidden * slope * UNIT
        d_gate = through_activation(d_hidden, gate_slope, z_gate, ACTIVATION) * UNIT
        if WEIGHTED:
            # Padding, which has no weight, ends as zeros: 0 times an infinite weight of the layer is NaN.
            dz, d_gate = gl.where(weights != 0, dz, 0.0), gl.where(weights != 0, d_gate, 0.0)
        dz, d_gate = dz.to(dz_desc.dtype), d_gate.to(dz_desc.dtype)
    if WEIGHTED:
        gl.static_assert(sums_ptr is None, "the sums of rows with weights are another kernel's")
        hidden = gl.where(weights != 0, hidden, 0.0)
    if hidden_desc is not None:
        if dropout[0] is not None:
            hidden = dropped(hidden, kept, dropout[2])
        sent = send(consumer, hidden_desc, row, column, hidden * UNIT, places, sent, PLACES)
        _release(consumer, tile_empty, position, PARTS, Z_STAGES)
    if not BOTH_FIRST:
        if GATED:
            dz = d_hidden * slope * UNIT
        else:
            dz = through_activation(d_hidden, slope, z, ACTIVATION) * UNIT
            if WEIGHTED:
                dz = gl.where(weights != 0, dz, 0.0)
    sent = send(consumer, dz_desc, row, column, dz, places, sent, PLACES)
    if not GATED and hidden_desc is None:
        _release(consumer, tile_empty, position, PARTS, Z_STAGES)
    if sums_ptr is not None:
        if GATED:
            band_ptr = sums_ptr + (row // HALF).to(gl.int64) * PARTS * N
            _store_sums(band_ptr, _own_sums(dz, M - row), column, N)
        else:
            sums += _own_sums(dz, M - row)
    if GATED:
        if not BOTH_FIRST:
            d_gate = through_activation(d_hidden, gate_slope, z_gate, ACTIVATION) * UNIT
        sent = send(consumer, d_gate_desc, row, column, d_gate, places, sent, PLACES)
        if sums_ptr is not None:
            _store_sums(band_ptr + N, _own_sums(d_gate, M - row), column, N)
    if GATED and hidden_desc is None:
        _release(consumer, tile_empty, position, PARTS, Z_STAGES)
    return position + PARTS, sent, sums, weight_sums


@gluon.jit
def _start(added_ptr, row, column, M, N, layout: gl.constexpr):
    """What the product of half a tile joins: nothing, or the same part of what is given."""
    if added_ptr is None:
        return gl.zeros([HALF, TILE], gl.float32, layout)
    else:
        rows = gl.expand_dims(row + gl.arange(0, HALF, gl.SliceLayout(1, layout)), 1)
        cols = gl.expand_dims(column + gl.arange(0, TILE, gl.SliceLayout(0, layout)), 0)
        places = rows.to(gl.int64) * N + cols
        return gl.load(added_ptr + places, mask=(rows < M) & (cols < N), other=0.0).to(gl.float32)


@gluon.jit
def _consume(
    consumer: gl.constexpr, dz_desc, d_gate_desc, hidden_desc, sums_ptr, dropout, added_ptr, left_ring, right_ring,
    tiles, places, full, empty, tile_full, tile_empty, turns, tile_rows, tile_columns, inner, N, M, experts,
    group, weights_ptr, weight_sums_ptr, limits,
    RIGHT_TRANSPOSED: gl.constexpr, STEP: gl.constexpr, STAGES: gl.constexpr, Z_STAGES: gl.constexpr,
    PLACES: gl.constexpr, STAYS: gl.constexpr, WHOLE_COLUMNS: gl.constexpr, GATED: gl.constexpr,
    LIMITED: gl.constexpr, ACTIVATION: gl.constexpr, ACCURACY: gl.constexpr,
):  # fmt: skip
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE, 16])
    half_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
    steps = gl.cdiv(inner, STEP)
    turn = 0
    sent = 0
    position = 0
    # Two values: a loop takes a variable for unchanged that is given what it had, and would not exchange equal ones.
    no_left = _own_sums(gl.zeros([HALF, HALF], gl.float32, half_layout), HALF)
    no_right = _own_sums(gl.zeros([HALF, HALF], gl.float32, half_layout), HALF)
    left_sums, right_sums = no_left, no_right
    rows = gl.arange(0, HALF, gl.SliceLayout(1, half_layout))
    first = gl.program_id(0) + consumer * gl.num_programs(0)
    for index in range(first, tile_rows * tile_columns, 2 * gl.num_programs(0)):
        tile_row, tile_column, _ = tile_of(index, tile_rows, tile_columns, experts, group)
        column = tile_column * TILE
        # Before the product, which takes as long as they need to arrive.
        top = _start(added_ptr, tile_row * TILE, column, M, N, layout)
        bottom = _start(added_ptr, tile_row * TILE + HALF, column, M, N, layout)
        top_weights = _weights_of(weights_ptr, tile_row * TILE + rows)
        bottom_weights = _weights_of(weights_ptr, tile_row * TILE + HALF + rows)
        top, bottom = multiply(
            consumer, top, bottom, left_ring, right_ring, full, empty, turns, turn, steps, RIGHT_TRANSPOSED, STAGES
        )
        turn += 1
        # The quarters take turns in the same registers, so that the code is there once, not four times: fetching four
        # copies took 22 of 128 µs (16,384 × 512 × 2048 on an H100), and 142 of 258 with a gate and sums.
        for half in range(2):
            left, right = column_halves(top, half_layout)
            row = tile_row * TILE + half * HALF
            weight_sums = gl.zeros([HALF], gl.float32, gl.SliceLayout(1, half_layout))
            for side in range(2):
                position, sent, sums, weight_sums = _finish(
                    consumer, left, row, column + side * HALF, M, N, dz_desc, d_gate_desc, hidden_desc, sums_ptr,
                    dropout, limits, tiles, tile_full, tile_empty, position, places, sent, left_sums, top_weights,
                    weight_sums, weights_ptr is not None, WHOLE_COLUMNS, Z_STAGES, PLACES, GATED, LIMITED, ACTIVATION,
                    ACCURACY,
                )  # fmt: skip
                left, left_sums, right_sums = right, right_sums, sums
            if weight_sums_ptr is not None:
                gl.store(weight_sums_ptr + tile_column.to(gl.int64) * M + row + rows, weight_sums)
            top, top_weights = bottom, bottom_weights
        if sums_ptr is not None and not GATED and not STAYS:
            band_ptr = sums_ptr + tile_row.to(gl.int64) * N
            _store_sums(band_ptr, left_sums, column, N)
            _store_sums(band_ptr, right_sums, column + HALF, N)
            left_sums, right_sums = no_left, no_right
    if sums_ptr is not None and not GATED and STAYS:
        # A consumer without a tile stores zeros.
        column = gl.program_id(0) % tile_columns * TILE
        band = gl.program_id(0) // tile_columns * 2 + consumer
        band_ptr = sums_ptr + band.to(gl.int64) * N
        _store_sums(band_ptr, left_sums, column, N)
        _store_sums(band_ptr, right_sums, column + HALF, N)
    tma.store_wait(0)


@gluon.jit(
    do_not_specialize=[
        "expert_count", "weight_rows", "tile_rows", "group", "M", "drop_limit", "keep_scale", "mask_row",
        "mask_column", "limit", "offset",
    ]
)  # fmt: skip
def _pipelined_epilogue_gradient_kernel(
    dy_desc, down_desc, z_desc, gate_desc, dz_desc, d_gate_desc, hidden_desc, v_desc, a_desc, sums_ptr, seed_ptr,
    added_ptr, tile_expert_ptr, starts_ptr, weights_ptr, weight_sums_ptr, inner, N, tile_columns, whole, rank,
    expert_count, weight_rows, tile_rows, group, M, drop_limit, keep_scale, mask_row, mask_column, limit, offset,
    RIGHT_TRANSPOSED: gl.constexpr, STEP: gl.constexpr, STAGES: gl.constexpr, Z_STAGES: gl.constexpr,
    PLACES: gl.constexpr, STAYS: gl.constexpr, WHOLE_COLUMNS: gl.constexpr, LIMITED: gl.constexpr,
    ACTIVATION: gl.constexpr, ACCURACY: gl.constexpr,
):  # fmt: skip
    dtype: gl.constexpr = dy_desc.dtype
    barrier: gl.constexpr = mbarrier.MBarrierLayout()
    GATED: gl.constexpr = gate_desc is not None
    dropout = (seed_ptr, drop_limit, keep_scale, mask_row, mask_column)
    low_rank = (v_desc, a_desc, None, rank, 0)
    experts = (tile_expert_ptr, starts_ptr, expert_count, weight_rows)
    tile_rows = rows_in_use(tile_rows, experts)
    limits = (limit, offset)
    left_ring, right_ring, full, empty, turns = make_ring(dy_desc, down_desc, RIGHT_TRANSPOSED, STEP, STAGES)
    tiles = gl.allocate_shared_memory(dtype, [2 * Z_STAGES, HALF, HALF], z_desc.layout)
    places = gl.allocate_shared_memory(dtype, [2 * PLACES, HALF, HALF], dz_desc.layout)
    tile_full = gl.allocate_shared_memory(gl.int64, [2 * Z_STAGES, 1], barrier)
    tile_empty = gl.allocate_shared_memory(gl.int64, [2 * Z_STAGES, 1], barrier)
    init_barriers(tile_full, tile_empty, 2 * Z_STAGES, 1)
    fence_async_shared()
    specialize(2, _consume, (
        dz_desc, d_gate_desc, hidden_desc, sums_ptr, dropout, added_ptr, left_ring, right_ring, tiles, places, full,
        empty, tile_full, tile_empty, turns, tile_rows, tile_columns, whole, N, M, experts, group, weights_ptr,
        weight_sums_ptr, limits, RIGHT_TRANSPOSED, STEP, STAGES, Z_STAGES, PLACES, STAYS, WHOLE_COLUMNS, GATED,
        LIMITED, ACTIVATION, ACCURACY,
    ), copy_operands, (
        dy_desc, down_desc, None, low_rank, left_ring, right_ring, full, empty, tile_rows, tile_columns, inner, experts,
        group, RIGHT_TRANSPOSED, STEP, STAGES,
    ), _copy_pre_activations, (
        z_desc, gate_desc, tiles, tile_full, tile_empty, tile_rows, tile_columns, experts, group, Z_STAGES,
    ))  # fmt: skip


def prepare_hidden_gradient(
    dy: Matrix,
    down: Matrix,
    z: Matrix,
    z_gate: Matrix | None,
    row_strides: tuple[int, int],
    keep_hidden: bool,
    bias: bool,
    activation: str,
    accuracy: str,
    pipeline: EpiloguePipeline,
    dropout: Dropout,
    low_rank: LowRank | None,
    experts: int = 0,
    limits: tuple[float, float] | None = None,
) -> Launch | None:
    """The launch for operands of these layouts; rows of the gradients and of the hidden are ``row_strides`` apart.

    None where TMA cannot read ``low_rank``. With ``experts``, rows are sorted by them, and have weights; w_down is
    those of all, behind one another. ``limits`` are those of :func:`limited_hidden_and_slopes`.
    """
    tile, half = TILE.value, HALF.value
    rows, columns = z.rows, z.columns
    tile_rows, tile_columns = -(-rows // tile), -(-columns // tile)
    stays = pipeline.stays and bias and z_gate is None and tile_rows > 1 and not experts
    # Asked only where sums over columns are taken, so that no other variant is compiled twice.
    whole_columns = not experts or columns % tile == 0
    programs = pipeline.programs_for_columns(tile_columns) if stays else pipeline.programs
    assert programs > 0, "planned for fewer columns of tiles"
    right_block = pipeline.step, columns_at_once(down.transposed)
    copies = low_rank_copies(low_rank, down.transposed, (half, pipeline.step), right_block)
    if copies is None:
        return None
    gradient_stride, hidden_stride = row_strides
    out = dense(rows, columns, half, half, gradient_stride)
    return Launch(
        _pipelined_epilogue_gradient_kernel,
        min(tile_rows * tile_columns, programs),
        (
            dy.columns, columns, tile_columns, copies.whole(dy.columns, pipeline.step), copies.columns, experts,
            down.step,
        ),
        (tile_rows, 1 if stays else pipeline.group, rows, *dropout.numbers(), *(limits or (0.0, 0.0))),
        (
            down.transposed, pipeline.step, pipeline.stages, pipeline.z_stages, pipeline.places,
            stays, whole_columns, limits is not None, activation, accuracy,
        ),
        geometries=(
            dy.geometry(half, pipeline.step),
            down.geometry(*right_block),
            z.geometry(half, half),
            None if z_gate is None else z_gate.geometry(half, half),
            out,
            None if z_gate is None else out,
            dense(rows, columns, half, half, hidden_stride) if keep_hidden else None,
            *copies.geometries[:2],
        ),
    )  # fmt: skip


def launch_hidden_gradient(
    prepared: Launch,
    matrices: tuple[torch.Tensor | None, ...],
    vectors: tuple[torch.Tensor | None, ...],
    sorting: tuple[torch.Tensor | None, ...] = (None, None, None, None),
) -> None:
    """Fills the last three of (dy, down, z, z_gate, dz, d_gate, hidden), ``[M, N]``, where they are given.

    Behind them come the first two of a ``LowRank`` as TMA copies them. ``vectors`` are the sums,
    ``[bands, parts × N]``, the seed, and what is added to dH, contiguous; ``sorting`` the expert of each row of tiles,
    where the rows of each expert begin, the weights ``[M]`` of the rows in float32, and the sums for their gradients,
    one for each column of tiles, ``[columns of tiles, M]``.
    """
    prepared((*vectors, *sorting), matrices)
