"""Auto mode's decisions beside the committed times: what the paths that it takes cost over the fastest ones.

    python -m benchmarks.replay               every operation, pass and card
    python -m benchmarks.replay --worst 20    and the decisions that cost the most
    python -m benchmarks.replay --plot        and the picture of what is expected beside what was measured

No GPU is asked: each row of the results is planned again for the card that it was measured on, *as shipped* with the
whole record, and *left out* as if nothing had been measured at its sizes. Eager torch is the alternative, and kernels
wherever they were timed.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple
from zlib import crc32

from fusedlayers import planning
from fusedlayers.bench.tables import NONE, Table
from fusedlayers.planning import CARDS
from fusedlayers.planning.call import in_words
from fusedlayers.planning.record import LAUNCHED, REPLAYED, TORCH, Record

from .measured import DRAWN, sources
from .plots import figure_class

# A decision that costs more is a wrong one: so much lies within the noise of two measurements.
WRONG = 1.03
PICTURE = Path(__file__).parents[1] / "docs" / "pictures" / "expected.png"
_COLOURS = (
    "#0072b2",
    "#e69f00",
    "#009e73",
    "#cc79a7",
    "#d55e00",
    "#56b4e9",
    "#f0e442",
    "#8c8c8c",
    "#4c4c4c",
    "#b0a090",
)


class Decision(NamedTuple):
    """A problem in one kind of time, the paths that auto mode takes, and the times of all known paths."""

    card: str
    problem: Any
    folder: str
    shipped: str
    left_out: str | None
    seconds: dict[str, float]
    # By path, logarithms of how many times as long as torch it is expected to take without the row.
    ratios: dict[str, float]

    @property
    def how(self) -> str:
        return REPLAYED if self.problem.captured else LAUNCHED

    def regret(self, path: str) -> float:
        """The time of a path over that of the fastest one."""
        return self.seconds[path] / min(self.seconds.values())

    def line(self) -> str:
        times = ", ".join(f"{path} {in_words(seconds)}" for path, seconds in self.seconds.items())
        what = f"{self.card} {self.problem.operation} {self.problem.described}, {self.how}"
        left_out = "" if self.left_out is None else f"{self.left_out}, "
        regret = self.regret(self.left_out or self.shipped)
        return f"{regret:.2f} {what}: {left_out}as shipped {self.shipped} ({times})"


def decisions(card: str, left_out: int = 1) -> Iterator[Decision]:
    """Every row of the results of a card that was timed on the paths taken, and on torch's.

    One in ``left_out`` problems is decided without its row, too: the same ones whatever else is measured.
    """
    device = CARDS[card]
    assert device.record is not None
    for source in sources(card):
        problem = source.problem
        if problem != problem.decisive:
            continue
        blind = None
        name = f"{problem.recorded_kin} {problem.variant} {problem.sizes}"
        if crc32(name.encode()) % left_out == 0:
            blind = replace(device, override=device.record.without(problem.recorded_kin, problem.sizes))
        for captured, seconds in ((False, source.launched), (True, source.replayed)):
            call = replace(problem, captured=captured)
            shipped = problem.recorded(planning.plan(call, device).path, device)
            other = None if blind is None else problem.recorded(planning.plan(call, blind).path, device)
            if {TORCH, shipped, other or TORCH} <= seconds.keys() and len(seconds) > 1:
                ratios = {} if blind is None or blind.override is None else _ratios(call, blind.override, seconds)
                yield Decision(card, call, source.folder, shipped, other, seconds, ratios)


def _ratios(problem: Any, record: Record, paths: Iterable[str]) -> dict[str, float]:
    surface = record.surface(problem.recorded_kin, problem.measured_as[0], len(problem.sizes))
    return {} if surface is None else surface.ratios(*surface.near(problem.sizes, problem.variant), paths)


def draw(found: Sequence[Decision], path: Path) -> None:
    """A point for every path and row: its time over torch's, as measured and as expected without that measurement.

    Raises:
        MatplotlibMissingError: matplotlib is not installed.
    """
    figure = figure_class()(figsize=(10, 5.2), layout="constrained")
    operations = sorted({each.problem.operation for each in found})
    for axes, how in zip(figure.subplots(1, 2, sharey=True), (LAUNCHED, REPLAYED), strict=True):
        for operation, colour in zip(operations, _COLOURS, strict=False):
            points = [
                (each.seconds[path] / each.seconds[TORCH], math.exp(ratio))
                for each in found
                if each.how == how and each.problem.operation == operation
                for path, ratio in each.ratios.items()
                if path != TORCH and path in each.seconds
            ]
            if points:
                axes.scatter(*zip(*points, strict=True), s=5, alpha=0.6, color=colour, label=operation)
        axes.plot((0.03, 20), (0.03, 20), color="black", linewidth=0.8)
        axes.axhline(1, color="#8c8c8c", linewidth=0.5)
        axes.axvline(1, color="#8c8c8c", linewidth=0.5)
        axes.set(xscale="log", yscale="log", xlim=(0.03, 20), ylim=(0.03, 20), xlabel="measured time over torch's")
        axes.xaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_major_formatter("{x:g}")
        axes.set_title("launched one by one" if how == LAUNCHED else "in a CUDA graph")
    figure.axes[0].set_ylabel("time over torch's, expected without that measurement")
    figure.legend(*figure.axes[1].get_legend_handles_labels(), loc="outside right upper", markerscale=3, frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def committed(left_out: int = 1) -> list[Decision]:
    """The decisions about all results of layers that were measured with the usual release of Triton."""
    return [each for card in CARDS for each in decisions(card, left_out)]


def mean_regret(regrets: Iterable[float]) -> float:
    """Their geometric mean."""
    return math.exp(statistics.fmean(map(math.log, regrets)))


def wrong(regrets: Iterable[float]) -> float:
    """The share of decisions that cost more than the noise."""
    return statistics.fmean(each > WRONG for each in regrets)


def table(found: list[Decision]) -> Table:
    """A line for each card, operation, direction and kind of time, sizes that were drawn apart; and one for all."""
    groups: dict[tuple[str, ...], list[Decision]] = {}
    for each in found:
        kinds = "drawn" if each.folder == DRAWN else "published"
        groups.setdefault((each.card, each.problem.operation, each.how, kinds), []).append(each)
    for how in (LAUNCHED, REPLAYED):
        groups["all", "", how, ""] = [each for each in found if each.how == how]
    groups["all", "", "", ""] = found
    lines = []
    for name, rows in groups.items():
        line = [*name, str(len(rows))]
        blind = [each.regret(each.left_out) for each in rows if each.left_out is not None]
        for regrets in ([each.regret(each.shipped) for each in rows], blind):
            line += [f"{mean_regret(regrets):.4f}", f"{wrong(regrets):.1%}"] if regrets else [NONE, NONE]
        lines.append(tuple(line))
    columns = ("card", "operation", "time", "sizes", "rows", "as shipped", f"above {WRONG}", "left out",
               f"above {WRONG}")  # fmt: skip
    return Table("Auto mode's time over that of the fastest path, in the geometric mean", columns, tuple(lines))


def build_parser() -> argparse.ArgumentParser:
    """All options."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.replay", description=__doc__.split("\n")[0])
    parser.add_argument("--plot", action="store_true", help=f"draw {PICTURE.relative_to(PICTURE.parents[2])}")
    parser.add_argument("--worst", type=int, default=0, metavar="N", help="list the N decisions that cost the most")
    return parser


def main(arguments: list[str] | None = None) -> int:
    """Run the command line, and return the exit status."""
    chosen = build_parser().parse_args(arguments)
    found = committed()
    print(table(found).plain())
    if chosen.plot:
        draw(found, PICTURE)
        print(f"plot: {PICTURE}")
    for each in sorted(found, key=lambda each: -each.regret(each.left_out or each.shipped))[: chosen.worst]:
        print(each.line())
    return 0


if __name__ == "__main__":
    sys.exit(main())
