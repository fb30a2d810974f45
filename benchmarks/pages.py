"""The tables and the picture of README.md and docs/, made of the committed results.

    python -m benchmarks.pages            tell what differs; the exit status is 1 then
    python -m benchmarks.pages --write    write it

A table stands between the lines ``<!-- table: its name -->`` and ``<!-- end of the table -->``. There is one for each
card. A record is found by the name of its file: ``CARD-bf16.json``, ``CARD-bf16-WHAT.json`` where a folder has several
of one card, and ``-triton-RELEASE`` before the dot where Triton was another release than usual.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from fusedlayers.bench import tables
from tests.models import family_table, step_table
from train_examples import end_to_end, precision_losses
from train_examples.tables import table

from . import drawn, float8, host_tables, layer_tables, lengths, step_tables
from .endings import over_torch

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PICTURE = ROOT / "docs" / "pictures" / "whole-models.png"
_MARKED = re.compile(r"(<!-- table: (.+?) -->\n).*?(<!-- end of the table -->\n)", re.DOTALL)
_OTHER_TRITON = r"(?:-triton-[\d.]+)?"


class Place(NamedTuple):
    """Where the records of one table lie, and what shows one of them. ``what`` is a pattern of regular expressions."""

    folder: str = ""
    what: str = ""
    markdown: Callable[[Any], str] = layer_tables.markdown

    def paths(self) -> list[Path]:
        """The record of each card, and of each release of Triton, by name."""
        name = re.compile(rf"\w+-bf16{self.what}{_OTHER_TRITON}\.json")
        found = (path for path in (RESULTS / self.folder).glob("*.json") if name.fullmatch(path.name))
        # A record without another word in its name first.
        return sorted(found, key=lambda path: path.stem)

    def shown(self) -> str:
        """All of their tables, each with its picture if there is one of the same name."""
        parts = []
        for path in self.paths():
            parts.append(self.markdown(_read(path)).strip())
            picture = path.with_suffix(".png")
            if picture.exists():
                parts.append(f"![The same as a picture](../{picture.relative_to(ROOT).as_posix()})")
        return "\n\n".join(parts)


# Every table of the benchmark's results.
PLACES = {
    "whole steps": Place("steps", "(?:-eager)?", step_tables.markdown),
    "host": Place("host", markdown=host_tables.markdown),
    "host, autocast": Place("host", "-autocast", host_tables.markdown),
    "layers": Place(),
    "narrow": Place("narrow"),
    "loss head": Place("loss_head"),
    "loss head, many tokens": Place("loss_head", "-many-tokens"),
    "loss head, growing": Place("loss_head", "-tokens"),
    "loss head, other libraries": Place("loss_head", "-others"),
    "loss head, log-probabilities": Place("loss_head", "-log-probabilities"),
    "experts": Place("experts"),
    "adapters": Place("lora"),
    "autotune": Place("autotune"),
    "random sizes": Place("drawn", r"(?:-\w+)?", drawn.markdown),
    "recompute": Place("recompute"),
    "lengths": Place("lengths", markdown=lengths.markdown),
    "fp8": Place("float8", markdown=float8.markdown),
    "fp8, whole steps": Place("steps", "-fp8", step_tables.markdown),
}


def _read(path: Path) -> Any:
    return json.loads(path.read_text())


def _most_complete(place: str, wanted: Callable[[Any], int]) -> Any:
    """Of several cards' records, with the usual Triton, the one with most of what is wanted; of equals the newest."""
    found = [_read(path) for path in PLACES[place].paths() if "-triton-" not in path.name]
    return max(found, key=lambda record: (wanted(record), record["started"]))


def _whole_runs() -> str:
    found = end_to_end.markdown(json.loads(end_to_end.RECORD.read_text()))
    return found.replace("](train_examples", "](../train_examples")


def _loss_curves() -> str:
    found = precision_losses.markdown(json.loads(precision_losses.RECORD.read_text()))
    return found.replace("](train_examples", "](../train_examples")


def _compiled_runs() -> list[tuple[str, dict[str, Any], dict[str, Any]]]:
    """Model and tokens a step of each group of whole runs, and its compiled runs: torch's, and ours."""
    groups = json.loads(end_to_end.RECORD.read_text())["groups"]
    names = ("torch, compiled", "fused, compiled")
    return [
        (name.removeprefix("model="), *(group["runs"][run]["summary"] for run in names))
        for name, group in groups.items()
    ]


def _steps() -> Any:
    """The record of whole steps that the first page shows."""
    return _most_complete("whole steps", _shown_cells)


def _shown_cells(found: Any) -> int:
    return sum(cell != tables.NONE for line in step_tables.overview(found).rows for cell in line)


