"""One trial: exactly the right integers, again and again, and which configuration is to blame where they are not."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from ...devices import assumed, describe
from ...functional.switches import switched
from ...planning import Decision
from ..cases import DTYPES
from ..cases.trial import Trial
from ..contenders import FUSED, contender
from ..exactness import exact_work, in_dtypes, inequality
from .trials import launched

# Some compilers get a configuration wrong only now and then.
REPEATS = 20


@dataclass(frozen=True)
class Outcome:
    """What came of a trial: configuration -> what was wrong with it; ``broken`` says that the process is unusable."""

    failures: dict[str, str]
    broken: bool = False


def run(trial: Trial, device: torch.device) -> Outcome:
    """The trial on ``device``, ``REPEATS`` times; once through the interpreter, which always does the same."""
    with assumed(**trial.facts):
        plan = trial.plan(describe(device))
        if not launched(plan):
            # No kernel runs this on the device, so that none can be to blame.
            return Outcome({})
        case, options = trial.prepared()
        work, truth = exact_work(case, options, trial.shape, dtype=DTYPES[trial.dtype], device=device, seed=0)
        work = replace(work, inputs=trial.laid_out(work.inputs))
        expected = in_dtypes(case, work, truth, DTYPES[trial.dtype])
        names = [*case.results, *(f"d{name}" for name in work.leaves)] if case.backward else list(case.results)
        ours = contender(FUSED, case, options)
        failures: dict[str, str] = {}
        with switched({**ours.switches, **trial.switches}):
            for _ in range(1 if device.type == "cpu" else REPEATS):
                results: tuple[torch.Tensor, ...] = ()
                try:
                    results = work.forward(ours.call)
                    results += work.gradients(results)
                    faults = [*map(inequality, names, results, expected)]
                except Exception as error:
                    reason = f"{trial}: {type(error).__name__}: {error}"
                    # A gradient that cannot be computed says nothing about the forward pass.
                    computed = case.results if results else ()
                    return Outcome(failures | blamed(plan, None, reason, computed), is_broken(device))
                for name, fault in zip(names, faults, strict=False):
                    if fault is not None:
                        failures = blamed(plan, name, f"{trial}: {fault}") | failures
        return Outcome(failures)


def blamed(plan: Decision, result: str | None, reason: str, computed: tuple[str, ...] = ()) -> dict[str, str]:
    """The configurations that computed ``result``, or all but those of what was ``computed``; and the reason."""
    yields = plan.yields
    found = {
        field: name for field, name in launched(plan).items() if not set(yields.get(field, ())).intersection(computed)
    }
    owners = [field for field in found if result in yields.get(field, ())]
    rest = [field for field in found if field not in yields]
    fields = found if result is None else owners or rest or found
    return {found[field]: reason for field in fields}


def is_broken(device: torch.device) -> bool:
    """Whether the device refuses everything after an error, as CUDA does after an illegal access."""
    if device.type != "cuda":
        return False
    try:
        torch.cuda.synchronize(device)
    except RuntimeError:
        return True
    return False
