"""How the three products of a linear layer run: torch or split kernels, with which tiles and splits each, and why."""

from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

from ..kernels.tuning import SplitTiles, split_tiles, starts_early
from . import weight_gradient
from .call import NO_OTHER_PATH, VECTOR, Call, Decision, Facts, Yields, tiles_text
from .choosing import Choice, choose
from .costs import SAVED_FOR_SLOPE, SLOPE_FROM_VALUE
from .devices import PARTIALS_LIMIT, Device, floor_seconds, splits_of_full_waves
from .measured import fitted
from .record import TORCH
from .weight_gradient import WeightGradientPlan, WeightGradientProblem

FORWARD, DATA_GRADIENT = "forward", "data gradient"

# The fewest columns of a data gradient's tile: W is read along its strided axis.
LEAST_COLUMNS = 64


@dataclass(frozen=True, kw_only=True)
class SplitRule:
    """How many splits fill the SMs.

    Operands whose rows are not aligned are read in small pieces, so that ``unaligned_programs`` times as many programs
    wait for memory at once. If one wave of programs keeps less than ``filled_share`` of the SMs busy, splits of at
    least ``long_split`` blocks run in several waves.
    """

    unaligned_programs: int
    filled_share: float
    long_split: int


SPLIT_RULE = fitted("linear", SplitRule)


@dataclass(frozen=True)
class LinearProblem(Call):
    """One call: ``act(x Wᵀ + b)`` for x ``[M, K]`` and W ``[N, K]``, and which gradients will be asked for.

    ``split_k`` is 0 for "auto".
    """

    M: int
    N: int
    K: int
    dtype: str
    activation: str = "identity"
    bias: bool = False
    needs_data_gradient: bool = False
    needs_weight_gradient: bool = False
    needs_bias_gradient: bool = False
    split_k: int = 0
    atomic: bool = False
    compiled: bool = False  # by torch.compile, where a product of torch's costs the host less than a custom operation
    operation: str = "linear"

    __hash__ = Call.__hash__

    @property
    def training(self) -> bool:
        return self.needs_data_gradient or self.needs_weight_gradient or self.needs_bias_gradient

    @property
    def model_flops(self) -> tuple[int, int]:
        product = 2 * self.M * self.N * self.K
        return product, product * (self.needs_data_gradient + self.needs_weight_gradient)

    @property
    def asks_for_kernels(self) -> bool:
        """A number of splits, or atomic addition, is a wish for the kernels by name: no question of speed."""
        return self.split_k > 0 or self.atomic

    @property
    def weight_gradient(self) -> WeightGradientProblem:
        """The product that sums over the rows, with the bias gradient where that is wanted, too."""
        return WeightGradientProblem(
            M=self.M, O=self.N, K=self.K, dtype=self.dtype, bias=self.needs_bias_gradient, layer=True,
            input_precision=self.input_precision, captured=self.captured, subclass=self.subclass,
        )  # fmt: skip

    @property
    def kin(self) -> str:
        return "linear training" if self.training else "linear"

    @property
    def variant(self) -> str:
        return self.activation

    @property
    def sizes(self) -> tuple[int, ...]:
        return self.M, self.N, self.K

    @property
    def described(self) -> str:
        return f"M={self.M} (rows) N={self.N} K={self.K}, {self.dtype}, {self.passes}"

    def plan(self, device: Device, backend: str) -> "LinearPlan":
        return plan(self, device, backend)


class Product(NamedTuple):
    """``[M, K] [N, K]ᵀ`` of one layer; ``name`` says which one it is."""

    name: str
    M: int
    N: int
    K: int

    @property
    def aligned(self) -> bool:
        """Whether rows in memory, if they follow one another, all start at the address of a vector."""
        return (self.N if self.name == DATA_GRADIENT else self.K) % VECTOR == 0


@dataclass(frozen=True)
class ProductPlan:
    """One product: without tiles it is torch's, for ``reason``; else it is cut into ``splits`` ranges."""

    reason: str
    tiles: SplitTiles | None = None
    splits: int = 1

    def text(self, inner: int, letter: str, atomic: bool) -> str:
        """The tiles and splits in words; ``letter`` names the ``inner`` axis."""
        t = self.tiles
        if t is None:
            return "torch"
        size = f"{t.block_m} × {t.block_n} of the result, {t.block_inner} of {letter} at a time"
        how = "added in any order" if atomic else "added in a fixed order"
        splits = f"{self.splits} ranges of {letter} = {inner}" + (f", {how}" if self.splits > 1 or atomic else "")
        return f"{splits}; {tiles_text(size, t)}"


