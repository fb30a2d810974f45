"""FFNs and linear layers whose products run in 8 bits: which calls do, and why the others run as in 16 bits.

The products of a call are those of x and of upstream gradients with the weights, and by most recipes weight gradients.
"""

from dataclasses import dataclass, fields
from typing import Any, ClassVar, TypeVar

from ..kernels.tuning import EPILOGUE_PIPELINES, EpiloguePipeline
from ..kernels.tuning.dtypes import GENERIC
from .call import Call, Decision, Facts
from .devices import Device, floor_seconds
from .gemm_gemm import Problem
from .linear import LinearProblem
from .lora_ffn import LoRAProblem
from .measured import fitted
from .weight_gradient import WeightGradientPlan

_Call = TypeVar("_Call", bound=Call)

IN_8_BITS, IN_16_BITS = "float8", "bf16"
# Recipes in a word, as users write and operations pass it on: weight gradients in 8 bits where that pays, wherever it
# is possible, and nowhere. The last two are torchao's.
AUTO, ROWWISE, ROWWISE_BF16 = "fp8", "rowwise", "rowwise_with_gw_hp"
# Rows of operands and results begin at multiples of 16 bytes.
MULTIPLE = 16
# Activations that may be larger than what they are of.
_UNBOUNDED = ("sigmoid", "relu2")
# The most columns of a gated FFN that is bounded. Its hidden is then 28 dB above its noise, with twice as many 24.
_MOST_GATED = 8192
# The FLOPs of one 16-bit instruction for those of an 8-bit one.
_RATE = 0.5


@dataclass(frozen=True, kw_only=True)
class Limits:
    """From where on auto mode takes 8 bits."""

    least_width: int  # of a layer
    least_flops: int  # of one of its products, compiled or in a CUDA graph
    least_launched_flops: int  # of a kernel's products in a forward pass, launched one by one
    least_launched_linear_flops: int  # the same of a linear layer, whose launches do less each
    least_reuse: int  # FLOPs of a weight gradient for each byte that transposing its operands moves
    least_bounded_reuse: int  # the same of both weight gradients of an FFN whose hidden is bounded


LIMITS = fitted("float8", Limits)


class Float8Call:
    """What calls in 8 bits have in common, those of experts excepted."""

    # Kernels with products in a forward pass: up and gate projections share one, and the launches that quantise.
    kernels: ClassVar[int] = 2

    @property
    def why_slower(self: Any) -> str | None:
        """Why 8 bits would take longer than 16, or None."""
        return why_narrow(self.widths) or why_small(self, self.M)

    def kept_by_torch(self: Any, device: Device) -> int:
        """As of the call in 16 bits."""
        found: int = self.plain.kept_by_torch(device)
        return found

    def plan(self, device: Device, backend: str) -> "Float8Plan":
        """As of any other call."""
        found: Float8Plan = plan(self, device, backend)
        return found


