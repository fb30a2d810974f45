"""H on Hopper, and Z and Zg if they are kept; if gated, from both projections in one pass over x."""

from ...activations import activation_unit, limited_hidden_and_slopes
from ...dropout import Dropout, DropoutNumbers
from ...hopper import Matrix, Resource, dense, fence_async_shared, gl, gluon, resources
from ...launching import Launch
from ...tuning import EpiloguePipeline
from ..arithmetic import Arithmetic
from ..low_rank import LowRank, low_rank_copies
from .elements import (
    Scales,
    bias_of_columns,
    biases_of_halves,
    draw,
    dropped,
    in_8_bits,
    lower,
    of_columns,
    row_scales_of_tile,
    scaled,
    zeros,
)
from .loading import Term, load_tiles
from .pingpong import columns_at_once, pingpong_ring, store_tiles
from .ring import HALF, TILE, Stages, column_halves, make_staging, staging_of, tma_store, with_low_rank
from .roles import warp_specialize
from .schedules import make_schedule


@resources("hidden z z_gate up_bias_ptr gate_bias_ptr N scales dropout limits staging GATED ARITHMETIC")
class _Hidden(Resource):
    """What the epilogue reads and writes besides the product."""


@gluon.jit
def _prologue(tile, given):
    row, column, expert = tile
    if given.scales.rows_ptr is not None:
        acc = zeros(HALF, TILE, 8)
    elif given.GATED:
        acc = biases_of_halves(given.up_bias_ptr, given.gate_bias_ptr, expert * given.N, column, given.N)
    else:
        acc = bias_of_columns(given.up_bias_ptr, expert * given.N, column, given.N, TILE)
    return acc, acc, row_scales_of_tile(given.scales, row)


@gluon.jit
def _activate(consumer: gl.constexpr, z, z_gate, row_scales, row, column, expert, given, stored):
    """Store the hidden of a quarter of a tile, and kept pre-activations; return the number of stores so far."""
    GATED: gl.constexpr = given.GATED
    ARITHMETIC: gl.constexpr = given.ARITHMETIC
    scales, first = given.scales, expert * given.N
    if scales.rows_ptr is not None:
        z = scaled(z, row_scales, column, scales, scales.columns_ptr, given.up_bias_ptr, first, given.N)
        if GATED:
            z_gate = scaled(z_gate, row_scales, column, scales, scales.gate_ptr, given.gate_bias_ptr, first, given.N)
    UNIT: gl.constexpr = activation_unit(ARITHMETIC.activation, ARITHMETIC.accuracy)
    layout: gl.constexpr = z.type.layout
    if given.z is not None:
        stored = tma_store(consumer, given.z, row, column, z, given.staging, stored)
        if GATED:
            stored = tma_store(consumer, given.z_gate, row, column, z_gate, given.staging, stored)
    hidden, _, _ = limited_hidden_and_slopes(z, z_gate, given.limits, GATED, ARITHMETIC)
    if given.dropout.seed_ptr is not None:
        hidden = dropped(hidden, draw(given.dropout, row, column, layout), given.dropout)
    hidden *= UNIT
    if given.hidden.dtype == gl.float8e4nv:
        columns = lower(of_columns(scales.columns_ptr, column, given.N, layout))
        if GATED:
            columns *= lower(of_columns(scales.gate_ptr, column, given.N, layout))
        hidden = in_8_bits(hidden, lower(row_scales), columns)
    return tma_store(consumer, given.hidden, row, column, hidden, staging_of(given.hidden, given.staging), stored)


@gluon.jit
def _epilogue(consumer: gl.constexpr, tile, top, bottom, loaded, given, stored):
    row, column, expert = tile
    top_scales, bottom_scales = loaded
    # A loop, so that the code of a quarter exists once: see ``hidden_gradient``.
    for half in range(2):
        left, right = column_halves(top)
        if given.GATED:
            stored = _activate(
                consumer, left, right, top_scales, row + half * HALF, column, expert, given, stored
            )  # fmt: skip
        else:
            for side in range(2):
                stored = _activate(
                    consumer, left, left, top_scales, row + half * HALF, column + side * HALF, expert, given, stored
                )  # fmt: skip
                left = right
        top, top_scales = bottom, bottom_scales
    return stored


