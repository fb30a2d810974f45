"""What the self-test calls: for every tile configuration that the planner can choose on a device, a call that takes it.

Each benchmark case has its own trials. The sizes are small, and still every loop of a kernel runs several times: whole
tiles only, and tails in all of them.
"""

from __future__ import annotations

from ... import planning
from ...planning import Decision, Device
from ..cases import ALL
from ..cases.trial import Trial


def all_trials(device: Device) -> list[Trial]:
    """Every trial for a GPU; each configuration is taken by one with relu and by one without an activation."""
    return list(dict.fromkeys(trial for case in ALL.values() for trial in case.trials(device)))


def short_trials(device: Device) -> list[Trial]:
    """For each kind of kernel and of configuration one trial that takes it, in few trials."""
    kinds = {
        trial: {name.split("(")[0] for name in launched(trial.plan(device)).values()} for trial in all_trials(device)
    }
    missing, chosen = set[str]().union(*kinds.values()), list[Trial]()
    while missing:
        chosen.append(max(kinds, key=lambda trial: len(kinds[trial] & missing)))
        missing -= kinds[chosen[-1]]
    return chosen


def few_trials() -> list[Trial]:
    """A small subset for Triton's interpreter, which is slow, and wrong for bfloat16."""
    return [trial for case in ALL.values() for trial in case.few_trials]


def launched(plan: Decision) -> dict[str, str]:
    """Field of the plan -> the configuration that runs where operands lie as in the trials: in whole, aligned rows."""
    found = {field: names[0] for field, names in planning.configurations(plan).items()}
    if not plan.problem.training:
        # A loss head plans them whatever is wanted, as its path may not depend on that.
        found.pop("gradient_tiles", None)
    if "stored" in found:
        # Its kernels take the place of both gradients'.
        return {field: name for field, name in found.items() if field in ("forward_tiles", "stored")}
    for field in [field for field in found if field.endswith("pipeline")]:
        # In the place of a generic kernel, or of torch's product.
        found.pop(field.removesuffix("pipeline") + "tiles", None)
    return found


def covered(trials: list[Trial], device: Device) -> set[str]:
    """The configurations that these trials run."""
    return {name for trial in trials for name in launched(trial.plan(device)).values()}
