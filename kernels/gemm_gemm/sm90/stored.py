"""A backward pass on Hopper that stores the hidden and its gradient, and the kernel of the weight gradients.

The first kernel keeps rows of x in registers and rows of dy in shared memory while the load warp streams the weights
past them, a block of hidden units at a time. The inner axis of a product comes in two pieces, each in a stage of its
own; rows of x arrive in the ring of the weights.

The second kernel sums ``leftᵀ right`` over rows, in splits. Gradients of up and gate are ``dZᵀ x``, that of down is
``dyᵀ H``. The bias gradients are the sums of the left operands, computed as a product with a matrix of ones. One launch
computes all gradients, which together fill the device. Its ring and loads are those of any weight gradient; each of two
consumers holds the sums of 64 columns of left.
"""

from ...activations import activation_unit, hidden_and_slopes, through_activation
from ...hopper import (
    Geometry,
    copy_in,
    dense,
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from ...launching import Launch, ceil_div
from ...matmul.sm90.cooperative import cooperative_ring
from ...matmul.sm90.elements import bias_of_columns, zeros
from ...matmul.sm90.loading import load_rows, rows_first
from ...matmul.sm90.ring import (
    HALF,
    TILE,
    OperandRing,
    Stages,
    acquire,
    make_staging,
    operand_ring,
    release_after_load,
    tma_store,
    wait_full,
)
from ...matmul.sm90.roles import warp_specialize
from ...tiles import split_range
from ...tuning import CONSUMER_ROWS, StoredConfig
from ..operands import Matrices, Operands
from .mainloop import Products, geometries
from .weight_gradient import store_bias_sums, store_sums


@gluon.jit
def _sharing_stages(ring, desc):
    """Another operand that arrives in the stages of a ring, in blocks of the same size."""
    return OperandRing(
        desc=desc, step=0, tiles=ring.tiles, full=ring.full, empty=ring.empty, STAGES=ring.STAGES, TRANSPOSED=False
    )  # fmt: skip


@gluon.jit
def _load_pieces(ring, first, position):
    """Load both pieces of the rows from ``first`` on, or of the columns of a transposed matrix."""
    desc = ring.desc
    for piece in gl.static_range(2):
        stage, full = acquire(ring, position + piece, desc.block_type.nbytes)
        if ring.TRANSPOSED:
            copy_in(desc, [piece * desc.block_type.shape[0], first], full, ring.tiles.index(stage))
        else:
            copy_in(desc, [first, piece * desc.block_type.shape[1]], full, ring.tiles.index(stage))
    return position + 2


@gluon.jit
def _load_hidden(products, tiles):
    dy = products.dy
    PIECE: gl.constexpr = dy.desc.block_type.shape[1]
    up_position = 0
    down_position = 0
    count = 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        for consumer in gl.static_range(2):
            row = tile * TILE + consumer * HALF
            mbarrier.wait(dy.empty.index(consumer), (count & 1) ^ 1)
            mbarrier.expect(dy.full.index(consumer), products.ROW_BYTES)
            for piece in gl.static_range(2):
                copy_in(dy.desc, [row, piece * PIECE], dy.full.index(consumer), dy.tiles.index(consumer * 2 + piece))
            up_position = _load_pieces(products.x, row, up_position)
        count += 1
        for n in range(0, products.N, products.UNITS):
            if products.gate is not None:
                up_position = _load_pieces(products.gate, n, up_position)
            up_position = _load_pieces(products.up, n, up_position)
            down_position = _load_pieces(products.down, n, down_position)


@gluon.jit
def _multiply(left, ring, acc, use_acc: gl.constexpr, position):
    right = rows_first(ring, wait_full(ring, position)).permute((1, 0))
    return warpgroup_mma(left, right, acc, use_acc=use_acc, is_async=True)


@gluon.jit
def _start_pre_activations(x_0, x_1, products, bias_ptr, n, position):
    """Start ``x Wᵀ + bias``, piece by piece."""
    acc = bias_of_columns(bias_ptr, 0, n, products.N, products.UNITS)
    acc = _multiply(x_0, products.up, acc, bias_ptr is not None, position)
    return _multiply(x_1, products.up, acc, True, position + 1)


@gluon.jit
def _release(ring, position):
    for piece in gl.static_range(2):
        mbarrier.arrive(ring.empty.index((position + piece) % ring.STAGES))
    return position + 2


@gluon.jit
def _take_x(consumer: gl.constexpr, products, position):
    """Both pieces of the consumer's rows of x in registers, and the next position in the ring.

    The rows of all consumers arrive in the ring; a consumer skips those of the other one.
    """
    layout: gl.constexpr = gl.DotOperandLayout(0, zeros(HALF, products.UNITS).type.layout, 2)
    for owner in gl.static_range(2):
        for piece in gl.static_range(2):
            stage = wait_full(products.up, position)
            if owner == consumer:
                x_1 = products.up.tiles.index(stage).load(layout)
                if piece == 0:
                    x_0 = x_1
                release_after_load(products.up.empty.index(stage))
            else:
                mbarrier.arrive(products.up.empty.index(stage))
            position += 1
    return x_0, x_1, position


@gluon.jit
def _consume_hidden(consumer: gl.constexpr, products, stored, staging, tiles):
    GATED: gl.constexpr = products.gate is not None
    PARTS: gl.constexpr = 3 if GATED else 2
    part_columns = gl.cdiv(products.N, products.UNITS) * products.UNITS
    up_position = 0
    down_position = 0
    count = 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        x_0, x_1, up_position = _take_x(consumer, products, up_position)
        mbarrier.wait(products.dy.full.index(consumer), count & 1)
        row = tile * TILE + consumer * HALF
        for n in range(0, products.N, products.UNITS):
            if GATED:
                z_gate = _start_pre_activations(x_0, x_1, products, products.gate_bias_ptr, n, up_position)
                up_position += 2
            z = _start_pre_activations(x_0, x_1, products, products.up_bias_ptr, n, up_position)
            d_hidden = zeros(HALF, products.UNITS)
            for piece in gl.static_range(2):
                dy_tile = products.dy.tiles.index(consumer * 2 + piece)
                d_hidden = _multiply(dy_tile, products.down, d_hidden, piece > 0, down_position + piece)
            if GATED:
                z, z_gate, d_hidden = warpgroup_mma_wait(0, [z, z_gate, d_hidden])
                _release(products.up, up_position - 2)
            else:
                z = warpgroup_mma_wait(2, [z])
                z_gate = z
            up_position = _release(products.up, up_position)
            values, slope, gate_slope = hidden_and_slopes(z, z_gate, GATED, products.ARITHMETIC)
            column = n + (PARTS - 1) * part_columns
            tma_store(consumer, stored, row, column, values, staging, 0)
            if GATED:
                tma_store(consumer, stored, row, n, d_hidden * slope, staging, 1)
            else:
                d_hidden = warpgroup_mma_wait(0, [d_hidden])
            down_position = _release(products.down, down_position)
            dz = through_activation(d_hidden, gate_slope, z_gate, products.ARITHMETIC)
            column = n + (PARTS - 2) * part_columns
            tma_store(consumer, stored, row, column, dz, staging, PARTS - 1)
        mbarrier.arrive(products.dy.empty.index(consumer))
        count += 1
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["N", "tiles"])
def _sm90_hidden_gradient_kernel(
    x_desc, dy_desc, up_desc, gate_desc, down_desc, stored_desc, up_bias_ptr, gate_bias_ptr, seed_ptr, N, tiles,
    UP_STAGES: gl.constexpr, DOWN_STAGES: gl.constexpr, OUT_TILES: gl.constexpr, ARITHMETIC: gl.constexpr,
):  # fmt: skip
    UNITS: gl.constexpr = up_desc.block_type.shape[0]
    UP_BYTES: gl.constexpr = up_desc.block_type.nbytes
    up = operand_ring(up_desc, 0, False, UP_STAGES, 2)
    gate = None
    if gate_desc is not None:
        gate = _sharing_stages(up, gate_desc)
    # Both pieces of a consumer's dy share a stage.
    products = Products(
        x=_sharing_stages(up, x_desc), dy=operand_ring(dy_desc, 0, False, 2, 1, 2), up=up, gate=gate,
        down=operand_ring(down_desc, 0, True, DOWN_STAGES, 2), up_bias_ptr=up_bias_ptr, gate_bias_ptr=gate_bias_ptr,
        N=N, UNITS=UNITS, CONSUMERS=2, ROW_BYTES=2 * dy_desc.block_type.nbytes,
        UP_BYTES=UP_BYTES, EVEN_N=False, ARITHMETIC=ARITHMETIC,
    )  # fmt: skip
    staging = make_staging(stored_desc, OUT_TILES)
    fence_async_shared()
    warp_specialize(2, _consume_hidden, (products, stored_desc, staging, tiles), _load_hidden, (products, tiles))


