"""The hidden and its gradient on Hopper, written to memory once for the products of the backward pass that read them.

Rows of x stay in registers and rows of dy in shared memory while the producer streams the weights past them, a block of
hidden units at a time, in pieces of the columns that a product sums over. Rows of x arrive in the ring of the weights.
"""

import torch

from ...activations import hidden_and_slopes, through_activation
from ...hopper import (
    Matrix,
    copy_in,
    copy_out,
    dense,
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from ...launching import Launch
from ...pipeline import init_barriers, release_after_load, specialize, stage_of
from ...tuning import CONSUMER_ROWS, StoredConfig
from ..operands import Matrices, Operands


@gluon.jit
def _copy_piece(desc, row, column, ring, full, empty, position, STAGES: gl.constexpr):
    stage, phase = stage_of(position, STAGES)
    mbarrier.wait(empty.index(stage), phase ^ 1)
    mbarrier.expect(full.index(stage), desc.block_type.nbytes)
    copy_in(desc, [row, column], full.index(stage), ring.index(stage))
    return position + 1


@gluon.jit
def _produce(
    x_desc, dy_desc, up_desc, gate_desc, down_desc, dy_tiles, up_ring, down_ring, row_full, row_empty,
    up_full, up_empty, down_full, down_empty, N, tiles,
    K: gl.constexpr, O: gl.constexpr, BLOCK_N: gl.constexpr, CONSUMERS: gl.constexpr, UP_STAGES: gl.constexpr,
    DOWN_STAGES: gl.constexpr, ROWS: gl.constexpr, PIECE: gl.constexpr,
):  # fmt: skip
    X_PIECES: gl.constexpr = K // PIECE
    DY_PIECES: gl.constexpr = O // PIECE
    up_position = 0
    down_position = 0
    turn = 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        for consumer in gl.static_range(CONSUMERS):
            row = (tile * CONSUMERS + consumer) * ROWS
            mbarrier.wait(row_empty.index(consumer), (turn & 1) ^ 1)
            mbarrier.expect(row_full.index(consumer), DY_PIECES * dy_desc.block_type.nbytes)
            for piece in gl.static_range(DY_PIECES):
                target = dy_tiles.index(consumer * DY_PIECES + piece)
                copy_in(dy_desc, [row, piece * PIECE], row_full.index(consumer), target)
            for piece in gl.static_range(X_PIECES):
                up_position = _copy_piece(
                    x_desc, row, piece * PIECE, up_ring, up_full, up_empty, up_position, UP_STAGES
                )
        turn += 1
        for n in range(0, N, BLOCK_N):
            if gate_desc is not None:
                for piece in gl.static_range(X_PIECES):
                    up_position = _copy_piece(
                        gate_desc, n, piece * PIECE, up_ring, up_full, up_empty, up_position, UP_STAGES
                    )
            for piece in gl.static_range(X_PIECES):
                up_position = _copy_piece(up_desc, n, piece * PIECE, up_ring, up_full, up_empty, up_position, UP_STAGES)
            for piece in gl.static_range(DY_PIECES):
                down_position = _copy_piece(
                    down_desc, piece * PIECE, n, down_ring, down_full, down_empty, down_position, DOWN_STAGES
                )


@gluon.jit
def _multiply(left, UNITS_FIRST: gl.constexpr, acc, use_acc: gl.constexpr, ring, full, position, STAGES: gl.constexpr):
    stage, phase = stage_of(position, STAGES)
    mbarrier.wait(full.index(stage), phase)
    right = ring.index(stage)
    if UNITS_FIRST:
        right = right.permute((1, 0))
    return warpgroup_mma(left, right, acc, use_acc=use_acc, is_async=True)


@gluon.jit
def _start_pre_activations(
    x_0, x_1, PIECES: gl.constexpr, bias_ptr, cols, N, ring, full, position, STAGES: gl.constexpr, layout: gl.constexpr,
):  # fmt: skip
    """Starts ``x @ Wᵀ + bias``, piece by piece."""
    ROWS: gl.constexpr = x_0.shape[0]
    COLUMNS: gl.constexpr = cols.shape[0]
    BIASED: gl.constexpr = bias_ptr is not None
    acc = gl.zeros([ROWS, COLUMNS], gl.float32, layout)
    if BIASED:
        acc += gl.expand_dims(gl.load(bias_ptr + gl.minimum(cols, N - 1)).to(gl.float32), 0)
    acc = _multiply(x_0, True, acc, BIASED, ring, full, position, STAGES)
    if PIECES == 2:
        acc = _multiply(x_1, True, acc, True, ring, full, position + 1, STAGES)
    return acc


@gluon.jit
def _release(empty, position, PIECES: gl.constexpr, STAGES: gl.constexpr):
    for piece in gl.static_range(PIECES):
        mbarrier.arrive(empty.index((position + piece) % STAGES))
    return position + PIECES


@gluon.jit
def _store(desc, row, column, values, tile, OTHERS: gl.constexpr):
    """Sends a tile on its way out; at most the ``OTHERS`` sent last may still be read from their places."""
    tma.store_wait(OTHERS)
    tile.store(values.to(tile.dtype))
    fence_async_shared()
    copy_out(desc, [row, column], tile)


@gluon.jit
def _consume(
    consumer: gl.constexpr, stored_desc, up_bias_ptr, gate_bias_ptr,
    dy_tiles, out_tiles, up_ring, down_ring, row_full, row_empty, up_full, up_empty, down_full, down_empty,
    N, tiles,
    K: gl.constexpr, O: gl.constexpr, BLOCK_N: gl.constexpr, CONSUMERS: gl.constexpr, UP_STAGES: gl.constexpr,
    DOWN_STAGES: gl.constexpr, OUT_TILES: gl.constexpr, ROWS: gl.constexpr, PIECE: gl.constexpr, GATED: gl.constexpr,
    ACTIVATION: gl.constexpr, ACCURACY: gl.constexpr,
):  # fmt: skip
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    x_layout: gl.constexpr = gl.DotOperandLayout(0, layout, 2)
    cols = gl.arange(0, BLOCK_N, gl.SliceLayout(0, layout))
    X_PIECES: gl.constexpr = K // PIECE
    DY_PIECES: gl.constexpr = O // PIECE
    PARTS: gl.constexpr = 3 if GATED else 2
    FIRST_OUT: gl.constexpr = consumer * OUT_TILES
    part_columns = gl.cdiv(N, BLOCK_N) * BLOCK_N
    up_position = 0
    down_position = 0
    turn = 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        # Everyone's rows of x come through the ring; what is another consumer's is passed over.
        for owner in gl.static_range(CONSUMERS):
            for piece in gl.static_range(X_PIECES):
                stage, phase = stage_of(up_position, UP_STAGES)
                mbarrier.wait(up_full.index(stage), phase)
                if owner == consumer:
                    if piece == 0:
                        x_0 = up_ring.index(stage).load(x_layout)
                        x_1 = x_0
                    else:
                        x_1 = up_ring.index(stage).load(x_layout)
                    release_after_load(up_empty.index(stage))
                else:
                    mbarrier.arrive(up_empty.index(stage))
                up_position += 1
        mbarrier.wait(row_full.index(consumer), turn & 1)
        row = (tile * CONSUMERS + consumer) * ROWS
        for n in range(0, N, BLOCK_N):
            if GATED:
                z_gate = _start_pre_activations(x_0, x_1, X_PIECES, gate_bias_ptr, cols + n, N, up_ring, up_full,
                                                up_position, UP_STAGES, layout)  # fmt: skip
                up_position += X_PIECES
            z = _start_pre_activations(x_0, x_1, X_PIECES, up_bias_ptr, cols + n, N, up_ring, up_full, up_position,
                                       UP_STAGES, layout)  # fmt: skip
            d_hidden = gl.zeros([ROWS, BLOCK_N], gl.float32, layout)
            for piece in gl.static_range(DY_PIECES):
                d_hidden = _multiply(dy_tiles.index(consumer * DY_PIECES + piece), False, d_hidden, piece > 0,
                                     down_ring, down_full, down_position + piece, DOWN_STAGES)  # fmt: skip
            if GATED:
                z, z_gate, d_hidden = warpgroup_mma_wait(0, [z, z_gate, d_hidden])
                _release(up_empty, up_position - X_PIECES, X_PIECES, UP_STAGES)
            else:
                z = warpgroup_mma_wait(DY_PIECES, [z])
                z_gate = z
            up_position = _release(up_empty, up_position, X_PIECES, UP_STAGES)
            hidden, slope, gate_slope = hidden_and_slopes(z, z_gate, GATED, ACTIVATION, ACCURACY)
            _store(stored_desc, row, n + (PARTS - 1) * part_columns, hidden, out_tiles.index(FIRST_OUT), OUT_TILES - 1)
            if GATED:
                _store(stored_desc, row, n, d_hidden * slope, out_tiles.index(FIRST_OUT + 1 % OUT_TILES), OUT_TILES - 1)
            else:
                d_hidden = warpgroup_mma_wait(0, [d_hidden])
            down_position = _release(down_empty, down_position, DY_PIECES, DOWN_STAGES)
            dz = through_activation(d_hidden, gate_slope, z_gate, ACTIVATION)
            _store(stored_desc, row, n + (PARTS - 2) * part_columns, dz,
                   out_tiles.index(FIRST_OUT + (PARTS - 1) % OUT_TILES), OUT_TILES - 1)  # fmt: skip
        mbarrier.arrive(row_empty.index(consumer))
        turn += 1
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["N", "tiles"])
def _pipelined_hidden_gradient_kernel(
    x_desc, dy_desc, up_desc, gate_desc, down_desc, stored_desc, up_bias_ptr, gate_bias_ptr, N, tiles,
    K: gl.constexpr, O: gl.constexpr, BLOCK_N: gl.constexpr, CONSUMERS: gl.constexpr, UP_STAGES: gl.constexpr,
    DOWN_STAGES: gl.constexpr, OUT_TILES: gl.constexpr, ROWS: gl.constexpr, PIECE: gl.constexpr,
    ACTIVATION: gl.constexpr, ACCURACY: gl.constexpr,
):  # fmt: skip
    dtype: gl.constexpr = x_desc.dtype
    barrier: gl.constexpr = mbarrier.MBarrierLayout()
    GATED: gl.constexpr = gate_desc is not None
    dy_tiles = gl.allocate_shared_memory(dtype, [CONSUMERS * (O // PIECE), ROWS, PIECE], dy_desc.layout)
    out_tiles = gl.allocate_shared_memory(dtype, [CONSUMERS * OUT_TILES, ROWS, BLOCK_N], stored_desc.layout)
    up_ring = gl.allocate_shared_memory(dtype, [UP_STAGES, BLOCK_N, PIECE], up_desc.layout)
    down_ring = gl.allocate_shared_memory(dtype, [DOWN_STAGES, PIECE, BLOCK_N], down_desc.layout)
    row_full = gl.allocate_shared_memory(gl.int64, [CONSUMERS, 1], barrier)
    row_empty = gl.allocate_shared_memory(gl.int64, [CONSUMERS, 1], barrier)
    up_full = gl.allocate_shared_memory(gl.int64, [UP_STAGES, 1], barrier)
    up_empty = gl.allocate_shared_memory(gl.int64, [UP_STAGES, 1], barrier)
    down_full = gl.allocate_shared_memory(gl.int64, [DOWN_STAGES, 1], barrier)
    down_empty = gl.allocate_shared_memory(gl.int64, [DOWN_STAGES, 1], barrier)
    init_barriers(row_full, row_empty, CONSUMERS, 1)
    init_barriers(up_full, up_empty, UP_STAGES, CONSUMERS)
    init_barriers(down_full, down_empty, DOWN_STAGES, CONSUMERS)
    fence_async_shared()
    specialize(2, _consume, (
        stored_desc, up_bias_ptr, gate_bias_ptr, dy_tiles, out_tiles, up_ring, down_ring, row_full, row_empty, up_full,
        up_empty, down_full, down_empty, N, tiles, K, O, BLOCK_N, CONSUMERS, UP_STAGES, DOWN_STAGES, OUT_TILES, ROWS,
        PIECE, GATED, ACTIVATION, ACCURACY,
    ), _produce, (
        x_desc, dy_desc, up_desc, gate_desc, down_desc, dy_tiles, up_ring, down_ring, row_full, row_empty, up_full,
        up_empty, down_full, down_empty, N, tiles, K, O, BLOCK_N, CONSUMERS, UP_STAGES, DOWN_STAGES, ROWS, PIECE,
    ))  # fmt: skip


def prepare_hidden_gradient(
    operands: Operands, matrices: Matrices, dy: Matrix, config: StoredConfig
) -> tuple[tuple[int, int, int], Launch]:
    """The shape of what is stored, and the launch."""
    _, rows, width, hidden, out_width = operands.sizes()
    block, piece = config.block, config.piece
    tiles = -(-rows // (CONSUMER_ROWS * config.consumers))
    parts = 2 if matrices.gate is None else 3
    columns = -(-hidden // block) * block
    prepared = Launch(
        _pipelined_hidden_gradient_kernel,
        min(tiles, config.programs),
        (),
        (hidden, tiles),
        (
            width, out_width, block, config.consumers, config.up_stages, config.down_stages, config.out_tiles,
            CONSUMER_ROWS, piece, operands.arithmetic.activation, operands.arithmetic.accuracy,
        ),
        geometries=(
            matrices.x.geometry(CONSUMER_ROWS, piece),
            dy.geometry(CONSUMER_ROWS, piece),
            matrices.up.geometry(block, piece),
            None if matrices.gate is None else matrices.gate.geometry(block, piece),
            matrices.down.geometry(piece, block),
            dense(rows, parts * columns, CONSUMER_ROWS, block),
        ),
    )  # fmt: skip
    return (rows, parts, columns), prepared


def hidden_gradient(
    operands: Operands, dy: torch.Tensor, shape: tuple[int, int, int], prepared: Launch
) -> torch.Tensor:
    """dZ, dZg (gated only) and H as ``[M, parts, N']``, in units of ``activation_unit``.

    ``N'`` is N up to whole blocks; what lies beyond N is not defined.
    """
    x = operands.x
    stored = x.new_empty(shape)
    prepared((operands.up_bias, operands.gate_bias), (x, dy, operands.up, operands.gate, operands.down, stored))
    return stored
