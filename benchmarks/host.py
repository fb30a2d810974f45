"""What a layer costs the host when layers are launched one by one: time a layer of a loop, against torch's.

    python -m benchmarks.host                       verify and time everything that is published
    python -m benchmarks.host --grid linear         some of it
    python -m benchmarks.host --compiled            torch.compile of torch and of auto mode, too
    python -m benchmarks.host --autocast            float32 layers under torch.autocast, as models are trained

The loop starts on an idle device and ends when all of it is done; host and device overlap as in a user's loop. All
contenders are interleaved. *One thread*: ``torch.autograd.set_multithreading_enabled(False)``, so that nothing is
handed over to autograd's own thread. The same loop inside a CUDA graph tells the time of the device alone.

The rows of the record (:mod:`fusedlayers.bench.record`) have the case ``host``, ``depth`` (layers of a loop) and no
flops, bytes or floor; times are those of a layer. Contenders are "torch", "auto", "kernels" and "function", as they
are, ", one thread" and ", compiled", without tflops, floor_share, saved_bytes, peak_bytes and replayed_path.

Exit status: 0 if everything is right, 1 if a verification is red or a picture cannot be drawn, 2 for a bad command
line.
"""

from __future__ import annotations

import argparse
import copy
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fusedlayers.bench import record as records
from fusedlayers.bench.arguments import add_record_options, chosen_device, parse_shape, positive, record_path, several
from fusedlayers.bench.cases import DTYPES, Grid, Shape, shape_text
from fusedlayers.bench.contenders import AUTO_SWITCHES, FUSED_SWITCHES, Contender, why_untimed
from fusedlayers.bench.record import Record
from fusedlayers.bench.runner import FORWARD, FORWARD_BACKWARD
from fusedlayers.bench.timing import NotTimed, Timing, measure
from fusedlayers.bench.verification import Verification, close
from fusedlayers.closeness import compare_draws
from fusedlayers.functional.dispatch import decisions
from fusedlayers.functional.switches import switched

from . import host_tables
from .chains import DEPTH, FUNCTION, MODULE, STANDS, TORCH, Layer, Loop, Stand
from .endings import answered, finish
from .host_tables import AUTO, AUTO_FUNCTION, COMPILED, KERNELS, ONE_THREAD, ONE_WAY
from .loop_clock import loop_clock_for

# Host time this close to the time of the loop means that the host sets the pace.
HOST_BOUND_SHARE = 0.9
# Draws of inputs that one verdict is about: with few rows torch's error in a single tile is often lucky.
DRAWS = 8
_MAKERS = {TORCH: TORCH, AUTO: MODULE, KERNELS: MODULE, AUTO_FUNCTION: FUNCTION}
_DIRECTIONS = {"forward": (FORWARD,), "forward_backward": (FORWARD_BACKWARD,), "both": (FORWARD_BACKWARD, FORWARD)}


