"""The record of compiled kernels answers for what is unchanged, and for nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fusedlayers.kernels import device
from tests import compilation_record as record

TARGET = SimpleNamespace(backend="cuda", arch=90, warp_size=32)
OPTIONS = {"num_warps": 4, "num_stages": 2}


def source(text: str) -> Any:
    return SimpleNamespace(hash=lambda: text)


@pytest.fixture
def compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The sources that the compiler, a stand-in here, was given."""
    monkeypatch.delenv("FUSEDLAYERS_COMPILE_ALL", raising=False)
    monkeypatch.setattr(record, "RECORD", tmp_path / "record.json")
    monkeypatch.setattr(record, "_FOLDER", tmp_path / "found")
    monkeypatch.setattr(record, "toolchain", lambda architecture: f"a compiler for {architecture}")
    record._record.cache_clear()
    yield []
    record._record.cache_clear()


def compiler(compiled: list[str]) -> Any:
    def compile_it(src: Any, target: Any, options: Any) -> Any:
        compiled.append(src.hash())
        return SimpleNamespace(hash=f"binary of {src.hash()}")

    return record.unless_known(compile_it)


def make_record(compiled: list[str], options: dict[str, Any] = OPTIONS) -> None:
    """Of one kernel, as the tests that compile make it."""
    found = compiler(compiled)(source("kernel"), target=TARGET, options=options)
    record.note(found, {"registers": 32})
    record.main(record._FOLDER)
    record._record.cache_clear()
    compiled.clear()


def test_an_unchanged_kernel_is_not_compiled(compiled: list[str]) -> None:
    make_record(compiled)
    with pytest.raises(record.Known) as known:
        compiler(compiled)(source("kernel"), target=TARGET, options=dict(reversed(OPTIONS.items())))
    assert known.value.findings == {"registers": 32}
    assert compiled == []


def libraries(folder: Path, content: bytes) -> dict[str, Any]:
    """The options of a target whose library lies in ``folder``, as that of an environment does."""
    folder.mkdir()
    (folder / "libdevice.bc").write_bytes(content)
    return {**OPTIONS, "extern_libs": (("libdevice", str(folder / "libdevice.bc")),)}


def test_another_environment_reads_the_same_record(compiled: list[str], tmp_path: Path) -> None:
    """A fresh clone has Triton's files in a folder of its own."""
    make_record(compiled, libraries(tmp_path / "here", b"library"))
    with pytest.raises(record.Known):
        compiler(compiled)(source("kernel"), target=TARGET, options=libraries(tmp_path / "there", b"library"))
    compiler(compiled)(source("kernel"), target=TARGET, options=libraries(tmp_path / "newer", b"newer library"))
    assert compiled == ["kernel"]


@pytest.mark.parametrize("change", ["source", "target", "options", "compiler", "reader", "all"])
def test_whatever_changes_is_compiled(change: str, compiled: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    make_record(compiled)
    src, target, options = source("kernel"), TARGET, OPTIONS
    if change == "source":
        src = source("another kernel")
    elif change == "target":
        target = SimpleNamespace(backend="cuda", arch=80, warp_size=32)
    elif change == "options":
        options = {**OPTIONS, "num_warps": 8}
    elif change == "compiler":
        monkeypatch.setattr(record, "toolchain", lambda architecture: "another compiler")
    elif change == "reader":
        monkeypatch.setattr(record, "_reader", lambda: "another reader")
    else:
        monkeypatch.setenv("FUSEDLAYERS_COMPILE_ALL", "1")
    compiler(compiled)(src, target=target, options=options)
    assert compiled == [src.hash()]


def test_a_record_holds_what_was_used_and_nothing_else(compiled: list[str]) -> None:
    make_record(compiled)
    for path in record._FOLDER.iterdir():
        path.unlink()
    record.note(compiler(compiled)(source("new"), target=TARGET, options=OPTIONS), {"registers": 64})
    record.main(record._FOLDER)
    record._record.cache_clear()
    assert [findings["registers"] for findings in record._record().values()] == [64]


@pytest.mark.skipif(not device.HAS_TRITON, reason="Triton is not installed")
def test_the_committed_record_is_read() -> None:
    record._record.cache_clear()
    assert len(record._record()) > 500
    assert all("error" not in findings for findings in record._record().values())
