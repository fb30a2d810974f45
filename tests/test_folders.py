"""Records are optional: whatever lies in the user's cache folder, or keeps it from being read, no call raises."""

from __future__ import annotations

import errno
import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import hypothesis
import hypothesis.strategies as st
import pytest
import torch

import fusedlayers as fl
from fusedlayers import calibrations, devices, folders
from fusedlayers.planning import Device, LinearProblem, Problem, plan
from fusedlayers.planning.record import Record, Row
from tests.support.selection import draws

ROOT = Path(__file__).resolve().parent.parent
CPU = torch.device("cpu")
CARD = Device("cuda", "Some Card", "sm_86", sms=82, triton=True)
FFN = Problem("ffn", 1, 4096, 1024, 4096, 1024, "bfloat16", "silu", gated=True)
FILES = ("calibration.json", "selftest.json")
# Descends further than any reader of JSON does.
DEEP = 200_000


def row(problem: Any) -> Row:
    """A problem as it would be recorded."""
    seconds = {"torch": 2e-5, "generic": 1e-5, "fused": 1e-5}
    return Row(problem.kin, problem.variant, problem.sizes, seconds, {**seconds, "torch": 9e-6}, sure=True)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The library's cache folder, which is not there yet, and nothing that this process remembers of another one."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for remembered in (devices._describe, devices.why_nothing_compiles, folders.say_once):
        remembered.cache_clear()
    yield tmp_path / "cache" / "fusedlayers"
    for remembered in (devices._describe, devices.why_nothing_compiles, folders.say_once):
        remembered.cache_clear()


# What each process that has no home folder to read does first, after all that it imports: here forks of one process,
# whose imports take longer than all else.
FIRST_CALLS = """
import logging, os, pwd, sys, traceback
import torch
from torch import nn
import fusedlayers as fl
from fusedlayers import devices

def unknown():
    # Nobody by that number, so that no home folder is known.
    def nobody(uid):
        raise KeyError(uid)

    os.environ.pop("HOME", None)
    pwd.getpwuid = nobody

def unreadable():
    # A folder that nobody may read.
    os.environ["HOME"] = sys.argv[1]
    if os.geteuid() == 0:
        os.setgid(65534)
        os.setuid(65534)

def no_folder():
    assert os.environ["HOME"] == "/dev/null"

def first_calls(setting, count):
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append((record.levelname, record.getMessage()))
    logging.getLogger("fusedlayers").addHandler(handler)
    logging.getLogger("fusedlayers").setLevel(logging.INFO)
    setting()
    layer, x = fl.FusedFFN(8, 16), torch.randn(2, 8)
    layer(x)
    devices.records()  # as torch.compile asks for it
    fl.explain(layer, x)
    model = nn.Sequential(nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)))
    assert fl.replace(model).replaced
    fl.functional.linear_cross_entropy(x, torch.randn(5, 8), torch.tensor([1, 2]))
    fl.functional.linear(x, torch.randn(5, 8))
    about = [line for line in lines if "ignored" in line[1]]
    print(lines)
    assert len(about) == count and all(level == "INFO" for level, _ in about), about

failed = []
for setting, count in ((unknown, 1), (unreadable, 1), (no_folder, 0)):
    child = os.fork()
    if not child:
        try:
            first_calls(setting, count)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    if os.waitpid(child, 0)[1]:
        failed.append(setting.__name__)
assert not failed, failed
"""


@pytest.mark.interpreter
def test_first_calls_without_a_home_folder(tmp_path: Path, run_python: Callable[..., Any]) -> None:
    home = tmp_path / "home"
    home.mkdir(mode=0o700)
    if os.geteuid() != 0:
        home.chmod(0)
    code = FIRST_CALLS.replace("sys.argv[1]", repr(str(home)))
    run_python(code, HOME="/dev/null", XDG_CACHE_HOME=None, TRITON_INTERPRET="1")


def place_nothing(path: Path) -> None:
    path.parent.rmdir()


def place_behind_a_file(path: Path) -> None:
    path.parent.rmdir()
    path.parent.write_text("")


