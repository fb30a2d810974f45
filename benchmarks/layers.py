"""Every published grid of sizes: ours beside torch and, on request, beside others' versions.

    python -m benchmarks.layers --time
    python -m benchmarks.layers --time --families ffn,moe_ffn
    python -m benchmarks.layers --time --families linear_cross_entropy --contenders function,liger,cce,quack,auto
    python -m benchmarks.layers --time --families linear_log_probs --shape 8192x4096x151936 --contenders eager,trl,auto

Sizes and options of one's own: ``python -m fusedlayers.bench``, whose runner this is. Exit status: 0 if everything is
right, 1 if a verification is red or nothing was timed, 2 for a bad command line.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace

from fusedlayers.bench.arguments import CONTENDERS, add_run_options, parse_shape, record_path, settings_of, several
from fusedlayers.bench.cases import CASES, Case, Shape
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
    parser.add_argument("--shape", nargs="+", default=[], help="sizes of one family, instead of those of its grids")
    add_run_options(parser, _WORDS)
    return parser


def main(arguments: list[str] | None = None) -> int:
    """Run the command line, and return the exit status."""
    return answered(build_parser(), _run, arguments)


def _shapes(texts: list[str], cases: list[Case]) -> list[Shape]:
    """The sizes on the command line, which are those of one case.

    Raises:
        ValueError: there are several cases, or a text is none of their sizes.
    """
    if texts and len(cases) > 1:
        raise ValueError("argument --shape: expected one family beside it (--families)")
    try:
        return [parse_shape(text, cases[0].letters, cases[0].meaning) for text in texts]
    except argparse.ArgumentTypeError as error:
        raise ValueError(f"argument --shape: {error}") from error


def _run(chosen: argparse.Namespace, words: list[str]) -> int:
    settings = settings_of(chosen)
    names = settings.contenders
    settings = replace(settings, make=peers.contender, libraries=peers.distributions(names))
    cases = [CASES[name] for name in chosen.families]
    for line in peers.check(names, cases) if settings.timed else ():
        print(f"skip   {line}")
    shapes = _shapes(chosen.shape, cases)
    rows = [
        Row(case, grid, grid.options, shape)
        for case in cases
        for grid in case.grids
        for shape in shapes or settings.shapes(grid)
    ]
    return report(rows, settings, words, record_path(chosen.output, "layers", settings.dtype, settings.device))


if __name__ == "__main__":
    sys.exit(main())
