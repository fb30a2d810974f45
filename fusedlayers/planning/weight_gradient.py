"""How a weight gradient with its bias gradient runs: torch, one kernel, or both, with which tiles and splits, and why.

"fused" is one kernel for both gradients, "sums" a kernel for the bias gradient beside torch's product.
"""

from dataclasses import dataclass, replace
from operator import itemgetter
from typing import Any, ClassVar

from ..kernels.tuning import PIPELINES, WeightGradientPipeline
from ..kernels.tuning.dtypes import GENERIC
from ..kernels.tuning.grouped_gemm import GroupedTiles, product_tiles
from .call import Call, Decision, Facts, tiles_text
from .choosing import choose
from .devices import PARTIALS_LIMIT, Device, splits_of_full_waves
from .measured import TileCosts, fitted
from .record import LAUNCHED, REPLAYED

# A bound of partials, besides their bytes.
MOST_SPLITS = 256


@dataclass(frozen=True, kw_only=True)
class SplitRule:
    """Which splits pay."""

    shortest_split: int  # in row blocks; a shorter one spends more on its partial than on its products


SPLIT_RULE = fitted("weight_gradient", SplitRule)


@dataclass(frozen=True)
class WeightGradientProblem(Call):
    """One call: ``dW = dyᵀ x`` for dy ``[M, O]`` and x ``[M, K]``, and with ``bias`` the sum of dy over its rows.

    ``training``: gradients of dy or x will be asked for, second derivatives of a layer. ``layer``: it is part of a
    layer's backward pass, where the host has other work, too.
    """

    M: int
    O: int
    K: int
    dtype: str
    bias: bool = True
    training: bool = False
    layer: bool = False
    operation: str = "weight_gradient"

    __hash__ = Call.__hash__

    @property
    def flops(self) -> int:
        return 2 * self.M * self.O * self.K

    @property
    def model_flops(self) -> tuple[int, int]:
        return self.flops, 2 * self.flops * self.training

    @property
    def partial_bytes(self) -> int:
        """Float32 gradients of one split."""
        return 4 * (self.O * self.K + self.O * self.bias)

    @property
    def kin(self) -> str:
        return "weight_gradient with sums" if self.bias else "weight_gradient"

    @property
    def measured_as(self) -> tuple[str, ...]:
        # In a layer's backward pass the host may be ahead of the GPU, so both times count.
        return (LAUNCHED, REPLAYED) if self.layer and not self.captured else super().measured_as

    @property
    def sizes(self) -> tuple[int, ...]:
        return (self.M, self.O, self.K)

    @property
    def described(self) -> str:
        return f"M={self.M} (rows) O={self.O} K={self.K}, {self.dtype}"

    def plan(self, device: Device, backend: str) -> "WeightGradientPlan":
        return plan(self, device, backend)


@dataclass(frozen=True, kw_only=True)
class WeightGradientPlan(Decision):
    """The path is "fused", "sums" or "torch"."""

    has_passes: ClassVar[bool] = False

    tiles: GroupedTiles | None = None
    pipeline: WeightGradientPipeline | None = None  # the sm90 kernel, which runs instead if TMA can read the operands
    splits: int = 1

    def runs(self) -> str:
        return "through torch, with the sums in a kernel" if self.path == "sums" else super().runs()

    def kernel_facts(self) -> Facts:
        rows = []
        if self.pipeline is not None:
            units, columns = self.pipeline.tile
            size = f"{units} × {columns} of dW, {self.pipeline.rows} rows in each of {self.pipeline.stages} stages"
            rows.append(("tiles", f"sm90: {size}, consumers {self.pipeline.consumers}"))
        elif self.tiles is not None:
            t = self.tiles
            size = f"{t.block_m} × {t.block_n} of dW, {t.block_inner} rows at a time"
            rows.append(("tiles", tiles_text(size, t)))
        if self.path == "fused":
            rows.append(("splits", f"{self.splits} row ranges"))
        return rows


