"""What compilers made of kernels before, so that an unchanged kernel is not compiled again to find the same.

A kernel is known by its source and that of all it calls, its arguments and options, the target, the versions of Triton,
of its assembler and of Python, and by the code that reads the findings: whatever changes is compiled anew. After a
change of kernels the record is made again, from all tests that compile:

    FUSEDLAYERS_COMPILED=build/compiled python -m pytest tests -k "code_generation or adding_a_product or vector_units"
    FUSEDLAYERS_COMPILED=build/compiled make test-triton
    python -m tests.compilation_record build/compiled

``FUSEDLAYERS_COMPILE_ALL=1`` compiles everything, whatever the record says.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fusedlayers.kernels.device import toolchain

RECORD = Path(__file__).with_suffix(".json")
READERS = tuple(Path(__file__).with_name(name) for name in ("code_generation.py", "overflowing_products.py"))

# Absolute, because scripts that compile run in folders of their own.
_FOLDER = os.environ.get("FUSEDLAYERS_COMPILED") and Path(os.environ["FUSEDLAYERS_COMPILED"]).resolve()
_keys: dict[str, str] = {}  # hash of a compiled kernel -> its key in the record


class Known(Exception):
    """Instead of a compiled kernel: what is on record of it."""

    def __init__(self, findings: dict[str, Any]) -> None:
        super().__init__(findings)
        self.findings = findings


def unless_known(compile_it: Callable[..., Any]) -> Callable[..., Any]:
    """Triton's function that compiles a source, which raises :class:`Known` for what is on record."""
    if os.environ.get("FUSEDLAYERS_COMPILE_ALL", "0") == "1":
        return compile_it

    @functools.wraps(compile_it)
    def compile_unknown(src: Any, target: Any = None, options: Any = None, **others: Any) -> Any:
        key = _key(src, target, options)
        if key in _record():
            _use(key, _record()[key])
            raise Known(_record()[key])
        compiled = compile_it(src, target=target, options=options, **others)
        _keys[compiled.hash] = key
        return compiled

    return compile_unknown


def note(compiled: Any, findings: dict[str, Any]) -> None:
    """What was found of a kernel that was not on record."""
    if compiled.hash in _keys:
        _use(_keys[compiled.hash], findings)


def _key(src: Any, target: Any, options: Any) -> str:
    architecture = f"sm_{target.arch}" if target.backend == "cuda" else str(target.arch)
    # By their content: every environment has these files in a folder of its own.
    libraries = [(name, _digest(path)) for name, path in options.get("extern_libs", ())]
    others = sorted((name, value) for name, value in options.items() if name != "extern_libs")
    parts = (src.hash(), target, others, libraries, toolchain(architecture), sys.version_info[:2], _reader())
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:24]


@functools.cache
def _digest(path: str) -> str:
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()


@functools.cache
def _reader() -> str:
    return hashlib.sha256(b"".join(reader.read_bytes() for reader in READERS)).hexdigest()


@functools.cache
def _record() -> dict[str, Any]:
    record: dict[str, Any] = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    return record


def _use(key: str, findings: dict[str, Any]) -> None:
    if _FOLDER:
        path = _FOLDER / f"{key}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        # Under a name of its own first: several processes may find the same.
        unfinished = path.with_suffix(f".{os.getpid()}")
        unfinished.write_text(json.dumps(findings))
        unfinished.replace(path)


def main(folder: Path) -> None:
    """Make the record of all that tests used and found, and of nothing else."""
    found = {path.stem: json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))}
    lines = [f"{json.dumps(key)}: {json.dumps(findings)}" for key, findings in found.items()]
    RECORD.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    print(f"{len(found)} kernels in {RECORD}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
