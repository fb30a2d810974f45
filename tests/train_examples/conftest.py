"""A little of the standard library, so that examples which read it take a moment and not seconds."""

from __future__ import annotations

import shutil
import sysconfig
from pathlib import Path

import pytest

# Some of each part of the pairs.
MODULES = (
    *("calendar.py", "statistics.py", "difflib.py", "configparser.py", "ssl.py"),
    *("shutil.py", "site.py", "modulefinder.py"),
    *("threading.py", "subprocess.py", "socketserver.py", "gzip.py"),
)
PACKAGES = ("email", "unittest", "wsgiref")


@pytest.fixture(scope="session")
def few_modules(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a few modules of the standard library."""
    folder = tmp_path_factory.mktemp("modules")
    for name in MODULES:
        shutil.copy(Path(sysconfig.get_path("stdlib")) / name, folder)
    return folder


@pytest.fixture(scope="session")
def few_packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a few packages of the standard library."""
    folder = tmp_path_factory.mktemp("packages")
    for name in PACKAGES:
        shutil.copytree(Path(sysconfig.get_path("stdlib")) / name, folder / name)
    return folder


@pytest.fixture
def modules(few_modules: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The few modules instead of the standard library."""
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(few_modules))
    return few_modules


@pytest.fixture
def packages(few_packages: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The few packages instead of the standard library."""
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(few_packages))
    return few_packages
