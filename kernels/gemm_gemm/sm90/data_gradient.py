"""Data gradient on Hopper: rows of x and dy stay in shared memory while the load warp streams the weights past them.

The gradient of the last bias, the sum of dy over its rows, comes from the same reading of dy.
"""

from typing import Any, NamedTuple

import torch

from ...activations import activation_unit, hidden_and_slopes, through_activation
from ...hopper import (
    Matrix,
    copy_out,
    dense,
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    resources,
    tma,
    warpgroup_mma_wait,
)
from ...launching import Launch
from ...matmul.sm90.elements import zeros
from ...matmul.sm90.loading import rows_first
from ...matmul.sm90.ring import HALF
from ...matmul.sm90.roles import specialize
from ...matmul.sm90.schedules import RowSchedule, rows_at
from ...partials import reduce_partials
from ...tiles import only_before
from ...tuning import CONSUMER_ROWS, Sm90Config, sm90_width
from ..operands import Matrices, Operands
from .mainloop import (
    add_product,
    geometries,
    last_constants,
    load_tiles,
    make_products,
    multiply_twice,
    row_stage,
    start_pre_activations,
    start_product,
    up_gradient,
)


@resources
class _Output:
    """dx, and where the sums of dy go, ``O`` of each consumer, if they are asked for."""

    dx: Any
    dy_sums_ptr: Any
    O: Any


@gluon.jit
def _first_products(acc, tiles, stage, n, products):
    """z, z_gate and dH of the hidden units from ``n`` on."""
    x_tile, dy_tile = tiles
    z = start_pre_activations(x_tile, products.up, products.up_bias_ptr, stage, n, products)
    d_hidden = start_product(dy_tile, rows_first(products.down, stage), None)
    if products.gate is not None:
        z_gate = start_pre_activations(x_tile, products.gate, products.gate_bias_ptr, stage, n, products)
        acc, z, d_hidden, z_gate = warpgroup_mma_wait(0, [acc, z, d_hidden, z_gate])
    else:
        acc, z, d_hidden = warpgroup_mma_wait(0, [acc, z, d_hidden])
        z_gate = z
    return acc, (z, z_gate, d_hidden)


@gluon.jit
def _add_products(acc, block, n, position, products, EVEN_N: gl.constexpr):
    """Starts ``acc + dZ W_up (+ dZg W_gate)``, of the hidden units from ``n`` on."""
    z, z_gate, d_hidden = block
    stage = position % products.up.STAGES
    GATED: gl.constexpr = products.gate is not None
    _, slope, gate_slope = hidden_and_slopes(z, z_gate, GATED, products.ACTIVATION, products.ACCURACY)
    units = n + gl.arange(0, products.UNITS, gl.SliceLayout(0, z.type.layout))
    dz = up_gradient(d_hidden, slope, z, GATED, products.ACTIVATION)
    dz = only_before(dz, units, products.N, EVEN_N)
    acc = add_product(dz, rows_first(products.up, stage), acc)
    if GATED:
        dz = through_activation(d_hidden, gate_slope, z_gate, products.ACTIVATION)
        dz = only_before(dz, units, products.N, EVEN_N)
        acc = add_product(dz, rows_first(products.gate, stage), acc)
    return acc


