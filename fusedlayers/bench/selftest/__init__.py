"""The self-test: every kernel configuration for this machine's GPU, compiler and assembler, with exact integers.

What fails is named and recorded in the user's cache folder, where planning finds what to avoid; what passes again is
forgotten.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence

import torch

from ... import releases
from ...devices import describe, record_failures
from ...kernels.device import HAS_TRITON, interpreted, toolchain
from ..cases.trial import Trial
from .processes import process_count, run_in_processes
from .running import Outcome, run
from .trials import all_trials, covered, few_trials, short_trials


def main(device: torch.device, say: Callable[[str], None] = print, *, short: bool = False) -> int:
    """Test ``device``; the exit status: 0 if all is right, 1 if something failed or there is nothing to test.

    ``short``: one call of each kind of kernel, as before auto mode takes kernels under an unknown release of Triton.
    """
    if reason := why_nothing_to_test(device):
        print(f"selftest: there is nothing to test: {reason}", file=sys.stderr)
        return 1
    started = time.perf_counter()
    facts = describe(device)
    trials = few_trials() if device.type == "cpu" else short_trials(facts) if short else all_trials(facts)
    where = f"{facts.name}, {toolchain(facts.architecture)}"
    say(f"selftest: {len(trials)} calls on {where}")
    failures = find_failures(trials, device, say)
    tested = covered(trials, facts)
    try:
        path = record_failures(facts, list(failures), tested if short else None)
        if facts.release_note and not short:
            # From now on every configuration is judged by itself.
            releases.record(facts)
        unwritten = ""
    except (OSError, ValueError) as error:
        path, unwritten = None, str(error)
    for name, reason in failures.items():
        say(f"FAILED {name}\n       {reason}")
    say(
        f"selftest: {len(tested - set(failures))} of {len(tested | set(failures))} configurations give exact integers, "
        f"in {time.perf_counter() - started:.0f} s"
    )
    if unwritten:
        say(f"not recorded, so that auto mode does not know of it: {unwritten}")
    elif failures:
        say(f"recorded in {path}: from now on these are avoided here, until this test passes")
    elif path is not None:
        say(f"{path}: what failed here before is forgotten")
    return 1 if failures else 0


def why_nothing_to_test(device: torch.device) -> str | None:
    """Why no kernel runs on ``device``, or None."""
    if not HAS_TRITON:
        return "Triton is not installed, so that everything runs through torch"
    if device.type == "cpu" and not interpreted():
        return "there is no GPU (TRITON_INTERPRET=1 tests a few kernels on the CPU, through Triton's interpreter)"
    if device.type == "cuda" and interpreted():
        return "TRITON_INTERPRET is set, so that no kernel would be compiled for the GPU"
    return None


def find_failures(trials: Sequence[Trial], device: torch.device, say: Callable[[str], None] = print) -> dict[str, str]:
    """Configuration -> what was wrong with it."""
    failures: dict[str, str] = {}
    finished = 0

    def done(trial: Trial, outcome: Outcome) -> None:
        nonlocal finished
        finished += 1
        for name, reason in outcome.failures.items():
            failures.setdefault(name, reason)
        if finished % 50 == 0 and finished < len(trials):
            say(f"  {finished} of {len(trials)}")

    if device.type == "cpu":
        for trial in trials:
            done(trial, run(trial, device))
    else:
        run_in_processes(trials, device, process_count(len(trials), device), done)
    return dict(sorted(failures.items()))