@dataclass(frozen=True)
class Float8Problem(Float8Call, Problem):  # type: ignore[misc]
    """An FFN in 8 bits."""

    recipe: str = AUTO
    biased: bool = False  # the up or the gate projection

    __hash__ = Call.__hash__

    @property
    def up_gradient_in_8_bits(self) -> bool:
        """Whether the gradients of w_up and w_gate are products of 8-bit operands."""
        return self.gradients_bounded or (not self.bounded and transposes(self.recipe, self._reuse[0]))

    @property
    def down_gradient_in_8_bits(self) -> bool:
        """The same of w_down."""
        return self.gradients_bounded or (not self.bounded and transposes(self.recipe, self._reuse[1]))

    @property
    def _reuse(self) -> tuple[float, float]:
        return reuse((2 if self.gated else 1) * self.N, self.K), reuse(self.O, self.N)

    @property
    def bounded(self) -> bool:
        """Whether the hidden is stored in 8 bits by the kernel that computes it, with scales that bound it."""
        if self.gated and (self.biased or self.activation == "tanh" or max(self.K, self.O) > _MOST_GATED):
            # The product of two bounds that are not close is not close at all.
            return False
        return self.activation not in _UNBOUNDED

    @property
    def gradients_bounded(self) -> bool:
        """Whether the gradients of the pre-activations are, too: if all weight gradients take 8 bits."""
        return self.bounded and transposes(self.recipe, min(self._reuse), LIMITS.least_bounded_reuse)

    @property
    def flops_in_16_bits(self) -> int:
        """Of weight gradients."""
        up = 0 if self.up_gradient_in_8_bits else (2 if self.gated else 1) * self.K
        down = 0 if self.down_gradient_in_8_bits else self.O
        return 2 * self.M * self.N * (up + down) * self.needs_weight_gradient

    @property
    def plain(self) -> Problem:
        """The same call in 16 bits."""
        return without_recipe(self, Problem)

    @property
    def widths(self) -> tuple[int, ...]:
        return self.K, self.N, self.O

    @property
    def kept_elements(self) -> int:
        """x and the pre-activations."""
        return self.M * (self.K + (2 if self.gated else 1) * self.N)

    @property
    def workspace_bytes(self) -> int:
        """x and h in 8 bits, and h in 16 if it is not bounded; in the backward pass h, the gradients of the
        pre-activations and dy, with the transposes of some of them."""
        parts, wide = 2 if self.gated else 1, self.element_bytes
        forward = self.M * (self.N * (1 if self.bounded else wide + 1) + self.K)
        dy = 2 * self.O if self.down_gradient_in_8_bits else self.O
        inner = max(parts + 2, 2 * parts) if self.gradients_bounded else wide * (parts + 1) + parts
        backward = self.M * (self.N * inner + dy + self.K * self.gradients_bounded)
        return backward if self.training else forward

    @property
    def why_in_16_bits(self) -> str | None:
        """What of the call 8 bits cannot give, or None."""
        if self.recompute is True:
            return "products in 8 bits keep pre-activations, which recompute=True forbids"
        # Without gradients, too, although nothing is kept then: values must not depend on that.
        if self.saved_limit is not None and self.kept_elements * self.element_bytes > self.saved_limit:
            return "products in 8 bits keep more bytes than recompute= allows"
        return None

    def in_8_bits(self, plain: Any, device: Device) -> dict[str, Any]:
        """What the plan says of a call in 8 bits; ``plain`` is that of the call in 16."""
        gradient = EPILOGUE_PIPELINES["scaled_hidden_gradient", self.gated]
        return {
            "hidden_pipeline": EPILOGUE_PIPELINES["scaled_hidden", self.gated],
            "gradient_pipeline": gradient if self.training else None,
            "product_pipeline": EPILOGUE_PIPELINES["scaled_product", False],
            "saved_bytes": self.kept_elements * self.element_bytes * self.training,
        }


@dataclass(frozen=True)
class Float8LoRAProblem(Float8Problem, LoRAProblem):  # type: ignore[misc]
    """An FFN in 8 bits, with adapters in 16; weights are mostly frozen, and their gradients, if any, in 16 bits."""

    up_gradient_in_8_bits: ClassVar[bool] = False
    down_gradient_in_8_bits: ClassVar[bool] = False
    # Adapters read the hidden and the gradients of the pre-activations in 16 bits.
    bounded: ClassVar[bool] = False

    __hash__ = Call.__hash__

    @property
    def flops_in_16_bits(self) -> int:
        """Of weight gradients, and of adapters."""
        return super().flops_in_16_bits + sum(self.adapter_flops)

    @property
    def plain(self) -> LoRAProblem:
        """The same call in 16 bits."""
        return without_recipe(self, LoRAProblem)

    @property
    def kept_elements(self) -> int:
        """x, the pre-activations and the products with A."""
        return super().kept_elements + self.M * self.ranks

    @property
    def workspace_bytes(self) -> int:
        return super().workspace_bytes + max(self.dropped_bytes)