# What may lie in the place of a record -> whether that is worth a line.
PLACED: dict[str, tuple[Callable[[Path], object], bool]] = {
    "nothing": (place_nothing, False),
    "a file in place of the folder": (place_behind_a_file, False),
    "a link to nothing": (lambda path: path.symlink_to("nowhere"), False),
    "a link to itself": (lambda path: path.symlink_to(path.name), True),
    "a folder": (Path.mkdir, True),
    "a pipe": (os.mkfifo, True),
    "a device": (lambda path: path.symlink_to("/dev/zero"), True),
    "an empty file": (Path.touch, True),
    "no text": (lambda path: path.write_bytes(b"\xff\xfe\x00"), True),
    "half a file": (lambda path: path.write_text('{"schema": 1, "rec'), True),
    "lists in lists": (lambda path: path.write_text("[" * DEEP + "]" * DEEP), True),
    "a record with lists in lists": (
        lambda path: path.write_text('{"schema": 1, "records": [' + "[" * DEEP + "]" * DEEP + "]}"), True,
    ),
    "objects in objects": (lambda path: path.write_text('{"a":' * DEEP + "1" + "}" * DEEP), True),
    "a huge number": (lambda path: path.write_text("9" * 100_000), True),
    "another type": (lambda path: path.write_text('"text"'), True),
    "numbers": (lambda path: path.write_text('{"cpu": [1, null]}'), True),
    "records without an end": (lambda path: path.write_text('{"schema": 1, "records": {"gpu": 1e999}}'), True),
}  # fmt: skip


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("placed", PLACED)
def test_whatever_lies_there_costs_one_line_at_most(
    placed: str, name: str, cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(devices, "interpreted", lambda: True)
    cache.mkdir(parents=True)
    place, said = PLACED[placed]
    place(cache / name)
    with caplog.at_level(logging.INFO, "fusedlayers"):
        for _ in range(2):
            devices._describe.cache_clear()
            facts = devices.describe(CPU)
            devices.records()
        fl.FusedFFN(8, 16)(torch.randn(2, 8))
    assert (facts.avoided, facts.calibration) == (frozenset(), None)
    lines = [record for record in caplog.records if "ignored" in record.getMessage()]
    assert len(lines) == said
    assert all(record.levelno == logging.INFO and str(cache) in record.getMessage() for record in lines)


@pytest.mark.parametrize("placed", sorted(set(PLACED) - {"a folder", "a file in place of the folder"}))
def test_the_next_record_takes_its_place(placed: str, cache: Path) -> None:
    cache.mkdir(parents=True)
    PLACED[placed][0](cache / FILES[0])
    calibrations.add(CARD, [row(FFN)], None)
    assert calibrations.on_record(CARD) is not None
    assert not [path for path in cache.iterdir() if path.name.startswith(".")]


def test_an_empty_variable_is_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    assert folders.cache_folder() == tmp_path / ".cache" / "fusedlayers"


# What two processes write at the same time: each its own device, or its own entries, one by one. Both are forks of one
# process, and begin when the other is there, too.
WRITES = """
import os
from dataclasses import replace
from fusedlayers import calibrations, devices
from fusedlayers.planning import Device, Problem
from fusedlayers.planning.record import Row

CARD = {card}
FFN = {ffn}

def write(number):
    for count in range(40):
        devices.record_failures(replace(CARD, name=f"Card {{number}}"), [f"configuration {{count}}"], {{"another"}})
        problem = replace(FFN, M=2 * count + number)
        row = Row(problem.kin, problem.variant, problem.sizes, {{"torch": 2e-5, "generic": 1e-5}}, {{}}, sure=True)
        calibrations.add(CARD, [row], None)

ready, go = os.pipe(), os.pipe()
children = []
for number in range(2):
    children.append(os.fork())
    if not children[-1]:
        os.write(ready[1], b"r")
        os.read(go[0], 1)
        write(number)
        os._exit(0)
for _ in children:
    os.read(ready[0], 1)
os.write(go[1], b"gg")
assert [os.waitpid(child, 0)[1] for child in children] == [0, 0]
"""


def test_two_processes_lose_none_of_each_others_records(cache: Path, run_python: Callable[..., Any]) -> None:
    run_python(WRITES.format(card=repr(CARD), ffn=repr(FFN)))
    found = calibrations.on_record(CARD)
    assert len(found) == 80
    for number in range(2):
        failed = devices.failures_on_record(replace(CARD, name=f"Card {number}"))
        assert failed == {f"configuration {count}" for count in range(40)}
    assert {path.name for path in cache.iterdir()} == {*FILES, "calibration.lock", "selftest.lock"}


def test_a_lock_ends_with_its_process(cache: Path) -> None:
    holds = "import sys, time\nfrom pathlib import Path\nfrom fusedlayers import folders\n"
    holds += "with folders.locked(Path(sys.argv[1])): print('held', flush=True); time.sleep(300)"
    lock = cache / "any.lock"
    holder = subprocess.Popen([sys.executable, "-c", holds, str(lock)], stdout=subprocess.PIPE, text=True)
    assert holder.stdout.readline() == "held\n"
    with folders.locked(lock, seconds=0.0) as held:
        assert not held
    holder.kill()
    holder.communicate()
    with folders.locked(lock, seconds=0.0) as held:
        assert held


@pytest.mark.parametrize("missing", ["the system", "the file system"])
def test_without_locks_one_line_says_so(
    missing: str, cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if missing == "the system":
        monkeypatch.setattr(folders, "fcntl", None)
    else:

        def refuses(descriptor: int, operation: int) -> None:
            raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

        monkeypatch.setattr(folders.fcntl, "flock", refuses)
    with caplog.at_level(logging.INFO, "fusedlayers"):
        for name in ("a", "b"):
            devices.record_failures(CARD, [name], {name})
    assert devices.failures_on_record(CARD) == {"a", "b"}
    [line] = [record.getMessage() for record in caplog.records]
    assert line.endswith("so processes may lose each other's records")


# JSON of any kind, with the words that a record has.
WORDS = st.sampled_from(
    ["schema", "records", "gpu", "processors", "torch", "compiler", "sources", "entries", "kin", "variant", "sizes",
     "launched", "replayed", "torch", "generic", "epilogue", "ffn training", "linear", "hash"]
)  # fmt: skip
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.just(10**400),
    st.floats(),
    st.text(max_size=5),
    st.just("\ud800"),
    WORDS,
)
JSON = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS | st.text(max_size=3), inner, max_size=4)
)


