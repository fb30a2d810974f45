"""The pre-activations that an epilogue reads: a load warp of their own copies them, a quarter of a tile at a time."""

from ...hopper import Resource, copy_in, gl, gluon, mbarrier, resources
from .ring import HALF, stage_of
from .schedules import tile_at, tile_count


@resources("tiles full empty STAGES")
class Quarters(Resource):
    """The ring of pre-activations: ``STAGES`` stages for each consumer, with a quarter of its tile each."""


@gluon.jit
def _load_quarter(desc, row, column, quarters, consumer, position):
    stage, phase = stage_of(position, quarters.STAGES)
    stage += consumer * quarters.STAGES
    mbarrier.wait(quarters.empty.index(stage), phase ^ 1)
    mbarrier.expect(quarters.full.index(stage), desc.block_type.nbytes)
    copy_in(desc, [row, column], quarters.full.index(stage), quarters.tiles.index(stage))
    return position + 1


@gluon.jit
def load_pre_activations(z_desc, gate_desc, quarters, schedule):
    PARTS: gl.constexpr = 1 if gate_desc is None else 2
    count = 0
    for index in range(gl.program_id(0), tile_count(schedule), gl.num_programs(0)):
        first_row, first_column, _ = tile_at(schedule, index)
        consumer = count % 2
        position = count // 2 * (4 * PARTS)
        for quarter in gl.static_range(4):
            row, column = first_row + quarter // 2 * HALF, first_column + quarter % 2 * HALF
            position = _load_quarter(z_desc, row, column, quarters, consumer, position)
            if gate_desc is not None:
                position = _load_quarter(gate_desc, row, column, quarters, consumer, position)
        count += 1


@gluon.jit
def wait_for_quarter(consumer: gl.constexpr, quarters, position, layout: gl.constexpr):
    """A quarter of pre-activations in registers, once it has arrived."""
    stage, phase = stage_of(position, quarters.STAGES)
    stage += consumer * quarters.STAGES
    mbarrier.wait(quarters.full.index(stage), phase)
    return quarters.tiles.index(stage).load(layout).to(gl.float32)


@gluon.jit
def release(consumer: gl.constexpr, quarters, position, PARTS: gl.constexpr):
    """Release the stages of a quarter's pre-activations.

    Only after a result that depends on all of them is stored: the next copy must not overtake a pending read.
    """
    for part in gl.static_range(PARTS):
        mbarrier.arrive(quarters.empty.index(consumer * quarters.STAGES + (position + part) % quarters.STAGES))
