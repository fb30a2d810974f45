"""Digests of the package's own Python files, which identify its version exactly."""

import hashlib
from collections.abc import Iterator
from pathlib import Path

from . import kernels

_PACKAGE, _KERNELS = Path(__file__).resolve().parent, Path(kernels.__file__).resolve().parent
_ROOTS = (_PACKAGE, _KERNELS)


def python_files(roots: tuple[Path, ...] = _ROOTS) -> Iterator[tuple[str, Path]]:
    """(path relative to its package, file) of every Python file."""
    for root in roots:
        for path in sorted(root.rglob("*.py")):
            yield path.relative_to(root).as_posix(), path


def contents(roots: tuple[Path, ...] = _ROOTS) -> str:
    """A digest of all files, the same wherever the same sources are installed."""
    digest = hashlib.sha256()
    for name, path in python_files(roots):
        digest.update(name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def of_kernels() -> str:
    """A digest of the kernels and their tiles, which decide how fast a path is."""
    return contents((_KERNELS,))[:16]


def stamp() -> str:
    """A digest of sizes and modification times, which differs between installations and reads no file."""
    facts = [(name, path.stat().st_size, path.stat().st_mtime_ns) for name, path in python_files()]
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:16]