def plan(problem: WeightGradientProblem, device: Device, backend: str = "auto") -> WeightGradientPlan:
    """The path that runs ``problem`` on ``device``."""
    unsupported = problem.why_no_kernels(device)
    cannot = {"fused": unsupported}
    if backend == "auto":
        alone = problem.bias and not (problem.layer or problem.training)
        cannot["sums"] = unsupported or (None if alone else "only calls by themselves were measured with it")
    choice = choose(problem, device, backend, cannot)
    element = problem.element_bytes
    io_bytes = element * (problem.M * (problem.O + problem.K) + problem.O * (problem.K + problem.bias))
    options: dict[str, Any] = {}
    if choice.path == "fused":
        tiles = product_tiles(device.architecture, 8 * element)
        pipeline = None
        if device.backend_for(problem.dtype) != GENERIC:
            pipeline, splits = choose_pipeline(problem, device.sms, device.tile_costs)
        else:
            splits = choose_splits(problem, device, tiles)
        workspace = splits * problem.partial_bytes if splits > 1 else 0
        options = {"tiles": tiles, "pipeline": pipeline, "splits": splits, "workspace_bytes": workspace}
    reason = "one kernel reads dy once, for both gradients" if problem.bias else "one kernel computes dW"
    return WeightGradientPlan.of(
        problem, device, choice, reason="a kernel adds up dy" if choice.path == "sums" else reason,
        flops=problem.flops, bytes=io_bytes,
        saved_bytes=element * problem.M * (problem.O + problem.K) if problem.training else 0, unsupported=unsupported,
        **options,
    )  # fmt: skip


def choose_splits(problem: WeightGradientProblem, device: Device, tiles: GroupedTiles) -> int:
    """Row ranges of the generic kernel: enough programs for every SM, bounded partials."""
    programs = -(-problem.O // tiles.block_m) * -(-problem.K // tiles.block_n)
    # The accumulators take most of the registers: one program of 8 warps, or two of 4, fit on an SM.
    resident = device.sms * 8 // tiles.num_warps
    return max(1, min(resident // programs, most_splits(problem, tiles.block_inner)))


def choose_pipeline(problem: WeightGradientProblem, sms: int, costs: TileCosts) -> tuple[WeightGradientPipeline, int]:
    """The tile and the number of row ranges that are expected to take least time."""
    choices = [
        (sm90_seconds(problem, pipeline, splits, sms, costs), pipeline, splits)
        for pipeline in PIPELINES
        for splits in splits_of_full_waves(tile_count(problem, pipeline), sms, most_splits(problem, pipeline.rows))
    ]
    _, pipeline, splits = min(choices, key=itemgetter(0))
    return replace(pipeline, programs=sms), splits


def most_splits(problem: WeightGradientProblem, row_block: int) -> int:
    """The most row ranges: none shorter than pays, and partials within their limit."""
    longest = -(-problem.M // (row_block * SPLIT_RULE.shortest_split))
    return max(1, min(longest, MOST_SPLITS, PARTIALS_LIMIT // problem.partial_bytes))


def tile_count(problem: WeightGradientProblem, pipeline: WeightGradientPipeline) -> int:
    """Tiles of dW."""
    units, columns = pipeline.tile
    return -(-problem.O // units) * -(-problem.K // columns)


def sm90_seconds(
    problem: WeightGradientProblem, pipeline: WeightGradientPipeline, splits: int, sms: int, costs: TileCosts
) -> float:
    """What the sm90 kernel, and the sum of its partials, are expected to take: waves of programs × their work.

    A wave is as slow as the matrix units, the L2 cache or the memory allow, and ends with a store.
    """
    units, columns = pipeline.tile
    programs = tile_count(problem, pipeline) * splits
    waves = -(-programs // sms)
    blocks = -(-problem.M // (pipeline.rows * splits))
    products = units * columns * pipeline.rows / (costs.products_per_cycle * costs.share_of_peak)
    loads = 2 * (units + columns) * pipeline.rows / costs.bytes_per_cycle
    on_chip = waves * blocks * max(products, loads) / costs.clock
    # Every wave that starts anew reads both sides again, at worst.
    memory = 2 * problem.M * (problem.O + problem.K) / costs.bytes_per_second
    stored = units * columns * (4 if splits > 1 else 2)
    seconds = max(on_chip, memory) + costs.fill_seconds + waves * stored / costs.store_bytes_per_second
    if splits > 1:
        seconds += costs.reduce_seconds + splits * problem.partial_bytes / costs.partial_bytes_per_second
    return seconds
