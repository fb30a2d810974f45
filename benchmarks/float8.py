"""Layers of ``precision="fp8"`` beside ours in bf16, torch's, and two other ways to compute in 8 bits.

    python -m benchmarks.float8                   all layers
    python -m benchmarks.float8 --seconds 5       timed for longer
    python -m benchmarks.float8 --layers experts  only those
    python -m benchmarks.float8 --forced          8 bits also where auto mode would not take them

*Separate* is ``torch._scaled_mm`` with scales of rows, and torch.compile of all else. *torchao* is torchao's float8
training, compiled in the same way, if it is installed (``pip install torchao``). Of its two recipes with scales of rows
it runs the one whose weight gradients are computed as ours are: ``rowwise`` where auto mode computes them from operands
in 8 bits, and ``rowwise_with_gw_hp`` where from operands in 16.

*fp8* quantises the weights at every call, as the first training call after an optimizer's step does; *weights kept* is
a further one, such as that of another micro-batch. Launched calls are timed before CUDA graphs are captured, because no
weight that was used in a graph is kept.

The rows of the record (:mod:`fusedlayers.bench.record`) have the case ``float8``, ``title``, ``shape`` and
``direction``; ``launched`` and ``replayed``, {contender: {median, first_quartile, third_quartile}}; ``paths``, ours by
the kind of time; ``noise``, {contender: the signal over the noise in dB beside eager torch, the least of y, dx and the
gradients of weights, null for the same bits}; ``compilation``, {contender: seconds}, and ``clocks``. The versions have
torchao's if it took part.

Exit status: 0 if everything is right, 1 if a result is wrong or nothing can be measured, 2 for a bad command line.
"""

from __future__ import annotations

import argparse
import gc
import math
import random
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict

import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

from fusedlayers.bench import record as records
from fusedlayers.bench.arguments import add_record_options, positive, record_path
from fusedlayers.bench.cases import shape_text
from fusedlayers.bench.contenders import AUTO_SWITCHES
from fusedlayers.bench.record import Record
from fusedlayers.bench.runner import FORWARD, FORWARD_BACKWARD
from fusedlayers.bench.tables import DIRECTIONS, ENOUGH, KINDS, NONE, Table, shape_of
from fusedlayers.bench.timing import (
    DISCARDED_ROUNDS,
    FEWEST_ROUNDS,
    MOST_ROUNDS,
    WARM_UP_RUNS,
    Clock,
    clock_for,
    spread,
)
from fusedlayers.functional.dispatch import decisions
from fusedlayers.functional.float8 import forget_weights
from fusedlayers.functional.switches import switched

from .endings import answered, chosen_gpu, day_and_commit
from .float8_layers import (
    BF16,
    COMPILED,
    FP8,
    KEPT,
    LAYERS,
    SEPARATE,
    TORCH,
    TORCHAO,
    Layer,
    contenders,
    has_torchao,
)
from .layer_tables import other_commits

# The least signal over noise, in dB, beside eager torch.
_LEAST = {COMPILED: 35.0, SEPARATE: 18.0, TORCHAO: 18.0, BF16: 35.0, FP8: 18.0, KEPT: 18.0}
# Others' ways to compute in 8 bits.
_PEERS = (SEPARATE, TORCHAO)
_BEST = "best peer"
_MOST_WARM_UPS = 10
Step = Callable[[], tuple[Tensor, ...]]


def measured(layer: Layer, direction: str, clock: Clock, device: torch.device, seconds: float, seed: int) -> Record:
    """A row of the record: each contender compared with torch, and timed for about ``seconds``, launched and replayed.

    Raises:
        ValueError: a result is wrong; the message names the contender.
    """
    torch._dynamo.reset()
    torch.manual_seed(seed)
    backward = direction == FORWARD_BACKWARD
    tokens, columns, hidden, *_ = layer.shape
    x = torch.randn(tokens, columns, device=device, dtype=torch.bfloat16, requires_grad=backward)
    upstream = torch.randn(tokens, columns if layer.activation else hidden, device=device, dtype=torch.bfloat16)
    steps = {name: _step(name, each, x, upstream) for name, each in contenders(layer, device, backward).items()}
    compilation = {name: _warm_up(step) for name, step in steps.items()}
    noise = verified(steps)
    noted = {name: _Noted(step) for name, step in steps.items()}
    for name in (BF16, FP8):
        noted[name]()
    times, paths = dict[str, Record](), dict[str, Record]()
    for kind in KINDS:
        if kind == "launched":
            runs: dict[str, Callable[[], object]] = dict(steps)
        else:
            runs = {}
            for name in (name for name in noted if name != KEPT):
                graph, reason = clock.capture(noted[name])
                if graph is None:
                    print(f"  {name} is not replayed: {reason}", file=sys.stderr)
                else:
                    runs[name] = graph
        times[kind] = _interleaved(runs, clock, seconds)
        paths[kind] = {name: noted[name].paths for name in (BF16, FP8) if name in runs}
    return {
        "case": "float8", "title": layer.title, "shape": list(layer.shape), "direction": direction, **times,
        "paths": paths, "noise": noise, "compilation": compilation, "clocks": records.clocks(device),
    }  # fmt: skip


