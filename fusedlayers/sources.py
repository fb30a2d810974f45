"""The package's own Python files, by which one state of it is told from another."""

import hashlib
from collections.abc import Iterator
from pathlib import Path

from . import kernels

_ROOTS = (Path(__file__).resolve().parent, Path(kernels.__file__).resolve().parent)


def python_files() -> Iterator[tuple[str, Path]]:
    """Each file's path relative to its package, and the file."""
    for root in _ROOTS:
        for path in sorted(root.rglob("*.py")):
            yield path.relative_to(root).as_posix(), path


def contents() -> str:
    """A digest of all files, the same wherever the same sources are installed."""
    digest = hashlib.sha256()
    for name, path in python_files():
        digest.update(name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def stamp() -> str:
    """A digest of sizes and times of change: another one for every installation, without a file being read."""
    facts = [(name, path.stat().st_size, path.stat().st_mtime_ns) for name, path in python_files()]
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:16]
