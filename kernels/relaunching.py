"""Launching a compiled kernel without the host work that Triton repeats in every launch.

Triton's launcher, which is written in Python, encodes each descriptor for TMA, queries the driver about each pointer,
allocates scratch memory, prepares metadata for hooks that nobody has set, and hands all of that to a function in C.
Here a descriptor is encoded once for each address and geometry, pointers are passed as numbers, and the function in C
is called directly. No other file relies on how Triton launches. This one relies on the following:

- ``make_tensordesc_arg(descriptor, metadata)`` of the driver's module gives the arguments of the function in C for one
  descriptor. Triton 3.6 to 3.9 have it; some take a third argument, which is unused.
- ``driver.launcher_cls(source, metadata)`` makes a launcher. Its ``launch`` is the function in C, for which the
  launcher's ``*_scratch_size`` say how much memory to allocate.
- The launcher calls ``launch(gridX, gridY, gridZ, stream, ...)``. The kernel's arguments come last: one by one, or
  as one tuple (3.7).

A launcher that is built otherwise is noticed before the first such call (:func:`_c_function`), and launches go through
Triton's public interface, which one warning says.
"""

import copy
import inspect
import logging
import sys
from functools import cache
from types import SimpleNamespace
from typing import Any

from .device import compiler, triton
from .hopper import Descriptor

_log = logging.getLogger("fusedlayers")

_ENCODING_PARAMETERS = (("arg", "metadata"), ("arg", "metadata", "_"))


class Variant:
    """A compiled kernel, and the descriptors of its first launch, without their tensors.

    ``direct``: whether :meth:`run` may be called; else only :meth:`launch`.
    """

    __slots__ = (
        "_after", "_checked", "_compiled", "_encode", "_function", "_metas", "_nested", "_stream", "direct",
    )  # fmt: skip

    def __init__(self, compiled: Any, checked: list[Any]) -> None:
        self._compiled, self._checked = compiled, checked
        for descriptor in checked:
            if descriptor is not None:
                descriptor.base = None  # or the cache would keep the tensor alive
        driver = triton.runtime.driver.active
        self._stream: Any = getattr(driver, "get_current_stream", None)
        self._encode: Any = getattr(sys.modules[type(driver).__module__], "make_tensordesc_arg", None)
        metas = iter(getattr(compiled.metadata, "tensordesc_meta", None) or ())
        self._metas = [None if descriptor is None else next(metas, None) for descriptor in checked]
        found = None
        if callable(self._stream) and _encodes(self._encode, checked, self._metas):
            found = _c_function(_launcher(driver, compiled, checked), compiled)
        self.direct = found is not None
        if found is not None:
            self._function, self._after, self._nested = found
        else:
            _warn()

    def encoding(self, index: int, descriptor: Descriptor) -> tuple[Any, ...]:
        """The arguments of :meth:`run` for one descriptor: the tensor map, sizes and strides."""
        complete, meta = descriptor.like(self._checked[index]), self._metas[index]
        # The third argument, which some releases have, is unused.
        return tuple(self._encode(complete, meta, *(None,) * (self._encode.__code__.co_argcount - 2)))

    def run(self, programs: int, device: int, arguments: tuple[Any, ...]) -> None:
        """Run it on the current stream of ``device``, which must be the current device.

        ``arguments`` are the kernel's: encodings of its descriptors, addresses, numbers and constants.
        """
        if self._nested:
            self._function(programs, 1, 1, self._stream(device), *self._after, arguments)
        else:
            self._function(programs, 1, 1, self._stream(device), *self._after, *arguments)

    def launch(self, programs: int, descriptors: list[Descriptor | None], others: tuple[Any, ...]) -> None:
        """Run it through Triton's public interface; ``others`` are tensors, numbers and constants."""
        alike = [None if d is None else d.like(other) for d, other in zip(descriptors, self._checked, strict=True)]
        self._compiled[(programs, 1, 1)](*alike, *others)


@cache
def _warn() -> None:
    _log.warning("%s launches kernels in a way that is not known here, so that every launch takes longer", compiler())


def _encodes(encode: Any, checked: list[Any], metas: list[Any]) -> bool:
    """Whether ``encode`` is the function that is known, and each descriptor has the metadata that it takes."""
    if not any(each is not None for each in checked):
        return True
    known = inspect.isfunction(encode) and tuple(inspect.signature(encode).parameters) in _ENCODING_PARAMETERS
    return known and all(isinstance(meta, dict) for each, meta in zip(checked, metas, strict=True) if each is not None)


def _launcher(driver: Any, compiled: Any, checked: list[Any]) -> Any:
    """Triton's launcher of a kernel, built for encoded descriptors: tensor map, sizes and strides.

    None where such a launcher cannot be made.
    """
    given = [descriptor for descriptor in checked if descriptor is not None]
    if not given:
        return compiled.run
    launcher: Any = getattr(driver, "launcher_cls", None)
    known = inspect.isclass(launcher) and tuple(inspect.signature(launcher).parameters) == ("src", "metadata")
    if not known:
        return None
    signature: dict[Any, Any] = {}
    ranks = iter([len(descriptor.shape) for descriptor in given])
    for name, kind in compiled.src.signature.items():
        if not isinstance(kind, str) or not kind.startswith("tensordesc"):
            signature[name] = kind
            continue
        rank = next(ranks)
        for part, each in enumerate(["nvTmaDesc", *["i32"] * rank, *["i64"] * rank]):
            signature[name, part] = each
    source = SimpleNamespace(fn=compiled.src.fn, constants=compiled.src.constants, signature=signature)
    return launcher(source, compiled.metadata._replace(tensordesc_meta=None))


def _c_function(launcher: Any, compiled: Any) -> tuple[Any, tuple[Any, ...], bool] | None:
    """(function in C, what it takes between the stream and the kernel's arguments, whether these form one tuple).

    None where it is not called as this file expects. One call of the launcher, with a recorder in place of the
    function, shows how.
    """
    sizes = [getattr(launcher, name, None) for name in ("global_scratch_size", "profile_scratch_size")]
    if sizes != [0, 0] or getattr(launcher, "gsan_enabled", False) or not callable(getattr(launcher, "launch", None)):
        return None
    recorder, calls = copy.copy(launcher), []
    recorder.launch = lambda *each: calls.append(each)
    # Numbers and objects that are found by identity.
    first, arguments = (2**40, 1, 1, object()), (object(), object())
    try:
        recorder(*first, compiled.function, compiled.packed_metadata, None, None, None, *arguments)
    except TypeError:
        return None  # it has other parameters
    if len(calls) != 1 or not _are(calls[0][:4], first):
        return None
    between = calls[0][4:]
    if isinstance(between[-1], tuple) and _are(between[-1], arguments):
        return launcher.launch, between[:-1], True
    return (launcher.launch, between[:-2], False) if _are(between[-2:], arguments) else None


def _are(left: tuple[Any, ...], right: tuple[Any, ...]) -> bool:
    """Whether both hold the same objects."""
    return len(left) == len(right) and all(one is other for one, other in zip(left, right, strict=True))
