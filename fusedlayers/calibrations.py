"""The record of measurements on the user's own GPUs, a JSON file in the user's cache folder.

    schema   2
    records  one for each GPU and each set of versions that its figures depend on:
        gpu, processors, torch, compiler, sources   the key; processors counts SMs, sources is a digest of the kernels
        driver, toolchain, measured                 information about the last run; toolchain names the assembler
        entries  list of {kin, variant, sizes, launched, replayed, hash}: ``planning.record.Row``, in seconds by path

The hash of an entry covers all its figures and the key of its record. An entry that was edited, or moved to another
record, is therefore not trusted. Merging the file of a team or of an image keeps the entries that are already there.
"""

from __future__ import annotations

import hashlib
import json
import logging
import sys
from collections.abc import Callable, Collection, Iterable, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

from . import sources
from .folders import CacheFile, read_json, write_json
from .kernels.device import compiler, toolchain
from .planning import Device
from .planning.record import Record, Row

logger = logging.getLogger("fusedlayers")

SCHEMA = 2
_PLACE = ("gpu", "processors", "torch", "compiler", "sources")
Place = tuple[Any, ...]
Json = dict[str, Any]


def calibration_file() -> Path:
    """The path of the record.

    Raises:
        ValueError: no home folder is known.
    """
    return FILE.path


def on_record(facts: Device) -> Record | None:
    """The measurements of such a device with these versions, or None."""
    records = [record for record in FILE.read() or () if record["gpu"] == facts.name]
    place = place_of(facts) if records else ()
    entries = [found for record in records if _place(record) == place for found in trusted(record)]
    if records and not entries:
        changed = [name for name, now in zip(_PLACE, place, strict=True) if any(each[name] != now for each in records)]
        logger.warning(
            "%s has no figures for %s with these versions (others: %s): python -m fusedlayers.bench calibrate",
            FILE.path, facts.name, ", ".join(changed) or "none",
        )  # fmt: skip
    return Record(entries) if entries else None


def place_of(facts: Device) -> Place:
    """The key of a record: the device, and all versions that its figures depend on.

    The assembler is not part of it: it comes with Triton, and changes within a process that calls ``torch.compile``.
    """
    return facts.name, facts.sms, torch.__version__, compiler(), sources.of_kernels()


def add(facts: Device, entries: Collection[Row], driver: str | None) -> Path:
    """Records entries, which replace earlier ones of the same problems, and returns the file.

    Raises:
        OSError, ValueError: the file cannot be written.
    """
    place = place_of(facts)
    last_run = {
        "driver": driver,
        "toolchain": toolchain(facts.architecture),
        "measured": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }

    def with_entries(own: list[Json] | None) -> Json:
        records = _by_place(own)
        known = records.get(place, {"entries": []})["entries"]
        merged = {_problem(entry): entry for entry in [*known, *(_as_json(found, place) for found in entries)]}
        records[place] = dict(zip(_PLACE, place, strict=True)) | last_run | {"entries": list(merged.values())}
        return _contents(records.values())

    return FILE.update(with_entries)


def merge(paths: Sequence[Path]) -> tuple[int, int]:
    """Merges the records of other files into the user's, and returns the numbers of new and of untrusted entries.

    Raises:
        ValueError: a file cannot be read, or is no record; the message names it, and nothing is merged.
    """
    given = [record for path in paths for record in read(path)]
    taken = dropped = 0

    def with_those_given(own: list[Json] | None) -> Json:
        nonlocal taken, dropped
        records = _by_place(own)
        for record in given:
            place = _place(record)
            into = records.get(place, record | {"entries": []})
            known = {_problem(entry): entry for entry in into["entries"]}
            for entry in record["entries"]:
                if entry["hash"] != _hash(entry, place):
                    dropped += 1
                elif _problem(entry) not in known:
                    known[_problem(entry)] = entry
                    taken += 1
            records[place] = into | {"entries": list(known.values())}
        return _contents(records.values())

    FILE.update(with_those_given)
    return taken, dropped


