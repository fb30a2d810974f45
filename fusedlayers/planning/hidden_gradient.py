"""How the gradient of an FFN's pre-activations runs: torch or one kernel, with which tiles, and why."""

import math
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, ClassVar

from ..kernels.tuning import (
    CONSUMER_ROWS,
    EPILOGUE_ELEMENTS,
    EPILOGUE_PIPELINES,
    FEW_WEIGHTS,
    FEW_WEIGHTS_GROUP,
    EpiloguePipeline,
    EpilogueTiles,
    epilogue_tiles,
)
from ..kernels.tuning.dtypes import GENERIC
from .call import Call, Decision, Facts, tiles_text
from .choosing import choose
from .devices import PARTIALS_LIMIT, Device
from .measured import Preferences

# At most this many bands of rows have partial sums: a program sums over the tiles of its band itself.
MOST_BANDS = 256


@dataclass(frozen=True)
class HiddenGradientProblem(Call):
    """One call: dy ``[M, O]`` times w_down ``[O, N]``, through the activation at z ``[M, N]``; sums if ``bias``."""

    M: int
    N: int
    O: int
    dtype: str
    activation: str = "identity"
    gated: bool = False
    dropout: bool = False  # whether the kernel draws a hidden's mask again, as in the backward pass of an FFN
    bias: bool = True
    training: bool = False  # whether gradients of an operand will be asked for: second derivatives of a layer
    operation: str = "hidden_gradient"

    __hash__ = Call.__hash__

    @property
    def flops(self) -> int:
        return 2 * self.M * self.N * self.O

    @property
    def model_flops(self) -> tuple[int, int]:
        return self.flops, 2 * self.flops * self.training

    @property
    def kin(self) -> str:
        return "hidden_gradient gated" if self.gated else "hidden_gradient"

    @property
    def variant(self) -> str:
        return self.activation

    @property
    def sizes(self) -> tuple[int, ...]:
        return (self.M, self.N, self.O)

    @property
    def described(self) -> str:
        return f"M={self.M} (rows) N={self.N} (d_ff) O={self.O}, {self.dtype}"

    def plan(self, device: Device, backend: str) -> "HiddenGradientPlan":
        return plan(self, device, backend)


@dataclass(frozen=True, kw_only=True)
class HiddenGradientPlan(Decision):
    """The path is "fused" or "torch"."""

    has_passes: ClassVar[bool] = False

    tiles: EpilogueTiles | None = None
    pipeline: EpiloguePipeline | None = None  # the sm90 kernel, which runs instead if TMA can read the operands
    row_tiles: int = 1  # tiles below one another that a program of the generic kernel computes
    accuracy: str = "exact"  # of activations: one of kernels.activations.ACCURACIES

    def kernel_facts(self) -> Facts:
        return [] if self.tiles is None else [("tiles", epilogue_text(self.tiles, self.pipeline))]


def plan(
    problem: HiddenGradientProblem, device: Device, backend: str = "auto", *, torch_multiplies: bool = False
) -> HiddenGradientPlan:
    """The path that runs ``problem`` on ``device``.

    ``torch_multiplies``: where kernels run, their tiles are those of what follows torch's product.
    """
    unsupported = problem.why_no_kernels(device)
    choice = choose(problem, device, backend, {"fused": unsupported})
    p = problem
    parts = 2 if p.gated else 1
    read = p.M * p.O + p.O * p.N + parts * p.M * p.N
    io_bytes = p.element_bytes * (read + parts * p.M * p.N + parts * p.N * p.bias)
    options: dict[str, Any] = {}
    if choice.path == "fused":
        if torch_multiplies:
            tiles, pipeline = EPILOGUE_ELEMENTS[p.gated], None
        else:
            tiles = epilogue_tiles(device.architecture, p.format.bits, p.gated, p.dropout)
            pipeline = choose_pipeline(problem, device)
        row_tiles = choose_row_tiles(problem, tiles, device)
        options = {
            "tiles": tiles,
            "pipeline": pipeline,
            "row_tiles": row_tiles,
            "accuracy": problem.activation_accuracy(device),
            "workspace_bytes": _sm90_partial_bytes(problem, pipeline)
            if pipeline is not None
            else _partial_bytes(problem, math.ceil(p.M / (row_tiles * tiles.block_m))),
        }
    return HiddenGradientPlan.of(
        problem, device, choice,
        reason="one kernel writes dZ" + (", and sums it up on the way" if p.bias else ""),
        flops=p.flops, bytes=io_bytes,
        saved_bytes=p.element_bytes * read if p.training else 0, unsupported=unsupported, **options,
    )  # fmt: skip


