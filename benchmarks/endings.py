"""What the benchmarks of the documentation's tables share where they end: record, picture, tables and exit status."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

from fusedlayers.bench import record as records
from fusedlayers.bench.record import Record

from .plots import draw


def finish(record: Record, path: Path, tables: ModuleType, passed: str, *, plotting: bool) -> bool:
    """Write the record, draw it where that is asked for, and print it; whether all of that could be done.

    ``tables`` has ``plot``, ``table`` and ``over_limits`` for such records; ``passed`` says what a line of the last is.
    """
    records.finish(record, path)
    print(f"\nrecord: {path}")
    if plotting and not draw(tables.plot, record, path):
        return False
    tables.table(record).show()
    for line in tables.over_limits(record):
        print(f"{passed}: {line}")
    return True


def over_torch(row: Record, name: str) -> float | None:
    """A contender's launched time over torch's of the same round, which runs the same way; above 1 torch is faster."""
    return row["contenders"].get(name, {}).get("over_torch")


def day_and_commit(record: Record) -> str:
    """When a record was made, and of which commit if it is one of a clone."""
    return record["started"][:10] + (f", commit {record['commit'][:10]}" if record["commit"] else "")


def answered(
    parser: argparse.ArgumentParser, run: Callable[[argparse.Namespace, list[str]], int], arguments: list[str] | None
) -> int:
    """The exit status of ``run`` on the words of a command line; a ValueError ends it as a bad option does."""
    words = sys.argv[1:] if arguments is None else arguments
    try:
        return run(parser.parse_args(words), words)
    except ValueError as error:
        parser.error(str(error))
