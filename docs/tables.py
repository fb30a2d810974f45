"""The tables and the picture of README.md and docs/, made of the committed results.

    python -m docs.tables            tell what differs; the exit status is 1 then
    python -m docs.tables --write    write it

A table stands between the lines ``<!-- table: its name -->`` and ``<!-- end of the table -->``.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fusedlayers.bench import tables
from fusedlayers.bench.published import drawn, host_tables, step_tables
from fusedlayers.bench.published.endings import over_torch
from fusedlayers.bench.published.plots import figure_class
from tests.models import family_table, step_table
from train_examples import end_to_end
from train_examples.tables import table

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "fusedlayers" / "bench" / "results"
PICTURE = ROOT / "docs" / "pictures" / "whole-models.png"
_MARKED = re.compile(r"(<!-- table: (.+?) -->\n).*?(<!-- end of the table -->\n)", re.DOTALL)
_COMPILED = {"eager": "", "compile": ", compiled"}


def _read(*place: str) -> Any:
    return json.loads(RESULTS.joinpath(*place).read_text())


def _whole_runs() -> str:
    found = end_to_end.markdown(json.loads(end_to_end.RECORD.read_text()))
    return found.replace("](train_examples", "](../train_examples")


def _compiled_runs() -> list[tuple[str, dict[str, Any], dict[str, Any]]]:
    """Model and tokens a step of each group of whole runs, and its compiled runs: torch's, and ours."""
    groups = json.loads(end_to_end.RECORD.read_text())["groups"]
    names = ("torch, compiled", "fused, compiled")
    return [
        (name.removeprefix("model="), *(group["runs"][run]["summary"] for run in names))
        for name, group in groups.items()
    ]


def _expectations() -> str:
    """What a user may expect, in few lines: whole models, one layer, and where torch stays faster."""
    lines = []
    for row, _ in _steps():
        if row["grid"] not in ("llama-2048", "qwen2-896", "mixtral-1024"):
            continue
        theirs = 1e3 * (tables.median(row, "torch", "launched") or 0.0)
        for name, how in (("auto", ""), ("auto-norm", ", with `norm=True`")):
            if (over := over_torch(row, name)) is not None:
                memory = [step_tables.peak(row, each) for each in ("torch", name)]
                text = f"{row['title']}{_COMPILED[row['direction']]}{how}"
                lines.append(_line(text, f"{theirs:.1f} ms", 1 / over, memory))
    for name, torch, ours in _compiled_runs():
        if name.startswith("narrow"):
            speeds = [each["tokens_per_second"] for each in (torch, ours)]
            memory = [each["peak_memory_bytes"] for each in (torch, ours)]
            text = "Language model of width 256 (`narrow`), compiled"
            lines.append(_line(text, f"{speeds[0] / 1e6:.2f} M tokens/s", speeds[1] / speeds[0], memory))
    shapes = {"ffn": [65536, 256, 1024], "gated_ffn": [8192, 2048, 5632]}
    for row in tables.timed_rows(_read("h200-bf16.json")):
        if row["direction"] == "forward_backward" and row["shape"] == shapes.get(row["grid"]):
            ratio, names = tables.speed_up(row, "replayed"), ("torch eager", "torch.compile")
            best = min(time for name in names if (time := tables.median(row, name, "replayed")) is not None)
            text = f"One FFN layer in a CUDA graph, {tables.shape_of(row)}{', gated' * (row['grid'] != 'ffn')}"
            lines.append(_line(text, f"{1e6 * best:.0f} µs", ratio or 0.0, [None, None]))
    small = next(row for row in _read("host", "h200-bf16.json")["rows"] if row["direction"] == "forward_backward")
    theirs, over = tables.median(small, "torch", "launched") or 0.0, over_torch(small, "auto") or 1.0
    text = f"One small FFN layer launched by itself, {tables.shape_of(small)}"
    lines.append(_line(text, f"{1e6 * theirs:.0f} µs", 1 / over, [None, None]))
    return table(("on one H200, bf16", "torch", "speed with fusedlayers", "memory, torch's and ours"), lines) + "\n"


def _steps() -> list[tuple[Any, float]]:
    """The whole training steps, eager and compiled, and our time over torch's."""
    rows = [row for row in tables.timed_rows(_read("steps", "h200-bf16.json")) if row["direction"] in _COMPILED]
    return [(row, over) for row in rows if (over := over_torch(row, "auto")) is not None]


