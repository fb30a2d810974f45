"""dZ and dZg on Hopper, their sums over bands of rows, and H once more, from the product dy W_down.

A second load warp loads the pre-activations of a tile, a quarter at a time, during its mainloop. Each thread sums its
own elements of a column; the sums of all threads are reduced only when those of a band are complete.
"""

from typing import NamedTuple

from ...activations import activation_unit, limited_hidden_and_slopes, through_activation
from ...dropout import Dropout, DropoutNumbers
from ...hopper import Matrix, Resource, dense, fence_async_shared, gl, gluon, resources, tma
from ...launching import Launch
from ...tiles import only_before
from ...tuning import EpiloguePipeline
from ..arithmetic import Arithmetic
from ..low_rank import LowRank, low_rank_copies
from .elements import Scales, draw, dropped, in_8_bits, lower, of_columns, of_rows, scaled, upper, zeros
from .loading import Term, load_tiles
from .pingpong import columns_at_once, mma_tiles, pingpong_ring
from .pre_activations import Quarters, load_pre_activations, release, wait_for_quarter
from .ring import (
    HALF,
    TILE,
    Stages,
    column_halves,
    make_barriers,
    make_staging,
    tma_store,
    with_low_rank,
)
from .roles import warp_specialize
from .schedules import make_schedule


class _Variant(NamedTuple):
    """Whether down is transposed, columns are whole tiles, and sums stay on chip; and the strides of scales."""

    down_transposed: bool
    whole_columns: bool
    sums_stay: bool
    row_scale_stride: int
    column_scale_stride: int


@resources(
    "dz d_gate hidden sums_ptr added_ptr weights_ptr weight_sums_ptr M N scales units_ptr hidden_rows_ptr dropout "
    "limits quarters staging GATED ARITHMETIC BITS VARIANT ROWS_FIRST"
)
class _Gradient(Resource):
    """What the epilogue reads and writes besides the product; ``weights_ptr``: routing weights of sorted rows.

    ``ROWS_FIRST``: scales of rows are loaded before the mainloop, for which a mask or an addend leaves no registers.
    """


@gluon.jit
def _own_sums(gradient, valid_rows):
    """Each thread's sums of its rows, ``[warps, rows of threads, columns]``: no exchange between threads."""
    COLUMNS: gl.constexpr = gradient.shape[1]
    if valid_rows < gradient.shape[0]:
        # Past M the product is 0, but 0 times an infinite weight is NaN.
        rows = gl.arange(0, gradient.shape[0], gl.SliceLayout(1, gradient.type.layout))
        gradient = gl.where(gl.expand_dims(rows < valid_rows, 1), gradient, 0.0)
    return gl.sum(gradient.reshape([4, 2, 8, COLUMNS]), 1)


@gluon.jit
def _store_sums(sums_ptr, sums, column, N):
    """Reduce the sums of all threads, and store those of the columns."""
    total = gl.sum(gl.sum(sums, 1), 0)
    cols = column + gl.arange(0, total.shape[0], total.type.layout)
    gl.store(sums_ptr + cols, total.to(sums_ptr.dtype.element_ty), mask=cols < N)


@gluon.jit
def _weights_of(weights_ptr, row, BITS: gl.constexpr):
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 256 // BITS])
    rows = row + gl.arange(0, HALF, gl.SliceLayout(1, layout))
    if weights_ptr is None:
        return gl.full([HALF], 1.0, gl.float32, rows.type.layout)
    else:
        return gl.load(weights_ptr + rows)


@gluon.jit
def _scales_of(given, row):
    """The scales of the product's rows of a quarter, and what the hidden's are multiplied by; 0 if there are none."""
    scales = of_rows(given.scales.rows_ptr, row, given.M, given.scales.ROW_STRIDE, given.BITS)
    return scales, of_rows(given.hidden_rows_ptr, row, given.M, 1, given.BITS)


