"""Auto mode beside the best of torch at sizes that nobody chose: each operation at random ones of a fixed seed.

    python -m fusedlayers.bench.published.drawn                     60 sizes of every operation
    python -m fusedlayers.bench.published.drawn --families ffn,maxsim --sizes 20 --seed 7

A size lies between the least and the greatest of its operation's published grids, on a logarithmic scale, and takes no
more arithmetic than the greatest of them. Each is verified, and timed if it is right, as by the other benchmarks.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

from .. import record as records
from ..arguments import add_record_options, chosen_device, positive, record_path, several, show
from ..cases import CASES, Case, Shape
from ..contenders import AUTO, COMPILED, EAGER
from ..record import Record
from ..runner import Row, Settings, run, shape_text
from ..tables import DIRECTIONS, ENOUGH, KINDS, PATHS, Table, apart, best_of_torch, median, speed_up

FAMILIES = tuple(name for name, case in CASES.items() if case.grids)
# From here on a size is a multiple of 8, every other one of 64: models have such.
_FIRST_EVEN, _STEPS = 64, (8, 64)


def main(arguments: list[str] | None = None) -> int:
    """Run the command line, and return the exit status: 1 if a result is wrong or nothing can be measured."""
    parser = argparse.ArgumentParser(
        prog="python -m fusedlayers.bench.published.drawn", description=__doc__.split("\n")[0]
    )
    parser.add_argument(
        "--families", type=lambda text: several(text, FAMILIES), default=FAMILIES, metavar="NAME,…",
        help=f"of {','.join(FAMILIES)}; default: all",
    )  # fmt: skip
    parser.add_argument("--sizes", type=int, default=60, help="how many of each operation (default: 60)")
    parser.add_argument("--seconds", type=positive, default=0.15, help="timing per size and direction (default: 0.15)")
    add_record_options(parser)
    words = sys.argv[1:] if arguments is None else arguments
    chosen = parser.parse_args(words)
    try:
        device = chosen_device(chosen)
        dtype = chosen.dtype or ("bf16" if device.type == "cuda" else "fp32")
        record_path(chosen.output, "drawn", dtype, device)
        if chosen.sizes < 1:
            raise ValueError(f"argument --sizes: {chosen.sizes}: expected 1 or more")
        if chosen.plot:
            raise ValueError("argument --plot: there is a table of random sizes, and no picture")
    except ValueError as error:
        parser.error(str(error))
    if device.type != "cuda":
        print("error: auto mode is timed beside torch, which needs a GPU", file=sys.stderr)
        return 1
    settings = Settings(
        dtype, device, seed=chosen.seed, timed=True, contenders=(EAGER, COMPILED, AUTO), seconds=chosen.seconds,
        commit=chosen.commit,
    )  # fmt: skip
    started, right = time.perf_counter(), True
    path = record_path(chosen.output, "drawn", dtype, device)
    method: dict[str, object] = {"seconds_per_row": chosen.seconds, "seed": chosen.seed, "sizes": chosen.sizes}
    record = records.new_record(words, device, method, chosen.commit)
    for family in chosen.families:
        for row in drawn(CASES[family], chosen.sizes, chosen.seed):
            if chosen.budget is not None and time.perf_counter() - started > chosen.budget:
                print(f"skip   {row.label}: the budget of {chosen.budget:g} s was spent")
                continue
            found, green = _measured(row, settings, words)
            right &= green
            record["rows"] += found
            records.write(record, path)
    records.finish(record)
    records.write(record, path)
    print(f"record: {path}")
    show(table(record))
    for line in slower_than_torch(record):
        print(f"slower than torch: {line}")
    return 0 if right else 1


def drawn(case: Case, sizes: int, seed: int) -> Iterator[Row]:
    """Random rows of a case, one of each published grid in turn."""
    drawing = random.Random(f"{case.name} {seed}")
    for number in range(sizes):
        grid = case.grids[number % len(case.grids)]
        most = max(case.forward_flops(shape, grid.options) for shape in grid.shapes)
        shape = _shape(case, drawing)
        while case.forward_flops(shape, grid.options) > most:
            shape = _shape(case, drawing)
        yield Row(case, grid, grid.options, shape)


def _shape(case: Case, drawing: random.Random) -> Shape:
    """A size for each letter."""
    shape = []
    for published in zip(*(shape for grid in case.grids for shape in grid.shapes), strict=True):
        least, greatest = min(published), max(published)
        size = round(math.exp(drawing.uniform(math.log(least), math.log(greatest))))
        step = drawing.choice(_STEPS) if size >= _FIRST_EVEN else 1
        shape.append(max(least, size // step * step))
    return tuple(shape)


def _measured(row: Row, settings: Settings, words: list[str]) -> tuple[list[Record], bool]:
    """What the record says about a row, forward and with its backward pass, and whether it is right."""
    with TemporaryDirectory() as folder:
        found, right = run([row], settings, words, Path(folder) / "record.json", say=lambda line: None)
    if not right:
        for verdict in found["rows"][0]["verification"]:
            print(f"RED    {row.label}: {verdict}", file=sys.stderr)
        return [], False
    print(f"timed  {row.label}")
    return [_short(timed) for timed in found["rows"]], True


def _short(row: Record) -> Record:
    """A row with what the table says: 60 sizes of ten operations would fill megabytes otherwise."""
    short = {"case": row["case"], "grid": row["grid"], "shape": shape_text(row["shape"]), "direction": row["direction"]}
    for kind in KINDS:
        ratio, ours = speed_up(row, kind), median(row, AUTO, kind)
        if ratio is not None and ours is not None:
            short[kind] = {
                "path": row["contenders"][AUTO][PATHS[kind]], "best": best_of_torch(row, kind),
                "microseconds": round(1e6 * ours, 2), "speed_up": round(ratio, 4), "beyond_noise": apart(row, kind),
            }  # fmt: skip
    return short


def table(record: Record) -> Table:
    """A line for each operation, direction and kind of time."""
    groups: dict[tuple[str, str, str], list[Record]] = {}
    for row in record["rows"]:
        for kind in KINDS:
            if kind in row:
                groups.setdefault((row["case"], row["direction"], kind), []).append(row[kind])
    lines = []
    for (name, direction, kind), rows in groups.items():
        ratios = [row["speed_up"] for row in rows]
        kernels = sum(row["path"] != "torch" for row in rows)
        slower = sum(row["speed_up"] < ENOUGH and row["beyond_noise"] for row in rows)
        lines.append(
            (name, DIRECTIONS[direction], kind, str(len(rows)), str(kernels), f"{statistics.median(ratios):.2f}",
             f"{max(ratios):.2f}", f"{min(ratios):.2f}", str(slower))
        )  # fmt: skip
    columns = ("operation", "pass", "time", "sizes", "in kernels", "median speed-up", "best", "least", "slower")
    return Table("Random sizes: the best of torch over auto mode", columns, tuple(lines))


def slower_than_torch(record: Record) -> list[str]:
    """One line for every size at which auto mode is slower than torch by more than the noise."""
    return [
        f"{row['grid']} {row['shape']} {row['direction']}, {kind}: {row[kind]['speed_up']:.2f} of "
        f"{row[kind]['best']}'s speed ({row[kind]['path']} path)"
        for row in record["rows"]
        for kind in KINDS
        if kind in row and row[kind]["speed_up"] < ENOUGH and row[kind]["beyond_noise"]
    ]


def markdown(record: Record) -> str:
    """The section of the documentation: the table, and every size that is slower."""
    versions, method = record["versions"], record["method"]
    caption = (
        f"Measured on {record['device']['name']}, torch {versions['torch']}, Triton {versions['triton']}, bf16, "
        f"{record['started'][:10]}, commit {str(record['commit'])[:10]}, sizes drawn with the seed {method['seed']}. "
        "*Speed-up* is the best of eager torch and `torch.compile` over auto mode, launched or replayed in a CUDA "
        f"graph; *slower*: how many sizes are below {ENOUGH} by more than the noise."
    )
    if (processes := method.get("processes", 1)) > 1:
        caption += f" {processes} processes compiled while one of them had the GPU for itself: the host is slowed down."
    slower = [f"- {line}" for line in slower_than_torch(record)]
    details = ["<details>", "<summary>Every size that is slower</summary>", "", *slower, "", "</details>"]
    return "\n".join([caption, "", table(record).markdown(), *(["", *details] if slower else [])])


if __name__ == "__main__":
    sys.exit(main())
