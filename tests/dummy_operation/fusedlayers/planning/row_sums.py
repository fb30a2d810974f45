"""How the sums of rows run: torch or one kernel, and why."""

from dataclasses import dataclass

from ..kernels.tuning.row_sums import RowSumTiles
from .call import Call, Decision, Facts
from .choosing import choose
from .devices import Device
from .record import TORCH


@dataclass(frozen=True)
class RowSumsProblem(Call):
    """One call for x ``[M, N]``."""

    M: int
    N: int
    dtype: str
    training: bool = False
    operation: str = "row_sums"

    __hash__ = Call.__hash__

    @property
    def model_flops(self) -> tuple[int, int]:
        return self.M * self.N, 0

    @property
    def kin(self) -> str:
        return "row_sums training" if self.training else "row_sums"

    @property
    def sizes(self) -> tuple[int, ...]:
        return self.M, self.N

    @property
    def described(self) -> str:
        return f"M={self.M} (rows) N={self.N}, {self.dtype}, {self.passes}"

    def plan(self, device: Device, backend: str) -> "RowSumsPlan":
        return plan(self, device, backend)


@dataclass(frozen=True, kw_only=True)
class RowSumsPlan(Decision):
    """The path is "fused" or "torch"."""

    tiles: RowSumTiles | None = None

    def kernel_facts(self) -> Facts:
        return [] if self.tiles is None else [("tiles", f"{self.tiles.block_m} rows × {self.tiles.block_n} columns")]


def plan(problem: RowSumsProblem, device: Device, backend: str = "auto") -> RowSumsPlan:
    """The path that runs ``problem`` on ``device``."""
    unsupported = problem.why_no_kernels(device)
    # Auto mode takes torch until times are on record.
    choice = choose(problem, device, backend, {"fused": unsupported})
    flops, io_bytes = problem.M * problem.N, problem.element_bytes * problem.M * (problem.N + 1)
    return RowSumsPlan.of(
        problem, device, choice, reason="the kernel reads x once", flops=flops, bytes=io_bytes,
        saved_bytes=problem.element_bytes * problem.M * problem.N if problem.training else 0, unsupported=unsupported,
        tiles=None if choice.path == TORCH else RowSumTiles(),
    )  # fmt: skip
