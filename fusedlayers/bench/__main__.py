"""The command line of the benchmark.

    python -m fusedlayers.bench ffn                                  verify the published grid
    python -m fusedlayers.bench ffn --shape 65536x256x1024 --time    verify one shape, then time it
    python -m fusedlayers.bench all --time --plot                    everything that the README shows
    python -m fusedlayers.bench table FILE.json                      the README's tables of a record
    python -m fusedlayers.bench plot FILE.json                       the pictures of a record
    python -m fusedlayers.bench update FILE.json NEWER.json          put rows that were measured anew into a record
    python -m fusedlayers.bench selftest                             every kernel configuration on this machine

Exit status: 0 if everything is right, 1 if a verification is red, a record is unusable or there is
no GPU to test, 2 for a bad command line.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path

import torch

from ..functional.dispatch import workspace_limit
from ..kernels.activations import canonical_activation
from ..kernels.gemm_reduce import OPERATIONS
from . import plots, record, selftest, tables
from .cases import CASES, DTYPES, INITS, Case, Grid, Options, Shape
from .contenders import AUTO, AUTOTUNED, CHECKPOINTED, COMPILED, EAGER, FUSED
from .exactness import INTEGER_ACTIVATIONS, INTEGER_OPERATIONS
from .runner import FORWARD, FORWARD_BACKWARD, Row, Settings, run

_CONTENDER_WORDS = {
    "eager": EAGER,
    "compile": COMPILED,
    "autotune": AUTOTUNED,
    "checkpoint": CHECKPOINTED,
    "auto": AUTO,
    "fused": FUSED,
}
_USUAL_CONTENDERS = (EAGER, COMPILED, AUTO, FUSED)
_DIRECTION_WORDS = {
    "forward": (FORWARD,),
    "forward_backward": (FORWARD_BACKWARD,),
    "both": (FORWARD, FORWARD_BACKWARD),
}
# Zeros run faster than real data and integers are mostly zeros: neither says what a user would see.
_TIMED_INITS = ("normal", "uniform")


def main(arguments: list[str] | None = None) -> int:
    """Run the command line, and return the exit status."""
    words = sys.argv[1:] if arguments is None else arguments
    parser = build_parser()
    # A flag too, for the sake of those who look for one.
    chosen = parser.parse_args(["selftest" if word == "--selftest" else word for word in words])
    if chosen.name == "selftest":
        try:
            return selftest.main(_device(chosen))
        except ValueError as error:
            parser.error(str(error))
    if chosen.name in ("table", "plot"):
        return _show(chosen)
    if chosen.name == "update":
        return _update(chosen)
    try:
        settings = _settings(chosen)
        rows = _rows(chosen, settings)
    except ValueError as error:
        parser.error(str(error))
    return _benchmark(chosen, rows, settings, words)


def build_parser() -> argparse.ArgumentParser:
    """All commands and their options."""
    parser = argparse.ArgumentParser(prog="python -m fusedlayers.bench", description=__doc__.split("\n")[0])
    commands = parser.add_subparsers(dest="name", required=True, metavar="NAME")
    for case in CASES.values():
        command = commands.add_parser(case.name, help=f"benchmark {case.name}: shapes {case.meaning}")
        _add_case_options(command, case)
        _add_run_options(command)
    _add_run_options(commands.add_parser("all", help="benchmark every published grid"))
    for name, what in (("table", "print the markdown tables of a record"), ("plot", "draw the pictures of a record")):
        commands.add_parser(name, help=what).add_argument("file", type=Path, metavar="FILE.json")
    command = commands.add_parser("update", help="put the rows of a newer record into an older one")
    command.add_argument("file", type=Path, metavar="FILE.json")
    command.add_argument("newer", type=Path, metavar="NEWER.json")
    command = commands.add_parser("selftest", help="test every kernel configuration on this machine with integers")
    _add_device_option(command)
    return parser


def _add_device_option(command: argparse.ArgumentParser) -> None:
    command.add_argument("--device", help="default: cuda if there is one, else cpu")


def _add_case_options(command: argparse.ArgumentParser, case: Case) -> None:
    command.add_argument(
        "--shape",
        type=lambda text: parse_shape(text, case),
        action="extend",
        nargs="+",
        metavar="x".join(case.letters),
        help=f"{case.meaning}; one or more, default: the published grid (small shapes without a GPU)",
    )
    if case.has_activation:
        command.add_argument("--activation", type=_activation, help="default: that of the published grid")
    if "gated" in case.flags:
        command.add_argument("--gated", action="store_true", help="a gated FFN")
    if "bias" in case.flags:
        command.add_argument(
            "--bias", action=argparse.BooleanOptionalAction, help="default: with biases unless gated, as published"
        )
    if "op" in case.flags:
        command.add_argument("--op", choices=OPERATIONS, help="default: those of the published grids")
        command.add_argument("--dim", type=int, choices=(-2, -1), help="-2: over M, -1: over N (default: as published)")
    if "recompute" in case.flags:
        command.add_argument("--recompute", action="store_true", help="ours keeps no hidden, whatever it costs")


def _add_run_options(command: argparse.ArgumentParser) -> None:
    command.add_argument("--dtype", choices=DTYPES, help="default: bf16 on a GPU, fp32 without one")
    _add_device_option(command)
    command.add_argument("--init", choices=INITS, default="normal", help="values of the inputs (default: normal)")
    command.add_argument("--seed", type=int, default=0, help="of the inputs (default: 0)")
    command.add_argument("--verify", action="store_true", help="verify only; verification also precedes any timing")
    command.add_argument("--time", action="store_true", help="time what was verified")
    command.add_argument("--direction", choices=_DIRECTION_WORDS, default="both", help="what to time (default: both)")
    command.add_argument(
        "--contenders",
        type=_contenders,
        metavar="NAME,…",
        help=f"of {','.join(_CONTENDER_WORDS)}; default: eager and auto, on a GPU compile and fused too",
    )
    command.add_argument(
        "--seconds", type=_positive, default=1.0, help="timing per row and direction, beside warm-up (default: 1)"
    )
    command.add_argument("--budget", type=_positive, help="seconds after which no further row is timed")
    command.add_argument("--plot", action="store_true", help="draw the pictures of the record")
    command.add_argument("--output", type=Path, default=Path("outputs/bench"), help="folder (default: outputs/bench)")
    command.add_argument("--commit", help="of the sources, where they are no git clone")


def parse_shape(text: str, case: Case) -> Shape:
    """``65536x256x1024``, with x or ×, as numbers.

    Raises:
        argparse.ArgumentTypeError: not as many positive integers as the case has letters.
    """
    words = text.replace("×", "x").lower().split("x")
    if len(words) != len(case.letters) or not all(word.isdecimal() and int(word) > 0 for word in words):
        raise argparse.ArgumentTypeError(
            f"{text!r}: expected {len(case.letters)} positive integers {'x'.join(case.letters)} ({case.meaning})"
        )
    return tuple(map(int, words))


def _activation(text: str) -> str:
    try:
        return canonical_activation(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _contenders(text: str) -> tuple[str, ...]:
    words = text.split(",")
    unknown = [word for word in words if word not in _CONTENDER_WORDS]
    if unknown:
        raise argparse.ArgumentTypeError(f"{unknown[0]!r}: expected names out of {','.join(_CONTENDER_WORDS)}")
    return tuple(contender for word, contender in _CONTENDER_WORDS.items() if word in words)


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a number of seconds") from error
    if not value > 0:
        raise argparse.ArgumentTypeError(f"{text!r}: expected more than 0 seconds")
    return value


def _device(chosen: argparse.Namespace) -> torch.device:
    has_gpu = torch.cuda.is_available()
    try:
        device = torch.device(chosen.device or ("cuda" if has_gpu else "cpu"))
    except RuntimeError as error:
        raise ValueError(f"argument --device: {chosen.device!r}: expected cuda, cuda:N or cpu") from error
    if device.type not in ("cuda", "cpu"):
        raise ValueError(f"argument --device: {chosen.device!r}: expected cuda, cuda:N or cpu")
    if device.type == "cuda":
        if (device.index or 0) >= torch.cuda.device_count():
            raise ValueError(
                f"argument --device: {chosen.device!r}: there are {torch.cuda.device_count()} CUDA devices"
            )
        device = torch.device("cuda", device.index or 0)
    return device


def _settings(chosen: argparse.Namespace) -> Settings:
    device = _device(chosen)
    if chosen.time and chosen.verify:
        # Both named means both wanted, as either flag alone already implies the verification.
        chosen.verify = False
    if chosen.time and chosen.init not in _TIMED_INITS:
        raise ValueError(f"argument --init: {chosen.init}: --time needs random data: {' or '.join(_TIMED_INITS)}")
    on_gpu = device.type == "cuda"
    return Settings(
        dtype=chosen.dtype or ("bf16" if on_gpu else "fp32"),
        device=device,
        init=chosen.init,
        seed=chosen.seed,
        timed=chosen.time,
        directions=_DIRECTION_WORDS[chosen.direction],
        contenders=chosen.contenders or (_USUAL_CONTENDERS if on_gpu else (EAGER, AUTO)),
        seconds=chosen.seconds,
        budget=chosen.budget,
        commit=chosen.commit,
    )


def _rows(chosen: argparse.Namespace, settings: Settings) -> list[Row]:
    cases = CASES.values() if chosen.name == "all" else [CASES[chosen.name]]
    rows = []
    for case in cases:
        if chosen.name == "all":
            grids = case.grids
        elif "op" in case.flags:
            grids = case.reductions(chosen.op, chosen.dim)
        else:
            grids = (case.grid(getattr(chosen, "gated", False)),)
        for grid in grids:
            options = _options(chosen, grid, settings)
            titled = grid if options == grid.options else replace(grid, title=_title(case, options), options=options)
            shapes = grid.shapes if settings.device.type == "cuda" else grid.shapes_without_gpu
            for shape in getattr(chosen, "shape", None) or shapes:
                rows.append(Row(case, titled, options, shape))
    return rows


def _options(chosen: argparse.Namespace, grid: Grid, settings: Settings) -> Options:
    options = grid.options
    activation = getattr(chosen, "activation", None)
    if activation is not None:
        options = replace(options, activation=activation)
    elif settings.init == "integer" and options.activation not in INTEGER_ACTIVATIONS:
        options = replace(options, activation="relu")
    if options.activation not in INTEGER_ACTIVATIONS and settings.init == "integer":
        raise ValueError(f"argument --activation: {options.activation}: --init integer takes {INTEGER_ACTIVATIONS}")
    if getattr(chosen, "bias", None) is not None:
        options = replace(options, bias=chosen.bias)
    if getattr(chosen, "recompute", False):
        options = replace(options, recompute=True)
    if settings.init == "integer" and options.op not in INTEGER_OPERATIONS:
        raise ValueError(f"argument --op: {options.op}: --init integer takes {INTEGER_OPERATIONS}")
    return options


def _title(case: Case, options: Options) -> str:
    parts = [("gated " if options.gated else "") + case.name]
    if case.has_activation:
        parts.append(options.activation)
    if "bias" in case.flags:
        parts.append("bias" if options.bias else "no bias")
    if "op" in case.flags:
        parts.append(f"{options.op} over {'M' if options.dim == -2 else 'N'}")
    if options.recompute is True:
        parts.append(f"recompute=True within {workspace_limit() / 2**20:g} MiB")
    return ", ".join(parts)


def _benchmark(chosen: argparse.Namespace, rows: list[Row], settings: Settings, words: list[str]) -> int:
    if settings.device.type != "cuda":
        print("no GPU is used: verifying" + (" and timing" if settings.timed else "") + " the torch path on the CPU")
    kind = "cpu" if settings.device.type == "cpu" else torch.cuda.get_device_name(settings.device)
    path = chosen.output / f"{chosen.name}-{settings.dtype}-{kind.lower().replace(' ', '-')}.json"
    try:
        found, right = run(rows, settings, words, path)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"\nrecord: {path}")
    if not right:
        refused = ": nothing is timed" if settings.timed else ""
        print(f"verification is RED{refused}", file=sys.stderr)
        return 1
    if not settings.timed:
        print("verification is green")
        return 0
    if chosen.plot and not _draw(found, path):
        return 1
    _print(tables.screen(found))
    for line in tables.slower_than_torch(found):
        print(f"slower than torch: {line}")
    return 0


def _show(chosen: argparse.Namespace) -> int:
    try:
        found = record.read(chosen.file)
        if chosen.name == "table":
            print(tables.markdown(found), end="")
            return 0
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0 if _draw(found, chosen.file) else 1


def _update(chosen: argparse.Namespace) -> int:
    try:
        record.write(record.updated(record.read(chosen.file), record.read(chosen.newer)), chosen.file)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def _draw(found: record.Record, path: Path) -> bool:
    try:
        for picture in plots.plot(found, path):
            print(f"plot:   {picture}")
    except (ValueError, plots.MatplotlibMissingError) as error:
        print(f"error: {error}", file=sys.stderr)
        return False
    return True


def _print(table: tables.Table) -> None:
    """Through rich where it is installed, in plain columns otherwise."""
    try:
        from rich import box
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        print(table.plain())
        return
    shown = Table(title=table.title, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for column in table.columns:
        shown.add_column(column, no_wrap=True)
    for row in table.rows:
        shown.add_row(*row)
    console = Console()
    # Written to a file or a pipe, rich would cut the table to 80 columns.
    console.print(shown) if console.is_terminal else print(table.plain())


if __name__ == "__main__":
    sys.exit(main())
