"""Pure functions from a problem and a device to a plan: which path runs, with which tiles and splits, and why.

No tensors and no device queries here, so every decision is covered by tests on any machine. One file per operation
holds its problem, its planner, and its plan with what ``explain`` prints of it.
"""

from typing import Any

from .avoiding import configurations, without_avoided
from .call import KERNEL_PATHS, Call, Decision, unmeasured, why_never_kernels
from .devices import BACKENDS, CARDS, Device, card, floor_seconds
from .ffn_chunked import ChunkPlan
from .float8 import Float8LinearProblem, Float8Plan, Float8Problem
from .gemm_gemm import Plan, Problem
from .gemm_reduce import ReducePlan, ReduceProblem
from .hidden_gradient import HiddenGradientProblem
from .linear import LinearPlan, LinearProblem, ProductPlan
from .maxsim import MaxSimPlan, MaxSimProblem
from .moe_ffn_float8 import Float8MoePlan, Float8MoeProblem
from .weight_gradient import WeightGradientPlan, WeightGradientProblem


def plan(problem: Call, device: Device, backend: str = "auto") -> Any:
    """The path that runs ``problem`` on ``device``: the plan of its operation.

    ``backend`` is the user's wish: ``"auto"`` takes what is expected to be fastest by what was measured, ``"triton"``
    the kernels wherever they can run, ``"torch"`` never a kernel. What failed the self-test on the device is avoided
    whatever the wish.
    """
    return without_avoided(problem.plan, device, backend) if device.avoided else problem.plan(device, backend)


__all__ = [
    "BACKENDS",
    "CARDS",
    "KERNEL_PATHS",
    "Call",
    "ChunkPlan",
    "Decision",
    "Device",
    "Float8LinearProblem",
    "Float8MoePlan",
    "Float8MoeProblem",
    "Float8Plan",
    "Float8Problem",
    "HiddenGradientProblem",
    "LinearPlan",
    "LinearProblem",
    "MaxSimPlan",
    "MaxSimProblem",
    "Plan",
    "Problem",
    "ProductPlan",
    "ReducePlan",
    "ReduceProblem",
    "WeightGradientPlan",
    "WeightGradientProblem",
    "card",
    "configurations",
    "floor_seconds",
    "plan",
    "unmeasured",
    "why_never_kernels",
]