def places_in(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every place of a JSON value, as the keys and indices that lead to it."""
    keys = list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    return [path, *(place for key in keys for place in places_in(value[key], (*path, key)))]


@st.composite
def damaged(draw: st.DrawFn) -> Any:
    """A right calibration with something else at one to three places, and hashes that fit it where that is possible."""
    entries = [
        calibrations._as_json(row(problem), calibrations.place_of(CARD))
        for problem in (FFN, replace(FFN, M=64), LINEAR, replace(LINEAR, M=1))
    ]
    record = dict(zip(calibrations._PLACE, calibrations.place_of(CARD), strict=True)) | {"entries": entries}
    whole: Any = {"schema": 2, "records": [record | {"driver": "1", "toolchain": "2", "measured": None}]}
    for _ in range(draw(st.integers(1, 3))):
        whole = json.loads(json.dumps(whole))
        path = draw(st.sampled_from(places_in(whole)))
        if not path:
            whole = draw(JSON)
            continue
        inside = whole
        for key in path[:-1]:
            inside = inside[key]
        if draw(st.booleans()):
            inside[path[-1]] = draw(JSON)
        elif isinstance(inside, dict):
            inside[draw(WORDS)] = inside.pop(path[-1])
        else:
            del inside[path[-1]]
    try:
        for record in whole["records"]:
            for entry in record["entries"]:
                entry["hash"] = calibrations._hash(entry, calibrations._place(record))
    except (TypeError, KeyError, AttributeError, ValueError):
        pass  # Damaged beyond what has a hash.
    return whole


LINEAR = LinearProblem(M=64, N=32, K=4096, dtype="float16")


@hypothesis.given(st.one_of(JSON, damaged()))
@hypothesis.settings(max_examples=draws(40, 300))
def test_a_damaged_calibration_is_refused_or_harmless(whole: Any) -> None:
    try:
        records = calibrations.checked(whole)
    except ValueError:
        return
    json.dumps({"schema": 2, "records": records}, allow_nan=False)
    assert all(hash(calibrations._place(record)) is not None for record in records), "as merging needs"
    entries = [entry for record in records for entry in calibrations.trusted(record)]
    known = Device("cuda", "Some Card", "sm_86", sms=82, triton=True, calibration=Record(entries))
    for problem in (FFN, LINEAR):
        made = plan(problem, known)
        made.facts(known)


# Where Triton keeps what it compiles.


@pytest.mark.parametrize("folder", ["", "~/.triton/cache", "/dev/null/cache"])
def test_kernels_compile_without_a_folder_of_tritons_own(
    folder: str, cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(devices, "compiled_folder", lambda: folder)
    monkeypatch.setenv("TRITON_CACHE_DIR", folder)
    with caplog.at_level(logging.INFO, "fusedlayers"):
        assert devices.why_nothing_compiles() is None
        assert devices.why_nothing_compiles() is None
    made = Path(os.environ["TRITON_CACHE_DIR"])
    folders.check_folder(made)
    [line] = [record.getMessage() for record in caplog.records]
    assert line.startswith("Triton cannot keep compiled kernels in ")
    assert line.endswith(f"this process keeps them in {made}")


def test_where_nothing_compiles_torch_runs(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(**options: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(devices, "compiled_folder", lambda: "/dev/null/cache")
    monkeypatch.setattr(devices.tempfile, "TemporaryDirectory", full)
    reason = devices.why_nothing_compiles()
    assert reason.endswith("nor in a temporary folder: No space left on device")


def test_a_folder_of_tritons_own_stays(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "compiled_folder", lambda: str(tmp_path / "deep" / "cache"))
    monkeypatch.setenv("TRITON_CACHE_DIR", "as it was")
    assert devices.why_nothing_compiles() is None
    assert os.environ["TRITON_CACHE_DIR"] == "as it was"
    assert not (tmp_path / "deep").exists()