@gluon.jit
def _consume(consumer: gl.constexpr, products, schedule, output):
    # Each warp adds up a quarter of the columns, each thread eight of them, so that no sum crosses a warp; a read of
    # shared memory takes at least the 8 rows of its swizzling pattern.
    COLUMNS: gl.constexpr = products.dy.desc.block_type.shape[1]
    LANES: gl.constexpr = COLUMNS // 32
    READ_ROWS: gl.constexpr = max(8, 32 // LANES)
    read_layout: gl.constexpr = gl.BlockedLayout([1, 8], [32 // LANES, LANES], [1, 4], [1, 0])
    dy_sums = gl.zeros([READ_ROWS, COLUMNS], gl.float32, read_layout)
    position = 0
    turn = 0
    for index in range(gl.program_id(0), schedule.tiles, gl.num_programs(0)):
        batch, row = rows_at(schedule, index)
        row += batch * products.x.step + consumer * HALF
        own_stage, phase = row_stage(consumer, turn, products)
        mbarrier.wait(products.x.full.index(own_stage), phase)
        x_tile, dy_tile = products.x.tiles.index(own_stage), products.dy.tiles.index(own_stage)
        acc = zeros(HALF, products.x.desc.block_type.shape[1])
        acc, position = multiply_twice(
            acc, (x_tile, dy_tile), position, products, _first_products, _add_products
        )  # fmt: skip
        turn += 1
        if output.dy_sums_ptr is not None:
            for first in gl.static_range(0, HALF, READ_ROWS):
                dy_sums += dy_tile.slice(first, READ_ROWS).load(read_layout).to(gl.float32)
        # x is no longer needed: dx takes its place on the way out.
        x_tile.store((acc * activation_unit(products.ACTIVATION, products.ACCURACY)).to(x_tile.dtype))
        fence_async_shared()
        copy_out(output.dx, [row, 0], x_tile)
        tma.store_wait(0)
        mbarrier.arrive(products.x.empty.index(own_stage))
    if output.dy_sums_ptr is not None:
        part = gl.program_id(0) * products.CONSUMERS + consumer
        outer = gl.arange(0, COLUMNS, gl.SliceLayout(0, read_layout))
        gl.store(output.dy_sums_ptr + part * output.O + outer, gl.sum(dy_sums, 0), mask=outer < output.O)


@gluon.jit(do_not_specialize=["up_step", "down_step", "N", "M", "tiles", "row_tiles"])
def _sm90_data_gradient_kernel(
    x_desc, dy_desc, up_desc, gate_desc, down_desc, dx_desc, up_bias_ptr, gate_bias_ptr, dy_sums_ptr,
    up_step, down_step, N, M, tiles, row_tiles,
    O: gl.constexpr, CONSUMERS: gl.constexpr, STAGES: gl.constexpr, ROW_STAGES: gl.constexpr,
    EVEN_N: gl.constexpr, UP_TRANSPOSED: gl.constexpr, DOWN_TRANSPOSED: gl.constexpr, ACTIVATION: gl.constexpr,
    ACCURACY: gl.constexpr,
):  # fmt: skip
    schedule = RowSchedule(tiles=tiles, entry_tiles=row_tiles, ROWS=HALF * CONSUMERS)
    products = make_products(
        x_desc, dy_desc, up_desc, gate_desc, down_desc, up_bias_ptr, gate_bias_ptr, N, M, up_step, down_step,
        CONSUMERS * ROW_STAGES, STAGES, CONSUMERS, EVEN_N, UP_TRANSPOSED, DOWN_TRANSPOSED, ACTIVATION, ACCURACY,
    )  # fmt: skip
    output = _Output(dx=dx_desc, dy_sums_ptr=dy_sums_ptr, O=O)
    fence_async_shared()
    specialize(CONSUMERS, _consume, (products, schedule, output), load_tiles, (products, schedule))


class Prepared(NamedTuple):
    """What all executions of one prepared call share: the shapes of dx and of the partial sums of dy, if asked for."""

    shape: tuple[int, ...]
    partials: tuple[int, int] | None
    launch: Launch
    sums: dict[Any, Any]


def prepare_data_gradient(
    operands: Operands, matrices: Matrices, dy: Matrix, column_sums: bool, config: Sm90Config
) -> Prepared:
    """The launch for operands that fit: see ``Operands.matrices``."""
    batch, rows, width, hidden, out_width = operands.sizes()
    block, block_k, block_o = config.block, sm90_width(width), sm90_width(out_width)
    row_tiles = -(-rows // (CONSUMER_ROWS * config.consumers))
    tiles = batch * row_tiles
    programs = min(tiles, config.programs)
    partials = None
    # The widest gated kernel has no registers left for them.
    if column_sums and not (matrices.gate is not None and width > 128):
        partials = (programs * config.consumers, out_width)
    prepared = Launch(
        _sm90_data_gradient_kernel,
        programs,
        (),
        (matrices.up.step, matrices.down.step, hidden, rows, tiles, row_tiles),
        (
            out_width, config.consumers, config.stages, config.row_stages, hidden % block == 0,
            *last_constants(operands, matrices),
        ),
        geometries=(
            *geometries(matrices, dy, CONSUMER_ROWS, block, block_k, block_o),
            dense(batch * rows, width, CONSUMER_ROWS, block_k),
        ),
    )  # fmt: skip
    return Prepared(tuple(operands.x.shape), partials, prepared, {})


def data_gradient(operands: Operands, dy: torch.Tensor, prepared: Prepared) -> tuple[torch.Tensor, torch.Tensor | None]:
    """dx, contiguous, and the sums of dy over all rows where they are prepared."""
    x = operands.x
    dx = x.new_empty(prepared.shape)
    partials = None
    if prepared.partials is not None:
        partials = x.new_empty(prepared.partials, dtype=torch.float32)
    biases = operands.up_bias, operands.gate_bias
    prepared.launch((x, dy, operands.up, operands.gate, operands.down, dx, *biases, partials))
    if partials is None:
        return dx, None
    sums = x.new_empty(partials.shape[1])
    reduce_partials(partials, [sums], ready=prepared.sums)
    return dx, sums
