"""H on Hopper, and Z and Zg where they are kept, from one product: gated, from both projections in one pass over x."""

import torch

from ...activations import activation_unit, limited_hidden_and_slopes
from ...dropout import Dropout
from ...hopper import Matrix, dense, fence_async_shared, gl, gluon, tma
from ...launching import Launch
from ...pipeline import specialize
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
def _start(up_bias_ptr, gate_bias_ptr, first, column, N, layout: gl.constexpr, GATED: gl.constexpr):
    """What the sums of a tile begin with: the bias of its columns, of which ``N`` lie from ``first`` on."""
    acc = gl.zeros([HALF, TILE], gl.float32, layout)
    cols = gl.arange(0, TILE, gl.SliceLayout(0, layout))
    if GATED:
        # Columns of the gate are those behind the first half.
        inside = first + gl.minimum(column + cols % HALF, N - 1)
        if up_bias_ptr is not None and gate_bias_ptr is not None:
            bias = gl.load(gl.where(cols < HALF, up_bias_ptr + inside, gate_bias_ptr + inside)).to(gl.float32)
            acc += gl.expand_dims(bias, 0)
        elif up_bias_ptr is not None:
            bias = gl.load(up_bias_ptr + inside).to(gl.float32)
            acc += gl.expand_dims(gl.where(cols < HALF, bias, 0.0), 0)
        elif gate_bias_ptr is not None:
            bias = gl.load(gate_bias_ptr + inside).to(gl.float32)
            acc += gl.expand_dims(gl.where(cols < HALF, 0.0, bias), 0)
    elif up_bias_ptr is not None:
        acc += gl.expand_dims(gl.load(up_bias_ptr + first + gl.minimum(column + cols, N - 1)).to(gl.float32), 0)
    return acc


@gluon.jit
def _finish(
    consumer: gl.constexpr, z, z_gate, row, column, hidden_desc, z_desc, gate_desc, dropout, limits, places, sent,
    PLACES: gl.constexpr, GATED: gl.constexpr, LIMITED: gl.constexpr, ACTIVATION: gl.constexpr, ACCURACY: gl.constexpr,
):  # fmt: skip
    UNIT: gl.constexpr = activation_unit(ACTIVATION, ACCURACY)
    layout: gl.constexpr = z.type.layout
    if z_desc is not None:
        sent = send(consumer, z_desc, row, column, z, places, sent, PLACES)
        if GATED:
            sent = send(consumer, gate_desc, row, column, z_gate, places, sent, PLACES)
    limit, offset = limits
    hidden, _, _ = limited_hidden_and_slopes(z, z_gate, limit, offset, GATED, LIMITED, ACTIVATION, ACCURACY)
    if dropout[0] is not None:
        kept = draw(dropout, row, column, layout)
        hidden = dropped(hidden, kept, dropout[2])
    return send(consumer, hidden_desc, row, column, hidden * UNIT, places, sent, PLACES)


@gluon.jit
def _consume(
    consumer: gl.constexpr, hidden_desc, z_desc, gate_desc, up_bias_ptr, gate_bias_ptr, dropout, left_ring, right_ring,
    places, full, empty, turns, tile_rows, tile_columns, inner, N, experts, group, limits,
    RIGHT_TRANSPOSED: gl.constexpr, STEP: gl.constexpr, STAGES: gl.constexpr, PLACES: gl.constexpr,
    GATED: gl.constexpr, LIMITED: gl.constexpr, ACTIVATION: gl.constexpr, ACCURACY: gl.constexpr,
):  # fmt: skip
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE, 16])
    half_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
    SPAN: gl.constexpr = HALF if GATED else TILE
    steps = gl.cdiv(inner, STEP)
    turn = 0
    sent = 0
    first = gl.program_id(0) + consumer * gl.num_programs(0)
    for index in range(first, tile_rows * tile_columns, 2 * gl.num_programs(0)):
        tile_row, tile_column, expert = tile_of(index, tile_rows, tile_columns, experts, group)
        column = tile_column * SPAN
        start = _start(up_bias_ptr, gate_bias_ptr, expert * N, column, N, layout, GATED)
        top, bottom = multiply(
            consumer, start, start, left_ring, right_ring, full, empty, turns, turn, steps, RIGHT_TRANSPOSED, STAGES
        )
        turn += 1
        # One copy of the code for all quarters: see the hidden's gradient.
        for half in range(2):
            left, right = column_halves(top, half_layout)
            row = tile_row * TILE + half * HALF
            if GATED:
                sent = _finish(
                    consumer, left, right, row, column, hidden_desc, z_desc, gate_desc, dropout, limits, places, sent,
                    PLACES, GATED, LIMITED, ACTIVATION, ACCURACY,
                )  # fmt: skip
            else:
                for side in range(2):
                    sent = _finish(
                        consumer, left, left, row, column + side * HALF, hidden_desc, z_desc, gate_desc, dropout,
                        limits, places, sent, PLACES, GATED, LIMITED, ACTIVATION, ACCURACY,
                    )  # fmt: skip
                    left = right
            top = bottom
    tma.store_wait(0)


