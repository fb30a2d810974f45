"""What the benchmarks of the documentation's tables share where they end: record, picture, tables and exit status."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import torch

from fusedlayers.bench import record as records
from fusedlayers.bench.arguments import chosen_device
from fusedlayers.bench.record import Record
from fusedlayers.bench.runner import Row, Settings, measured

from .plots import MatplotlibMissingError, draw


def finish(record: Record, path: Path, tables: ModuleType, passed: str, *, plotting: bool) -> None:
    """Write the record, draw it where that is asked for, and print it.

    ``tables`` has ``plot``, ``table`` and ``over_limits`` for such records; ``passed`` says what a line of the last is.

    Raises:
        MatplotlibMissingError: the record cannot be drawn.
    """
    records.finish(record, path)
    print(f"\nrecord: {path}")
    if plotting:
        draw(tables.plot, record, path)
    tables.table(record).show()
    for line in tables.over_limits(record):
        print(f"{passed}: {line}")


def over_torch(row: Record, name: str) -> float | None:
    """A contender's launched time over torch's of the same round, which runs the same way; above 1 torch is faster."""
    return row["contenders"].get(name, {}).get("over_torch")


def day_and_commit(record: Record) -> str:
    """When a record was made, and of which commit if it is one of a clone."""
    return record["started"][:10] + (f", commit {record['commit'][:10]}" if record["commit"] else "")


def answered(
    parser: argparse.ArgumentParser, run: Callable[[argparse.Namespace, list[str]], int], arguments: list[str] | None
) -> int:
    """The exit status of ``run`` on the words of a command line.

    A ValueError ends it as a bad option does, and what the machine lacks with the status 1.
    """
    words = sys.argv[1:] if arguments is None else arguments
    try:
        return run(parser.parse_args(words), words)
    except ValueError as error:
        parser.error(str(error))
    except (MatplotlibMissingError, NoGPUError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


class NoGPUError(RuntimeError):
    """There is no GPU to time anything on."""


def chosen_gpu(chosen: argparse.Namespace, what: str) -> torch.device:
    """The device of ``--device``; ``what`` says what is timed.

    Raises:
        ValueError: there is no such device; the message names the argument.
        NoGPUError: it is no GPU.
    """
    device = chosen_device(chosen)
    if device.type != "cuda":
        raise NoGPUError(f"{what}, which needs a GPU")
    return device


def measured_alone(row: Row, settings: Settings) -> list[Record]:
    """The entries of one row, forward and backward, without a word; none where memory does not suffice."""
    try:
        return [*measured([row], settings, say=lambda line: None)]
    except torch.OutOfMemoryError:
        return []
    finally:
        # What a process keeps for its next row, others lack.
        torch.cuda.empty_cache()
