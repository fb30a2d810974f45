"""The command line of the benchmark.

    python -m fusedlayers.bench ffn                                  verify the published grid
    python -m fusedlayers.bench ffn --shape 65536x256x1024 --time    verify one shape, then time it
    python -m fusedlayers.bench all --time                           every published grid
    python -m fusedlayers.bench selftest                             every kernel configuration on this machine
    python -m fusedlayers.bench calibrate                            what runs faster in kernels on this machine

Exit status: 0 if everything is right, 1 if a verification is red, nothing was timed or there is no
GPU to test, 2 for a bad command line.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path

from ..functional.switches import backend
from ..kernels.activations import canonical_activation
from ..kernels.gemm_reduce import OPERATIONS
from . import calibrate, record, selftest, tables
from .arguments import (
    add_device_option,
    add_record_options,
    chosen_device,
    parse_shape,
    positive,
    record_path,
    several,
    show,
)
from .cases import CASES, INITS, Case, Grid, Options
from .contenders import (
    AUTO,
    AUTOTUNED,
    CCE,
    CHECKPOINTED,
    COMPILED,
    EAGER,
    FUNCTION,
    FUSED,
    LIGER,
    QUACK,
    missing_peers,
)
from .exactness import INTEGER_ACTIVATIONS, INTEGER_OPERATIONS
from .runner import FORWARD, FORWARD_BACKWARD, Row, Settings, run

_CONTENDER_WORDS = {
    "eager": EAGER,
    "compile": COMPILED,
    "autotune": AUTOTUNED,
    "checkpoint": CHECKPOINTED,
    "function": FUNCTION,
    "liger": LIGER,
    "cce": CCE,
    "quack": QUACK,
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
    if chosen.name in ("selftest", "calibrate"):
        try:
            if chosen.name == "calibrate":
                return calibrate.main(chosen)
            return selftest.main(chosen_device(chosen), short=chosen.short)
        except ValueError as error:
            parser.error(str(error))
    try:
        settings = _settings(chosen)
        rows = _rows(chosen, settings)
        if settings.timed:
            _check_contenders(settings.contenders, rows)
        path = record_path(chosen.output, chosen.name, settings.dtype, settings.device)
    except ValueError as error:
        parser.error(str(error))
    return _benchmark(rows, settings, words, path)


def build_parser() -> argparse.ArgumentParser:
    """All commands and their options."""
    parser = argparse.ArgumentParser(
        prog="python -m fusedlayers.bench",
        usage="%(prog)s NAME [--time] [options]",
        description="Verify operations against float64 on this machine and, with --time, time them beside torch. "
        "Without --time they are verified only. The options of each NAME: %(prog)s NAME --help",
    )
    # Named again, as the usage of a command would begin with that of the parser.
    commands = parser.add_subparsers(dest="name", required=True, metavar="NAME", prog=parser.prog)
    for case in CASES.values():
        command = commands.add_parser(case.name, help=f"benchmark {case.name}: shapes {case.meaning}")
        _add_case_options(command, case)
        _add_run_options(command)
    command = commands.add_parser("all", help="benchmark every published grid")
    command.add_argument(
        "--families", type=lambda text: several(text, tuple(CASES)), default=tuple(CASES), metavar="NAME,…",
        help="of those above; default: all",
    )  # fmt: skip
    _add_run_options(command)
    command = commands.add_parser("selftest", help="test every kernel configuration on this machine with integers")
    add_device_option(command)
    command.add_argument("--short", action="store_true", help="one call of each kind of kernel, some 20 s")
    calibrate.add_options(commands.add_parser("calibrate", help=calibrate.HELP))
    return parser


def _add_case_options(command: argparse.ArgumentParser, case: Case) -> None:
    command.add_argument(
        "--shape",
        type=lambda text: parse_shape(text, case.letters, case.meaning),
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
    if "skewed" in case.flags:
        command.add_argument("--skewed", action="store_true", help="tokens of the experts follow Zipf's law")
    if "recompute" in case.flags:
        command.add_argument("--recompute", action="store_true", help="ours keeps nothing that it can compute again")


def _add_run_options(command: argparse.ArgumentParser) -> None:
    add_record_options(command)
    command.add_argument("--init", choices=INITS, default="normal", help="values of the inputs (default: normal)")
    command.add_argument("--verify", action="store_true", help="verify only; verification also precedes any timing")
    command.add_argument("--time", action="store_true", help="time what was verified")
    command.add_argument("--direction", choices=_DIRECTION_WORDS, default="both", help="what to time (default: both)")
    command.add_argument(
        "--contenders",
        type=lambda text: tuple(_CONTENDER_WORDS[word] for word in several(text, tuple(_CONTENDER_WORDS))),
        metavar="NAME,…",
        help=f"of {','.join(_CONTENDER_WORDS)}; default: eager and auto, on a GPU compile and fused too",
    )
    command.add_argument(
        "--seconds", type=positive, default=1.0, help="timing per row and direction, beside warm-up (default: 1)"
    )


def _activation(text: str) -> str:
    try:
        return canonical_activation(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _settings(chosen: argparse.Namespace) -> Settings:
    device = chosen_device(chosen)
    # The contenders set the switch themselves; a wrong one in the environment is named all the same.
    backend()
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
    cases = [CASES[name] for name in (chosen.families if chosen.name == "all" else [chosen.name])]
    rows = []
    for case in cases:
        if chosen.name == "all":
            grids = case.grids
        elif "op" in case.flags:
            grids = case.reductions(chosen.op, chosen.dim)
        else:
            gated = getattr(chosen, "gated", case.grids[0].options.gated)
            grids = (case.grid(gated, getattr(chosen, "skewed", False)),)
        for grid in grids:
            options = _options(chosen, grid, settings)
            titled = grid if options == grid.options else replace(grid, title=_title(case, options), options=options)
            shapes = grid.shapes if settings.device.type == "cuda" else grid.shapes_without_gpu
            for shape in getattr(chosen, "shape", None) or shapes:
                rows.append(Row(case, titled, options, shape))
    return rows


def _check_contenders(names: tuple[str, ...], rows: list[Row]) -> None:
    """Says which cases a contender is no version of.

    Raises:
        ValueError: a contender cannot run at all; the message says what to install.
    """
    try:
        for line in missing_peers(names, [(row.case, row.options) for row in rows]):
            print(f"skip   {line}")
    except ValueError as error:
        raise ValueError(f"argument --contenders: {error}") from error


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
    if options.skewed:
        parts.append("skewed")
    if options.recompute is True:
        parts.append("recompute=True")
    return ", ".join(parts)


def _benchmark(rows: list[Row], settings: Settings, words: list[str], path: Path) -> int:
    if settings.device.type != "cuda":
        print("no GPU is used: verifying" + (" and timing" if settings.timed else "") + " the torch path on the CPU")
    try:
        found, right = run(rows, settings, words, path)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"\nrecord: {path}")
    timed = tables.timed_rows(found)
    if not right:
        refused = ": its operation is not timed" if timed else ": nothing is timed" if settings.timed else ""
        print(f"verification is RED{refused}", file=sys.stderr)
        if not timed:
            return 1
    if not settings.timed:
        print("verification is green")
        return 0
    if nothing := _why_nothing_timed(found):
        print(f"error: nothing was timed: {nothing}", file=sys.stderr)
        return 1
    show(tables.screen(found))
    for line in tables.slower_than_torch(found):
        print(f"slower than torch: {line}")
    return 0 if right else 1


def _why_nothing_timed(found: record.Record) -> str:
    """Why no contender has a time in any row that was to be timed, or an empty text."""
    entries = [(name, entry) for row in found["rows"] for name, entry in row["contenders"].items()]
    if any(entry["status"] == "timed" for _, entry in entries):
        return ""
    return "; ".join(dict.fromkeys(f"{name}: {entry['reason']}" for name, entry in entries))


if __name__ == "__main__":
    sys.exit(main())