@dataclass(frozen=True)
class Float8LinearProblem(Float8Call, LinearProblem):  # type: ignore[misc]
    """A linear layer in 8 bits."""

    recipe: str = AUTO

    gated: ClassVar[bool] = False
    kernels: ClassVar[int] = 1

    __hash__ = Call.__hash__

    @property
    def weight_gradient_in_8_bits(self) -> bool:
        return transposes(self.recipe, reuse(self.N, self.K))

    @property
    def flops_in_16_bits(self) -> int:
        """Of weight gradients."""
        return 0 if self.weight_gradient_in_8_bits else 2 * self.M * self.N * self.K * self.needs_weight_gradient

    @property
    def plain(self) -> LinearProblem:
        """The same call in 16 bits."""
        return without_recipe(self, LinearProblem)

    @property
    def widths(self) -> tuple[int, ...]:
        return self.K, self.N

    @property
    def workspace_bytes(self) -> int:
        """x or dy in 8 bits, or with the gradient of weights dy and the transposes of both."""
        if self.needs_weight_gradient and self.weight_gradient_in_8_bits:
            return self.M * (self.K + 2 * self.N)
        return self.M * (max(self.K, self.N) if self.needs_data_gradient else self.K)

    @property
    def why_in_16_bits(self) -> str | None:
        """What of the call 8 bits cannot give, or None."""
        return "split_k and reduction ask for split kernels by name" if self.asks_for_kernels else None

    def in_8_bits(self, plain: Any, device: Device) -> dict[str, Any]:
        """What the plan says of a call in 8 bits; ``plain`` is that of the call in 16."""
        return {
            "product_pipeline": EPILOGUE_PIPELINES["scaled_product", False],
            "weight_gradient": getattr(plain, "weight_gradient", None),
            "saved_bytes": plain.saved_bytes,
        }


def reuse(left: int, right: int) -> float:
    """FLOPs of a weight gradient ``[left, right]`` for each byte that transposing its operands moves."""
    # A token of left is read and written in 8 bits, one of right is read in 16 bits.
    return 2 * left * right / (2 * left + 3 * right)


def transposes(recipe: str, flops: float, least: int | None = None) -> bool:
    """Whether a weight gradient, with so many FLOPs for each byte that transposing moves, has 8-bit operands."""
    return recipe == ROWWISE or (recipe == AUTO and flops >= (LIMITS.least_reuse if least is None else least))


def without_recipe(problem: Any, kind: type[_Call]) -> _Call:
    """The same call in 16 bits, a problem of this ``kind``."""
    return kind(**{each.name: getattr(problem, each.name) for each in fields(kind)})


@dataclass(frozen=True, kw_only=True)
class Float8Plan(Decision):
    """The path is "float8", or "bf16" where the call runs as without ``precision``."""

    hidden_pipeline: EpiloguePipeline | None = None
    gradient_pipeline: EpiloguePipeline | None = None
    product_pipeline: EpiloguePipeline | None = None
    weight_gradient: WeightGradientPlan | None = None  # of a linear layer; None: torch's products
    accuracy: str = "exact"  # of activations in kernels

    def runs(self) -> str:
        if self.path == IN_16_BITS:
            return "in 16 bits"
        return f"in the float8 kernels (e4m3, a scale for each row; {_weight_gradients(self.problem)})"

    def gain(self, device: Device) -> str:
        return self.reason

    def kernel_facts(self) -> Facts:
        named = {
            "hidden": self.hidden_pipeline,
            "hidden-gradient": self.gradient_pipeline,
            "product": self.product_pipeline,
        }
        rows = [(f"{name} tiles", _text(pipeline)) for name, pipeline in named.items() if pipeline is not None]
        return [("precision", f"fp8, a scale for each row; {_weight_gradients(self.problem)}"), *rows]


def _weight_gradients(problem: Any) -> str:
    """How many bits the operands of weight gradients have, in words."""
    if isinstance(problem, Float8LinearProblem):
        return f"weight gradients in {8 if problem.weight_gradient_in_8_bits else 16} bits"
    up, down = problem.up_gradient_in_8_bits, problem.down_gradient_in_8_bits
    if up == down:
        return f"weight gradients in {8 if up else 16} bits"
    return f"the weight gradient of {'w_down' if up else 'w_up'} in 16 bits"


