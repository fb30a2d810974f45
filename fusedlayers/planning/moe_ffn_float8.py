"""Experts whose products run in 8 bits: which calls do, and why the others do not."""

from dataclasses import dataclass, replace
from typing import Any, ClassVar

from ..kernels.tuning import EPILOGUE_PIPELINES
from ..kernels.tuning.grouped_gemm_pipelines import BLOCK, SCALED_WEIGHT_GRADIENT, CooperativePipeline
from ..kernels.tuning.limits import CONSUMER_ROWS
from . import float8
from .call import Call, Facts, sm90_text
from .devices import Device
from .measured import fitted
from .moe_ffn import MoePlan, MoeProblem, saved_bytes, tiles, why_too_many_rows, workspace_bytes

# The kernel in 8 bits of each step.
_KERNELS = {"hidden": "scaled_hidden", "product": "scaled_product", "hidden_gradient": "scaled_hidden_gradient"}


@dataclass(frozen=True, kw_only=True)
class Limits:
    """From where on auto mode takes 8 bits."""

    least_reuse: int  # FLOPs of products in 8 bits for each byte that quantising moves, all of a step in 8 bits
    least_reuse_beside_16_bits: int  # the same with weight gradients in 16 bits
    least_gradient_reuse: int  # FLOPs of a weight gradient for each byte that transposing its operands moves


LIMITS = fitted("float8_experts", Limits)


@dataclass(frozen=True)
class Float8MoeProblem(MoeProblem):
    """Experts in 8 bits."""

    recipe: str = float8.AUTO

    kernels: ClassVar[int] = 2

    __hash__ = Call.__hash__

    @property
    def block(self) -> int:
        """That of the sm90 kernels, whatever the number of rows."""
        return BLOCK

    @property
    def plain(self) -> MoeProblem:
        """The same call in 16 bits."""
        return float8.without_recipe(self, MoeProblem)

    @property
    def widths(self) -> tuple[int, ...]:
        return self.K, self.N

    @property
    def up_gradient_in_8_bits(self) -> bool:
        """Whether the gradients of w_up and w_gate are products of 8-bit operands."""
        return self._transposes((self.products - 1) * self.N, self.K)

    @property
    def down_gradient_in_8_bits(self) -> bool:
        """The same of w_down."""
        return self._transposes(self.K, self.N)

    def _transposes(self, left: int, right: int) -> bool:
        # A consumer stores 64 rows, which must not reach into the next expert's gradient.
        if self.K % CONSUMER_ROWS or self.N % CONSUMER_ROWS:
            return False
        return float8.transposes(self.recipe, float8.reuse(left, right), LIMITS.least_gradient_reuse)

    @property
    def _gradients(self) -> tuple[int, int]:
        """How many weight gradients of w_up and w_gate, and of w_down, are products of 8-bit operands."""
        return (self.products - 1) * self.up_gradient_in_8_bits, int(self.down_gradient_in_8_bits)

    @property
    def flops_in_16_bits(self) -> int:
        """Of weight gradients."""
        if self.frozen:
            return 0
        return self.model_flops[1] // 2 // self.products * (self.products - sum(self._gradients))

    @property
    def reuse(self) -> float:
        """FLOPs of products in 8 bits for each byte that quantising moves.

        Those of a training step, with and without gradients: what is computed must not depend on that.
        """
        weights, tokens, hidden = self.E * self.K * self.N * self.products, self.M * self.K, self.slots * self.N
        up, down = self._gradients
        # Elements are read in 16 bits and written in 8, and transposed in 8. Those of weights, of which there are two
        # copies, count half: so measured times are a function of this number.
        moved = 4 * weights + 3 * (2 * tokens + self.products * hidden)
        moved += self.slots * (2 * up * self.N + 2 * (up > 0) * self.K) + down * self.slots * (2 * self.K + 5 * self.N)
        flops = self.model_flops[0]
        return (2 * flops + flops // self.products * (up + down)) / max(moved, 1)

    @property
    def workspace_bytes(self) -> int:
        """Beside those of 16 bits, rows of dy or of dz and dg in 8, and the transposes of some."""
        up, down = (self.up_gradient_in_8_bits, self.down_gradient_in_8_bits) if self.training else (False, False)
        dy, dz = self.K * (1 + down) + 2 * self.N * down, (self.products - 1) * self.N * (1 + up) + self.K * up
        return workspace_bytes(self) + self.capacity * max(dy, dz)

    @property
    def why_in_16_bits(self) -> str | None:
        """What of the call 8 bits cannot give, or None."""
        return why_too_many_rows(self)

    @property
    def why_slower(self) -> str | None:
        """Why 8 bits would take longer than 16, or None."""
        all_in_8_bits = sum(self._gradients) == self.products
        least = LIMITS.least_reuse if all_in_8_bits else LIMITS.least_reuse_beside_16_bits
        if self.reuse >= least:
            return float8.why_small(self, self.slots)
        return (
            f"the experts are narrow or have few rows for their weights: {self.reuse:,.0f} FLOPs in products for each "
            f"byte that quantising moves, worth it from {least:,} on"
        )

    def in_8_bits(self, plain: MoePlan, device: Device) -> dict[str, Any]:
        """What the plan says of a call in 8 bits; ``plain`` is that of the call in 16."""
        found: dict[str, Any] = tiles(self, device)
        for step, kernel in _KERNELS.items():
            if (pipeline := found.get(f"{step}_pipeline")) is not None:
                gated = self.gated and step != "product"
                # Groups have rows of one expert, as in 16 bits.
                scaled = replace(EPILOGUE_PIPELINES[kernel, gated], group=pipeline.group, programs=device.sms)
                found[f"{step}_pipeline"] = scaled
        if self.training and any(self._gradients):
            found["scaled_gradient_pipeline"] = replace(SCALED_WEIGHT_GRADIENT, programs=device.sms)
            if not self.flops_in_16_bits:
                found |= {"weight_gradient_tiles": None, "weight_gradient_pipeline": None}
        return found | {"saved_bytes": saved_bytes(self, kernels=True)}

    def plan(self, device: Device, backend: str) -> "Float8MoePlan":
        found: Float8MoePlan = float8.plan(self, device, backend, Float8MoePlan)
        return found


@dataclass(frozen=True, kw_only=True)
class Float8MoePlan(float8.Float8Plan, MoePlan):
    """The path is "float8", or "bf16" where the call runs as without ``precision``."""

    scaled_gradient_pipeline: CooperativePipeline | None = None  # of weight gradients in 8 bits

    def kernel_facts(self) -> Facts:
        precision, *_ = super().kernel_facts()
        found = [precision, *MoePlan.kernel_facts(self)]
        if (pipeline := self.scaled_gradient_pipeline) is not None:
            size = f"{pipeline.tile[0]} × {pipeline.tile[1]}, {pipeline.step} inner"
            found.append(("weight gradient, 8 bits", sm90_text(size, 2, pipeline.stages)))
        return found