@gluon.jit
def _load_tile(ring, tile, stored_desc, x_desc, dy_desc, hidden_desc, part_columns, PROJECTIONS: gl.constexpr):
    part, is_down, unit, column, row, steps = tile
    # Stored are dZ, dZg (gated only) and H, each ``part_columns`` wide.
    position = 0
    if is_down:
        load_rows(ring, dy_desc, hidden_desc, unit, PROJECTIONS * part_columns + column, row, steps, position)
    else:
        load_rows(ring, stored_desc, x_desc, part * part_columns + unit, column, row, steps, position)


@gluon.jit
def _store(ptr, bias_ptr, acc, sums, partial, unit, column, units, width):
    """Store one consumer's tile of a gradient ``[units, width]``, and the sums."""
    store_sums(ptr, acc, unit, column, units, width, True, partial)
    # All columns have the same sum; the other programs of these units store it, too.
    store_bias_sums(bias_ptr, gl.max(sums, 1), unit, units, partial)


@gluon.jit
def _consume_tile(
    consumer: gl.constexpr,
    ring,
    ones,
    tile,
    gradients,
    partial,
    N,
    K: gl.constexpr,
    O: gl.constexpr,
    ARITHMETIC: gl.constexpr,
):
    part, is_down, unit, column, _, steps = tile
    up_ptr, gate_ptr, down_ptr, up_bias_ptr, gate_bias_ptr, down_bias_ptr = gradients
    SUMS: gl.constexpr = not (up_bias_ptr is None and gate_bias_ptr is None and down_bias_ptr is None)
    acc = zeros(HALF, ring.right.shape[2])
    sums = zeros(HALF, 8)
    position = 0
    for _ in range(steps):
        stage = wait_full(ring, position)
        left = ring.left.index(stage * 2 + consumer).permute((1, 0))
        acc = warpgroup_mma(left, ring.right.index(stage), acc, is_async=True)
        if SUMS:
            sums = warpgroup_mma(left, ones.permute((1, 0)), sums, is_async=True)
            acc, sums = warpgroup_mma_wait(2, [acc, sums])
        else:
            acc = warpgroup_mma_wait(1, [acc])
        if position > 0:
            mbarrier.arrive(ring.empty.index((position - 1) % ring.STAGES))
        position += 1
    acc, sums = warpgroup_mma_wait(0, [acc, sums])
    UNIT: gl.constexpr = activation_unit(ARITHMETIC.activation, ARITHMETIC.accuracy)
    acc *= UNIT
    unit += consumer * HALF
    if is_down:
        _store(down_ptr, down_bias_ptr, acc, sums, partial, unit, column, O, N)
    else:
        sums *= UNIT
        if part == 0:
            _store(up_ptr, up_bias_ptr, acc, sums, partial, unit, column, N, K)
        else:
            _store(gate_ptr, gate_bias_ptr, acc, sums, partial, unit, column, N, K)