def _line(what: str, torch: str, speed_up: float, memory: list[int | None]) -> tuple[str, ...]:
    theirs, ours = memory
    sizes = "" if theirs is None or ours is None else f"{theirs / 2**20:,.0f} and {ours / 2**20:,.0f} MiB"
    return what, torch, f"{speed_up:.2f} ×", sizes


def draw(path: Path) -> None:
    """Speed and memory of whole training steps with ours, as multiples of torch's."""
    rows = _steps()
    names = [f"{row['title'].replace(', 128 images', '')}{_COMPILED[row['direction']]}" for row, _ in rows]
    speeds = [1 / over for _, over in rows]
    memory = [(step_tables.peak(row, "auto") or 0) / (step_tables.peak(row, "torch") or 1) for row, _ in rows]
    for name, torch, ours in _compiled_runs():
        names.append(f"language model, {name.replace(' a step', '')}, compiled")
        speeds.append(ours["tokens_per_second"] / torch["tokens_per_second"])
        memory.append(ours["peak_memory_bytes"] / torch["peak_memory_bytes"])
    figure = figure_class()(figsize=(10, 0.36 * len(names) + 1.4), layout="constrained")
    faster, smaller = figure.subplots(1, 2, sharey=True)
    places = list(range(len(names)))[::-1]
    for axes, values, title in (
        (faster, speeds, "speed (right of 1 is faster)"),
        (smaller, memory, "peak memory (left of 1 is less)"),
    ):
        axes.barh(places, values, color=["#0072b2" if axes is faster else "#e69f00"] * len(names))
        axes.axvline(1.0, color="black", linewidth=1)
        for place, value in zip(places, values, strict=True):
            # In front of the line at 1, which would cross the numbers just below it.
            background = {"facecolor": "white", "edgecolor": "none", "pad": 0.5}
            axes.text(value + 0.012, place, f"{value:.2f}", va="center", fontsize=8, bbox=background)
        # Room for the number behind the longest bar.
        axes.set_xlim(0, 1.18 * max(1.1, *values))
        axes.set_xlabel("as a multiple of torch's", fontsize=8)
        axes.set_title(title, fontsize=10)
    faster.set_yticks(places, names, fontsize=8)
    figure.suptitle("Whole training steps on one H200, bf16: fusedlayers in auto mode beside torch in the same mode")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


TABLES: dict[str, Callable[[], str]] = {
    "what to expect": _expectations,
    "whole runs": _whole_runs,
    "whole steps": lambda: step_tables.markdown(_read("steps", "h200-bf16.json")),
    "families": lambda: step_table.markdown(json.loads(step_table.RECORD.read_text())),
    "every family": lambda: family_table.markdown(json.loads(family_table.RECORD.read_text())),
    "host": lambda: host_tables.markdown(_read("host", "h200-bf16.json")),
    "host, autocast": lambda: host_tables.markdown(_read("host", "h200-bf16-autocast.json")),
    "layers": lambda: tables.markdown(_read("h200-bf16.json")),
    "narrow": lambda: tables.markdown(_read("narrow", "h200-bf16.json")),
    "loss head": lambda: tables.markdown(_read("loss_head", "h200-bf16.json")),
    "loss head, many tokens": lambda: tables.markdown(_read("loss_head", "h200-bf16-many-tokens.json")),
    "loss head, other libraries": lambda: tables.markdown(_read("loss_head", "h200-bf16-others.json")),
    "experts": lambda: tables.markdown(_read("experts", "h200-bf16.json")),
    "adapters": lambda: tables.markdown(_read("lora", "h200-bf16.json")),
    "autotune": lambda: tables.markdown(_read("autotune", "h200-bf16.json")),
    "random sizes": lambda: "\n\n".join(
        drawn.markdown(record)
        for record in (
            _read("drawn", "h200-bf16-ffn.json"),
            _read("drawn", "h200-bf16.json"),
            _read("drawn", "h200-bf16-maxsim.json"),
            _read("drawn", "h100-bf16-ffn.json"),
            _read("drawn", "h100-bf16.json"),
            _read("drawn", "h100-bf16-maxsim.json"),
        )
    ),
    "recompute": lambda: tables.markdown(_read("recompute", "h200-bf16.json")),
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
    parser = argparse.ArgumentParser(prog="python -m docs.tables", description=(__doc__ or "").splitlines()[0])
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
