"""The command line of the benchmark.

    python -m fusedlayers.bench ffn                                  verify the published grid
    python -m fusedlayers.bench ffn --shape 65536x256x1024 --time    verify one shape, then time it
    python -m fusedlayers.bench selftest                             every kernel configuration on this machine
    python -m fusedlayers.bench calibrate                            what runs faster in kernels on this machine

Exit status: 0 if everything is right, 1 if a verification is red, nothing was timed or there is no
GPU to test, 2 for a bad command line.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace

from ..kernels.activations import canonical_activation
from ..kernels.gemm_reduce import OPERATIONS
from . import calibrate, selftest
from .arguments import add_device_option, add_run_options, chosen_device, parse_shape, record_path, settings_of
from .cases import CASES, Case, Grid, Options
from .exactness import INTEGER_ACTIVATIONS, INTEGER_OPERATIONS
from .runner import Row, Settings, report


def main(arguments: list[str] | None = None) -> int:
    """Run the command line, and return the exit status."""
    words = sys.argv[1:] if arguments is None else arguments
    parser = build_parser()
    # A flag too, for the sake of those who look for one.
    chosen = parser.parse_args(["selftest" if word == "--selftest" else word for word in words])
    try:
        if chosen.name == "calibrate":
            return calibrate.main(chosen)
        if chosen.name == "selftest":
            return selftest.main(chosen_device(chosen), short=chosen.short)
        settings = settings_of(chosen)
        rows = _rows(chosen, settings)
        path = record_path(chosen.output, chosen.name, settings.dtype, settings.device)
    except ValueError as error:
        parser.error(str(error))
    return report(rows, settings, words, path)


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
        add_run_options(command)
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


def _activation(text: str) -> str:
    try:
        return canonical_activation(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _rows(chosen: argparse.Namespace, settings: Settings) -> list[Row]:
    case = CASES[chosen.name]
    wanted = {name: getattr(chosen, name, None) for name in ("gated", "skewed", "op", "dim")}
    grids = case.published(**{name: value for name, value in wanted.items() if value is not None})
    rows = []
    # The grids of a reduction differ in what can be named; of others the first one is the usual one.
    for grid in grids if "op" in case.flags else grids[:1]:
        options = _options(chosen, grid, settings)
        published = grid in case.grids and options == grid.options
        titled = grid if published else replace(grid, title=_title(case, options), options=options)
        rows += [Row(case, titled, options, shape) for shape in chosen.shape or settings.shapes(grid)]
    return rows


def _options(chosen: argparse.Namespace, grid: Grid, settings: Settings) -> Options:
    """The options of a grid, changed as the command line asks."""
    given = {name: value for name in ("activation", "bias") if (value := getattr(chosen, name, None)) is not None}
    if getattr(chosen, "recompute", False):
        given["recompute"] = True
    options = replace(grid.options, **given)
    if settings.init == "integer":
        if "activation" not in given and options.activation not in INTEGER_ACTIVATIONS:
            options = replace(options, activation="relu")
        for name, known in (("activation", INTEGER_ACTIVATIONS), ("op", INTEGER_OPERATIONS)):
            if (value := getattr(options, name)) not in known:
                raise ValueError(f"argument --{name}: {value}: --init integer takes {known}")
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


if __name__ == "__main__":
    sys.exit(main())
