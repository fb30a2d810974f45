"""How an FFN with adapters of low rank (LoRA) runs: on the epilogue path or through torch, and what adapters add."""

from dataclasses import dataclass, replace
from typing import ClassVar

from . import ffn_epilogue, gemm_gemm
from .call import Call
from .choosing import choose
from .costs import keeps_mask, mask_bytes, saved_bytes
from .devices import Device, floor_seconds
from .gemm_gemm import Plan, Problem


@dataclass(frozen=True)
class LoRAProblem(Problem):
    """An FFN each of whose weights W may be ``W + s B A``; rank 0: it has no adapter.

    ``needs_weight_gradient`` is about the weights W alone, which are usually frozen.
    """

    rank_up: int = 0
    rank_gate: int = 0
    rank_down: int = 0
    needs_adapter_gradient: bool = False
    adapter_dropout: bool = False
    shared_dropout: bool = False  # gate and up projection drop the same elements

    family: ClassVar[str] = "lora_ffn"  # its kernels have more operands than those of an FFN

    __hash__ = Call.__hash__

    @property
    def training(self) -> bool:
        return super().training or self.needs_bias_gradient or self.needs_adapter_gradient

    @property
    def tokens(self) -> int:
        return self.M

    @property
    def ranks(self) -> int:
        """The columns of all products with an A, which are saved for the backward pass."""
        return self.rank_up + self.rank_gate + self.rank_down

    @property
    def read_by_torch(self) -> tuple[bool, bool]:
        # After a dropout an adapter reads another tensor than x or the hidden.
        adapters = self.needs_adapter_gradient and not self.adapter_dropout
        of_x, of_hidden = self.rank_up + self.rank_gate > 0, self.rank_down > 0
        return self.needs_weight_gradient or (adapters and of_x), self.needs_weight_gradient or (adapters and of_hidden)

    @property
    def dropped_bytes(self) -> tuple[int, int, int]:
        """Bytes of the inputs of the up, gate and down projection's adapters after their dropout."""
        x, hidden = self.element_bytes * self.M * self.K, self.hidden_bytes
        of_gate = self.rank_gate and not (self.shared_dropout and self.rank_up)
        drops = self.adapter_dropout
        return x * (drops and self.rank_up > 0), x * (drops and of_gate > 0), hidden * (drops and self.rank_down > 0)

    @property
    def masked_bytes(self) -> int:
        """Bytes of the inputs whose masks torch's backward pass reads: those of x only for the gradient of x."""
        up, gate, down = self.dropped_bytes
        return (up + gate) * self.needs_data_gradient + down * self.training

    @property
    def adapter_flops(self) -> tuple[int, int]:
        """Floating-point operations of the products with A and B, forward and backward."""
        widths = (self.rank_up + self.rank_gate) * (self.K + self.N) + self.rank_down * (self.N + self.O)
        forward = 2 * self.M * widths
        return forward, forward * self.training + forward * self.needs_adapter_gradient

    @property
    def model_flops(self) -> tuple[int, int]:
        forward, backward = super().model_flops
        more_forward, more_backward = self.adapter_flops
        return forward + more_forward, backward + more_backward

    @property
    def described(self) -> str:
        p = self
        sizes = f"M={p.M} (tokens) K={p.K} (d_model) N={p.N} (d_ff) O={p.O}"
        gate = f", gate {p.rank_gate}" if p.gated else ""
        dropout = ", dropout in the adapters" if p.adapter_dropout else ""
        return f"{sizes}, ranks up {p.rank_up}{gate}, down {p.rank_down}{dropout}, {p.dtype}, {p.passes}"

    def kept_by_torch(self, device: Device) -> int:
        # torch's own layers keep the masks of nn.Dropout.
        masks = mask_bytes(self, device) - self.element_bytes * keeps_mask(self, device)
        return self.plan(device, "torch").saved_bytes + masks * (self.masked_bytes // self.element_bytes)

    def plan(self, device: Device, backend: str) -> Plan:
        return plan(self, device, backend)


def plan(problem: LoRAProblem, device: Device, backend: str = "auto") -> Plan:
    """The path that runs ``problem`` on ``device``."""
    unsupported = problem.why_no_kernels(device)
    not_measured = ffn_epilogue.why_generic(problem, device) if backend == "auto" else None
    choice = choose(
        problem, device, backend, {"epilogue": unsupported or not_measured},
        lambda path: saved_bytes(problem, path, device),
    )  # fmt: skip
    path = choice.path
    made = gemm_gemm.plan_on(problem, device, choice, unsupported)
    flops = made.flops + sum(problem.adapter_flops)
    kept = problem.element_bytes * problem.M * problem.ranks
    if path == "torch":
        # torch keeps the inputs of adapters after dropout and their products; kernels draw the masks again.
        kept = (kept + sum(problem.dropped_bytes)) * problem.needs_adapter_gradient
        kept += problem.masked_bytes * keeps_mask(problem, device)
    return replace(
        made,
        flops=flops,
        saved_bytes=made.saved_bytes + kept * problem.training,
        workspace_bytes=made.workspace_bytes + (0 if path == "torch" else max(problem.dropped_bytes)),
        floor_seconds=floor_seconds(flops, made.bytes, problem.dtype, device),
    )
