"""Calibration: which calls run faster in kernels on the user's own GPU, measured and recorded for planning.

The configurations that are needed pass the self-test first; then every call is verified and timed, launched and
replayed, beside the best of eager and compiled torch. ``planning.record`` says how the planner uses the times, and
``calibrations`` what their file holds.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from ... import calibrations
from ...devices import describe, record_failures, uncalibrated
from ...folders import check_folder
from ...kernels.device import HAS_TRITON, interpreted, toolchain
from ...planning import Device
from ...planning.call import in_words
from ...planning.record import TORCH, Record, Row
from .. import record
from ..arguments import add_device_option, chosen_device, positive
from ..cases import DTYPES, shape_text
from ..cases.trial import Trial
from ..selftest import find_failures
from ..selftest.running import is_broken
from ..selftest.trials import all_trials, launched
from .candidates import SYNTAX, at_shapes, of_model, parse_candidate, published
from .measuring import DroppedError, row_of

HELP = "measure on this GPU which calls run faster in kernels, for auto mode"
MINUTES, SECONDS = 5.0, 0.3


def add_options(command: argparse.ArgumentParser) -> None:
    """The options of the command."""
    add_device_option(command)
    command.add_argument("--minutes", type=positive, default=MINUTES, help="when no further call is begun (default: 5)")
    command.add_argument("--dtype", choices=DTYPES, default="bf16", help="of --shape and published sizes")
    command.add_argument(
        "--shape",
        type=parse_candidate,
        action="extend",
        nargs="+",
        metavar=SYNTAX,
        help="such as ffn:16384x1024x4096:silu,gated; one or more (default: the published sizes, and fewer rows)",
    )
    command.add_argument(
        "--model", metavar="MODULE:FUNCTION", help="at the sizes of a model: what the function gives is (model, inputs)"
    )
    command.add_argument("--again", action="store_true", help="measure what is on record, too")
    command.add_argument("--export", type=Path, metavar="FILE", help="write what is on record to a file, for others")
    command.add_argument("--merge", type=Path, nargs="+", metavar="FILE", help="put others' files on record")


def main(chosen: argparse.Namespace) -> int:
    """Measure, or write and read files; the exit status: 0 if something is on record for planning, else 1.

    Raises:
        ValueError: an argument is wrong, or a file; the message names it.
    """
    check_folder(calibrations.calibration_file().parent)
    if chosen.export or chosen.merge:
        return _share(chosen.merge or (), chosen.export)
    if (os.environ.get("RANK") or "0") != "0":
        print("calibrate: rank 0 measures; what it writes is read by the other ranks of the same home")
        return 0
    device = chosen_device(chosen)
    if reason := why_nothing_to_measure(device):
        print(f"calibrate: there is nothing to measure: {reason}", file=sys.stderr)
        return 1
    with uncalibrated():
        return _calibrate(chosen, device)


def why_nothing_to_measure(device: torch.device) -> str | None:
    """Why no kernel can be timed on ``device``, or None."""
    if not HAS_TRITON:
        return "Triton is not installed, so that everything runs through torch"
    if device.type != "cuda":
        return "there is no GPU"
    return "TRITON_INTERPRET is set, so that no kernel would be compiled for the GPU" if interpreted() else None


def _share(merged: Sequence[Path], exported: Path | None) -> int:
    if merged:
        taken, dropped = calibrations.merge(merged)
        print(f"calibrate: {taken} entries are new: {calibrations.calibration_file()}")
        if dropped:
            print(f"calibrate: {dropped} entries are not those that were measured, and were left out")
    if exported is not None:
        try:
            print(f"calibrate: {calibrations.export(exported)} entries in {exported}")
        except OSError as error:
            raise ValueError(f"argument --export: {exported}: {error.strerror}") from error
    return 0


def _calibrate(chosen: argparse.Namespace, device: torch.device) -> int:
    deadline = time.monotonic() + 60 * chosen.minutes
    facts = describe(device)
    trials, left = list[Trial](), list[str]()
    if chosen.model:
        trials, left = of_model(chosen.model)
    if chosen.shape:
        trials += at_shapes(chosen.shape, chosen.dtype)
    if not (chosen.model or chosen.shape):
        trials = published(chosen.dtype)
    known = None if chosen.again else calibrations.on_record(facts)
    pending = [trial for trial in trials if not is_known(trial, known)]
    where = f"{facts.name}, {toolchain(facts.architecture)}"
    print(f"calibrate: {len(pending)} of {len(trials)} calls are to be measured on {where}, torch {torch.__version__}")
    for words in left:
        print(f"  not measured: {words}: no benchmark case calls it like this")
    pending = passed(pending, facts, device)
    driver = record.device_facts(device)["driver"]
    found = list[Row]()
    for count, trial in enumerate(pending):
        if time.monotonic() > deadline:
            print(f"calibrate: the time is up before {len(pending) - count} calls; run it again to go on with them")
            break
        try:
            row = row_of(trial, device, SECONDS)
        except Exception as error:
            words = str(error) if isinstance(error, DroppedError) else f"{type(error).__name__}: {error}"
            print(f"  dropped: {label(trial)}: {words.splitlines()[0]}")
            if is_broken(device):
                print("calibrate: the GPU takes no more calls of this process; run it again", file=sys.stderr)
                break
            continue
        print(f"  {label(trial)}: {outcome(row)}")
        torch.cuda.empty_cache()
        # After each call, so that nothing is lost where the run is interrupted.
        path = calibrations.add(facts, [row], driver)
        found.append(row)
    if found:
        wins = sum(fastest(row.replayed or row.launched) != TORCH for row in found)
        print(f"calibrate: {wins} of {len(found)} were faster in kernels; recorded in {path}, which auto mode reads")
    return 0 if found or known is not None else 1


def is_known(trial: Trial, known: Record | None) -> bool:
    """Whether a call of these sizes is on record."""
    problem = trial.problem()
    place = problem.recorded_kin, problem.variant, problem.sizes
    return known is not None and any((row.kin, row.variant, row.sizes) == place for row in known.rows())


def passed(trials: Sequence[Trial], facts: Device, device: torch.device) -> list[Trial]:
    """The calls whose kernels give exact integers here; what fails is recorded, as by the self-test."""
    wanted = {trial: set(launched(trial.plan(facts)).values()) for trial in trials}
    missing = set[str]().union(*wanted.values())
    chosen, tested = list[Trial](), set[str]()
    for trial in all_trials(facts):
        # One for each configuration is enough: the whole self-test runs each with several options.
        if names := missing.intersection(launched(trial.plan(facts)).values()):
            chosen.append(trial)
            tested |= names
            missing -= names
    if chosen:
        print(f"calibrate: self-test of {len(tested)} configurations first")
    failures = find_failures(chosen, device)
    record_failures(facts, list(failures), tested)
    for name, reason in failures.items():
        print(f"  FAILED {name}\n         {reason}")
    for trial in (trial for trial in trials if not wanted[trial].isdisjoint(failures)):
        print(f"  dropped: {label(trial)}: its kernels give wrong numbers here")
    return [trial for trial in trials if wanted[trial].isdisjoint(failures)]


def label(trial: Trial) -> str:
    """A call in words."""
    options, case = trial.options, trial.prepared()[0]
    words = [options.activation] if case.has_activation else []
    words += [options.op, "rows" if options.dim == -2 else "columns"] if "op" in case.flags else []
    words += [word for word, given in (("gated", options.gated), ("bias", options.bias)) if given]
    passes = "forward and backward" if case.backward else "forward"
    return f"{' '.join([trial.case, shape_text(trial.shape), *words, trial.dtype])}, {passes}"


def fastest(seconds: Mapping[str, float]) -> str:
    """The path that took least."""
    return min(seconds, key=seconds.__getitem__)


def outcome(row: Row) -> str:
    """What a row says, in words."""
    return "; ".join(
        f"{how} {', '.join(f'{path} {in_words(seconds[path])}' for path in sorted(seconds, key=seconds.__getitem__))}"
        for how, seconds in (("launched", row.launched), ("replayed", row.replayed))
        if seconds
    )
