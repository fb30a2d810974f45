"""Whole training steps of models, with ours and without: forward, loss, backward, and a fused AdamW.

    python -m benchmarks.steps                                          all models, eager and compiled
    python -m benchmarks.steps --models gpt2-768 --modes eager          one of them, eager alone
    python -m benchmarks.steps --contenders torch,auto                  without Liger-Kernel and without our norms
    python -m benchmarks.records update STEPS.json OTHER_MODELS.json    models of several runs in one record

Several GPUs can measure models at once: run a process on each of them, and on CPU cores of its own (``taskset``).

For each model all contenders of all modes share their parameters and their attention and are interleaved. The first
steps, in which the compiler works, are checked against the model in float32 (in float64 where it is float32 itself):
the loss and the gradients, of ours each of them, and in 8 bits the median of them, beside the recipe's own error
(:mod:`.step_truth`). What is wrong is not timed, and the exit status is 1. Nor is "auto-fp8" where no product ran in 8
bits: then it is "auto-norm" once more. Under adapters it keeps the frozen weights in 8 bits.

The rows of the record (:mod:`fusedlayers.bench.record`) are one per model (``grid``, ``title``, ``sizes``) and mode
(``direction``: "eager", "compile", "reduce-overhead"); shape is the number of tokens. ``held_bytes`` are weights and
the optimizer's state. Contenders (:data:`.step_models.NAMES`) have peak_bytes (the most beyond those, in the first
steps), first_seconds (of these steps, the compiler's work included), loss_error and gradients_error (relative, the
median over the parameters) and path (of all blocks; of a compiled model as they were planned while it was traced).
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fusedlayers.bench import record as records
from fusedlayers.bench.arguments import add_record_options, chosen_device, positive, record_path, several
from fusedlayers.bench.cases import DTYPES
from fusedlayers.bench.contenders import AUTO_SWITCHES, FUSED_SWITCHES, Contender, why_untimed
from fusedlayers.bench.record import Record
from fusedlayers.bench.timing import NotTimed, Timing, measure
from fusedlayers.bench.verification import Finding, Verification
from fusedlayers.closeness import MAX_ERROR_LIMIT, RMS_FLOOR
from fusedlayers.functional import float8
from fusedlayers.functional.dispatch import decisions
from fusedlayers.functional.switches import switched
from fusedlayers.planning.float8 import IN_8_BITS

from . import attention, step_tables
from .endings import answered, finish
from .loop_clock import loop_clock_for
from .step_models import (
    AUTO,
    FP8,
    IN_16_BITS,
    KERNELS,
    LIGER,
    LIGER_AUTO,
    NAMES,
    NORM,
    OURS,
    STEP_MODELS,
    TORCH,
    StepModel,
    Variant,
    check_liger,
    variants,
)  # fmt: skip
from .step_tables import MODES
from .step_truth import Truth

# Steps before the times: the compiler works in the first ones, and "reduce-overhead" records in the second or third.
FIRST_STEPS = 3
# Steps in a row on an idle device: the host launches the second while the first still runs.
STEPS_IN_A_ROW = 2
# What most users run. "reduce-overhead", which keeps all that its graphs work in, is for those who ask.
USUAL_MODES = ("eager", "compile")
USUAL_CONTENDERS = (TORCH, AUTO, NORM, LIGER, LIGER_AUTO, FP8)
# Whose code is in a step, beside torch's, Triton's and ours.
_LIBRARIES = ("transformers", "peft", "liger_kernel")
_COMPILE_MODES = {"compile": None, "reduce-overhead": "reduce-overhead"}
# A rounding of bfloat16, in which most of a model computes: the loss of random labels is an average of thousands.
_LOSS_LIMIT = 2.0**-8
# How far the gradient of the median parameter may be off in 8 bits, over the error of the recipe's model.
_FLOAT8_LIMIT = 1.1


def build_parser() -> argparse.ArgumentParser:
    """All options."""
    command = argparse.ArgumentParser(prog="python -m benchmarks.steps", description=(__doc__ or "").split("\n")[0])
    add_record_options(command)
    command.add_argument("--plot", action="store_true", help="draw the picture of the record")
    for word, known, usual, what in (
        ("--models", tuple(STEP_MODELS), tuple(STEP_MODELS), "default: all"),
        ("--modes", MODES, None, "default: eager and compile on a GPU, eager without one"),
        ("--contenders", NAMES, None, f"default: {','.join(USUAL_CONTENDERS)}, Liger-Kernel's where it is installed"),
    ):
        command.add_argument(
            word, type=partial(several, known=known), default=usual, metavar="NAME,…",
            help=f"of {','.join(known)}; {what}",
        )  # fmt: skip
    command.add_argument("--compile-liger", action="store_true", help="time Liger-Kernel's layers compiled, too")
    command.add_argument("--small", action="store_true", help="the same models with few numbers, to try it")
    command.add_argument(
        "--seconds", type=positive, default=0.5, help="timing per model and contender, beside warm-up (default: 0.5)"
    )
    return command


@dataclass(frozen=True)
class Step:
    """What a contender does: a step of one model in one way."""

    name: str
    mode: str
    variant: Variant
    model: Callable[..., Any]
    inputs: Mapping[str, Tensor]
    optimizer: torch.optim.Optimizer

    @property
    def switches(self) -> Mapping[str, str]:
        return FUSED_SWITCHES if self.name == KERNELS else AUTO_SWITCHES

    def gradients(self) -> Tensor:
        """The loss, with gradients in the parameters."""
        with self.variant.around():
            if self.mode == "reduce-overhead":
                torch.compiler.cudagraph_mark_step_begin()
            loss: Tensor = self.model(**self.inputs).loss
            loss.backward()
        return loss.detach()

    def run(self) -> None:
        """The whole step."""
        self.gradients()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)


class StepsInARow:
    """The work of the clock: ``call`` is :meth:`Step.run`."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.count = STEPS_IN_A_ROW if device.type == "cuda" else 1

    def run_all(self, call: Callable[[], None]) -> None:
        """As many steps as count."""
        for _ in range(self.count):
            call()


