"""The user's switches: environment variables that are read at every call; an empty one counts as not set."""

import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from ..planning import BACKENDS

SWITCHES = ("FUSEDLAYERS_BACKEND", "FUSEDLAYERS_STRICT", "FUSEDLAYERS_WORKSPACE_MIB")

# os.environ decodes a variable at every read and raises internally where it is not set: half a microsecond each. Its
# own dictionary, of bytes on POSIX systems, is read directly.
_environment = os.environ
_beneath: Any = getattr(os.environ, "_data", None)
_BACKEND, _STRICT, _WORKSPACE = (os.fsencode(name) for name in SWITCHES)
if os.name != "posix" or type(_beneath) is not dict or not all(type(key) is bytes for key in _beneath):
    _beneath = None


def switches() -> tuple[object, object, object]:
    """The raw values of the :data:`SWITCHES`, None where not set; they are part of every call's key."""
    # os.environ may have been replaced by another mapping.
    if _beneath is not None and os.environ is _environment:
        return _beneath.get(_BACKEND), _beneath.get(_STRICT), _beneath.get(_WORKSPACE)
    return os.environ.get(SWITCHES[0]), os.environ.get(SWITCHES[1]), os.environ.get(SWITCHES[2])


def backend() -> str:
    """The user's wish, from ``FUSEDLAYERS_BACKEND``: ``auto`` (default), ``triton`` or ``torch``."""
    value = os.environ.get("FUSEDLAYERS_BACKEND") or "auto"
    if value not in BACKENDS:
        raise ValueError(f"FUSEDLAYERS_BACKEND is {value!r}; expected one of {', '.join(BACKENDS)}")
    return value


def strict() -> bool:
    """Whether ``FUSEDLAYERS_STRICT`` asks for an error where kernels cannot run, instead of torch."""
    value = os.environ.get("FUSEDLAYERS_STRICT") or "0"
    if value not in ("0", "1"):
        raise ValueError(f"FUSEDLAYERS_STRICT is {value!r}; expected 0 or 1")
    return value == "1"


def workspace_limit() -> int:
    """The most bytes of temporary memory of a loss head, from ``FUSEDLAYERS_WORKSPACE_MIB``; 0 where it is not set."""
    value = os.environ.get("FUSEDLAYERS_WORKSPACE_MIB")
    if not value:
        return 0
    try:
        limit = float(value) * 2**20
    except ValueError:
        limit = math.nan
    if not 1 <= limit < math.inf:
        raise ValueError(f"FUSEDLAYERS_WORKSPACE_MIB is {value!r}; expected a positive number of MiB")
    return int(limit)


@contextmanager
def switched(values: Mapping[str, str]) -> Iterator[None]:
    """Sets environment variables (``FUSEDLAYERS_BACKEND`` ...) inside the context."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name)
            else:
                os.environ[name] = value