def export(path: Path) -> int:
    """Writes the whole record into a file, for others to merge; returns the number of entries.

    Raises:
        ValueError: nothing is on record, or the record cannot be read.
    """
    own = calibration_file()
    if not own.exists():
        raise ValueError(f"{own}: nothing was measured here yet")
    records = read(own)
    write_json(_contents(records), path)
    return sum(len(record["entries"]) for record in records)


def read(path: Path) -> list[Json]:
    """The records of a file.

    Raises:
        ValueError: the file cannot be read, or is no record; the message names it.
    """
    found = read_json(path)
    try:
        return checked(found)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def checked(found: Any) -> list[Json]:
    """The checked records in a file's contents, without unknown keys.

    Raises:
        ValueError: the contents are no calibration.
    """
    if not isinstance(found, dict) or found.get("schema") != SCHEMA:
        raise ValueError(f"expected a calibration of schema {SCHEMA}")
    if type(found.get("records")) is not list:
        raise ValueError("is no complete calibration (records)")
    return [_checked_record(record) for record in found["records"]]


def trusted(record: Json) -> list[Row]:
    """The entries of a record whose hash is right."""
    place = _place(record)
    return [_entry(entry) for entry in record["entries"] if entry["hash"] == _hash(entry, place)]


def _by_place(records: list[Json] | None) -> dict[Place, Json]:
    return {_place(record): record for record in records or ()}


def _contents(records: Iterable[Json]) -> Json:
    return {"schema": SCHEMA, "records": list(records)}


def _place(record: Json) -> Place:
    return tuple(record[name] for name in _PLACE)


def _problem(entry: Json) -> str:
    return json.dumps([entry[name] for name in ("kin", "variant", "sizes")])


def _hash(entry: Json, place: Place) -> str:
    figures = {name: value for name, value in entry.items() if name != "hash"}
    return hashlib.sha256(json.dumps([place, figures], sort_keys=True).encode()).hexdigest()[:16]


def _as_json(row: Row, place: Place) -> Json:
    found: Json = {
        "kin": row.kin,
        "variant": row.variant,
        "sizes": list(row.sizes),
        "launched": dict(row.launched),
        "replayed": dict(row.replayed),
    }
    return found | {"hash": _hash(found, place)}


def _entry(found: Json) -> Row:
    launched, replayed = found["launched"], found["replayed"]
    return Row(found["kin"], found["variant"], tuple(found["sizes"]), launched, replayed, sure=True)


def _is_text(value: object) -> bool:
    return type(value) is str


def _is_size(value: object) -> bool:
    return type(value) is int and value >= 0


def _is_amount(value: Any) -> bool:
    return type(value) in (int, float) and 0 <= value <= sys.float_info.max


def _are_seconds(value: object) -> bool:
    return type(value) is dict and all(_is_amount(time) and time > 0 for time in value.values())


_Expected = dict[str, Callable[[Any], bool]]
# Checks of the fields of a record and of an entry, because a file may contain anything.
_RECORD: _Expected = {
    "gpu": _is_text,
    "processors": _is_size,
    "torch": _is_text,
    "compiler": _is_text,
    "sources": _is_text,
}
_ENTRY: _Expected = {
    "kin": _is_text,
    "variant": _is_text,
    "sizes": lambda value: type(value) is list and all(map(_is_size, value)),
    "launched": _are_seconds,
    "replayed": _are_seconds,
    "hash": _is_text,
}


def _checked_record(record: Any) -> Json:
    _check(record, _RECORD)
    if type(record.get("entries")) is not list:
        raise ValueError("is no complete calibration (entries)")
    for entry in record["entries"]:
        _check(entry, _ENTRY)
        if len(entry) > len(_ENTRY):
            raise ValueError(f"is no calibration of schema {SCHEMA} ({', '.join(sorted(set(entry) - set(_ENTRY)))})")
    for_the_reader = {name: record.get(name) for name in ("driver", "toolchain", "measured")}
    described = {name: value for name, value in for_the_reader.items() if value is None or _is_text(value)}
    return {name: record[name] for name in (*_PLACE, "entries")} | described


def _check(found: Any, expected: _Expected) -> None:
    wrong = [name for name, right in expected.items() if type(found) is not dict or not right(found.get(name))]
    if wrong:
        raise ValueError(f"is no complete calibration ({', '.join(wrong)})")


FILE = CacheFile("calibration.json", checked)
