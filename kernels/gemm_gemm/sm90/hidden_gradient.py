"""The hidden and its gradient on Hopper, written to memory once for the products of the backward pass that read them.

Rows of x stay in registers and rows of dy in shared memory while the load warp streams the weights past them, a block
of hidden units at a time, in pieces of the columns that a product sums over. Rows of x arrive in the ring of the
weights.
"""

from typing import Any

import torch

from ...activations import hidden_and_slopes, through_activation
from ...hopper import (
    Matrix,
    copy_in,
    dense,
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    resources,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from ...launching import Launch
from ...matmul.sm90.elements import bias_of_columns, zeros
from ...matmul.sm90.loading import rows_first
from ...matmul.sm90.ring import (
    HALF,
    TILE,
    acquire,
    make_staging,
    operand_ring,
    release_after_load,
    tma_store,
    wait_full,
)
from ...matmul.sm90.roles import specialize
from ...tuning import CONSUMER_ROWS, StoredConfig
from ..operands import Matrices, Operands
from .mainloop import geometries


@resources
class _Products:
    """Rings of pieces: of x and dy for each consumer's rows, of the weights for ``UNITS`` of the ``N`` hidden units.

    The pieces of dy have a stage for each consumer together; those of x come through the ring of up, as do the gate's.
    H and the gradients leave for ``stored``, where they lie next to one another.
    """

    dy: Any
    up: Any
    down: Any
    stored: Any
    staging: Any
    up_bias_ptr: Any
    gate_bias_ptr: Any
    N: Any
    X_PIECES: Any
    DY_PIECES: Any
    PIECE: Any
    UNITS: Any
    GATED: Any
    ACTIVATION: Any
    ACCURACY: Any


@gluon.jit
def _load_piece(ring, desc, row, column, position):
    stage, full = acquire(ring, position, desc.block_type.nbytes)
    copy_in(desc, [row, column], full, ring.tiles.index(stage))
    return position + 1


@gluon.jit
def _load_pieces(products, desc, row, position):
    """All pieces of rows that x is multiplied with, or of x."""
    for piece in gl.static_range(products.X_PIECES):
        position = _load_piece(products.up, desc, row, piece * products.PIECE, position)
    return position


@gluon.jit
def _load(products, x_desc, gate_desc, tiles):
    dy, down = products.dy, products.down
    up_position = 0
    down_position = 0
    turn = 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        for consumer in gl.static_range(2):
            row = tile * TILE + consumer * HALF
            mbarrier.wait(dy.empty.index(consumer), (turn & 1) ^ 1)
            mbarrier.expect(dy.full.index(consumer), products.DY_PIECES * dy.desc.block_type.nbytes)
            for piece in gl.static_range(products.DY_PIECES):
                target = dy.tiles.index(consumer * products.DY_PIECES + piece)
                copy_in(dy.desc, [row, piece * products.PIECE], dy.full.index(consumer), target)
            up_position = _load_pieces(products, x_desc, row, up_position)
        turn += 1
        for n in range(0, products.N, products.UNITS):
            if gate_desc is not None:
                up_position = _load_pieces(products, gate_desc, n, up_position)
            up_position = _load_pieces(products, products.up.desc, n, up_position)
            for piece in gl.static_range(products.DY_PIECES):
                down_position = _load_piece(down, down.desc, piece * products.PIECE, n, down_position)


@gluon.jit
def _multiply(left, ring, acc, use_acc: gl.constexpr, position):
    right = rows_first(ring, wait_full(ring, position)).permute((1, 0))
    return warpgroup_mma(left, right, acc, use_acc=use_acc, is_async=True)


@gluon.jit
def _start_pre_activations(x_0, x_1, products, bias_ptr, n, N, position):
    """Starts ``x Wᵀ + bias``, piece by piece."""
    acc = bias_of_columns(bias_ptr, 0, n, N, products.UNITS)
    acc = _multiply(x_0, products.up, acc, bias_ptr is not None, position)
    if products.X_PIECES == 2:
        acc = _multiply(x_1, products.up, acc, True, position + 1)
    return acc


@gluon.jit
def _release(ring, position, PIECES: gl.constexpr):
    for piece in gl.static_range(PIECES):
        mbarrier.arrive(ring.empty.index((position + piece) % ring.STAGES))
    return position + PIECES


@gluon.jit
def _take_x(consumer: gl.constexpr, products, position):
    """Both pieces of the consumer's rows of x, or the only one twice, in registers, and the position behind them.

    Everyone's rows of x come through the ring; another consumer's are passed over.
    """
    layout: gl.constexpr = gl.DotOperandLayout(0, zeros(HALF, products.UNITS).type.layout, 2)
    for owner in gl.static_range(2):
        for piece in gl.static_range(products.X_PIECES):
            stage = wait_full(products.up, position)
            if owner == consumer:
                if piece == 0:
                    x_0 = products.up.tiles.index(stage).load(layout)
                    x_1 = x_0
                else:
                    x_1 = products.up.tiles.index(stage).load(layout)
                release_after_load(products.up.empty.index(stage))
            else:
                mbarrier.arrive(products.up.empty.index(stage))
            position += 1
    return x_0, x_1, position


@gluon.jit
def _consume(consumer: gl.constexpr, products, tiles):
    GATED: gl.constexpr = products.GATED
    X_PIECES: gl.constexpr = products.X_PIECES
    DY_PIECES: gl.constexpr = products.DY_PIECES
    PARTS: gl.constexpr = 3 if GATED else 2
    N = products.N
    part_columns = gl.cdiv(N, products.UNITS) * products.UNITS
    up_position = 0
    down_position = 0
    turn = 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        x_0, x_1, up_position = _take_x(consumer, products, up_position)
        mbarrier.wait(products.dy.full.index(consumer), turn & 1)
        row = tile * TILE + consumer * HALF
        for n in range(0, N, products.UNITS):
            if GATED:
                z_gate = _start_pre_activations(x_0, x_1, products, products.gate_bias_ptr, n, N, up_position)
                up_position += X_PIECES
            z = _start_pre_activations(x_0, x_1, products, products.up_bias_ptr, n, N, up_position)
            d_hidden = zeros(HALF, products.UNITS)
            for piece in gl.static_range(DY_PIECES):
                dy_tile = products.dy.tiles.index(consumer * DY_PIECES + piece)
                d_hidden = _multiply(dy_tile, products.down, d_hidden, piece > 0, down_position + piece)
            if GATED:
                z, z_gate, d_hidden = warpgroup_mma_wait(0, [z, z_gate, d_hidden])
                _release(products.up, up_position - X_PIECES, X_PIECES)
            else:
                z = warpgroup_mma_wait(DY_PIECES, [z])
                z_gate = z
            up_position = _release(products.up, up_position, X_PIECES)
            values, slope, gate_slope = hidden_and_slopes(z, z_gate, GATED, products.ACTIVATION, products.ACCURACY)
            column = n + (PARTS - 1) * part_columns
            tma_store(consumer, products.stored, row, column, values, products.staging, 0)
            if GATED:
                tma_store(consumer, products.stored, row, n, d_hidden * slope, products.staging, 1)
            else:
                d_hidden = warpgroup_mma_wait(0, [d_hidden])
            down_position = _release(products.down, down_position, DY_PIECES)
            dz = through_activation(d_hidden, gate_slope, z_gate, products.ACTIVATION)
            column = n + (PARTS - 2) * part_columns
            tma_store(consumer, products.stored, row, column, dz, products.staging, PARTS - 1)
        mbarrier.arrive(products.dy.empty.index(consumer))
        turn += 1
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["N", "tiles"])
def _sm90_hidden_gradient_kernel(
    x_desc, dy_desc, up_desc, gate_desc, down_desc, stored_desc, up_bias_ptr, gate_bias_ptr, N, tiles,
    K: gl.constexpr, O: gl.constexpr, UP_STAGES: gl.constexpr, DOWN_STAGES: gl.constexpr, OUT_TILES: gl.constexpr,
    ACTIVATION: gl.constexpr, ACCURACY: gl.constexpr,
):  # fmt: skip
    UNITS: gl.constexpr = up_desc.block_type.shape[0]
    PIECE: gl.constexpr = up_desc.block_type.shape[1]
    products = _Products(
        dy=operand_ring(dy_desc, 0, False, 2, 1, O // PIECE), up=operand_ring(up_desc, 0, False, UP_STAGES, 2),
        down=operand_ring(down_desc, 0, True, DOWN_STAGES, 2), stored=stored_desc,
        staging=make_staging(stored_desc, OUT_TILES), up_bias_ptr=up_bias_ptr, gate_bias_ptr=gate_bias_ptr, N=N,
        X_PIECES=K // PIECE, DY_PIECES=O // PIECE, PIECE=PIECE, UNITS=UNITS, GATED=gate_desc is not None,
        ACTIVATION=ACTIVATION, ACCURACY=ACCURACY,
    )  # fmt: skip
    fence_async_shared()
    specialize(2, _consume, (products, tiles), _load, (products, x_desc, gate_desc, tiles))


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
        _sm90_hidden_gradient_kernel,
        min(tiles, config.programs),
        (),
        (hidden, tiles),
        (
            width, out_width, config.up_stages, config.down_stages, config.out_tiles, operands.arithmetic.activation,
            operands.arithmetic.accuracy,
        ),
        geometries=(
            *geometries(matrices, dy, CONSUMER_ROWS, block, piece, piece),
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
    prepared((x, dy, operands.up, operands.gate, operands.down, stored, operands.up_bias, operands.gate_bias))
    return stored
