"""Windows of source text of the installed Python standard library, each with its package.

No module is in two parts, and every package has windows in all of them.
"""

from __future__ import annotations

import sysconfig
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from train_examples.data import position, standard_library_files
from train_examples.rules import SettingsError
from train_examples.settings import WindowSettings, check_section

# The accuracy on fewer windows of a package is mostly luck.
LEAST_WINDOWS = 10
# The salt of the split's hash: the name of the example, so that it has its own split.
SPLIT = "package_classifier/"


@dataclass(frozen=True)
class Window:
    """Consecutive lines of one module, without blank ones."""

    name: str  # email/header.py:120, the number of its first line
    package: str
    text: str


@dataclass(frozen=True)
class Windows:
    """The packages in alphabetical order, their windows in three lists, and one line about them."""

    packages: tuple[str, ...]
    training: list[Window]
    validation: list[Window]
    test: list[Window]
    description: str


def load_windows(settings: WindowSettings) -> Windows:
    """The windows of every package that has enough of them in each part, split as ``settings`` says.

    Raises:
        SettingsError: names what is wrong: the kind, a number, or a library with fewer than two such packages.
    """
    check_section("data", settings)
    folder = Path(sysconfig.get_path("stdlib"))
    modules: defaultdict[str, list[list[Window]]] = defaultdict(list)
    for windows in distinct(windows_of_modules(folder, settings.lines)):
        modules[windows[0].package].append(windows)
    parts: dict[str, list[Window]] = {"training": [], "validation": [], "test": []}
    packages = []
    for package in sorted(modules):
        split = split_modules(modules[package], settings)
        if min(map(len, split.values())) >= LEAST_WINDOWS:
            packages.append(package)
            for name, part in split.items():
                parts[name] += part
    if len(packages) < 2:
        raise SettingsError(
            f"data=stdlib: {folder} has {len(packages)} packages with {LEAST_WINDOWS} windows or more in each part "
            f"(data.lines={settings.lines}, data.validation_fraction={settings.validation_fraction}, "
            f"data.test_fraction={settings.test_fraction}); expected at least 2"
        )
    sizes = ", ".join(f"{len(part):,} for {name}" for name, part in parts.items())
    return Windows(
        tuple(packages),
        **parts,
        description=f"windows of {settings.lines} lines from {len(packages)} packages of the Python standard library "
        f"in {folder}: {sizes}",
    )


def windows_of_modules(folder: Path, lines: int) -> Iterator[list[Window]]:
    """For every module inside a package its consecutive windows; a shorter rest at its end is dropped."""
    for path, source in standard_library_files(folder):
        if len(path.parts) == 1:
            continue
        numbered = [(number, line) for number, line in enumerate(source.decode().splitlines(), start=1) if line.strip()]
        yield [
            Window(
                f"{path.as_posix()}:{numbered[start][0]}",
                path.parts[0],
                "\n".join(line for _, line in numbered[start : start + lines]),
            )
            for start in range(0, len(numbered) - lines + 1, lines)
        ]


def distinct(modules: Iterator[list[Window]]) -> Iterator[list[Window]]:
    """The modules without windows that occurred before, such as licences: none may be in two parts. Modules that have
    no other are dropped."""
    seen: set[str] = set()
    for windows in modules:
        new: dict[str, Window] = {}
        for window in windows:
            if window.text not in seen:
                new.setdefault(window.text, window)
        seen |= new.keys()
        if new:
            yield list(new.values())


def split_modules(modules: Sequence[list[Window]], settings: WindowSettings) -> dict[str, list[Window]]:
    """The windows of one package in three parts, each module in one of them.

    A hash of their names shuffles the modules. In that order a module goes to the test part if that stays within its
    share of the windows, else to validation by the same rule, else to training, which so gets the large modules.
    """
    total = sum(map(len, modules))
    shares = {"test": settings.test_fraction * total, "validation": settings.validation_fraction * total}
    parts: dict[str, list[Window]] = {"training": [], "validation": [], "test": []}
    for windows in sorted(modules, key=lambda windows: position(SPLIT + module_of(windows[0]))):
        fitting = (name for name, share in shares.items() if len(parts[name]) + len(windows) <= share)
        parts[next(fitting, "training")] += windows
    return parts


def module_of(window: Window) -> str:
    """``email/header.py`` for a window of that file."""
    return window.name.rsplit(":", 1)[0]
