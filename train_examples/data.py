"""Text as bytes: the Python standard library or a user's file, split into training and validation."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path, PurePath

import torch
from torch import Tensor

from train_examples.rules import SettingsError
from train_examples.settings import DataSettings, check_section

# Installed packages are not the standard library, test folders hold files broken on purpose, the rest are tables.
SKIPPED_FOLDERS = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "pydoc_data", "__pycache__"}
)


@dataclass(frozen=True)
class Text:
    """Two one-dimensional uint8 tensors on the CPU, and one line that describes them."""

    training: Tensor
    validation: Tensor
    description: str


def load_text(settings: DataSettings, sequence: int) -> Text:
    """The text that ``settings`` names, checked to hold at least one sequence of ``sequence`` bytes in each part.

    Raises:
        SettingsError: names what is wrong: the kind, the fraction, or a file that is missing, empty or short.
    """
    check_section("data", settings)
    fraction = settings.validation_fraction
    if settings.kind == "stdlib":
        folder = sysconfig.get_path("stdlib")
        text, source = _read_standard_library(Path(folder), fraction), f"data=stdlib: {folder}"
    else:
        text, source = _read_file(settings.path, fraction), f"data.path: {settings.path}"
    for part, content in (("training", text.training), ("validation", text.validation)):
        if len(content) < sequence:
            raise SettingsError(
                f"{source} gives {len(content)} bytes for {part} (data.validation_fraction={fraction}); "
                f"expected at least {sequence}: one sequence of model.context bytes and the byte that follows it"
            )
    return text


def random_windows(content: Tensor, count: int, length: int, generator: torch.Generator) -> Tensor:
    """``count`` windows of ``length`` bytes from anywhere in ``content``: int64 ``[count, length]``."""
    starts = torch.randint(len(content) - length + 1, (count,), generator=generator)
    return content[starts[:, None] + torch.arange(length)].long()


def fixed_windows(content: Tensor, count: int, length: int) -> Tensor:
    """``count`` windows spread evenly over ``content``, the same every time: int64 ``[count, length]``."""
    starts = torch.linspace(0, len(content) - length, count, dtype=torch.float64).long()
    return content[starts[:, None] + torch.arange(length)].long()


def standard_library_files(folder: Path) -> Iterator[tuple[PurePath, bytes]]:
    """(path relative to ``folder``, source) of every file of the standard library that is text, in a fixed order."""
    for path in sorted(folder.rglob("*.py")):
        name = path.relative_to(folder)
        if SKIPPED_FOLDERS.isdisjoint(name.parts):
            source = path.read_bytes()
            if _is_text(source):
                yield name, source


def position(name: str) -> float:
    """A number in [0, 1) that depends on ``name`` alone: a split by it puts a file on the same side whatever else is
    installed, so no run trains on another's validation data."""
    return int.from_bytes(sha256(name.encode()).digest()[:8], "big") / 2**64


def _read_standard_library(folder: Path, validation_fraction: float) -> Text:
    parts: dict[bool, list[bytes]] = {False: [], True: []}
    for name, source in standard_library_files(folder):
        parts[position(name.as_posix()) < validation_fraction].append(source)
    training, validation = (b"".join(parts[part]) for part in (False, True))
    description = (
        f"Python standard library in {folder}: {len(parts[False])} files ({len(training):,} bytes) for training, "
        f"{len(parts[True])} files ({len(validation):,} bytes) for validation"
    )
    return Text(_as_tensor(training), _as_tensor(validation), description)


def _is_text(source: bytes) -> bool:
    try:
        source.decode()
    except UnicodeDecodeError:
        return False
    return True


def _as_tensor(content: bytes) -> Tensor:
    # torch.frombuffer refuses an empty buffer, and warns about a read-only one: a bytearray is neither.
    return torch.frombuffer(bytearray(content), dtype=torch.uint8) if content else torch.empty(0, dtype=torch.uint8)


def _read_file(path: str | None, validation_fraction: float) -> Text:
    if path is None:
        raise SettingsError("data.path is not set; expected the path of a text file with data=text_file")
    file = Path(path).expanduser()
    if not file.is_file():
        raise SettingsError(f"data.path is {path!r}: there is no such file (looked for {file.absolute()})")
    size = file.stat().st_size
    if size == 0:
        raise SettingsError(f"data.path is {path!r}: the file is empty")
    # Memory-mapped: a file may be larger than memory, and only the windows that are drawn are loaded.
    content = torch.from_file(str(file), shared=False, size=size, dtype=torch.uint8)
    training_size = size - round(size * validation_fraction)
    description = f"{file}: {training_size:,} bytes for training, the last {size - training_size:,} for validation"
    return Text(content[:training_size], content[training_size:], description)
