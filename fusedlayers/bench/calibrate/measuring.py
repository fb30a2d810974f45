"""One call, right first and then timed: our kernels beside the best of torch, launched and replayed."""

from __future__ import annotations

import math

import torch

from ...devices import describe
from ...planning.record import TORCH, Row
from ..cases import DTYPES, Draw
from ..cases.trial import Trial
from ..contenders import AUTO, COMPILED, EAGER, FUSED, contender, our_paths, our_plan
from ..timing import NotTimed, clock_for, measure
from ..verification import verify
from ..work import timed_work


class DroppedError(Exception):
    """Nothing can be recorded of a call, for this reason."""


def row_of(trial: Trial, device: torch.device, seconds: float) -> Row:
    """What is to be recorded of a call: seconds of each path, launched and, where it can be captured, in a graph.

    Torch's are those of eager or compiled torch, whichever is faster.

    Raises:
        DroppedError: kernels cannot run it, or do not compile, or give wrong numbers.
    """
    case, options = trial.prepared()
    dtype = DTYPES[trial.dtype]
    for found in verify(case, options, trial.shape, init="normal", dtype=dtype, device=device):
        if found.red:
            raise DroppedError(found.summary())
    # A call's compiled code is of no use to the next one, and many would exceed the compiler's limit of variants.
    torch._dynamo.reset()
    clock = clock_for(device)
    draw = Draw(dtype, device, seed=2)
    work = timed_work(case, options, trial.shape, draw, case.backward, clock.cold_cache_bytes)
    if (reason := our_plan(case, options, work, backend="triton").unsupported) is not None:
        raise DroppedError(reason)
    paths = our_paths(case, options, work)
    if {*paths[AUTO]} <= {TORCH, *paths[FUSED]}:
        del paths[AUTO]  # The others take these paths, too.
    names = [EAGER, COMPILED, *paths]
    timings = measure([contender(name, case, options) for name in names], work, seconds=seconds, clock=clock)
    if isinstance(forced := timings[FUSED], NotTimed):
        raise DroppedError(forced.reason)
    problem, facts = trial.problem(), describe(device)
    launched, replayed = dict[str, float](), dict[str, float]()
    for name in names:
        if isinstance(timing := timings[name], NotTimed):
            continue
        ways = paths.get(name, (TORCH, TORCH))
        for times, spread, path in zip((launched, replayed), (timing.launched, timing.replayed), ways, strict=True):
            recorded = problem.recorded(path, facts)
            if spread is not None and spread.median < times.get(recorded, math.inf):
                times[recorded] = spread.median
    return Row(problem.recorded_kin, problem.variant, problem.sizes, launched, replayed, sure=True)