def _step(name: str, module: nn.Module, x: Tensor, upstream: Tensor) -> Step:
    leaves = (x, *(each for each in module.parameters() if each.requires_grad))

    def step() -> tuple[Tensor, ...]:
        if name == FP8:
            forget_weights()
        with torch.set_grad_enabled(x.requires_grad):
            y = module(x)
            return (y, *torch.autograd.grad(y, leaves, upstream)) if x.requires_grad else (y,)

    return step


class _Noted:
    """A step that notes the paths of its last call: the one that a capture records."""

    def __init__(self, step: Step) -> None:
        self.step, self.paths = step, ""

    def __call__(self) -> None:
        with decisions() as taken:
            self.step()
        self.paths = " ".join(sorted({each.rpartition(" ")[2] for each in taken}))


def _warm_up(step: Step) -> float:
    """Seconds until nothing is compiled any more.

    Raises:
        ValueError: that does not end.
    """
    started = until = time.perf_counter()
    calm = 0
    for _ in range(_MOST_WARM_UPS):
        before = {name: dict(each) for name, each in counters.items()}
        step()
        calm += 1
        if before != {name: dict(each) for name, each in counters.items()}:
            calm, until = 0, time.perf_counter()
        if calm == WARM_UP_RUNS:
            return until - started
    raise ValueError(f"still compiles after {_MOST_WARM_UPS} calls")


def verified(steps: dict[str, Step]) -> dict[str, float | None]:
    """The least signal over noise of each contender's results beside torch's, in dB; None for the same bits.

    Raises:
        ValueError: it is too little; the message names the contender.
    """
    expected = [each.detach().float() for each in steps[TORCH]()]
    noise: dict[str, float | None] = {}
    for name, least in _LEAST.items():
        if name in steps:
            results = zip(steps[name](), expected, strict=True)
            ratios = [_decibels(ours.detach().float(), truth) for ours, truth in results]
            # The least number, but a NaN above all.
            found = next(filter(math.isnan, ratios), min(ratios))
            if not found >= least:
                raise ValueError(f"{name} is wrong: {found:.1f} dB beside torch, expected at least {least:g}")
            noise[name] = round(found, 1) if math.isfinite(found) else None
    return noise


def _decibels(ours: Tensor, truth: Tensor) -> float:
    return float(10 * torch.log10(truth.square().sum() / (ours - truth).square().sum()))