@gluon.jit(do_not_specialize=["part_columns", "M", "splits"])
def _stored_weight_gradient_kernel(
    stored_desc, x_desc, dy_desc, hidden_desc,
    up_ptr, gate_ptr, down_ptr, up_bias_ptr, gate_bias_ptr, down_bias_ptr, stride_split, N, part_columns, M, splits,
    K: gl.constexpr, O: gl.constexpr, COLUMNS: gl.constexpr, STAGES: gl.constexpr, ARITHMETIC: gl.constexpr,
):  # fmt: skip
    ROWS: gl.constexpr = STAGES.step
    DTYPE: gl.constexpr = stored_desc.dtype
    PROJECTIONS: gl.constexpr = 1 if gate_ptr is None else 2
    split = gl.program_id(0) % splits
    tile = gl.program_id(0) // splits
    column_tiles = gl.cdiv(K, COLUMNS)
    part_tiles = gl.cdiv(N, TILE) * column_tiles
    part = gl.minimum(tile // part_tiles, PROJECTIONS)
    tile -= part * part_tiles
    is_down = part == PROJECTIONS
    if is_down:
        column_tiles = gl.cdiv(N, COLUMNS)
    row, end = split_range(split, M, splits, ROWS)
    steps = gl.cdiv(gl.maximum(end - row, 0), ROWS)
    # The gradient (up is part 0, then gate, down), its tile's first unit and column, the first row, steps of rows.
    own = (part, is_down, tile // column_tiles * TILE, tile % column_tiles * COLUMNS, row, steps)
    gradients = (up_ptr, gate_ptr, down_ptr, up_bias_ptr, gate_bias_ptr, down_bias_ptr)
    ring = cooperative_ring(stored_desc, x_desc, COLUMNS, True, False, ROWS, STAGES.stages)
    ones = gl.allocate_shared_memory(DTYPE, [8, ROWS], gl.NVMMASharedLayout.get_default_for([8, ROWS], DTYPE))
    ones.store(gl.full([8, ROWS], 1.0, DTYPE, gl.BlockedLayout([1, 4], [2, 16], [4, 1], [1, 0])))
    fence_async_shared()
    warp_specialize(
        2, _consume_tile, (ring, ones, own, gradients, split.to(gl.int64) * stride_split, N, K, O, ARITHMETIC),
        _load_tile, (ring, own, stored_desc, x_desc, dy_desc, hidden_desc, part_columns, PROJECTIONS),
    )  # fmt: skip


def prepare_stored(
    operands: Operands, matrices: Matrices, split_size: int, splits: int, config: StoredConfig
) -> tuple[tuple[int, int, int], Launch, Launch]:
    """The shape ``[M, parts, N']`` of the stored dZ, dZg (gated only) and H, and the launches of both kernels.

    Its values are still to be multiplied by ``activation_unit``. ``N'`` is N rounded up to whole blocks; columns past N
    are undefined. The tensors of the second launch are the stored one, x, dy, the stored one again, and the gradients
    to fill, or the partials of the first split: up, gate, down, and those of the requested biases.
    """
    assert matrices.beside is not None
    _, rows, width, hidden, out_width = operands.sizes()
    tiles = ceil_div(rows, CONSUMER_ROWS * config.consumers)
    parts, part_columns = 2 if matrices.gate is None else 3, ceil_div(hidden, config.block) * config.block
    arithmetic = operands.arithmetic.sm90_constants

    def stored(block_rows: int, block_columns: int) -> Geometry:
        return dense(rows, parts * part_columns, block_rows, block_columns)

    hidden_gradient = Launch(
        _sm90_hidden_gradient_kernel,
        min(tiles, config.programs),
        (),
        (hidden, tiles),
        (config.up_stages, config.down_stages, config.out_tiles, arithmetic),
        geometries=(
            *geometries(matrices, CONSUMER_ROWS, config.block, config.piece, config.piece),
            stored(CONSUMER_ROWS, config.block),
        ),
    )
    weight_gradients = Launch(
        _stored_weight_gradient_kernel,
        config.weight_tiles(parts - 1, width, hidden, out_width) * splits,
        (split_size, hidden),
        (part_columns, rows, splits),
        (width, out_width, config.block_columns, Stages(config.rows, config.stages, 0), arithmetic),
        geometries=(
            stored(config.rows, CONSUMER_ROWS),
            matrices.x.geometry(config.rows, config.block_columns),
            matrices.beside.geometry(config.rows, CONSUMER_ROWS),
            stored(config.rows, config.block_columns),
        ),
    )
    return (rows, parts, part_columns), hidden_gradient, weight_gradients