@dataclass(frozen=True)
class Precision:
    """The name of the dtype of products; with ``autocast`` layers and their inputs are float32."""

    name: str
    autocast: bool = False

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of products."""
        return DTYPES[self.name]

    @property
    def held(self) -> torch.dtype:
        """The dtype of parameters and inputs."""
        return torch.float32 if self.autocast else self.dtype

    def under(self, unit: Layer, device: torch.device) -> Layer:
        """The unit as it runs: under autocast, or as it is."""
        if not self.autocast:
            return unit

        def run(x: Tensor) -> Tensor:
            with torch.autocast(device.type, self.dtype):
                return unit(x)

        return run


@dataclass(frozen=True)
class Row:
    """Layers of one size."""

    stand: Stand
    shape: Shape

    @property
    def label(self) -> str:
        return f"{self.stand.grid.name} {shape_text(self.shape)}"


def build_parser() -> argparse.ArgumentParser:
    """All options."""
    command = argparse.ArgumentParser(prog="python -m benchmarks.host", description=(__doc__ or "").split("\n")[0])
    add_record_options(command)
    command.add_argument("--plot", action="store_true", help="draw the picture of the record")
    command.add_argument(
        "--grid", type=lambda text: several(text, tuple(STANDS)), default=tuple(STANDS), metavar="NAME,…",
        help=f"of {','.join(STANDS)}; default: all",
    )  # fmt: skip
    command.add_argument("--shape", action="extend", nargs="+", help="of one grid; default: the published ones")
    command.add_argument(
        "--contenders", type=lambda text: several(text, tuple(_MAKERS)), default=tuple(_MAKERS), metavar="NAME,…",
        help=f"of {','.join(_MAKERS)}; default: all",
    )  # fmt: skip
    command.add_argument("--direction", choices=_DIRECTIONS, default="both", help="what to time (default: both)")
    command.add_argument("--depth", type=int, default=DEPTH, help=f"layers of a loop (default: {DEPTH})")
    command.add_argument("--compiled", action="store_true", help="time what torch.compile makes of the chains, too")
    command.add_argument(
        "--autocast", action="store_true", help="layers and inputs in float32, under torch.autocast in the dtype"
    )
    command.add_argument("--verify", action="store_true", help="verify only")
    command.add_argument(
        "--seconds", type=positive, default=2.0, help="timing per row and direction, beside warm-up (default: 2)"
    )
    return command


def main(arguments: list[str] | None = None) -> int:
    """Verify all rows and, if all are right, time them; the exit status."""
    return answered(build_parser(), _run, arguments)


def _run(chosen: argparse.Namespace, words: list[str]) -> int:
    device = chosen_device(chosen)
    if chosen.plot and chosen.verify:
        raise ValueError("argument --plot: expected no --verify beside it: the pictures show times")
    rows = _rows(chosen, device)
    narrow = device.type == "cuda" or chosen.autocast
    precision = Precision(chosen.dtype or ("bf16" if narrow else "fp32"), chosen.autocast)
    if precision.autocast and precision.dtype == torch.float32:
        raise ValueError(f"argument --dtype: {precision.name}: expected bf16 or fp16 beside --autocast")
    path = record_path(chosen.output, "host-autocast" if precision.autocast else "host", precision.name, device)
    method = {"seconds_per_row": chosen.seconds, "cold_cache_bytes": 0, "init": "normal", "seed": chosen.seed}
    record = records.new_record(words, device, method, chosen.commit)
    started = time.perf_counter()
    verified = []
    for row in rows:
        print(f"verify {row.label} {precision.name}")
        verified.append(verify(row, chosen.contenders, precision, device, chosen.seed))
        for verification in verified[-1]:
            print(f"  {verification.summary()}")
    if any(verification.red for found in verified for verification in found):
        print("verification is RED: nothing is timed", file=sys.stderr)
        return 1
    if chosen.verify:
        print("verification is green")
        return 0
    for row, found in zip(rows, verified, strict=True):
        for direction in _DIRECTIONS[chosen.direction]:
            if chosen.budget is not None and time.perf_counter() - started > chosen.budget:
                print(f"skip   {row.label} {direction}: the budget of {chosen.budget:g} s was spent")
                continue
            print(f"time   {row.label} {direction}")
            record["rows"].append(_timed(row, direction, found, chosen, precision, device))
            records.write(record, path)
    finish(record, path, host_tables, "over its limit", plotting=chosen.plot)
    return 0


def _rows(chosen: argparse.Namespace, device: torch.device) -> list[Row]:
    if chosen.depth < 1:
        raise ValueError(f"argument --depth: {chosen.depth}: expected 1 layer or more")
    stands = [STANDS[name] for name in chosen.grid]
    if chosen.shape and len(stands) > 1:
        raise ValueError("argument --shape: expected it beside --grid with one name")
    rows = []
    for stand in stands:
        shapes = stand.grid.shapes if device.type == "cuda" else stand.grid.shapes_without_gpu
        if chosen.shape:
            try:
                shapes = tuple(parse_shape(text, stand.letters, stand.meaning) for text in chosen.shape)
            except argparse.ArgumentTypeError as error:
                raise ValueError(f"argument --shape: {error}") from error
        rows += [Row(stand, shape) for shape in shapes]
    return rows


def verify(row: Row, names: Sequence[str], precision: Precision, device: torch.device, seed: int) -> list[Verification]:
    """The result and all gradients of one layer of each of ours, by the tolerance rule against float64.

    Several draws of inputs are judged together: torch's own error is lucky in single tiles of large gradients.
    """
    torch.manual_seed(seed)
    layers = row.stand.layers(row.shape, 1, device=device, dtype=precision.held)
    loops = [_loop(row, layers, 1, device, precision, seed + draw, backward=True) for draw in range(DRAWS)]
    doubled = copy.deepcopy(layers[TORCH])
    for layer in doubled:
        layer.double()  # type: ignore[attr-defined]
    truth_loops = [
        Loop(loop.x.detach().double().requires_grad_(), loop.upstream.double(), _parameters(doubled), 1, backward=True)
        for loop in loops
    ]
    names_of = {id(parameter): name for name, parameter in layers[MODULE][0].named_parameters()}  # type: ignore[attr-defined]
    leaves = ["x", *(names_of[id(parameter)] for parameter in loops[0].leaves[1:])]
    truth = _results(row.stand.units(doubled)[0], truth_loops, leaves)
    expected = _results(precision.under(row.stand.units(layers[TORCH])[0], device), loops, leaves)
    found = []
    for name in names:
        if _MAKERS[name] not in layers or name == TORCH:
            continue
        if name == KERNELS and (reason := why_untimed(device)):
            found.append(Verification(name, "", "not run", reason))
            continue
        try:
            with switched(_switches(name)), decisions() as taken:
                ours = _results(precision.under(row.stand.units(layers[_MAKERS[name]])[0], device), loops, leaves)
        except Exception as error:
            found.append(Verification(name, "", "red", f"{type(error).__name__}: {error}"))
            continue
        findings = tuple(map(close, compare_draws(zip(ours, expected, truth, strict=True)).values()))
        status = "green" if all(finding.ok for finding in findings) else "red"
        # "ffn torch": the path follows the operation.
        paths = " ".join(sorted({path.rpartition(" ")[2] for path in taken}))
        found.append(Verification(name, paths, status, "", findings))
    return found


def _results(unit: Layer, loops: Sequence[Loop], leaves: Sequence[str]) -> list[dict[str, Tensor]]:
    """The result and the gradients of each draw."""
    found = []
    for loop in loops:
        loop.forget()
        y = unit(loop.x)
        y.backward(loop.upstream)
        results = {"y": y.detach()}
        for name, leaf in zip(leaves, loop.leaves, strict=True):
            assert leaf.grad is not None
            results[f"d{name}"] = leaf.grad
        found.append(results)
    return found


def _loop(
    row: Row, layers: dict[str, list[Layer]], depth: int, device: torch.device, precision: Precision, seed: int,
    backward: bool,
) -> Loop:  # fmt: skip
    generator = torch.Generator(device).manual_seed(seed)
    # What a chain gives is added to its input, and has that dtype.
    given = precision.held if row.stand.chained else precision.dtype
    x, upstream = (
        torch.randn(row.shape[0], size, generator=generator, device=device, dtype=dtype)
        for size, dtype in zip(row.stand.widths(row.shape), (precision.held, given), strict=True)
    )
    return Loop(x.requires_grad_(backward), upstream, _parameters(layers[TORCH]), depth, backward)


def _parameters(layers: Sequence[Any]) -> list[nn.Parameter]:
    return [parameter for layer in layers for parameter in layer.parameters()]


def _switches(name: str) -> dict[str, str]:
    return {} if name == TORCH else FUSED_SWITCHES if name == KERNELS else AUTO_SWITCHES


def _timed(
    row: Row, direction: str, found: list[Verification], chosen: argparse.Namespace, precision: Precision,
    device: torch.device,
) -> Record:  # fmt: skip
    """The row of the record: all contenders, interleaved."""
    torch._dynamo.reset()
    backward = direction == FORWARD_BACKWARD
    layers = row.stand.layers(row.shape, chosen.depth, device=device, dtype=precision.held)
    loop = _loop(row, layers, chosen.depth, device, precision, chosen.seed, backward)
    entries: Record = {}
    entrants: list[Contender] = []
    # Without a backward pass there is nothing to hand over to another thread.
    ways = (ONE_WAY, *([ONE_THREAD] if backward else []), *([COMPILED] if chosen.compiled else []))
    for way in ways:
        for name in chosen.contenders:
            if _MAKERS[name] not in layers or (way == COMPILED and name not in (TORCH, AUTO)):
                continue
            if name == KERNELS and (reason := why_untimed(device)):
                entries[name + way] = records.untimed_entry(reason)
                continue
            units = row.stand.units(layers[_MAKERS[name]])
            if way == COMPILED:
                units = [torch.compile(unit, dynamic=False) for unit in units]
            run = loop.over([precision.under(unit, device) for unit in units], threads=way != ONE_THREAD)
            entries[name + way] = {}
            entrants.append(Contender(name + way, run, _switches(name), recorded=way == ONE_WAY))  # type: ignore[arg-type]
    timings = measure(entrants, loop, seconds=chosen.seconds, clock=loop_clock_for(device))
    paths = {verification.contender: verification.path for verification in found}
    for name, timing in timings.items():
        path = paths.get(name.partition(",")[0])
        if isinstance(timing, NotTimed):
            entries[name] = records.untimed_entry(timing.reason, (path, None))
        else:
            entries[name] = _entry(timing, path, device)
            yardstick = timings.get(host_tables.yardstick(name))
            if isinstance(yardstick, Timing):
                entries[name]["over_torch"] = timing.over(yardstick)
    loop.forget()
    grid: Grid = row.stand.grid
    return {
        "case": "host",
        "grid": grid.name,
        "title": grid.title,
        "letters": list(row.stand.letters),
        "meaning": row.stand.meaning,
        "shape": list(row.shape),
        "dtype": precision.name,
        "autocast": precision.autocast,
        **asdict(grid.options),
        "direction": direction,
        "depth": chosen.depth,
        "verification": [verification.as_json() for verification in found],
        "clocks": records.clocks(device),
        "contenders": entries,
    }


def _entry(timing: Timing, path: str | None, device: torch.device) -> Record:
    # Not by the replayed time: the graph of auto mode may take another path. On a CPU the host is the device.
    host_bound = device.type != "cpu" and timing.host_seconds > HOST_BOUND_SHARE * timing.launched.median
    return {
        "status": "timed",
        "reason": timing.replay_reason,
        "path": path,
        "launched": asdict(timing.launched),
        "replayed": None if timing.replayed is None else asdict(timing.replayed),
        "host_seconds": timing.host_seconds,
        "host_bound": host_bound,
    }


if __name__ == "__main__":
    sys.exit(main())
