"""Pure functions from a problem and a device to a plan: which path runs, with which tiles and splits, and why.

No tensors and no device queries here, so every decision is covered by tests on any machine. One file per operation
holds its problem, its plan and its planner.
"""

from collections.abc import Callable
from typing import Any

from . import gemm_gemm, gemm_reduce, hidden_gradient, linear, maxsim, weight_gradient
from .avoiding import configurations, without_avoided
from .call import KERNEL_PATHS, Call, Decision
from .devices import BACKENDS, CEILINGS, Device, floor_seconds
from .ffn_chunked import WORKSPACE_LIMIT, ChunkPass, ChunkPlan
from .gemm_gemm import Plan, Problem
from .gemm_reduce import ReducePlan, ReduceProblem
from .hidden_gradient import HiddenGradientPlan, HiddenGradientProblem
from .linear import LinearPlan, LinearProblem, ProductPlan
from .maxsim import MaxSimPlan, MaxSimProblem
from .recomputing import Choice, choices
from .weight_gradient import WeightGradientPlan, WeightGradientProblem

_PLANNERS: dict[type[Call], Callable[[Any, Device, str], Any]] = {
    Problem: gemm_gemm.plan,
    ReduceProblem: gemm_reduce.plan,
    MaxSimProblem: maxsim.plan,
    HiddenGradientProblem: hidden_gradient.plan,
    WeightGradientProblem: weight_gradient.plan,
    LinearProblem: linear.plan,
}


def plan(problem: Call, device: Device, backend: str = "auto") -> Any:
    """The path that runs ``problem`` on ``device``: the plan of its operation.

    ``backend`` is the user's wish: ``"auto"`` takes what was measured fastest, ``"triton"`` the kernels wherever they
    can run, ``"torch"`` never a kernel. What failed the self-test on the device is avoided whatever the wish.
    """
    planner = _PLANNERS[type(problem)]
    if not device.avoided:
        return planner(problem, device, backend)
    return without_avoided(lambda facts, wish: planner(problem, facts, wish), device, backend)


__all__ = [
    "BACKENDS",
    "CEILINGS",
    "KERNEL_PATHS",
    "WORKSPACE_LIMIT",
    "Call",
    "Choice",
    "ChunkPass",
    "ChunkPlan",
    "Decision",
    "Device",
    "HiddenGradientPlan",
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
    "choices",
    "configurations",
    "floor_seconds",
    "plan",
]
