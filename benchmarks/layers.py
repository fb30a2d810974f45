"""Every published grid of sizes: ours beside torch and, on request, beside others' versions.

    python -m benchmarks.layers --time
    python -m benchmarks.layers --time --families ffn,moe_ffn
    python -m benchmarks.layers --time --families linear_cross_entropy --contenders function,liger,cce,quack,auto

Sizes and options of one's own: ``python -m fusedlayers.bench``, whose runner this is. Exit status: 0 if everything is
right, 1 if a verification is red or nothing was timed, 2 for a bad command line.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace

from fusedlayers.bench.arguments import CONTENDERS, add_run_options, record_path, settings_of, several
from fusedlayers.bench.cases import CASES
from fusedlayers.bench.runner import Row, report

from . import peers
from .endings import answered

# In the order of the columns of a table.
_WORDS = {**CONTENDERS, **{word: peer.title for word, peer in peers.PEERS.items()}}


def build_parser() -> argparse.ArgumentParser:
    """All options."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.layers", description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "--families", type=lambda text: several(text, tuple(CASES)), default=tuple(CASES), metavar="NAME,…",
        help=f"of {','.join(CASES)}; default: all",
    )  # fmt: skip
    add_run_options(parser, _WORDS)
    return parser


def main(arguments: list[str] | None = None) -> int:
    """Run the command line, and return the exit status."""
    return answered(build_parser(), _run, arguments)


def _run(chosen: argparse.Namespace, words: list[str]) -> int:
    settings = settings_of(chosen)
    names = settings.contenders
    settings = replace(settings, make=peers.contender, libraries=peers.distributions(names))
    cases = [CASES[name] for name in chosen.families]
    for line in peers.check(names, cases) if settings.timed else ():
        print(f"skip   {line}")
    rows = [
        Row(case, grid, grid.options, shape) for case in cases for grid in case.grids for shape in settings.shapes(grid)
    ]
    return report(rows, settings, words, record_path(chosen.output, "layers", settings.dtype, settings.device))


if __name__ == "__main__":
    sys.exit(main())
