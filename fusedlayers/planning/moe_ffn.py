"""How experts run: torch's grouped products or kernels over rows sorted by expert, and why."""

from dataclasses import dataclass

from .call import Call, Decision, direction, no_kernels, why_not_kernels
from .devices import Device, floor_seconds


@dataclass(frozen=True)
class MoeProblem(Call):
    """One call for x ``[M, K]`` and E experts with N hidden units, of which every token has ``top_k``."""

    M: int
    K: int
    N: int
    E: int
    top_k: int
    dtype: str
    activation: str = "silu"
    gated: bool = False
    biased: bool = False
    clamped: bool = False
    recompute: bool = False
    training: bool = False
    operation: str = "moe_ffn"

    __hash__ = Call.__hash__

    @property
    def empty(self) -> bool:
        return 0 in (self.M, self.K, self.N, self.E, self.top_k)

    @property
    def model_flops(self) -> tuple[int, int]:
        forward = 2 * self.M * self.top_k * self.K * self.N * (3 if self.gated else 2)
        return forward, 2 * forward * self.training

    @property
    def tokens(self) -> int:
        return self.M

    @property
    def described(self) -> str:
        sizes = f"M={self.M} (tokens) K={self.K} N={self.N} E={self.E} (experts) k={self.top_k}"
        return f"{sizes}, {self.dtype}, {direction(self)}"

    def plan(self, device: Device, backend: str) -> "MoePlan":
        return plan(self, device, backend)


@dataclass(frozen=True, kw_only=True)
class MoePlan(Decision):
    """The path is "epilogue" or "torch"."""


def plan(problem: MoeProblem, device: Device, backend: str = "auto") -> MoePlan:
    """The path that runs ``problem`` on ``device``."""
    unsupported = no_kernels(problem, device) or "not built yet"
    torch_because = why_not_kernels(problem, device, backend, unsupported, None, lambda *_: None)
    flops, moved = sum(problem.model_flops), 0
    return MoePlan(
        problem=problem,
        path="torch",
        reason="no other path is both possible and faster",
        rejected=(("epilogue", torch_because or ""),),
        flops=flops,
        bytes=moved,
        floor_seconds=floor_seconds(flops, moved, problem.dtype, device),
        unsupported=unsupported,
    )
