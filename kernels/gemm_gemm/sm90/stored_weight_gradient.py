"""Weight gradients on Hopper, from what the backward pass has stored: sums over rows of ``leftᵀ right``, in splits.

Those of up and gate are ``dZᵀ x``, that of down is ``dyᵀ H``, and the bias gradients are the sums of the left sides,
one more product, with a matrix of ones. All of them are computed in one launch, so that together they fill the device.
The ring and its loads are those of any weight gradient; two consumers hold the sums of 64 of left's columns each.
"""

from typing import Any

from ...activations import activation_unit
from ...hopper import (
    Matrix,
    dense,
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    resources,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from ...launching import Launch
from ...matmul.sm90.cooperative import cooperative_ring
from ...matmul.sm90.elements import zeros
from ...matmul.sm90.loading import load_rows
from ...matmul.sm90.ring import HALF, TILE, wait_full
from ...matmul.sm90.roles import specialize
from ...tiles import split_range
from ...tuning import CONSUMER_ROWS, StoredConfig
from ..operands import Matrices, Operands
from .mainloop import make_gradients


@resources
class _Tile:
    """What a program computes: a tile of up (``part`` 0), gate or down, over ``steps`` of the rows from ``row`` on."""

    part: Any
    is_down: Any
    unit: Any
    column: Any
    row: Any
    steps: Any


@gluon.jit
def _load(ring, tile, stored_desc, x_desc, dy_desc, hidden_desc, part_columns, PROJECTIONS: gl.constexpr):
    # Stored are dZ, dZg (gated only) and H, each ``part_columns`` wide.
    position = 0
    if tile.is_down:
        hidden_column = PROJECTIONS * part_columns + tile.column
        load_rows(ring, dy_desc, hidden_desc, tile.unit, hidden_column, tile.row, tile.steps, position)
    else:
        left_column = tile.part * part_columns + tile.unit
        load_rows(ring, stored_desc, x_desc, left_column, tile.column, tile.row, tile.steps, position)


@gluon.jit
def _store(ptr, sums_ptr, acc, sums, unit, column, units, width):
    """One consumer's tile of a gradient ``[units, width]``, and of the sums."""
    rows = gl.arange(0, acc.shape[0], gl.SliceLayout(1, acc.type.layout))
    columns = gl.arange(0, acc.shape[1], gl.SliceLayout(0, acc.type.layout))
    inside = gl.expand_dims(rows < units - unit, 1) & gl.expand_dims(columns < width - column, 0)
    offsets = gl.expand_dims(rows * width, 1) + gl.expand_dims(columns, 0)
    target = ptr + (unit.to(gl.int64) * width + column)
    gl.store(target + offsets, acc.to(ptr.dtype.element_ty), mask=inside)
    if sums_ptr is not None:
        # Each of the columns has the same sum; the other programs of these units store it too.
        total = gl.max(sums, 1)
        rows = gl.arange(0, sums.shape[0], gl.SliceLayout(1, sums.type.layout))
        gl.store(sums_ptr + unit + rows, total.to(sums_ptr.dtype.element_ty), mask=rows < units - unit)


@gluon.jit
def _consume(consumer: gl.constexpr, ring, ones, tile, given, N, ACTIVATION: gl.constexpr, ACCURACY: gl.constexpr):
    SUMS: gl.constexpr = not (given.up_bias_ptr is None and given.gate_bias_ptr is None and given.down_bias_ptr is None)
    acc = zeros(HALF, ring.right.shape[2])
    sums = zeros(HALF, 8)
    position = 0
    for _ in range(tile.steps):
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
    acc *= activation_unit(ACTIVATION, ACCURACY)
    unit = tile.unit + consumer * HALF
    if tile.is_down:
        _store(given.down_ptr, given.down_bias_ptr, acc, sums, unit, tile.column, given.O, N)
    else:
        sums *= activation_unit(ACTIVATION, ACCURACY)
        if tile.part == 0:
            _store(given.up_ptr, given.up_bias_ptr, acc, sums, unit, tile.column, N, given.K)
        elif given.gate_ptr is not None:
            _store(given.gate_ptr, given.gate_bias_ptr, acc, sums, unit, tile.column, N, given.K)


@gluon.jit(do_not_specialize=["part_columns", "M", "splits"])
def _stored_weight_gradient_kernel(
    stored_desc, x_desc, dy_desc, hidden_desc,
    up_ptr, gate_ptr, down_ptr, up_sums_ptr, gate_sums_ptr, dy_sums_ptr, stride_split, N, part_columns, M, splits,
    K: gl.constexpr, O: gl.constexpr, COLUMNS: gl.constexpr, ROWS: gl.constexpr, STAGES: gl.constexpr,
    ACTIVATION: gl.constexpr, ACCURACY: gl.constexpr,
):  # fmt: skip
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
    own = _Tile(
        part=part, is_down=is_down, unit=tile // column_tiles * TILE, column=tile % column_tiles * COLUMNS, row=row,
        steps=steps,
    )  # fmt: skip
    given = make_gradients(
        up_ptr, gate_ptr, down_ptr, up_sums_ptr, gate_sums_ptr, dy_sums_ptr, split.to(gl.int64) * stride_split, 0, K, O,
        False,
    )  # fmt: skip
    ring = cooperative_ring(stored_desc, x_desc, COLUMNS, True, False, ROWS, STAGES)
    ones = gl.allocate_shared_memory(DTYPE, [8, ROWS], gl.NVMMASharedLayout.get_default_for([8, ROWS], DTYPE))
    ones.store(gl.full([8, ROWS], 1.0, DTYPE, gl.BlockedLayout([1, 4], [2, 16], [4, 1], [1, 0])))
    fence_async_shared()
    specialize(
        2, _consume, (ring, ones, own, given, N, ACTIVATION, ACCURACY),
        _load, (ring, own, stored_desc, x_desc, dy_desc, hidden_desc, part_columns, PROJECTIONS),
    )  # fmt: skip


def prepare_stored_weight_gradients(
    operands: Operands,
    matrices: Matrices,
    dy: Matrix,
    shape: tuple[int, int, int],
    split_size: int,
    splits: int,
    config: StoredConfig,
) -> Launch:
    """The launch, for what :func:`hidden_gradient` returns in this shape.

    Its tensors are what is stored, x, dy, what is stored once more, and those to fill, gradients or the first split's
    partials: up, gate, down, and of the biases those that are asked for.
    """
    _, _, width, hidden, out_width = operands.sizes()
    rows, parts, part_columns = shape
    columns = parts * part_columns
    return Launch(
        _stored_weight_gradient_kernel,
        config.weight_tiles(parts - 1, width, hidden, out_width) * splits,
        (split_size, hidden),
        (part_columns, rows, splits),
        (
            width, out_width, config.block_columns, config.rows, config.stages, operands.arithmetic.activation,
            operands.arithmetic.accuracy,
        ),
        geometries=(
            dense(rows, columns, config.rows, CONSUMER_ROWS),
            matrices.x.geometry(config.rows, config.block_columns),
            dy.geometry(config.rows, CONSUMER_ROWS),
            dense(rows, columns, config.rows, config.block_columns),
        ),
    )  # fmt: skip
