"""The record that auto mode decides by, made of the committed results of the benchmark.

    python -m benchmarks.record            write the rows of every GPU
    python -m benchmarks.record --check    say whether they are those of the results; 1 if not

``python -m benchmarks.replay`` prints what the decisions cost.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from fusedlayers.planning import CARDS
from fusedlayers.planning.record import FOLDER, LAUNCHED, PARTS, REPLAYED, TORCH, Row

from .measured import DRAWN, HOST, Source, sources

_DIGITS = 3
# Of the same sizes, the later of these folders of results counts, between them all others.
_ORDER = {DRAWN: 0, HOST: 2}
# What sizes are called, by operation.
_SIZES = {
    "ffn": ("M", "K", "N"),
    "gemm_gemm": ("B", "M", "K", "N", "O"),
    "gemm_reduce": ("B", "kept", "reduced", "K"),
    "hidden_gradient": ("M", "N", "O"),
    "linear": ("M", "N", "K"),
    "linear_cross_entropy": ("M", "K", "V"),
    "lora_ffn": ("M", "K", "N"),
    "maxsim": ("queries", "documents", "query tokens", "document tokens", "K"),
    "moe_ffn": ("M", "K", "N", "E", "top_k"),
    "weight_gradient": ("M", "O", "K"),
}


def rows(found: Iterable[Source]) -> list[Row]:
    """A row for all that was measured of the same sizes: in a loop, else alone, else as it was drawn."""
    together: dict[tuple[str, str, tuple[int, ...]], Row] = {}
    for problem, launched, replayed, folder in sorted(found, key=lambda source: _ORDER.get(source.folder, 1)):
        if problem != problem.decisive:
            continue
        place = problem.recorded_kin, problem.variant, problem.sizes
        known = together.get(place, Row(*place, {}, {}))
        together[place] = Row(
            *place, launched or known.launched, replayed or known.replayed, folder == HOST, folder == DRAWN
        )
    return [row for row in together.values() if len(row.launched) > 1 or len(row.replayed) > 1]


def contents(card: str) -> dict[str, Any]:
    """The record of a card: its own description, and all rows."""
    path = FOLDER / f"{card.lower()}.json"
    made: dict[str, Any] = {**json.loads(path.read_text()), **{part: {} for part in PARTS}}
    for row in sorted(rows(sources(card)), key=lambda row: (row.kin, row.variant, row.sizes)):
        operation, _, kind = row.kin.partition(" ")
        known = made["loops" if row.sure else "drawn" if row.drawn else "rows"].setdefault(
            operation, {"sizes": list(_SIZES[operation]), "paths": [TORCH], "kinds": {}}
        )
        for path_name in {**row.launched, **row.replayed}:
            if path_name not in known["paths"]:
                known["paths"].append(path_name)
        known["kinds"].setdefault(f"{kind}: {row.variant}" if row.variant else kind, []).append(row)
    for known in (known for part in PARTS for known in made[part].values()):
        known["kinds"] = {kind: [_line(row, known["paths"]) for row in found] for kind, found in known["kinds"].items()}
    return made


def _line(row: Row, paths: list[str]) -> list[float]:
    times = [getattr(row, how).get(path, 0) for how in (LAUNCHED, REPLAYED) for path in paths]
    line = [*row.sizes, *map(_microseconds, times)]
    while not line[-1]:
        line.pop()
    return line


def _microseconds(seconds: float) -> float:
    rounded = float(f"{1e6 * seconds:.{_DIGITS}g}")
    return int(rounded) if rounded.is_integer() else rounded


def text(made: dict[str, Any]) -> str:
    """A line for each row, so that a new benchmark changes few of them."""
    return json.dumps(made, separators=(",", ":")).replace("],[", "],\n[").replace("[[", "[\n[") + "\n"


def build_parser() -> argparse.ArgumentParser:
    """All options."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.record", description=__doc__.split("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing, and fail if a file would change")
    return parser


def main(arguments: list[str] | None = None) -> int:
    """Run the command line, and return the exit status."""
    check = build_parser().parse_args(arguments).check
    changed = 0
    for card in CARDS:
        path, made = Path(FOLDER / f"{card.lower()}.json"), text(contents(card))
        if made != path.read_text():
            changed += 1
            print(f"{path.name}: {'is not that of the results' if check else 'written'}")
            if not check:
                path.write_text(made)
    return 1 if check and changed else 0


if __name__ == "__main__":
    sys.exit(main())
