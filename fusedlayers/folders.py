"""Files that the library writes: where its own lie, how they are written, and whether a folder takes them."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any


def cache_file(name: str) -> Path:
    """A file of the library's own in the user's cache folder, whether it is there or not."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fusedlayers" / name


def write_json(value: object, path: Path) -> None:
    """``value`` as JSON; another process never reads half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(f".{os.getpid()}")
    unfinished.write_text(json.dumps(value, indent=1, allow_nan=False) + "\n")
    unfinished.replace(path)


def read_json(path: Path, expected: str = "JSON") -> Any:
    """What a file of JSON holds.

    Raises:
        ValueError: it cannot be read, or is not what is ``expected``; the message begins with the file.
    """
    try:
        return json.loads(path.read_text())
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ValueError(f"{path}: expected {expected}: {error}") from error


def check_folder(folder: Path) -> None:
    """Try whether files can be written into a folder or, if there is none, where it would be made; leaves nothing.

    Raises:
        ValueError: they cannot; the message begins with the folder.
    """
    there = next(path for path in (folder, *folder.parents) if os.path.lexists(path))
    try:
        # Permissions alone do not tell: root may do everything, and yet file systems are read-only.
        with tempfile.TemporaryFile(dir=there):
            pass
    except OSError as error:
        reason = f"{there} is no folder" if isinstance(error, NotADirectoryError) else f"{there}: {error.strerror}"
        raise ValueError(f"{str(folder)!r}; expected a folder that files can be written into ({reason})") from error