def main(arguments: list[str] | None = None) -> int:
    """Check and time the chosen models; the exit status."""
    return answered(build_parser(), _run, arguments)


def _run(chosen: argparse.Namespace, words: list[str]) -> int:
    device = chosen_device(chosen)
    dtype = chosen.dtype or ("bf16" if device.type == "cuda" else "fp32")
    modes = chosen.modes or (USUAL_MODES if device.type == "cuda" else USUAL_MODES[:1])
    if TORCH not in (chosen.contenders or USUAL_CONTENDERS):
        raise ValueError("argument --contenders: expected torch among them, which the others are compared with")
    check_liger(chosen.contenders or ())
    try:
        import transformers  # noqa: F401  what the models are of
    except ImportError as error:
        raise ValueError("steps needs transformers: pip install 'fusedlayers[models]'") from error
    path = record_path(chosen.output, "steps", dtype, device)
    contenders = chosen.contenders or _usual_contenders()
    method = {
        "seconds_per_row": chosen.seconds, "cold_cache_bytes": 0, "init": "normal", "seed": chosen.seed,
        "small": chosen.small, "attention": attention.NAME,
    }  # fmt: skip
    record = records.new_record(words, device, method, chosen.commit, _LIBRARIES)
    started = time.perf_counter()
    red = False
    for name in chosen.models:
        spent = time.perf_counter() - started
        if chosen.budget is not None and spent > chosen.budget:
            print(f"skip   {name}: the budget of {chosen.budget:g} s was spent")
            continue
        model = STEP_MODELS[name].small() if chosen.small else STEP_MODELS[name]
        before = time.perf_counter()
        rows = measured(
            model, modes, contenders, DTYPES[dtype], device, chosen.seed, chosen.seconds, chosen.compile_liger
        )
        print(f"{name}: {time.perf_counter() - before:.0f} s")
        for row in rows:
            row["dtype"] = dtype
            for contender, entry in row["contenders"].items():
                if entry["status"] != "timed":
                    print(f"  skip {row['direction']}, {contender}: {entry['reason']}")
            for verdict in row["verification"]:
                if verdict["status"] == "red":
                    red = True
                    print(f"  {row['direction']}, {verdict['contender']}: RED: {verdict['reason']}")
        record["rows"] += rows
        records.write(record, path)
    finish(record, path, step_tables, "slower than without us", plotting=chosen.plot)
    return int(red)


def _usual_contenders() -> tuple[str, ...]:
    """Those of whoever names none: without Liger-Kernel, and saying so, where it is not installed."""
    try:
        check_liger(USUAL_CONTENDERS)
    except ValueError as error:
        print(f"skip   {LIGER} and {LIGER_AUTO}: {str(error).partition(': ')[2]}")
        return tuple(name for name in USUAL_CONTENDERS if name not in (LIGER, LIGER_AUTO))
    return USUAL_CONTENDERS


def measured(
    model: StepModel, modes: Sequence[str], names: Sequence[str], dtype: torch.dtype, device: torch.device, seed: int,
    seconds: float, compile_liger: bool = False,
) -> list[Record]:  # fmt: skip
    """A row for each mode: all contenders checked, then timed together."""
    forget(device)
    # Nobody merges adapters here, so what they are added to is quantised once.
    float8.keep_frozen_weights(model.rank > 0)
    torch.manual_seed(seed)
    plain = model.build(device, dtype)
    inputs = model.inputs(device, dtype, seed)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-5, fused=True)
    truth = Truth(plain, inputs)
    entries: dict[str, Record] = {mode: {} for mode in modes}
    verdicts: dict[str, list[Verification]] = {mode: [] for mode in modes}
    entrants: list[Contender] = []
    places: dict[str, tuple[str, str]] = {}
    found = variants(plain, names)
    for mode in modes:
        for name in names:
            if reason := found[name].reason or _why_untimed(name, mode, device, compile_liger):
                entries[mode][name] = records.untimed_entry(reason)
                continue
            step = Step(name, mode, found[name], _in_mode(found[name], mode), inputs, optimizer)
            with switched(step.switches):
                verdict, entry = checked(step, truth, device)
            entries[mode][name] = entry
            verdicts[mode].append(verdict)
            if not entry["reason"]:
                label = f"{name}, {mode}"
                places[label] = mode, name
                entrants.append(Contender(label, step.run, step.switches, recorded=False))  # type: ignore[arg-type]
    timings = measure(
        entrants,
        StepsInARow(device),
        seconds=seconds * len(entrants),
        clock=loop_clock_for(device, runs=1, uncounted=1),
    )
    for label, timing in timings.items():
        mode, name = places[label]
        entries[mode][name] |= _times(timing, timings.get(f"{TORCH}, {mode}"))
    held = sum(_bytes(parameter) for parameter in plain.parameters())
    held += sum(_bytes(value) for state in optimizer.state.values() for value in state.values())
    return [
        {
            "case": "steps",
            "grid": model.name,
            "title": model.title,
            "shape": [model.sizes.tokens],
            "sizes": asdict(model.sizes),
            "direction": mode,
            "held_bytes": held,
            "verification": [verdict.as_json() for verdict in verdicts[mode]],
            "clocks": records.clocks(device),
            "contenders": entries[mode],
        }
        for mode in modes
    ]


