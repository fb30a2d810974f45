"""Whether files can be written somewhere, asked before the work whose results they hold."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


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