@gluon.jit(do_not_specialize=["experts", "rows", "group", "dropout", "limits"])
def _sm90_hidden_kernel(
    x_desc, up_desc, w_gate_desc, hidden_desc, z_desc, gate_desc, u_desc, b_desc, b_gate_desc, up_bias_ptr,
    gate_bias_ptr, seed_ptr, tile_expert_ptr, starts_ptr, x_scale_ptr, up_scale_ptr, gate_scale_ptr, inner, N,
    tile_columns, whole, rank, gate_first, experts, rows, group, dropout, limits,
    RIGHT_TRANSPOSED: gl.constexpr, STAGES: gl.constexpr, SCALE_STRIDES: gl.constexpr, ARITHMETIC: gl.constexpr,
):  # fmt: skip
    STEP: gl.constexpr = STAGES.step
    GATED: gl.constexpr = w_gate_desc is not None
    schedule = make_schedule(
        gl.cdiv(rows, TILE), tile_columns, group, tile_expert_ptr, starts_ptr, experts[0], experts[1],
        HALF if GATED else TILE,
    )  # fmt: skip
    ring = pingpong_ring(x_desc, up_desc, RIGHT_TRANSPOSED, STEP, STAGES.stages)
    ring = with_low_rank(ring, u_desc, b_desc, rank, STAGES.low_rank_columns)
    widest = hidden_desc if z_desc is None else z_desc
    given = _Hidden(
        hidden=hidden_desc, z=z_desc, z_gate=gate_desc, up_bias_ptr=up_bias_ptr, gate_bias_ptr=gate_bias_ptr, N=N,
        scales=Scales(
            rows_ptr=x_scale_ptr, columns_ptr=up_scale_ptr, gate_ptr=gate_scale_ptr, rows=rows,
            ROW_STRIDE=SCALE_STRIDES[0], COLUMN_STRIDE=SCALE_STRIDES[1],
        ),
        dropout=DropoutNumbers(seed_ptr, *dropout),
        limits=limits, staging=make_staging(widest, STAGES.slots), GATED=GATED, ARITHMETIC=ARITHMETIC,
    )  # fmt: skip
    x_term = Term(left=x_desc, right=up_desc, other=w_gate_desc, inner=inner, first=0)
    low_rank = Term(left=u_desc, right=b_desc, other=b_gate_desc, inner=rank, first=gate_first)
    fence_async_shared()
    warp_specialize(
        2, store_tiles, (_prologue, _epilogue, ring, schedule, gl.cdiv(whole, STEP), given),
        load_tiles, (ring, schedule, x_term, low_rank),
    )  # fmt: skip


def prepare_hidden(
    x: Matrix,
    up: Matrix,
    gate: Matrix | None,
    columns: int,
    keep: bool,
    arithmetic: Arithmetic,
    pipeline: EpiloguePipeline,
    dropout: Dropout,
    low_rank: LowRank | None = None,
    experts: int = 0,
    width: int = 0,
) -> Launch | None:
    """The launch for these operands and results with ``columns`` columns; None if TMA cannot read ``low_rank``.

    Its tensors are x, up, gate, hidden, Z, Zg, the three of ``LowRank.copied``, the biases of up and of the gate, the
    dropout's seed, the expert of each row of tiles, the first row of each expert, and the scales of x, up and the gate.
    A hidden in 8 bits needs words of all scales.
    With ``experts``, rows are sorted by expert, and both weights stack those of all experts. If ``width`` is given,
    results have that many columns in memory.
    """
    tile, half = TILE.value, HALF.value
    rows = x.rows
    tile_rows, tile_columns = -(-rows // tile), -(-columns // (tile if gate is None else half))
    right_transposed = not up.transposed
    units = columns_at_once(right_transposed, gate is not None)
    step = pipeline.low_rank_step
    copies = low_rank_copies(low_rank, up.transposed, (half, step), (units, step))
    if copies is None:
        return None
    out = dense(rows, width or columns, half, half)
    return Launch(
        _sm90_hidden_kernel,
        min(tile_rows * tile_columns, pipeline.programs),
        (
            x.columns, columns, tile_columns, copies.whole(x.columns, pipeline.step), copies.columns, copies.first,
            (experts, up.step),
        ),
        (rows, pipeline.group, dropout.numbers(), arithmetic.numbers),
        (
            right_transposed,
            Stages(pipeline.step, pipeline.stages, pipeline.slots, low_rank_columns=copies.used(pipeline.step)),
            (x.scale_stride, up.scale_stride), arithmetic.sm90_constants,
        ),
        geometries=(
            x.geometry(half, pipeline.step),
            up.geometry(units, pipeline.step),
            None if gate is None else gate.geometry(units, pipeline.step),
            out,
            out if keep else None,
            out if keep and gate is not None else None,
            *copies.geometries,
        ),
    )  # fmt: skip