def _text(pipeline: EpiloguePipeline) -> str:
    rows, columns = pipeline.tile
    return f"sm90: {rows} × {columns} of the product, {pipeline.step} inner, stages {pipeline.stages}"


def plan(problem: Any, device: Device, backend: str = "auto", kind: type[Float8Plan] = Float8Plan) -> Any:
    """The path of a call with ``precision="fp8"`` on ``device``, as a plan of this ``kind``."""
    reason = why_not(problem, device, backend)
    p, in_8_bits = problem, reason is None
    forward, backward = p.model_flops
    in_16_bits = p.flops_in_16_bits
    plain = p.plain.plan(device, backend)
    options: dict[str, Any] = {"saved_bytes": plain.saved_bytes, "workspace_bytes": plain.workspace_bytes}
    if in_8_bits:
        options = p.in_8_bits(plain, device) | {
            "accuracy": p.activation_accuracy(device),
            "workspace_bytes": p.workspace_bytes,
            "floor_seconds": floor_seconds(
                int(_RATE * (forward + backward - in_16_bits)) + in_16_bits, plain.bytes, p.dtype, device
            ),
        }
    return kind(
        problem=p,
        path=IN_8_BITS if in_8_bits else IN_16_BITS,
        reason="products of 8-bit operands take half the time" if in_8_bits else str(reason),
        rejected=((IN_16_BITS, "the products are large enough to gain more than quantising takes"),)
        if in_8_bits
        else ((IN_8_BITS, str(reason)),),
        flops=plain.flops if not in_8_bits else forward + backward,
        bytes=plain.bytes,
        **options,
    )


def why_not(problem: Any, device: Device, backend: str = "auto") -> str | None:
    """Why a call runs in 16 bits although ``precision`` asks for 8, or None."""
    p = problem
    if backend == "torch":
        return "the backend is set to torch"
    if (reason := p.why_no_kernels(device)) is not None:
        return reason
    if device.backend == GENERIC:
        return "products in 8 bits are warp-specialised kernels, and these do not run here"
    if not p.format.narrow:
        return f"operands of {p.dtype} are not quantised: expected 16 bits"
    if (reason := why_uneven(p.widths)) is not None:
        return reason
    if (reason := p.why_in_16_bits) is not None:
        return str(reason)
    if backend == "triton":
        return None
    if device.left_to_torch:
        return device.left_to_torch
    if device.release_note:
        return f"the self-test of an unknown release of Triton has no products in 8 bits: {device.release_note}"
    found: str | None = p.why_slower
    return found


def why_small(problem: Any, rows: int) -> str | None:
    """Why a call with so many rows in its products would take longer in 8 bits than in 16, or None."""
    p = problem
    # A compiled step runs ahead of the GPU, which hides what the launches of one layer cost.
    if p.captured or getattr(p, "compiled", False):
        flops, least, what = 2 * rows * p.K * p.N, LIMITS.least_flops, "in a product, compiled or inside a CUDA graph"
    else:
        flops = p.model_flops[0] // p.kernels
        least = LIMITS.least_launched_linear_flops if p.kernels == 1 else LIMITS.least_launched_flops
        what = "in a kernel of the forward pass, launched one by one"
    if flops >= least:
        return None
    return f"the call is too small: {flops:,} FLOPs {what}, worth quantising from {least:,} on"


def why_uneven(widths: tuple[int, ...]) -> str | None:
    """Why no call of a layer of these widths runs in 8 bits, or None."""
    width = next((width for width in widths if width % MULTIPLE), None)
    return None if width is None else f"a width of {width} is no multiple of {MULTIPLE}"


def why_narrow(widths: tuple[int, ...]) -> str | None:
    """Why auto mode runs no call of a layer of these widths in 8 bits, or None."""
    if min(widths) >= LIMITS.least_width:
        return None
    return f"a width of {min(widths):,} is below {LIMITS.least_width:,}, where quantising takes what 8 bits gain"