def _bytes(value: Any) -> int:
    return value.numel() * value.element_size() if isinstance(value, Tensor) else 0


def forget(device: torch.device) -> None:
    """Models hold themselves in cycles: what is left of the last one must not count for the next."""
    torch.compiler.reset()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _why_untimed(name: str, mode: str, device: torch.device, compile_liger: bool) -> str:
    if name == KERNELS and (reason := why_untimed(device)):
        return reason
    if name in (LIGER, LIGER_AUTO) and mode != "eager" and not compile_liger:
        return "timed as it is, eager, without --compile-liger"
    if name == KERNELS and mode != "eager":
        # The switch is no part of what the compiler guards: what it made of auto mode would run.
        return "auto mode decides in compiled models"
    return ""


def _in_mode(variant: Variant, mode: str) -> Callable[..., Any]:
    assert variant.model is not None
    if mode == "eager":
        return variant.model
    return torch.compile(variant.model, dynamic=False, mode=_COMPILE_MODES[mode])


def checked(step: Step, truth: Truth, device: torch.device) -> tuple[Verification, Record]:
    """The first steps of a contender: whether it is right, and the entry of what is known of it before its times."""
    entry = records.untimed_entry("")
    before = 0
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
    start = time.perf_counter()
    try:
        with decisions() as taken:
            for _ in range(FIRST_STEPS):
                step.optimizer.zero_grad(set_to_none=True)
                loss = float(step.gradients())
    except Exception as error:
        entry["reason"] = f"{type(error).__name__}: {error}".splitlines()[0]
        return Verification(step.name, "", "red", entry["reason"]), entry
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        entry["peak_bytes"] = torch.cuda.max_memory_allocated(device) - before
    entry["first_seconds"] = time.perf_counter() - start
    paths = {path.rpartition(" ")[2] for path in taken}
    entry["path"] = " ".join(sorted(paths)) or None
    entry["loss_error"] = abs(loss - truth.loss) / abs(truth.loss)
    errors = truth.errors()
    step.optimizer.zero_grad(set_to_none=True)
    entry["gradients_error"] = statistics.median(errors)
    if truth.torch_errors is None:
        # Torch, eager, is the first contender of the first mode: the yardstick of all others.
        truth.torch_errors = errors
    compared = list(zip(truth.names, errors, truth.torch_errors, strict=True))
    if step.name not in OURS:
        # Other libraries promise no bound for each parameter.
        compared = [(" of the median parameter", entry["gradients_error"], statistics.median(truth.torch_errors))]
    allowed = [MAX_ERROR_LIMIT * yard + RMS_FLOOR for _, _, yard in compared]
    none_in_8_bits = bool(paths) and IN_8_BITS not in paths
    if step.name == FP8 and not none_in_8_bits:
        allowed = [_FLOAT8_LIMIT * truth.float8_error]
    findings = [
        Finding(name, error <= most, f"d{name}: error {error:.2g}, at most {most:.2g}")
        for (name, error, _), most in zip(compared, allowed, strict=True)
    ]
    loss_right = entry["loss_error"] <= _LOSS_LIMIT
    findings.append(Finding("loss", loss_right, f"loss {loss:.6g}, in more bits {truth.loss:.6g}"))
    faults = [finding.message for finding in findings if not finding.ok]
    if faults:
        entry["reason"] = "it is wrong"
    elif step.name == FP8 and none_in_8_bits:
        entry["reason"] = IN_16_BITS
    return Verification(step.name, entry["path"] or "", "red" if faults else "green", "; ".join(faults[:3])), entry


def _times(timing: Timing | NotTimed, yardstick: Timing | NotTimed | None) -> Record:
    if isinstance(timing, NotTimed):
        return {"reason": timing.reason}
    return {
        "status": "timed",
        "launched": asdict(timing.launched),
        "over_torch": timing.over(yardstick) if isinstance(yardstick, Timing) else None,
        "host_seconds": timing.host_seconds,
        "host_bound": timing.host_bound,
    }


if __name__ == "__main__":
    sys.exit(main())