def _interleaved(runs: dict[str, Callable[[], object]], clock: Clock, seconds: float) -> Record:
    """Median and quartiles of each, of rounds in which all are visited in random order."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    order, until = random.Random(0), math.inf
    for number in range(DISCARDED_ROUNDS + MOST_ROUNDS):
        if number == DISCARDED_ROUNDS:
            until = time.perf_counter() + seconds
        for name in order.sample(list(runs), len(runs)):
            found = [on_device for on_device, _ in clock.visit(runs[name])]
            times[name] += found if number >= DISCARDED_ROUNDS else []
        if number + 1 >= DISCARDED_ROUNDS + FEWEST_ROUNDS and time.perf_counter() > until:
            break
    kept = ("median", "first_quartile", "third_quartile")
    return {name: {each: asdict(spread(found))[each] for each in kept} for name, found in times.items()}


def table(record: Record) -> Table:
    """A line for each layer and direction: medians in µs, launched / replayed, and how many times as fast fp8 is."""
    rows = record["rows"]
    names = [name for name in (TORCH, *_LEAST) if any(name in row[kind] for row in rows for kind in KINDS)]
    peers = [name for name in _PEERS if name in names]
    ratios = {BF16: [BF16]} | ({_BEST if len(peers) > 1 else peers[0]: peers} if peers else {})
    known = ["path"] if any(row["paths"] for row in rows) else []
    columns = ("layer", "size", "pass", *names, *(f"× over {name}" for name in ratios), *known)
    lines = []
    for row in rows:
        times = [_both(f"{1e6 * time:.0f}" if time else NONE for time in _medians(row, name)) for name in names]
        speeds = [_speeds(row, others) for others in ratios.values()]
        over = [_both(f"{speed:.2f}" if speed else NONE for speed in each) for each in speeds]
        paths = [row["paths"].get(kind, {}).get(FP8) or NONE for kind in KINDS]
        path = [paths[0] if len(set(paths)) == 1 else _both(paths)] if known else []
        lines.append((row["title"], shape_of(row), DIRECTIONS[row["direction"]], *times, *over, *path))
    return Table("Layers in 8 bits: µs, launched / replayed", columns, tuple(lines))


def _both(words: Iterable[str]) -> str:
    return " / ".join(words)


def _medians(row: Record, name: str) -> list[float | None]:
    return [row[kind][name]["median"] if name in row[kind] else None for kind in KINDS]


def _speeds(row: Record, others: list[str]) -> list[float | None]:
    """How many times as fast fp8 is as the fastest of other contenders, launched and replayed."""
    times = zip(*(_medians(row, name) for name in others), strict=True)
    fastest = [min(filter(None, each), default=None) for each in times]
    return [other / ours if other and ours else None for other, ours in zip(fastest, _medians(row, FP8), strict=True)]


def markdown(record: Record) -> str:
    """The section of the documentation: the table, its conditions, and where 8 bits do not pay."""
    shown, versions = table(record), record["versions"]
    libraries = {"torch": "torch", "triton": "Triton", "torchao": "torchao"}
    installed = ", ".join(f"{title} {versions[name]}" for name, title in libraries.items() if name in versions)
    measured = ", ".join([record["device"]["name"], installed, day_and_commit(record), *other_commits(record["rows"])])
    caption = (
        f"Measured on {measured}: medians, all contenders "
        "interleaved, launched one by one / in a CUDA graph. "
        f"*{TORCH}* is eager torch in bf16, *{BF16}* our layer without `precision`, *{FP8}* with it."
    )
    if SEPARATE in shown.columns:
        caption += f" *{SEPARATE}*: `torch._scaled_mm` with scales of rows, and `torch.compile` of all else."
    if TORCHAO in shown.columns:
        caption += (
            f" *{TORCHAO}*: its float8 training under `torch.compile`, with the recipe `rowwise` where auto mode"
            " computes weight gradients in 8 bits, and else `rowwise_with_gw_hp`."
        )
    if f"× over {_BEST}" in shown.columns:
        caption += f" *{_BEST.capitalize()}*: the faster of *{SEPARATE}* and *{TORCHAO}*."
    if KEPT in shown.columns:
        caption += " *Weights kept*: a further training call between two steps of the optimizer."
    slower = [
        f"{row['title']} {shape_of(row)}, {DIRECTIONS[row['direction']]}, {kind} ({speed:.2f})"
        for row in record["rows"]
        for kind, speed in zip(KINDS, _speeds(row, [BF16]), strict=True)
        if speed and speed < ENOUGH
    ]
    nowhere = f"8 bits are nowhere more than {100 * (1 - ENOUGH):.0f} % slower than bf16 here."
    where = f"8 bits do not pay here: {'; '.join(slower)}." if slower else nowhere
    return f"{caption}\n\n{shown.markdown()}\n{where}\n"


def build_parser() -> argparse.ArgumentParser:
    """All options."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.float8", description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "--seconds", type=positive, default=2.0, help="timing per layer, pass and kind, beside warm-up (default: 2)"
    )
    parser.add_argument("--layers", default="", metavar="TEXT", help="only those whose title contains this")
    parser.add_argument(
        "--forced", action="store_true", help="8 bits wherever they are possible, and kernels for those in bf16, too"
    )
    add_record_options(parser)
    return parser


def main(arguments: list[str] | None = None) -> int:
    """Run the command line, and return the exit status."""
    return answered(build_parser(), _run, arguments)


def _run(chosen: argparse.Namespace, words: list[str]) -> int:
    if chosen.dtype not in (None, "bf16"):
        raise ValueError(f"argument --dtype: {chosen.dtype}: expected bf16, which torch._scaled_mm returns")
    layers = [layer for layer in LAYERS if chosen.layers in layer.title]
    if not layers:
        titles = "; ".join(dict.fromkeys(layer.title for layer in LAYERS))
        raise ValueError(f"argument --layers: {chosen.layers}: expected a part of one of these: {titles}")
    device = chosen_gpu(chosen, "products in 8 bits are timed beside torch")
    path = record_path(chosen.output, "float8", "bf16", device)
    clock, started, right = clock_for(device), time.perf_counter(), True
    method = {"seconds_per_row": chosen.seconds, "cold_cache_bytes": clock.cold_cache_bytes, "seed": chosen.seed}
    libraries = [TORCHAO] if has_torchao() else []
    if not libraries:
        print(f"skip   {TORCHAO}: it is not installed: pip install torchao")
    record = records.new_record(words, device, method, chosen.commit, libraries)
    switches = AUTO_SWITCHES | ({"FUSEDLAYERS_BACKEND": "triton"} if chosen.forced else {})
    for layer in layers:
        for direction in (FORWARD, FORWARD_BACKWARD):
            label = f"{layer.title} {shape_text(layer.shape)} {direction}"
            if chosen.budget is not None and time.perf_counter() - started > chosen.budget:
                print(f"skip   {label}: the budget of {chosen.budget:g} s was spent")
                continue
            try:
                with torch.cuda.device(device), switched(switches):
                    row = measured(layer, direction, clock, device, chosen.seconds, chosen.seed)
            except ValueError as error:
                right = False
                print(f"RED    {label}: {error}", file=sys.stderr)
                continue
            finally:
                gc.collect()
                torch.cuda.empty_cache()
            seconds = row["compilation"]
            compiled = [f"{name} {seconds[name]:.1f} s" for name in (COMPILED, *_PEERS) if name in seconds]
            print(f"timed  {label}" + (f" (compilation: {', '.join(compiled)})" if compiled else ""), flush=True)
            record["rows"].append(row)
            records.write(record, path)
    records.finish(record, path)
    print(f"record: {path}")
    table(record).show()
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