@gluon.jit(
    do_not_specialize=[
        "expert_count", "weight_rows", "tile_rows", "group", "drop_limit", "keep_scale", "mask_row", "mask_column",
        "limit", "offset",
    ]
)  # fmt: skip
def _pipelined_hidden_kernel(
    x_desc, up_desc, w_gate_desc, hidden_desc, z_desc, gate_desc, u_desc, b_desc, b_gate_desc, up_bias_ptr,
    gate_bias_ptr, seed_ptr, tile_expert_ptr, starts_ptr, inner, N, tile_columns, whole, rank, gate_first, expert_count,
    weight_rows, tile_rows, group, drop_limit, keep_scale, mask_row, mask_column, limit, offset,
    RIGHT_TRANSPOSED: gl.constexpr, STEP: gl.constexpr, STAGES: gl.constexpr, PLACES: gl.constexpr,
    LIMITED: gl.constexpr, ACTIVATION: gl.constexpr, ACCURACY: gl.constexpr,
):  # fmt: skip
    dtype: gl.constexpr = x_desc.dtype
    GATED: gl.constexpr = w_gate_desc is not None
    dropout = (seed_ptr, drop_limit, keep_scale, mask_row, mask_column)
    low_rank = (u_desc, b_desc, b_gate_desc, rank, gate_first)
    experts = (tile_expert_ptr, starts_ptr, expert_count, weight_rows)
    tile_rows = rows_in_use(tile_rows, experts)
    limits = (limit, offset)
    left_ring, right_ring, full, empty, turns = make_ring(x_desc, up_desc, RIGHT_TRANSPOSED, STEP, STAGES)
    places = gl.allocate_shared_memory(dtype, [2 * PLACES, HALF, HALF], hidden_desc.layout)
    fence_async_shared()
    specialize(2, _consume, (
        hidden_desc, z_desc, gate_desc, up_bias_ptr, gate_bias_ptr, dropout, left_ring, right_ring, places, full, empty,
        turns, tile_rows, tile_columns, whole, N, experts, group, limits, RIGHT_TRANSPOSED, STEP, STAGES, PLACES, GATED,
        LIMITED, ACTIVATION, ACCURACY,
    ), copy_operands, (
        x_desc, up_desc, w_gate_desc, low_rank, left_ring, right_ring, full, empty, tile_rows, tile_columns, inner,
        experts, group, RIGHT_TRANSPOSED, STEP, STAGES,
    ))  # fmt: skip


def prepare_hidden(
    x: Matrix,
    up: Matrix,
    gate: Matrix | None,
    columns: int,
    keep: bool,
    activation: str,
    accuracy: str,
    pipeline: EpiloguePipeline,
    dropout: Dropout,
    low_rank: LowRank | None,
    experts: int = 0,
    limits: tuple[float, float] | None = None,
    width: int = 0,
) -> Launch | None:
    """The launch for operands of these layouts, with results of so many columns; None: TMA cannot read ``low_rank``.

    With ``experts``, rows are sorted by them, and both weights are those of all, behind one another. ``limits``
    are those of :func:`limited_hidden_and_slopes`. Results may be of more columns, ``width``.
    """
    tile, half = TILE.value, HALF.value
    rows = x.rows
    tile_rows, tile_columns = -(-rows // tile), -(-columns // (tile if gate is None else half))
    right_transposed = not up.transposed
    units = columns_at_once(right_transposed, gate is not None)
    copies = low_rank_copies(low_rank, up.transposed, (half, pipeline.step), (units, pipeline.step))
    if copies is None:
        return None
    out = dense(rows, width or columns, half, half)
    return Launch(
        _pipelined_hidden_kernel,
        min(tile_rows * tile_columns, pipeline.programs),
        (
            x.columns, columns, tile_columns, copies.whole(x.columns, pipeline.step), copies.columns, copies.first,
            experts, up.step,
        ),
        (tile_rows, pipeline.group, *dropout.numbers(), *(limits or (0.0, 0.0))),
        (
            right_transposed, pipeline.step, pipeline.stages, pipeline.places, limits is not None, activation, accuracy,
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


def launch_hidden(
    prepared: Launch,
    matrices: tuple[torch.Tensor | None, ...],
    vectors: tuple[torch.Tensor | None, ...],
    sorting: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None),
) -> None:
    """Fills the last three of (x, up, gate, hidden, z, z_gate), where they are given: ``[M, N]``.

    Behind them come the three of a ``LowRank`` as TMA copies them. ``vectors`` are the biases of up and of the gate,
    and the seed; ``sorting`` the expert of each row of tiles, and where the rows of each expert begin.
    """
    prepared((*vectors, *sorting), matrices)
