"""The gradient of some columns of the logits on Hopper: the product of the forward pass again, and its epilogue."""

from collections.abc import Sequence
from typing import Any

import torch

from ...hopper import Descriptor, Matrix, dense, fence_async_shared, gl, gluon, resources
from ...launching import launch
from ...matmul.sm90.cooperative import cooperative_ring, store_tiles
from ...matmul.sm90.elements import bias_of_columns
from ...matmul.sm90.loading import Term, load_tiles
from ...matmul.sm90.ring import HALF, TILE, column_halves, make_staging, tma_store
from ...matmul.sm90.roles import specialize
from ...matmul.sm90.schedules import dense_schedule
from ...tuning import CONSUMER_ROWS
from ...tuning.cross_entropy import GradientPipeline
from ..elements import gradient_of, logits_of


@resources
class _Logits:
    """What the epilogue reads and writes besides the product; of each row its target and factors."""

    out: Any
    target_ptr: Any
    bias_ptr: Any
    weight_ptr: Any
    top_ptr: Any
    by_share_ptr: Any
    by_target_ptr: Any
    by_weight_ptr: Any
    by_logarithm_ptr: Any
    M: Any
    V: Any
    start: Any
    scale: Any
    softcap: Any
    inverse_cap: Any
    staging: Any
    COLUMNS: Any
    SCALED: Any
    SOFTCAP: Any
    ACCURACY: Any


@gluon.jit
def _of_rows(factor_ptr, rows, M):
    return gl.expand_dims(gl.load(factor_ptr + rows, mask=rows < M, other=0.0), 1)


@gluon.jit
def _prologue(consumer: gl.constexpr, tile, given):
    """The bias; and of the consumer's rows the column of the target and the factors of the gradient."""
    row, column, _ = tile
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
    rows = row + consumer * HALF + gl.arange(0, HALF, gl.SliceLayout(1, layout))
    place = gl.load(given.target_ptr + rows, mask=rows < given.M, other=-1) - given.start
    # A column is compared in 32 bits; a target that is none of these stays below all of them.
    place = gl.where((place >= 0) & (place < given.V), place, -1).to(gl.int32)
    top = _of_rows(given.top_ptr, rows, given.M)
    by_share = _of_rows(given.by_share_ptr, rows, given.M)
    by_target = _of_rows(given.by_target_ptr, rows, given.M)
    by_weight, by_logarithm = by_target, by_target
    if given.by_weight_ptr is not None:
        by_weight = _of_rows(given.by_weight_ptr, rows, given.M)
    if given.by_logarithm_ptr is not None:
        by_logarithm = _of_rows(given.by_logarithm_ptr, rows, given.M)
    factors = (top, by_share, by_target, by_weight, by_logarithm)
    return bias_of_columns(given.bias_ptr, 0, column, given.V, given.COLUMNS), (place, factors)


@gluon.jit
def _store_gradient(consumer: gl.constexpr, c, row, column, loaded, given, stored):
    """Stores the gradient of the logits from ``column`` on, 64 columns at a time."""
    if c.shape[1] > HALF:
        left, right = column_halves(c)
        stored = _store_gradient(consumer, left, row, column, loaded, given, stored)
        stored = _store_gradient(consumer, right, row, column + c.shape[1] // 2, loaded, given, stored)
    else:
        SMOOTHING: gl.constexpr = given.by_weight_ptr is not None
        ENTROPY: gl.constexpr = given.by_logarithm_ptr is not None
        place, factors = loaded
        top, by_share, by_target, by_weight, by_logarithm = factors
        cols = column + gl.arange(0, HALF, gl.SliceLayout(0, c.type.layout))
        x, slope = logits_of(
            c, given.scale, given.softcap, given.inverse_cap, given.SCALED, given.SOFTCAP, given.ACCURACY
        )
        if SMOOTHING and given.weight_ptr is not None:
            class_weights = gl.expand_dims(gl.load(given.weight_ptr + gl.minimum(cols, given.V - 1)), 0)
        else:
            class_weights = 1.0
        hit = gl.expand_dims(cols, 0) == gl.expand_dims(place, 1)
        gradient = gradient_of(
            x, slope, hit, class_weights, top, 0.0, by_share, by_logarithm, by_target, by_weight, ENTROPY, SMOOTHING,
            "hardware",
        )  # fmt: skip
        if column + HALF > given.V:
            gradient = gl.where(gl.expand_dims(cols < given.V, 0), gradient, 0.0)
        stored = tma_store(consumer, given.out, row, column, gradient, given.staging, stored)
    return stored


@gluon.jit
def _epilogue(consumer: gl.constexpr, tile, acc, loaded, given, stored):
    row, column, _ = tile
    return _store_gradient(consumer, acc, row + consumer * HALF, column, loaded, given, stored)


@gluon.jit(do_not_specialize=["M", "bands", "start", "scale", "softcap", "inverse_cap"])
def _sm90_logit_gradient_kernel(
    x_desc, w_desc, out_desc, target_ptr, bias_ptr, weight_ptr, top_ptr, by_share_ptr, by_target_ptr, by_weight_ptr,
    by_logarithm_ptr, inner, V, tile_columns, M, bands, start, scale, softcap, inverse_cap,
    COLUMNS: gl.constexpr, STEP: gl.constexpr, STAGES: gl.constexpr, LEAD: gl.constexpr, PLACES: gl.constexpr,
    GROUP: gl.constexpr, SCALED: gl.constexpr, SOFTCAP: gl.constexpr, ACCURACY: gl.constexpr,
):  # fmt: skip
    schedule = dense_schedule(bands, tile_columns, GROUP, COLUMNS)
    ring = cooperative_ring(x_desc, w_desc, COLUMNS, False, True, STEP, STAGES, 2, 1)
    given = _Logits(
        out=out_desc, target_ptr=target_ptr, bias_ptr=bias_ptr, weight_ptr=weight_ptr, top_ptr=top_ptr,
        by_share_ptr=by_share_ptr, by_target_ptr=by_target_ptr, by_weight_ptr=by_weight_ptr,
        by_logarithm_ptr=by_logarithm_ptr, M=M, V=V, start=start, scale=scale, softcap=softcap, inverse_cap=inverse_cap,
        staging=make_staging(out_desc, PLACES), COLUMNS=COLUMNS, SCALED=SCALED, SOFTCAP=SOFTCAP, ACCURACY=ACCURACY,
    )  # fmt: skip
    term = Term(left=x_desc, right=w_desc, other=None, inner=inner, first=0)
    fence_async_shared()
    specialize(
        2, store_tiles, (_prologue, _epilogue, ring, schedule, gl.cdiv(inner, STEP), given, LEAD),
        load_tiles, (ring, schedule, term),
    )  # fmt: skip


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
    bands, tile_columns = -(-rows // TILE.value), -(-columns // pipeline.columns)
    geometry = dense(rows, columns, CONSUMER_ROWS, HALF.value)
    launch(
        _sm90_logit_gradient_kernel,
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