def choose_row_tiles(problem: HiddenGradientProblem, tiles: EpilogueTiles, device: Device) -> int:
    """Tiles below one another that one program computes: one, unless that gives too many partial sums.

    Where torch computes the product, as many as keep a few programs busy on each SM.
    """
    tile_rows = math.ceil(problem.M / tiles.block_m)
    bands = tile_rows
    if problem.bias:
        bands = max(1, min(MOST_BANDS, 2 * PARTIALS_LIMIT // max(1, _partial_bytes(problem, 2))))
    if not tiles.block_inner:
        tile_columns = math.ceil(problem.N / tiles.block_n)
        bands = max(1, min(bands, tiles.programs * device.sms // max(1, tile_columns)))
    return math.ceil(tile_rows / max(1, bands))


def choose_pipeline(problem: HiddenGradientProblem, device: Device) -> EpiloguePipeline | None:
    """The warp-specialised kernel, where it runs and its partial sums stay within their limit."""
    pipeline = epilogue_pipeline("hidden_gradient", problem, device)
    if pipeline is not None and _programs_stay(problem, pipeline, device.preferences):
        pipeline = _pipeline_on("hidden_gradient", problem.gated, device.sms, stays=True)
    if pipeline is not None and _sm90_partial_bytes(problem, pipeline) > PARTIALS_LIMIT:
        return None
    return pipeline


def _programs_stay(problem: HiddenGradientProblem, pipeline: EpiloguePipeline, known: Preferences | None) -> bool:
    """Whether each program stays in one column of tiles: where that was measured faster and leaves few SMs idle."""
    if known is None or problem.gated or problem.empty:
        return False
    if known.widest_staying[0] < problem.O or known.widest_staying[1] < problem.N:
        return False
    _, tile_columns = pipeline.tiles(problem.M, problem.N)
    busy = pipeline.programs_for_columns(tile_columns)
    return busy >= known.least_staying * pipeline.programs


def epilogue_pipeline(kernel: str, problem: Any, device: Device) -> EpiloguePipeline | None:
    """The warp-specialised ``kernel`` of the epilogue path, where it runs: 16-bit operands on Hopper."""
    if device.backend_for(problem.dtype) == GENERIC:
        return None
    if problem.gated or kernel == "data_gradient":
        return _pipeline_on(kernel, problem.gated, device.sms)
    weights = problem.N * (problem.K if kernel == "hidden" else problem.O)
    few = problem.element_bytes * weights <= FEW_WEIGHTS
    return _pipeline_on(kernel, False, device.sms, few_weights=few)


@cache
def _pipeline_on(
    kernel: str, gated: bool, sms: int, *, stays: bool = False, few_weights: bool = False
) -> EpiloguePipeline:
    found = replace(EPILOGUE_PIPELINES[kernel, gated], programs=sms, stays=stays)
    return replace(found, group=FEW_WEIGHTS_GROUP) if few_weights else found


def _partial_bytes(problem: HiddenGradientProblem, bands: int) -> int:
    """Bytes of the float32 sums of so many bands of rows; without a gate those of a single band are the result."""
    if bands == 1 and not problem.gated:
        return 0
    return 4 * bands * (2 if problem.gated else 1) * problem.N * problem.bias


def _sm90_partial_bytes(problem: HiddenGradientProblem, pipeline: EpiloguePipeline) -> int:
    return _partial_bytes(problem, pipeline.bands(problem.M, problem.N, problem.gated))


def epilogue_text(tiles: EpilogueTiles, pipeline: EpiloguePipeline | None) -> str:
    """The tiles of a product with an epilogue, in words."""
    if pipeline is not None:
        size = f"{2 * CONSUMER_ROWS} × {2 * CONSUMER_ROWS} of the product"
        order = ", each program in one column of them" if pipeline.stays else ""
        return f"sm90: {size}, {pipeline.step} inner, consumers 2 in turn, stages {pipeline.stages}{order}"
    if not tiles.block_inner:
        return f"torch's product, then {tiles.block_m} × {tiles.block_n} of its elements, {tiles.num_warps} warps"
    return tiles_text(f"{tiles.block_m} × {tiles.block_n} of the product, {tiles.block_inner} inner", tiles)
