"""The windows of source text: lines in a row, never the same twice, and no module in two parts."""

from __future__ import annotations

import itertools
import sysconfig
from collections import Counter
from pathlib import Path

import pytest

from train_examples.rules import SettingsError
from train_examples.settings import WindowSettings
from train_examples.source_windows import Window, Windows, load_windows, module_of

SPLIT = {"validation_fraction": 0.15, "test_fraction": 0.15}


@pytest.fixture
def written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder instead of the standard library."""
    folder = tmp_path / "written"
    folder.mkdir()
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(folder))
    return folder


def write_package(folder: Path, name: str, modules: int, windows: int = 10) -> None:
    """A package of so many modules, each with so many different windows of two lines."""
    (folder / name).mkdir()
    for module in range(modules):
        lines = [f"{name}_{module} = {number}" for number in range(2 * windows)]
        (folder / name / f"module{module}.py").write_text("\n\n".join(lines) + "\n")


def parts(windows: Windows) -> dict[str, list[Window]]:
    return {"training": windows.training, "validation": windows.validation, "test": windows.test}


@pytest.mark.full
def test_the_installed_library_is_split_by_module() -> None:
    windows = load_windows(WindowSettings(kind="stdlib", **SPLIT))
    modules = {name: {module_of(window) for window in part} for name, part in parts(windows).items()}
    texts = {name: {window.text for window in part} for name, part in parts(windows).items()}
    for one, other in itertools.combinations(modules, 2):
        assert not modules[one] & modules[other]
        assert not texts[one] & texts[other]
    assert sum(map(len, texts.values())) == sum(map(len, parts(windows).values()))
    counts = {name: Counter(window.package for window in part) for name, part in parts(windows).items()}
    assert {tuple(sorted(count)) for count in counts.values()} == {windows.packages}
    assert len(windows.packages) >= 8
    for package in windows.packages:
        total = sum(count[package] for count in counts.values())
        for held_out in (counts["validation"], counts["test"]):
            assert 10 <= held_out[package] <= 0.15 * total
    assert f"{len(windows.test):,} for test" in windows.description


def test_windows_are_lines_in_a_row_and_never_the_same_twice(written: Path) -> None:
    write_package(written, "one", 8)
    write_package(written, "two", 8)
    write_package(written, "small", 8, windows=1)
    write_package(written, "single", 1, windows=80)
    (written / "alone.py").write_text("outside = 1\nof_any = 2\n" * 50)
    # The text of another module at its start, a rest of one line at its end, and what is repeated within.
    copied = (written / "one" / "module0.py").read_text()
    (written / "two" / "copy.py").write_text(copied + "again = 1\nagain = 2\n" * 2 + "rest = 3\n")
    windows = load_windows(WindowSettings(kind="stdlib", lines=2, **SPLIT))
    # One has too few windows for a part, one has them all in one module.
    assert windows.packages == ("one", "two")
    every = {window.name: window for part in parts(windows).values() for window in part}
    assert len(every) == 161
    assert every["one/module0.py:5"].text == "one_0 = 2\none_0 = 3"
    assert [name for name in every if name.startswith("two/copy.py")] == ["two/copy.py:40"]
    assert {window.package for window in every.values()} == {"one", "two"}


def test_settings_of_the_windows_that_cannot_work_are_named(written: Path) -> None:
    def refused(match: str, **settings: object) -> None:
        with pytest.raises(SettingsError, match=match):
            load_windows(WindowSettings(**{"kind": "stdlib", **SPLIT, **settings}))

    write_package(written, "one", 8)
    refused("data.kind is 'text_file'; expected stdlib", kind="text_file")
    refused("data.lines is 0; expected 1 or more", lines=0)
    refused("data.test_fraction is 1.5; expected a number between 0 and 1", test_fraction=1.5)
    refused("expected their sum to be below 1", test_fraction=0.5, validation_fraction=0.5)
    refused(r"has 1 packages with 10 windows or more in each part \(data.lines=2.*expected at least 2", lines=2)