@gluon.jit
def _store_quarter(
    consumer: gl.constexpr, d_hidden, row, column, expert, position, stored, sums, rows, weight_sums, given
):  # fmt: skip
    """Store the results of a quarter of a tile, and add its sums to ``sums``, or store them at once if gated.

    With routing weights, ``d_hidden`` comes unweighted, and the hidden is stored weighted; the quarter's part of the
    gradient of each row's weight is added to ``weight_sums``.
    """
    GATED: gl.constexpr = given.GATED
    ARITHMETIC: gl.constexpr = given.ARITHMETIC
    layout: gl.constexpr = d_hidden.type.layout
    weights, row_scales, hidden_rows = rows
    if not given.ROWS_FIRST:
        row_scales, hidden_rows = _scales_of(given, row)
    WHOLE: gl.constexpr = activation_unit(ARITHMETIC.activation, ARITHMETIC.accuracy)
    WEIGHTED: gl.constexpr = given.weights_ptr is not None
    # Routing weights are multiplied by the unit instead of the results.
    UNIT: gl.constexpr = 1.0 if WEIGHTED else WHOLE
    PARTS: gl.constexpr = 2 if GATED else 1
    # Compute and round both gradients before storing them: in float32 they would take too many registers meanwhile.
    BOTH_FIRST: gl.constexpr = GATED and given.sums_ptr is None
    NARROW: gl.constexpr = given.dz.dtype == gl.float8e4nv
    units = 0
    if given.units_ptr is not None:
        units = of_columns(given.units_ptr, column, given.N, layout)
    if given.scales.rows_ptr is not None:
        first = expert * given.N
        d_hidden = scaled(d_hidden, row_scales, column, given.scales, given.scales.columns_ptr, None, first, given.N)
        if given.added_ptr is not None:
            d_hidden += _added(given, row, column, d_hidden)
    if WEIGHTED:
        # Masked here, where few registers are live. The hidden needs no mask: TMA loads pre-activations past N as 0.
        cols = column + gl.arange(0, HALF, gl.SliceLayout(0, layout))
        d_hidden = only_before(d_hidden, cols, given.N, given.VARIANT.whole_columns)
    if given.dropout.seed_ptr is not None:
        kept = draw(given.dropout, row, column, layout)
        d_hidden = dropped(d_hidden, kept, given.dropout)
    z = wait_for_quarter(consumer, given.quarters, position, layout)
    if GATED:
        z_gate = wait_for_quarter(consumer, given.quarters, position + 1, layout)
    else:
        z_gate = z
    hidden, slope, gate_slope = limited_hidden_and_slopes(z, z_gate, given.limits, GATED, ARITHMETIC)
    if WEIGHTED:
        weight_sums += gl.sum(d_hidden * hidden, 1) * WHOLE
        weights = gl.expand_dims(weights * WHOLE, 1)
        hidden *= weights
        d_hidden *= weights
    if BOTH_FIRST:
        dz = d_hidden * slope * UNIT
        if NARROW:
            dz *= gl.expand_dims(lower(units), 0)
        d_gate = through_activation(d_hidden, gate_slope, z_gate, ARITHMETIC) * UNIT
        if NARROW:
            d_gate *= gl.expand_dims(upper(units), 0)
        if WEIGHTED:
            # Padding, whose routing weight is 0, must give 0: 0 times an infinite weight of the layer is NaN.
            dz, d_gate = gl.where(weights != 0, dz, 0.0), gl.where(weights != 0, d_gate, 0.0)
        dz, d_gate = dz.to(given.dz.dtype), d_gate.to(given.dz.dtype)
    if WEIGHTED:
        gl.static_assert(given.sums_ptr is None, "the sums of rows with weights are another kernel's")
        hidden = gl.where(weights != 0, hidden, 0.0)
    if given.hidden is not None:
        if given.dropout.seed_ptr is not None:
            hidden = dropped(hidden, kept, given.dropout)
        hidden *= UNIT
        if given.hidden_rows_ptr is not None:
            columns = upper(units) * lower(units) if GATED else upper(units)
            hidden = in_8_bits(hidden, hidden_rows, columns)
        stored = tma_store(consumer, given.hidden, row, column, hidden, given.staging, stored)
        release(consumer, given.quarters, position, PARTS)
    if not BOTH_FIRST:
        if GATED:
            dz = d_hidden * slope * UNIT
        else:
            dz = through_activation(d_hidden, slope, z, ARITHMETIC) * UNIT
            if WEIGHTED:
                dz = gl.where(weights != 0, dz, 0.0)
    stored = tma_store(consumer, given.dz, row, column, dz, given.staging, stored)
    if not GATED and given.hidden is None:
        release(consumer, given.quarters, position, PARTS)
    if given.sums_ptr is not None:
        if GATED:
            band_ptr = given.sums_ptr + (row // HALF).to(gl.int64) * PARTS * given.N
            _store_sums(band_ptr, _own_sums(dz, given.M - row), column, given.N)
        else:
            sums += _own_sums(dz, given.M - row)
    if GATED:
        if not BOTH_FIRST:
            d_gate = through_activation(d_hidden, gate_slope, z_gate, ARITHMETIC) * UNIT
        stored = tma_store(consumer, given.d_gate, row, column, d_gate, given.staging, stored)
        if given.sums_ptr is not None:
            _store_sums(band_ptr + given.N, _own_sums(d_gate, given.M - row), column, given.N)
    if GATED and given.hidden is None:
        release(consumer, given.quarters, position, PARTS)
    return position + PARTS, stored, sums, weight_sums


@gluon.jit
def _added(given, row, column, like):
    """The part of the addend of dH that belongs to ``like``, part of a tile."""
    layout: gl.constexpr = like.type.layout
    rows = gl.expand_dims(gl.arange(0, like.shape[0], gl.SliceLayout(1, layout)), 1)
    cols = gl.expand_dims(gl.arange(0, like.shape[1], gl.SliceLayout(0, layout)), 0)
    first = given.added_ptr + row.to(gl.int64) * given.N + column
    inside = (rows < given.M - row) & (cols < given.N - column)
    return gl.load(first + rows * given.N + cols, mask=inside, other=0.0).to(gl.float32)


@gluon.jit
def _initial(given, row, column):
    """The initial accumulator of half a tile: zeros, or the addend, which scales are not to multiply."""
    acc = zeros(HALF, TILE, given.BITS)
    if given.added_ptr is not None and given.scales.rows_ptr is None:
        acc = _added(given, row, column, acc)
    return acc


@gluon.jit
def _prologue(tile, given):
    row, column, _ = tile
    top, bottom = _initial(given, row, column), _initial(given, row + HALF, column)
    weights = _weights_of(given.weights_ptr, row, given.BITS), _weights_of(given.weights_ptr, row + HALF, given.BITS)
    top_scales, bottom_scales = (0, 0), (0, 0)
    if given.ROWS_FIRST:
        top_scales, bottom_scales = _scales_of(given, row), _scales_of(given, row + HALF)
    return top, bottom, ((weights[0], top_scales[0], top_scales[1]), (weights[1], bottom_scales[0], bottom_scales[1]))


@gluon.jit
def _epilogue(consumer: gl.constexpr, tile, top, bottom, rows, given, state):
    first_row, column, expert = tile
    position, stored, left_sums, right_sums, no_left, no_right = state
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 256 // given.BITS])
    top_rows, bottom_rows = rows
    # A loop over the quarters, so that their code exists once: fetching the instructions of four copies took 22 of
    # 128 µs (16,384 × 512 × 2048 on an H100), and 142 of 258 with a gate and sums.
    for half in range(2):
        left, right = column_halves(top)
        row = first_row + half * HALF
        weight_sums = gl.zeros([HALF], gl.float32, gl.SliceLayout(1, layout))
        for side in range(2):
            position, stored, sums, weight_sums = _store_quarter(
                consumer, left, row, column + side * HALF, expert, position, stored, left_sums, top_rows,
                weight_sums, given,
            )  # fmt: skip
            left, left_sums, right_sums = right, right_sums, sums
        if given.weight_sums_ptr is not None:
            row_ptr = given.weight_sums_ptr + (column // TILE).to(gl.int64) * given.M + row
            gl.store(row_ptr + gl.arange(0, HALF, gl.SliceLayout(1, layout)), weight_sums)
        top, top_rows = bottom, bottom_rows
    if given.sums_ptr is not None and not given.GATED and not given.VARIANT.sums_stay:
        band_ptr = given.sums_ptr + (first_row // TILE).to(gl.int64) * given.N
        _store_sums(band_ptr, left_sums, column, given.N)
        _store_sums(band_ptr, right_sums, column + HALF, given.N)
        left_sums, right_sums = no_left, no_right
    return position, stored, left_sums, right_sums, no_left, no_right


@gluon.jit
def _consume(consumer: gl.constexpr, ring, schedule, steps, given):
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
    position = 0
    stored = 0
    # Two values: a loop that swaps two variables with the same initial value would treat them as unchanged.
    no_left = _own_sums(gl.zeros([HALF, HALF], gl.float32, layout), HALF)
    no_right = _own_sums(gl.zeros([HALF, HALF], gl.float32, layout), HALF)
    state = (position, stored, no_left, no_right, no_left, no_right)
    state = mma_tiles(consumer, ring, schedule, steps, _prologue, _epilogue, given, state)
    if given.sums_ptr is not None and not given.GATED and given.VARIANT.sums_stay:
        # A consumer without a tile stores zeros.
        column = gl.program_id(0) % schedule.tile_columns * TILE
        band = gl.program_id(0) // schedule.tile_columns * 2 + consumer
        band_ptr = given.sums_ptr + band.to(gl.int64) * given.N
        _store_sums(band_ptr, state[2], column, given.N)
        _store_sums(band_ptr, state[3], column + HALF, given.N)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["experts", "tile_rows", "group", "M", "dropout", "limits"])
def _sm90_epilogue_gradient_kernel(
    dy_desc, down_desc, z_desc, gate_desc, dz_desc, d_gate_desc, hidden_desc, v_desc, a_desc, sums_ptr, seed_ptr,
    added_ptr, tile_expert_ptr, starts_ptr, weights_ptr, weight_sums_ptr, dy_scale_ptr, down_scale_ptr, units_ptr,
    hidden_rows_ptr, inner, N, tile_columns, whole, rank, experts, tile_rows, group, M, dropout, limits,
    VARIANT: gl.constexpr, STAGES: gl.constexpr, ARITHMETIC: gl.constexpr,
):  # fmt: skip
    STEP: gl.constexpr = STAGES.step
    Z_STAGES: gl.constexpr = STAGES.z_stages
    BITS: gl.constexpr = dy_desc.dtype.primitive_bitwidth
    ROW_STRIDE: gl.constexpr = VARIANT.row_scale_stride
    COLUMN_STRIDE: gl.constexpr = VARIANT.column_scale_stride
    schedule = make_schedule(tile_rows, tile_columns, group, tile_expert_ptr, starts_ptr, experts[0], experts[1], TILE)
    ring = pingpong_ring(dy_desc, down_desc, VARIANT.down_transposed, STEP, STAGES.stages)
    ring = with_low_rank(ring, v_desc, a_desc, rank, STAGES.low_rank_columns)
    tiles = gl.allocate_shared_memory(z_desc.dtype, [2 * Z_STAGES, HALF, HALF], z_desc.layout)
    quarters = Quarters(
        tiles=tiles, full=make_barriers(2 * Z_STAGES, 1), empty=make_barriers(2 * Z_STAGES, 1), STAGES=Z_STAGES
    )
    given = _Gradient(
        dz=dz_desc, d_gate=d_gate_desc, hidden=hidden_desc, sums_ptr=sums_ptr, added_ptr=added_ptr,
        weights_ptr=weights_ptr, weight_sums_ptr=weight_sums_ptr, M=M, N=N,
        scales=Scales(
            rows_ptr=dy_scale_ptr, columns_ptr=down_scale_ptr, gate_ptr=None, rows=M, ROW_STRIDE=ROW_STRIDE,
            COLUMN_STRIDE=COLUMN_STRIDE,
        ),
        units_ptr=units_ptr, hidden_rows_ptr=hidden_rows_ptr, dropout=DropoutNumbers(seed_ptr, *dropout),
        limits=limits, quarters=quarters,
        staging=make_staging(dz_desc, STAGES.slots), GATED=gate_desc is not None,
        ARITHMETIC=ARITHMETIC, BITS=BITS, VARIANT=VARIANT, ROWS_FIRST=seed_ptr is None and added_ptr is None,
    )  # fmt: skip
    dy_term = Term(left=dy_desc, right=down_desc, other=None, inner=inner, first=0)
    low_rank = Term(left=v_desc, right=a_desc, other=None, inner=rank, first=0)
    fence_async_shared()
    warp_specialize(
        2, _consume, (ring, schedule, gl.cdiv(whole, STEP), given),
        load_tiles, (ring, schedule, dy_term, low_rank),
        load_pre_activations, (z_desc, gate_desc, quarters, schedule),
    )  # fmt: skip


def prepare_hidden_gradient(
    dy: Matrix,
    down: Matrix,
    z: Matrix,
    z_gate: Matrix | None,
    row_strides: tuple[int, int],
    keep_hidden: bool,
    bias: bool,
    arithmetic: Arithmetic,
    pipeline: EpiloguePipeline,
    dropout: Dropout,
    low_rank: LowRank | None = None,
    experts: int = 0,
) -> Launch | None:
    """The launch for operands of these layouts; ``row_strides`` are those of the gradients and of the hidden.

    None if TMA cannot read ``low_rank``. With ``experts``, rows are sorted by expert and have routing weights; ``down``
    stacks the weights of all experts.

    Its tensors are dy, down, Z, Zg, dZ, dZg, hidden, the first two of ``LowRank.copied``, the sums
    ``[bands, parts × N]``, the dropout's seed, the addend of dH, contiguous; the expert of each row of tiles, the first
    row of each expert, the routing weights ``[M]`` in float32, and the sums for their gradients, ``[columns of tiles,
    M]``; the scales of dy and of down, and for results in 8 bits the word of each unit's inverses, and for a hidden the
    inverses of the scales of its rows: see ``kernels.bounds``.
    """
    tile, half = TILE.value, HALF.value
    rows, columns = z.rows, z.columns
    tile_rows, tile_columns = -(-rows // tile), -(-columns // tile)
    stays = pipeline.stays and bias and z_gate is None and tile_rows > 1 and not experts
    # Only kernels for experts sum over columns; True for all others saves a variant.
    whole_columns = not experts or columns % tile == 0
    programs = pipeline.programs_for_columns(tile_columns) if stays else pipeline.programs
    assert programs > 0, "planned for fewer columns of tiles"
    step, units = pipeline.low_rank_step, columns_at_once(down.transposed)
    copies = low_rank_copies(low_rank, down.transposed, (half, step), (step, units))
    if copies is None:
        return None
    gradient_stride, hidden_stride = row_strides
    out = dense(rows, columns, half, half, gradient_stride)
    return Launch(
        _sm90_epilogue_gradient_kernel,
        min(tile_rows * tile_columns, programs),
        (
            dy.columns, columns, tile_columns, copies.whole(dy.columns, pipeline.step), copies.columns,
            (experts, down.step),
        ),
        (tile_rows, 1 if stays else pipeline.group, rows, dropout.numbers(), arithmetic.numbers),
        (
            _Variant(down.transposed, whole_columns, stays, dy.scale_stride, down.scale_stride),
            Stages(pipeline.step, pipeline.stages, pipeline.slots, pipeline.z_stages, copies.used(pipeline.step)),
            arithmetic.sm90_constants,
        ),
        geometries=(
            dy.geometry(half, pipeline.step),
            down.geometry(pipeline.step, units),
            z.geometry(half, half),
            None if z_gate is None else z_gate.geometry(half, half),
            out,
            None if z_gate is None else out,
            dense(rows, columns, half, half, hidden_stride) if keep_hidden else None,
            *copies.geometries[:2],
        ),
    )  # fmt: skip
