"""Records as tables and pictures, and one record out of several.

    python -m benchmarks.records table FILE.json                the tables of a record in markdown
    python -m benchmarks.records plot FILE.json                 its pictures, beside it
    python -m benchmarks.records update FILE.json NEWER.json    rows that were measured anew, put into a record

A record is one of ``python -m fusedlayers.bench ... --time``, of ``benchmarks.host``, ``lengths``, ``steps`` or
``sweep``, and to update one of ``benchmarks.float8``, too. The exit status is 1 if it cannot be read, holds no times,
or is not like the newer one.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from fusedlayers.bench.record import Record, read, write

from . import host_tables, layer_tables, lengths, plots, step_tables, sweep

# What makes tables and pictures of records whose rows are no shapes of a case, by the case that their rows name.
_OTHERS: dict[str, Any] = {
    "host": host_tables, "lengths": lengths, "steps": step_tables, "split_k_sweep": sweep,
}  # fmt: skip


def main(arguments: list[str] | None = None) -> int:
    """Run the command line, and return the exit status."""
    chosen = build_parser().parse_args(arguments)
    try:
        record = read(chosen.file)
        if chosen.name == "table":
            print(markdown(record), end="")
        elif chosen.name == "update":
            write(updated(record, read(chosen.newer)), chosen.file)
        else:
            draw(record, chosen.file)
    except (ValueError, OSError, plots.MatplotlibMissingError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def build_parser() -> argparse.ArgumentParser:
    """All commands and their arguments."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.records", description=(__doc__ or "").split("\n")[0])
    commands = parser.add_subparsers(dest="name", required=True, metavar="NAME")
    for name, what in (
        ("table", "print the markdown tables of a record"),
        ("plot", "draw the pictures of a record"),
        ("update", "put the rows of a newer record into an older one"),
    ):
        command = commands.add_parser(name, help=what)
        command.add_argument("file", type=Path, metavar="FILE.json")
        if name == "update":
            command.add_argument("newer", type=Path, metavar="NEWER.json")
    return parser


def markdown(record: Record) -> str:
    """The tables of any record.

    Raises:
        ValueError: the record holds no times.
    """
    shown: str = _OTHERS.get(_case(record), layer_tables).markdown(record)
    return shown


def draw(record: Record, path: Path) -> None:
    """Draw the pictures of any record beside ``path``, and print which there are.

    Raises:
        ValueError: the record holds no times.
        MatplotlibMissingError: matplotlib is not installed.
    """
    plots.draw(_OTHERS.get(_case(record), plots).plot, record, path)


def _case(record: Record) -> str:
    return str(record["rows"][0]["case"]) if record["rows"] else ""


def updated(record: Record, newer: Record) -> Record:
    """``record`` with the rows of ``newer`` in place of its own of the same shape and direction, the others at the end.

    Rows of which a budget left nothing to be timed replace none that were.

    Raises:
        ValueError: the newer one has another device, other libraries, another method or less time, is not finished, is
            not of a known commit without changes, or has a row that is red, without times, there twice, or without a
            contender that was timed in the row that it is to replace.
    """
    method, seconds = newer["method"], record["method"].get("seconds_per_row", 0)
    # Rows that were timed for longer are as good.
    longer = {"seconds_per_row": seconds} if method.get("seconds_per_row", 0) > seconds else {}
    # Peak rates are what the library knew of the device then, not what it is.
    device = newer["device"] | {"ceilings": record["device"]["ceilings"]}
    # Of this library a row names the commit, which says more than the version. A library that was not there then timed
    # nothing: rows that it has times in stay, as all contenders must be there.
    versions = record["versions"] | newer["versions"] | {"fusedlayers": record["versions"]["fusedlayers"]}
    alike = newer | {"method": method | longer, "device": device, "versions": versions}
    check_alike(record, alike, "versions", "device", "method")
    if newer["finished"] is None:
        raise ValueError("finished: expected a newer run that is, got None")
    if newer["commit"] is None or newer["dirty"]:
        raise ValueError(f"commit: expected one without changes, got {newer['commit']}, dirty: {newer['dirty']}")
    older = {_identity(row): row for row in record["rows"]}
    measured: dict[tuple[object, ...], Record] = {}
    for row in newer["rows"]:
        identity = _identity(row)
        # One that has no times there, as it cannot run, has none to lose.
        entries = _entries(row)
        known, timed = _timed(_entries(older.get(identity, {}))), _timed(entries)
        red = any(verdict["status"] == "red" for verdict in row.get("verification", ()))
        if known and entries and not timed and not red:
            continue
        if identity in measured or red or not entries or set(known) - set(timed):
            raise ValueError(f"{identity}: expected it once, green, with times of {', '.join(known) or 'contenders'}")
        measured[identity] = row if newer["commit"] == record["commit"] else {"commit": newer["commit"]} | row
    rows = [measured.pop(identity, row) for identity, row in older.items()]
    return record | {"rows": [*rows, *measured.values()]}


def _entries(row: Record) -> Record:
    """What a row says of each contender; rows of layers in 8 bits have their launched times alone."""
    entries: Record = row.get("contenders", {})
    return entries or {name: {"launched": times} for name, times in row.get("launched", {}).items()}


def _timed(entries: Record) -> list[str]:
    return [name for name, entry in entries.items() if entry["launched"] is not None]


def check_alike(record: Record, newer: Record, *keys: str) -> None:
    """Let pass what may stand in one table: records that have the same in these keys.

    Raises:
        ValueError: names the key in which they differ.
    """
    for key in keys:
        if record[key] != newer[key]:
            raise ValueError(f"{key}: expected those of the record, {record[key]}, got {newer[key]}")


def _identity(row: Record) -> tuple[object, ...]:
    return row.get("grid"), row["title"], tuple(row["shape"]), row.get("dtype"), row["direction"]


if __name__ == "__main__":
    sys.exit(main())
