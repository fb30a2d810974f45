"""The text of the examples: what is read, how it is split, and what is refused."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import pytest
import torch

from tests.support import seeds
from train_examples.data import fixed_windows, load_text, random_windows
from train_examples.rules import SettingsError
from train_examples.settings import DataSettings


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that stands for the standard library: 40 small modules."""
    for number in range(40):
        path = tmp_path / f"package{number % 3}" / f"module{number}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"NUMBER = {number:02}\n")
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    return tmp_path


def modules(content: torch.Tensor) -> set[str]:
    return set(bytes(content.tolist()).decode().splitlines())


def test_the_standard_library_is_split_by_file(library: Path) -> None:
    text = load_text(DataSettings(kind="stdlib", validation_fraction=0.3), 4)
    training, validation = modules(text.training), modules(text.validation)
    assert training | validation == {f"NUMBER = {number:02}" for number in range(40)}
    assert not training & validation
    assert f"{len(validation)} files" in text.description


def test_other_files_do_not_move_a_file_to_the_other_side(library: Path) -> None:
    before = modules(load_text(DataSettings(kind="stdlib", validation_fraction=0.3), 4).validation)
    for number in range(40, 60):
        (library / f"module{number}.py").write_text(f"NUMBER = {number:02}\n")
    after = modules(load_text(DataSettings(kind="stdlib", validation_fraction=0.3), 4).validation)
    assert {line for line in after if int(line[-2:]) < 40} == before


def test_packages_tests_and_broken_files_are_skipped(library: Path) -> None:
    before = load_text(DataSettings(kind="stdlib", validation_fraction=0.3), 4)
    for folder in ("site-packages", "test", "package0/tests", "encodings"):
        (library / folder).mkdir(parents=True)
        (library / folder / "module.py").write_text("SKIPPED = True\n")
    (library / "latin.py").write_bytes(b"# caf\xe9\n")
    (library / "notes.txt").write_text("no Python\n")
    after = load_text(DataSettings(kind="stdlib", validation_fraction=0.3), 4)
    assert torch.equal(before.training, after.training)
    assert torch.equal(before.validation, after.validation)


def test_the_installed_library_is_enough_for_every_preset() -> None:
    text = load_text(DataSettings(kind="stdlib"), 1025)
    assert b"def " in bytes(text.training[:100_000].tolist())


def test_a_text_file_is_split_by_position(tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_bytes(bytes(range(200)))
    text = load_text(DataSettings(kind="text_file", path=str(path), validation_fraction=0.25), 50)
    assert text.training.tolist() == list(range(150))
    assert text.validation.tolist() == list(range(150, 200))


def test_bad_text_is_refused_by_the_name_of_its_setting(tmp_path: Path) -> None:
    empty, short = tmp_path / "empty", tmp_path / "short"
    empty.touch()
    short.write_text("x" * 100)

    def refused(match: str, **settings: object) -> None:
        with pytest.raises(SettingsError, match=match):
            load_text(DataSettings(kind="text_file", **settings), 33)

    refused("data.path is not set")
    refused(r"data.path is '.*absent'.*no such file", path=str(tmp_path / "absent"))
    refused(r"data.path is '.*'.*no such file", path=str(tmp_path))
    refused(r"data.path is '.*empty': the file is empty", path=str(empty))
    refused(r"data.path: .*short gives 10 bytes for validation .*expected at least 33", path=str(short))
    refused(r"data.path: .*short gives 10 bytes for training", path=str(short), validation_fraction=0.9)
    for fraction in (0.0, 1.0, -0.5, float("nan")):
        refused("data.validation_fraction is .*between 0 and 1", path=str(short), validation_fraction=fraction)


def test_a_standard_library_without_source_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    with pytest.raises(SettingsError, match=r"data=stdlib: .* gives 0 bytes for training"):
        load_text(DataSettings(kind="stdlib"), 33)


def test_random_windows_cover_the_text_and_follow_the_generator() -> None:
    content = torch.arange(40, dtype=torch.uint8)
    windows = random_windows(content, 500, 8, seeds.generator(1))
    assert windows.dtype == torch.int64
    assert torch.equal(windows, windows[:, :1] + torch.arange(8))
    assert set(windows[:, 0].tolist()) == set(range(33))
    assert torch.equal(windows, random_windows(content, 500, 8, seeds.generator(1)))
    assert not torch.equal(windows, random_windows(content, 500, 8, seeds.generator(2)))


@pytest.mark.parametrize("length", [8, 40])
def test_fixed_windows_reach_from_the_first_to_the_last_byte(length: int) -> None:
    windows = fixed_windows(torch.arange(40, dtype=torch.uint8), 5, length)
    assert windows.shape == (5, length)
    assert windows[0, 0] == 0
    assert windows[-1, -1] == 39
    assert torch.equal(windows, windows[:, :1] + torch.arange(length))
