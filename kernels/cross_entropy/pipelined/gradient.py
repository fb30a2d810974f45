"""The gradient of some columns of the logits on Hopper: the product of the forward pass again, and its epilogue."""

from collections.abc import Sequence

import torch

from ...gemm_epilogue.pipelined.products import send
from ...hopper import Descriptor, Matrix, dense, fence_async_shared, gl, gluon, tma
from ...launching import launch
from ...pipeline import specialize
from ...tiles import grouped_tile
from ...tuning import CONSUMER_ROWS
from ...tuning.cross_entropy import GradientPipeline
from ..elements import gradient_of, logits_of
from .product import BAND, ROWS, begin, copy_tile, halves, make_ring, multiply

# Columns of what an epilogue holds besides the tile itself.
PART = gl.constexpr(64)


@gluon.jit
def _produce(
    x_desc, w_desc, x_ring, w_ring, full, empty, bands, tile_columns, inner,
    COLUMNS: gl.constexpr, STEP: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    position = 0
    for index in range(gl.program_id(0), bands * tile_columns, gl.num_programs(0)):
        band, tile = grouped_tile(index, bands, tile_columns, GROUP)
        position = copy_tile(
            x_desc, w_desc, x_ring, w_ring, full, empty, band * BAND, tile * COLUMNS, inner, position, STEP, STAGES
        )


@gluon.jit
def _finish(
    consumer: gl.constexpr, c, out_desc, weight_ptr, row, column, place, factors, V, scale, softcap, inverse_cap,
    places, sent, PLACES: gl.constexpr, SCALED: gl.constexpr, SOFTCAP: gl.constexpr, SMOOTHING: gl.constexpr,
    ENTROPY: gl.constexpr, ACCURACY: gl.constexpr,
):  # fmt: skip
    """Sends the gradient of the logits from ``column`` on; returns how many parts were sent."""
    top, by_share, by_target, by_weight, by_logarithm = factors
    cols = column + gl.arange(0, PART, gl.SliceLayout(0, c.type.layout))
    x, slope = logits_of(c, scale, softcap, inverse_cap, SCALED, SOFTCAP, ACCURACY)
    if SMOOTHING and weight_ptr is not None:
        class_weights = gl.expand_dims(gl.load(weight_ptr + gl.minimum(cols, V - 1)), 0)
    else:
        class_weights = 1.0
    hit = gl.expand_dims(cols, 0) == gl.expand_dims(place, 1)
    gradient = gradient_of(
        x, slope, hit, class_weights, top, 0.0, by_share, by_logarithm, by_target, by_weight, ENTROPY, SMOOTHING,
        "hardware",
    )  # fmt: skip
    if column + PART > V:
        gradient = gl.where(gl.expand_dims(cols < V, 0), gradient, 0.0)
    return send(consumer, out_desc, row, column, gradient, places, sent, PLACES)


@gluon.jit
def _consume(
    consumer: gl.constexpr, out_desc, target_ptr, bias_ptr, weight_ptr, top_ptr, by_share_ptr, by_target_ptr,
    by_weight_ptr, by_logarithm_ptr, x_ring, w_ring, places, full, empty, lead, bands, tile_columns, steps, M, V, start,
    scale, softcap, inverse_cap, COLUMNS: gl.constexpr, STAGES: gl.constexpr, LEAD: gl.constexpr, PLACES: gl.constexpr,
    GROUP: gl.constexpr, SCALED: gl.constexpr, SOFTCAP: gl.constexpr, ACCURACY: gl.constexpr,
):  # fmt: skip
    SMOOTHING: gl.constexpr = by_weight_ptr is not None
    ENTROPY: gl.constexpr = by_logarithm_ptr is not None
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, PART, 16])
    lanes = gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    count = 0
    sent = 0
    for index in range(gl.program_id(0), bands * tile_columns, gl.num_programs(0)):
        band, tile = grouped_tile(index, bands, tile_columns, GROUP)
        row = band * BAND + consumer * ROWS
        column = tile * COLUMNS
        rows = row + lanes
        inside = rows < M
        place = gl.load(target_ptr + rows, mask=inside, other=-1) - start
        # A column is compared in 32 bits; a target that is none of these stays below all of them.
        place = gl.where((place >= 0) & (place < V), place, -1).to(gl.int32)
        top = gl.expand_dims(gl.load(top_ptr + rows, mask=inside, other=0.0), 1)
        by_share = gl.expand_dims(gl.load(by_share_ptr + rows, mask=inside, other=0.0), 1)
        by_target = gl.expand_dims(gl.load(by_target_ptr + rows, mask=inside, other=0.0), 1)
        if SMOOTHING:
            by_weight = gl.expand_dims(gl.load(by_weight_ptr + rows, mask=inside, other=0.0), 1)
        else:
            by_weight = by_target
        if ENTROPY:
            by_logarithm = gl.expand_dims(gl.load(by_logarithm_ptr + rows, mask=inside, other=0.0), 1)
        else:
            by_logarithm = by_target
        factors = (top, by_share, by_target, by_weight, by_logarithm)
        acc = begin(bias_ptr, column, V, COLUMNS)
        acc = multiply(consumer, acc, x_ring, w_ring, full, empty, lead, count, steps, STAGES, LEAD)
        count += 1
        left, right = halves(acc)
        for half in gl.static_range(2):
            if half == 0:
                first, second = halves(left)
            else:
                first, second = halves(right)
            sent = _finish(
                consumer, first, out_desc, weight_ptr, row, column + half * 2 * PART, place, factors, V, scale, softcap,
                inverse_cap, places, sent, PLACES, SCALED, SOFTCAP, SMOOTHING, ENTROPY, ACCURACY,
            )  # fmt: skip
            sent = _finish(
                consumer, second, out_desc, weight_ptr, row, column + (half * 2 + 1) * PART, place, factors, V, scale,
                softcap, inverse_cap, places, sent, PLACES, SCALED, SOFTCAP, SMOOTHING, ENTROPY, ACCURACY,
            )  # fmt: skip
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["M", "bands", "start", "scale", "softcap", "inverse_cap"])
def _pipelined_logit_gradient_kernel(
    x_desc, w_desc, out_desc, target_ptr, bias_ptr, weight_ptr, top_ptr, by_share_ptr, by_target_ptr, by_weight_ptr,
    by_logarithm_ptr, inner, V, tile_columns, M, bands, start, scale, softcap, inverse_cap,
    COLUMNS: gl.constexpr, STEP: gl.constexpr, STAGES: gl.constexpr, LEAD: gl.constexpr, PLACES: gl.constexpr,
    GROUP: gl.constexpr, SCALED: gl.constexpr, SOFTCAP: gl.constexpr, ACCURACY: gl.constexpr,
):  # fmt: skip
    x_ring, w_ring, full, empty, lead = make_ring(x_desc, w_desc, COLUMNS, STEP, STAGES)
    places = gl.allocate_shared_memory(out_desc.dtype, [2 * PLACES, ROWS, PART], out_desc.layout)
    fence_async_shared()
    steps = gl.cdiv(inner, STEP)
    specialize(2, _consume, (
        out_desc, target_ptr, bias_ptr, weight_ptr, top_ptr, by_share_ptr, by_target_ptr, by_weight_ptr,
        by_logarithm_ptr, x_ring, w_ring, places, full, empty, lead, bands, tile_columns, steps, M, V, start, scale,
        softcap, inverse_cap, COLUMNS, STAGES, LEAD, PLACES, GROUP, SCALED, SOFTCAP, ACCURACY,
    ), _produce, (
        x_desc, w_desc, x_ring, w_ring, full, empty, bands, tile_columns, inner, COLUMNS, STEP, STAGES, GROUP,
    ))  # fmt: skip


def gradient(
    matrices: tuple[Matrix, Matrix],
    out: torch.Tensor,
    vectors: tuple[torch.Tensor | None, ...],
    start: int,
    numbers: Sequence[float],
    capped: bool,
    accuracy: str,
    pipeline: GradientPipeline,
) -> None:
    """Fills ``out``, ``[M, C]``; ``vectors`` and the last ``numbers`` are those of the kernel's signature."""
    x, weight = matrices
    rows, columns = out.shape
    bands, tile_columns = -(-rows // BAND.value), -(-columns // pipeline.columns)
    geometry = dense(rows, columns, CONSUMER_ROWS, PART.value)
    launch(
        _pipelined_logit_gradient_kernel,
        min(pipeline.programs, bands * tile_columns),
        vectors,
        (x.columns, weight.rows, tile_columns),
        (rows, bands, start, *numbers),
        (
            pipeline.columns, pipeline.step, pipeline.stages, pipeline.lead, pipeline.places, pipeline.group,
            numbers[0] != 1.0, capped, accuracy,
        ),
        descriptors=(
            x.descriptor(CONSUMER_ROWS, pipeline.step), weight.descriptor(pipeline.columns, pipeline.step),
            Descriptor(out, *geometry),
        ),
    )  # fmt: skip