@dataclass(frozen=True, kw_only=True)
class LinearPlan(Decision):
    """The path is "fused" where at least one product runs in kernels, or "torch".

    ``data_gradient`` and ``weight_gradient`` are None where they are not wanted.
    """

    yields: ClassVar[Yields] = {"forward tiles": ("y",), "data_gradient tiles": ("dx",)}
    has_passes: ClassVar[bool] = False  # the products that kernels compute are named instead

    forward: ProductPlan
    data_gradient: ProductPlan | None = None
    weight_gradient: WeightGradientPlan | None = None
    accuracy: str = "exact"  # of activations in kernels: one of kernels.activations.ACCURACIES
    dependent: bool = False  # whether a kernel is started while the one before it still runs
    padded_columns: int = 0  # to which dz and W are padded for torch's gradients, 0 where they are not
    # Whether torch's products run in another order than torch's, inside a graph of a forward and a backward pass that
    # follow one another: dx before dW, while the weights are in the cache.
    data_gradient_first: bool = False

    def runs(self) -> str:
        how, _, _ = self.reason.partition(": ")
        return f"{'partly ' if self.rejected else ''}in {how}"

    def why_torch(self, device: Device) -> str:
        # The row "not fused" lists the reason of every product.
        return super().why_torch(device) if self.timed else self.forward.reason

    def gain(self, device: Device) -> str:
        _, _, products = self.reason.partition(": ")
        return products

    def kernel_facts(self) -> Facts:
        p = self.problem
        rows = [("forward", self.forward.text(p.K, "K", p.atomic))]
        if self.data_gradient is not None:
            rows.append(("data gradient", self.data_gradient.text(p.N, "N", p.atomic)))
        if self.padded_columns:
            rows.append(("gradients", f"torch, with dz and W padded to N = {self.padded_columns}"))
        if (made := self.weight_gradient) is not None:
            rows.append(
                ("weight gradient", f"{made.splits} ranges of the {p.M} rows" if made.path == "fused" else "torch")
            )
        return rows


def plan(problem: LinearProblem, device: Device, backend: str = "auto") -> LinearPlan:
    """The path that runs ``problem`` on ``device``."""
    p = problem
    unsupported = problem.why_no_kernels(device)
    if backend == "auto" and problem.asks_for_kernels:
        backend = "triton"
    forward, choice = plan_product(problem, Product(FORWARD, p.M, p.N, p.K), device, backend, unsupported)
    data = None
    if p.needs_data_gradient:
        data, _ = plan_product(problem, Product(DATA_GRADIENT, p.M, p.K, p.N), device, backend, unsupported)
    weight = plan_weight_gradient(problem, device, backend) if p.needs_weight_gradient else None
    # By the name of a product: why torch computes it, or None where kernels do.
    by_torch = {FORWARD: None if forward.tiles else forward.reason}
    if data is not None:
        by_torch[DATA_GRADIENT] = None if data.tiles else data.reason
    if weight is not None:
        by_torch["weight gradient"] = None if weight.path == "fused" else str(dict(weight.rejected).get("fused"))
    in_kernels = [name for name, reason in by_torch.items() if reason is None]
    reasons = {name: reason for name, reason in by_torch.items() if reason is not None}
    passes = 1 + p.needs_data_gradient + p.needs_weight_gradient
    flops = 2 * p.M * p.N * p.K * passes
    moved = p.element_bytes * (p.M * p.K + p.N * p.K + p.M * p.N) * passes
    workspaces = [0 if weight is None else weight.workspace_bytes]
    for product, width in ((forward, p.N), (data, p.K)):
        if product is not None and product.tiles is not None and (product.splits > 1 or p.atomic):
            workspaces.append(4 * p.M * width * (1 if p.atomic else product.splits))
    padded = _padded_columns(problem, device, data, weight) if forward.tiles is not None else 0
    if padded:
        workspaces.append(p.element_bytes * padded * (p.M + p.K * p.needs_data_gradient))
    kept = p.M * p.K * p.needs_weight_gradient + p.N * p.K * p.needs_data_gradient
    kept += p.M * p.N * p.training * (SAVED_FOR_SLOPE.get(p.activation, 0) + (p.activation in SLOPE_FROM_VALUE))
    options: dict[str, Any] = {
        "flops": flops,
        "bytes": moved,
        "saved_bytes": p.element_bytes * kept,
        "workspace_bytes": max(workspaces),
        "floor_seconds": floor_seconds(flops, moved, p.dtype, device),
        "unsupported": unsupported,
        "timed": choice.timed,
        "forward": forward,
        "data_gradient": data,
        "weight_gradient": weight,
    }
    if not in_kernels:
        few_rows = device.preferences is not None and device.preferences.data_gradient_first_rows >= p.M
        both = p.needs_data_gradient and p.needs_weight_gradient
        why = "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
        return LinearPlan(
            problem=problem,
            path=TORCH,
            reason=NO_OTHER_PATH,
            rejected=(("fused", forward.reason if len({*reasons.values()}) == 1 else why),),
            data_gradient_first=few_rows and both and p.captured and backend == "auto" and unsupported is None,
            **options,
        )
    return LinearPlan(
        problem=problem,
        path="fused",
        reason=f"kernels that split what they sum over: {', '.join(in_kernels)}",
        rejected=tuple((f"kernels for the {name}", reason) for name, reason in reasons.items()),
        accuracy=problem.activation_accuracy(device),
        padded_columns=padded,
        dependent=starts_early(device.architecture),
        **options,
    )


