"""Files that the library writes: its optional records in the user's cache folder, and checks of folders to write to."""

from __future__ import annotations

import json
import logging
import os
import secrets
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Generic, TypeVar

try:
    import fcntl
except ImportError:
    fcntl = None  # type: ignore[assignment]  # as on Windows

logger = logging.getLogger("fusedlayers")

# Seconds between two attempts to take a lock that another process may hold for long.
_PATIENCE = 0.2

Contents = TypeVar("Contents")


@dataclass(frozen=True)
class CacheFile(Generic[Contents]):
    """A JSON file of the library in the user's cache folder; ``checked`` validates its contents.

    The file is optional: if it cannot be read, or is not valid, it counts as missing, and one line of INFO says so.
    ``checked`` raises a ValueError for contents that are not valid.
    """

    name: str
    checked: Callable[[Any], Contents]

    @property
    def path(self) -> Path:
        """Its path; the file may not exist.

        Raises:
            ValueError: no home folder is known.
        """
        return cache_folder() / self.name

    def read(self) -> Contents | None:
        """Its contents; None if the file is missing or unusable."""
        try:
            found = _read_optional(self.path)
        except FileNotFoundError:
            return None
        except ValueError as error:
            reason = str(error)
        else:
            try:
                return self.checked(found)
            except ValueError as error:
                reason = f"{self.path}: {error}"
        say_once(f"{reason}; it is ignored")
        return None

    def update(self, change: Callable[[Contents | None], object]) -> Path:
        """Replaces the contents by ``change(contents)``, under a lock, so that no process's change is lost.

        Raises:
            OSError, ValueError: the file cannot be written.
        """
        path = self.path
        with locked(path.with_suffix(".lock")):
            write_json(change(self.read()), path)
        return path

    @property
    def state(self) -> str:
        """A text that changes whenever the file does; empty if there is none."""
        try:
            found = self.path.stat()
        except (OSError, ValueError):
            return ""
        return f"{found.st_size}-{found.st_mtime_ns}"


def cache_folder() -> Path:
    """The library's folder in the user's cache folder.

    Raises:
        ValueError: no home folder is known.
    """
    given = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(given) if given else Path.home() / ".cache") / "fusedlayers"
    except RuntimeError as error:
        raise ValueError(
            "no home folder is known to keep records in: set XDG_CACHE_HOME to a writable folder"
        ) from error


@contextmanager
def locked(path: Path, seconds: float | None = None) -> Iterator[bool]:
    """Holds the lock of this file, so that no other process or thread does; the file is created, and stays empty.

    The system releases the lock when the process ends, however it ends. Yields True if the lock is held, or if the file
    system has no locks, which one line of INFO says; False if the lock was not free within ``seconds``.

    Raises:
        OSError: the file cannot be created.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        yield _lock(file.fileno(), path, None if seconds is None else time.monotonic() + seconds)


def write_json(value: object, path: Path) -> None:
    """Writes ``value`` as JSON, atomically: another process never reads half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # The process id is not enough: a process in another container may have the same one.
    unfinished = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}")
    try:
        unfinished.write_text(json.dumps(value, indent=1, allow_nan=False) + "\n", encoding="utf-8")
        unfinished.replace(path)
    except OSError:
        unfinished.unlink(missing_ok=True)
        raise


def read_json(path: Path, expected: str = "JSON") -> Any:
    """The contents of a JSON file.

    Raises:
        ValueError: the file cannot be read, or is not what is ``expected``; the message begins with its path.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ValueError(f"{path}: expected {expected}: {error}") from error
    except RecursionError as error:
        raise ValueError(f"{path}: expected {expected}: it is nested too deeply") from error


def check_folder(folder: Path) -> None:
    """Checks that files can be written into a folder, or, if it does not exist, into the folder to create it in.

    Raises:
        ValueError: no file can be written; the message begins with the folder.
    """
    there = next(path for path in (folder, *folder.parents) if os.path.lexists(path))
    try:
        # Permissions are not enough to check: root has all of them even on a read-only file system.
        with tempfile.TemporaryFile(dir=there):
            pass
    except OSError as error:
        reason = f"{there} is no folder" if isinstance(error, NotADirectoryError) else f"{there}: {error.strerror}"
        raise ValueError(f"{str(folder)!r}; expected a folder that files can be written into ({reason})") from error


@cache
def say_once(message: str) -> None:
    """One line of INFO per message and process."""
    logger.info(message)


def _lock(descriptor: int, path: Path, deadline: float | None) -> bool:
    """Takes the lock, which is released when the file is closed; False if the deadline passed."""
    if fcntl is None:
        say_once(f"{path.parent}: this system has no locks for files, so processes may lose each other's records")
        return True
    try:
        if deadline is None:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            return True
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return True
            except BlockingIOError:
                if time.monotonic() > deadline:
                    return False
                time.sleep(_PATIENCE)
    except OSError as error:
        say_once(f"{path.parent}: cannot be locked ({error.strerror}), so processes may lose each other's records")
        return True


def _read_optional(path: Path) -> Any:
    """The contents of a JSON file.

    Raises:
        FileNotFoundError: there is no such file, as on most machines.
        ValueError: the file cannot be read.
    """
    try:
        mode = path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError) as error:
        raise FileNotFoundError from error
    except OSError as error:
        # The message names the folder, so that all files in an unreadable folder cause one line of INFO together.
        raise ValueError(f"{path.parent}: cannot be read: {error.strerror}") from error
    if not stat.S_ISREG(mode):
        # Opening a pipe would block until somebody writes into it.
        raise ValueError(f"{path}: expected a JSON file")
    return read_json(path)