def _training_steps() -> str:
    """The table of the first page, and how it was measured."""
    found = _steps()
    shown = step_tables.overview(found)
    rows = [row for row in tables.timed_rows(found) if row["grid"] in step_tables.FIRST_PAGE]
    tokens = " or ".join(f"{count:,}" for count in sorted({row["shape"][0] for row in rows}))
    conditions = f"{step_tables.conditions(found, rows)}: bf16, six layers, random weights, {tokens} tokens."
    return f"{table(shown.columns, shown.rows)}\n\n{conditions}"


def _expectations() -> str:
    """What a user may expect of single layers, and of a narrow model."""
    lines = []
    device = json.loads(end_to_end.RECORD.read_text())["device"].removeprefix("NVIDIA ").split()[0]
    for name, torch, ours in _compiled_runs():
        if name.startswith("narrow"):
            speeds = [each["tokens_per_second"] for each in (torch, ours)]
            memory = [each["peak_memory_bytes"] for each in (torch, ours)]
            text = "Language model of width 256 (`narrow`), compiled"
            lines.append(_line(text, device, f"{speeds[0] / 1e6:.2f} M tokens/s", speeds[1] / speeds[0], memory))
    shapes = {"ffn": [65536, 256, 1024], "gated_ffn": [8192, 2048, 5632]}
    layers = _most_complete("layers", lambda found: len(tables.timed_rows(found)))
    for row in tables.timed_rows(layers):
        if row["direction"] == "forward_backward" and row["shape"] == shapes.get(row["grid"]):
            ratio, names = tables.speed_up(row, "replayed"), ("torch eager", "torch.compile")
            best = min(time for name in names if (time := tables.median(row, name, "replayed")) is not None)
            text = f"One FFN layer in a CUDA graph, {tables.shape_of(row)}{', gated' * (row['grid'] != 'ffn')}"
            lines.append(_line(text, step_tables.card(layers), f"{1e6 * best:.0f} µs", ratio or 0.0, None))
    host = _most_complete("host", lambda found: len(tables.timed_rows(found)))
    small = next(row for row in host["rows"] if row["direction"] == "forward_backward")
    theirs, over = tables.median(small, "torch", "launched") or 0.0, over_torch(small, "auto") or 1.0
    text = f"One small FFN layer launched by itself, {tables.shape_of(small)}"
    lines.append(_line(text, step_tables.card(host), f"{1e6 * theirs:.0f} µs", 1 / over, None))
    return table(("training, bf16", "on one", "torch", "speed with fusedlayers", "MiB, torch's and ours"), lines) + "\n"


def _line(what: str, device: str, torch: str, speed_up: float, memory: list[int] | None) -> tuple[str, ...]:
    sizes = "" if memory is None else " and ".join(f"{size / 2**20:,.0f}" for size in memory)
    return what, device, torch, f"{speed_up:.2f} ×", sizes


def draw(path: Path) -> None:
    """Time and memory of whole training steps, of every model and in every way of the first page's table."""
    step_tables.picture(_steps(), step_tables.FIRST_PAGE, step_tables.WAYS, path)


TABLES: dict[str, Callable[[], str]] = {
    "training steps": _training_steps,
    "what to expect": _expectations,
    "whole runs": _whole_runs,
    "fp8, loss curves": _loss_curves,
    "families": lambda: step_table.markdown(json.loads(step_table.RECORD.read_text())),
    "every family": lambda: family_table.markdown(json.loads(family_table.RECORD.read_text())),
    **{name: place.shown for name, place in PLACES.items()},
}


def written(text: str) -> str:
    """A page with its tables as the results have them.

    Raises:
        ValueError: it asks for a table that is not known.
    """

    def shown(found: re.Match[str]) -> str:
        if found[2] not in TABLES:
            raise ValueError(f"table {found[2]!r} is not known; known are {', '.join(TABLES)}")
        return f"{found[1]}\n{TABLES[found[2]]().strip()}\n\n{found[3]}"

    return _MARKED.sub(shown, text)


def pages() -> list[Path]:
    """README.md, and all pages of docs/."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def main() -> int:
    """Compare or write; the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.pages", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--write", action="store_true", help="write what differs, and the picture")
    chosen = parser.parse_args()
    different = {page: text for page in pages() if (text := written(page.read_text())) != page.read_text()}
    for page, text in different.items():
        if chosen.write:
            page.write_text(text)
        print(f"{'written' if chosen.write else 'differs from the results'}: {page.relative_to(ROOT)}")
    if chosen.write:
        draw(PICTURE)
    return int(bool(different) and not chosen.write)


if __name__ == "__main__":
    sys.exit(main())
