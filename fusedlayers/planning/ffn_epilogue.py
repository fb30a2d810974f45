"""The epilogue path of an FFN: activations, gate and bias gradients in the epilogues of products, of any width.

Its forward pass keeps the pre-activations, where torch keeps them, the activated ones and, gated, their product.
"""

from dataclasses import dataclass
from typing import Any

from ..kernels.tuning import EpiloguePipeline, EpilogueTiles, epilogue_tiles
from . import hidden_gradient
from .call import no_kernels, not_measured, too_small
from .devices import Device
from .hidden_gradient import LEAST_WIDTH, HiddenGradientPlan, HiddenGradientProblem

# From how many floating-point operations of the products with x on (tokens × d_model × d_ff × 2, gated twice that)
# the path was faster than torch on an H200, bfloat16: (launched one by one, inside a CUDA graph). By (gated, training).
# Launched one by one, the host needs 0.4 to 0.5 ms for a forward and backward pass, eager torch 0.3 to 0.4.
FASTER_FROM: dict[tuple[bool, bool], tuple[int, int]] = {
    (False, False): (2**34, 2**32),
    (False, True): (9 * 2**32, 2**34),
    (True, False): (2**29, 2**32),
    (True, True): (11 * 2**32, 2**34),
}
# With 256 tokens the device was as fast or faster with torch at every width: too few tiles of 128 rows. Without a
# backward pass a gated FFN is two launches, torch's are five: launched one by one, the host decides.
LEAST_ROWS, LEAST_LAUNCHED_ROWS = 1024, 64
# In chunks they are measured against torch's operations in chunks, which are many more.
LEAST_CHUNK_WIDTH = 320
# Elements of 16 bits at a multiple of which rows must start for the warp-specialised kernels: the only ones measured.
VECTOR = 8


@dataclass(frozen=True)
class EpiloguePlan:
    """The tiles of the kernels; no gradient without one that goes through the hidden.

    ``data_gradient_pipeline`` is there where dx is summed over groups of hidden units: on the chunked path alone, and
    where no kernel does that, torch's product does.
    """

    hidden_tiles: EpilogueTiles
    hidden_pipeline: EpiloguePipeline | None
    gradient: HiddenGradientPlan | None
    data_gradient_pipeline: EpiloguePipeline | None = None


def plan(problem: Any, device: Device, columns: int, summed: bool = False) -> EpiloguePlan:
    """The tiles for ``problem``, a ``planning.Problem`` of an FFN, whose backward pass takes ``columns`` at a time.

    ``summed``: dx is summed over such groups of hidden units.
    """
    p = problem
    gradient = data = None
    if p.training:
        gradient = hidden_gradient.plan(_gradient_problem(p, columns), device, "triton")
        if summed and p.needs_data_gradient:
            data = hidden_gradient.epilogue_pipeline("data_gradient", p, device)
    pipeline = hidden_gradient.epilogue_pipeline("hidden", p, device)
    tiles = epilogue_tiles(device.architecture, 8 * p.element_bytes, p.gated, p.dropout)
    return EpiloguePlan(tiles, pipeline, gradient, data)


def _gradient_problem(p: Any, columns: int) -> HiddenGradientProblem:
    return HiddenGradientProblem(
        M=p.M, N=columns, O=p.O, dtype=p.dtype, activation=p.activation, gated=p.gated, dropout=p.dropout,
        bias=p.needs_bias_gradient,
    )  # fmt: skip


def why_unsupported(problem: Any, device: Device) -> str | None:
    """Why the path cannot run ``problem``, or None."""
    if problem.recompute is True:
        return "it keeps pre-activations, which recompute=True forbids"
    return no_kernels(problem, device)


def why_slower_in_chunks(problem: Any, device: Device) -> str | None:
    """Why torch's operations compute the chunks in auto mode, or None.

    On an H200 a training step in chunks took 4.0, 14.5 and 3.6 ms in the warp-specialised kernels, and 8.2, 24 and 9.0
    in torch's operations (16,384 tokens × 1024 × 4096, 8192 × 4096 × 14,336, gated 16,384 × 1024 × 2816); narrow ones
    4.0, 4.6 and 2.4 ms, and 10.4, 9.2 and 3.7 (49,152 × 384 × 1536, 65,536 × 320 × 1280, gated 8192 × 320 × 864).
    """
    return not_measured(problem, device) or _why_portable(problem, device, LEAST_CHUNK_WIDTH)


def why_slower(problem: Any, device: Device) -> str | None:
    """Why torch is expected to be faster, from measurements, or None."""
    if (reason := not_measured(problem, device) or _why_portable(problem, device, LEAST_WIDTH)) is not None:
        return reason
    if problem.training and hidden_gradient.choose_pipeline(_gradient_problem(problem, problem.N), device) is None:
        return "the sums of so many rows pass their limit in the kernel that was measured faster than torch"
    least_rows = LEAST_LAUNCHED_ROWS if problem.gated and problem.waits_for_host else LEAST_ROWS
    if least_rows > problem.M:
        return f"{problem.M} tokens: torch was as fast or faster below {least_rows:,}"
    flops = 2 * problem.M * problem.K * problem.N * (2 if problem.gated else 1)
    return too_small(flops, "FLOPs", FASTER_FROM[problem.gated, problem.training], problem.captured)


def _why_portable(problem: Any, device: Device, least_width: int) -> str | None:
    """Why the warp-specialised kernels do not run ``problem``, or were not measured on its like; or None."""
    if not device.pipelined:
        return "only the warp-specialised kernels were measured faster than torch, and they do not run here"
    if min(problem.K, problem.O) < least_width:
        return f"not measured on this path below width {least_width}"
    if any(size % VECTOR for size in (problem.K, problem.N, problem.O)):
        return f"only the warp-specialised kernels were measured faster; their widths are multiples of {VECTOR}"
    if problem.portable:
        return f"only the warp-specialised kernels were measured faster; they cannot copy {problem.portable} as it lies"
    return None
