"""Experts whose products run in 8 bits, apart from weight gradients: which calls do, and why the others do not."""

from dataclasses import dataclass, replace
from typing import Any, ClassVar

from ..kernels.tuning import EPILOGUE_PIPELINES
from ..kernels.tuning.grouped_gemm_pipelines import BLOCK
from . import float8
from .call import Call, Facts
from .devices import Device
from .measured import fitted
from .moe_ffn import MoePlan, MoeProblem, saved_bytes, tiles, why_too_many_rows, workspace_bytes

# The kernel in 8 bits of each step.
_KERNELS = {"hidden": "scaled_hidden", "product": "scaled_product", "hidden_gradient": "scaled_hidden_gradient"}


@dataclass(frozen=True, kw_only=True)
class Limits:
    """From where on auto mode takes 8 bits."""

    least_reuse: int  # FLOPs of products in 8 bits for each byte that quantising moves


LIMITS = fitted("float8_experts", Limits)


@dataclass(frozen=True)
class Float8MoeProblem(MoeProblem):
    """Experts in 8 bits."""

    recipe: str = float8.AUTO

    up_gradient_in_8_bits: ClassVar[bool] = False
    down_gradient_in_8_bits: ClassVar[bool] = False
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
    def flops_in_16_bits(self) -> int:
        """Of weight gradients."""
        return 0 if self.frozen else self.model_flops[1] // 2

    @property
    def reuse(self) -> float:
        """FLOPs of products in 8 bits for each byte that quantising moves.

        Those of both passes, with and without gradients: what is computed must not depend on that.
        """
        weights, tokens, hidden = self.E * self.K * self.N * self.products, self.M * self.K, self.slots * self.N
        # Elements are read in 16 bits and written in 8. Transposed weights are read twice, for their maxima first.
        moved = (3 + 5) * weights + 3 * (2 * tokens + self.products * hidden)
        return 2 * self.model_flops[0] / max(moved, 1)

    @property
    def workspace_bytes(self) -> int:
        """Beside those of 16 bits, rows of dy or of dz and dg in 8."""
        return workspace_bytes(self) + self.capacity * max(self.K, (self.products - 1) * self.N)

    @property
    def why_in_16_bits(self) -> str | None:
        """What of the call 8 bits cannot give, or None."""
        return why_too_many_rows(self)

    @property
    def why_slower(self) -> str | None:
        """Why 8 bits would take longer than 16, or None."""
        if self.reuse >= LIMITS.least_reuse:
            return float8.why_small(self, self.slots)
        return (
            f"the experts have few rows for their weights: {self.reuse:,.0f} FLOPs in products for each byte that "
            f"quantising moves, worth it from {LIMITS.least_reuse:,} on"
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
        return found | {"saved_bytes": saved_bytes(self, kernels=True)}

    def plan(self, device: Device, backend: str) -> "Float8MoePlan":
        found: Float8MoePlan = float8.plan(self, device, backend, Float8MoePlan)
        return found


@dataclass(frozen=True, kw_only=True)
class Float8MoePlan(float8.Float8Plan, MoePlan):
    """The path is "float8", or "bf16" where the call runs as without ``precision``."""

    def kernel_facts(self) -> Facts:
        precision, *_ = super().kernel_facts()
        return [precision, *MoePlan.kernel_facts(self)]