def _padded_columns(
    problem: LinearProblem, device: Device, data: ProductPlan | None, weight: WeightGradientPlan | None
) -> int:
    """To how many columns dz and W are padded, where torch computes the gradients and is faster so; else 0."""
    known, columns = device.preferences, -(-problem.N // VECTOR) * VECTOR
    by_torch = (data is None or data.tiles is None) and (weight is None or weight.path == "torch")
    if known is None or columns == problem.N or not problem.format.narrow or not by_torch:
        return 0
    small = known.padded_from[problem.captured] > (problem.M + problem.N) * problem.K
    return 0 if small or (data is None and weight is None) else columns


def plan_product(
    problem: LinearProblem, product: Product, device: Device, backend: str, unsupported: str | None
) -> tuple[ProductPlan, Choice]:
    """Kernels with tiles and splits for one product, or torch and the reason."""
    # Auto mode leaves data gradients to torch, which reads W along its strided axis as fast.
    slow = "torch reads W across its rows as fast" if product.name == DATA_GRADIENT and backend == "auto" else None
    choice = choose(problem, device, backend, {"fused": unsupported or slow})
    if choice.path == TORCH:
        return ProductPlan(choice.against["fused"]), choice
    return ProductPlan("the kernels cover the product", *_tiles_and_splits(problem, product, device)), choice


def _tiles_and_splits(problem: LinearProblem, product: Product, device: Device) -> tuple[SplitTiles, int]:
    # A product that reads its right operand across rows takes tiles that hold whole vectors of them.
    least_rows, least_columns = (2, LEAST_COLUMNS) if product.name == DATA_GRADIENT else (1, 1)
    sides = max(least_rows, product.M), max(least_columns, product.N)
    tiles = split_tiles(device.architecture, problem.format.bits, *sides)
    return tiles, choose_splits(product, tiles, device.sms, problem.split_k, problem.atomic)


def plan_weight_gradient(problem: LinearProblem, device: Device, backend: str) -> WeightGradientPlan:
    """The plan of ``weight_gradient``, with the number of splits that the call asks for."""
    made = weight_gradient.plan(problem.weight_gradient, device, backend)
    if made.path == "torch" or not problem.split_k:
        return made
    assert made.tiles is not None
    row_block = made.tiles.block_inner if made.pipeline is None else made.pipeline.rows
    bounded = min(problem.split_k, max(1, PARTIALS_LIMIT // made.problem.partial_bytes))
    splits = filled_splits(-(-problem.M // row_block), bounded)
    return replace(made, splits=splits, workspace_bytes=splits * made.problem.partial_bytes if splits > 1 else 0)


def filled_splits(blocks: int, splits: int) -> int:
    """How many of ``splits`` equal ranges of ``blocks`` blocks are not empty."""
    return -(-blocks // -(-blocks // min(splits, blocks)))


def choose_splits(product: Product, tiles: SplitTiles, sms: int, wanted: int = 0, atomic: bool = False) -> int:
    """Ranges of the inner axis: ``wanted``, or as many as fill the SMs; none empty, the partials bounded."""
    blocks = -(-product.K // tiles.block_inner)
    splits = wanted or _filling_splits(product, tiles, blocks, sms)
    if not atomic:
        splits = min(splits, PARTIALS_LIMIT // (4 * product.M * product.N))
    return filled_splits(blocks, max(1, splits))


def _filling_splits(product: Product, tiles: SplitTiles, blocks: int, sms: int) -> int:
    """As many as fill the SMs once or, where too few fit in, up to four times, if these are long."""
    programs = -(-product.M // tiles.block_m) * -(-product.N // tiles.block_n)
    at_once = sms * tiles.programs * (1 if product.aligned else SPLIT_RULE.unaligned_programs)
    once = max(1, min(at_once // programs, blocks // tiles.shortest_split))

    def filled(splits: int) -> float:
        return programs * splits / (-(-programs * splits // at_once) * at_once)

    choices = [once, *[s for s in splits_of_full_waves(programs, at_once, blocks // SPLIT_RULE.long_split) if s > once]]
    return next((splits for splits in choices if filled(splits) >= SPLIT_RULE.filled_share), max(choices, key=filled))
