"""Relaunching a compiled kernel without the host work that Triton repeats in every launch.

Triton's launcher encodes each descriptor for TMA, queries the driver about each pointer, and prepares metadata for
hooks that nobody has set. Here a descriptor is encoded once per address and geometry, pointers are passed as numbers,
and a launcher built for encoded descriptors takes both. A prepared launch calls the C function inside that launcher.
All of that is Triton's own code, called with other arguments; if its internals differ from those known here, launches
go through its public interface.
"""

import copy
import inspect
import sys
from types import SimpleNamespace
from typing import Any

import torch

from .device import triton
from .hopper import Descriptor, Geometry

# An encoding depends on address and geometry only: it stays valid whichever tensor owns the memory.
_encoded: dict[tuple[object, ...], list[Any]] = {}
_ENCODED_LIMIT = 4096  # addresses that change with every call must not fill the memory
_SLOT_LIMIT = 256  # the same, for one descriptor of one prepared launch
# Triton's metadata for encoding a descriptor (block, swizzle, element type) -> a short id.
_encodings: dict[tuple[object, ...], int] = {}

# The parameters of Triton's function that encodes a descriptor; the last is unused, and some releases lack it.
_ENCODING_PARAMETERS = (("arg", "metadata"), ("arg", "metadata", "_"))
_LAUNCHER_PARAMETERS = ("self", "gridX", "gridY", "gridZ", "stream", "function")


class Variant:
    """A compiled kernel, and the descriptors of its first launch, without their tensors."""

    def __init__(self, compiled: Any, checked: list[Any]) -> None:
        self._compiled, self._checked = compiled, checked
        for descriptor in checked:
            if descriptor is not None:
                descriptor.base = None  # or the cache would keep the tensor alive
        self._encode: Any = None
        self._launcher: Any = None
        driver = triton.runtime.driver.active
        backend = sys.modules[type(driver).__module__]
        if _is_known(driver, backend, compiled):
            self._launcher = _launcher(driver, compiled, checked)
            self._encode = backend.make_tensordesc_arg
            self._unused = (None,) * (len(inspect.signature(self._encode).parameters) - 2)
            self._stream = driver.get_current_stream
            self._facts = _by_place(compiled, checked)

    def launch(
        self,
        programs: int,
        device: int,
        descriptors: tuple[Descriptor | None, ...],
        pointers: tuple[torch.Tensor | None, ...],
        addresses: list[int | None],
        rest: tuple[object, ...],
    ) -> None:
        """Run it on the current stream of ``device``, which must be the current device."""
        if self._launcher is None or _listened_to():
            alike = [None if d is None else d.like(other) for d, other in zip(descriptors, self._checked, strict=True)]
            self._compiled[(programs, 1, 1)](*alike, *pointers, *rest)
            return
        arguments: list[Any] = []
        for place, descriptor in enumerate(descriptors):
            if descriptor is None:
                arguments.append(None)
                continue
            key = (self._facts[place][0], descriptor.base.data_ptr(), *descriptor.shape, *descriptor.strides)
            made = _encoded.get(key)
            if made is None:
                if len(_encoded) >= _ENCODED_LIMIT:
                    _encoded.clear()
                made = _encoded[key] = self._encoding(place, descriptor)
            arguments += made
        compiled = self._compiled
        self._launcher(
            programs, 1, 1, self._stream(device), compiled.function, compiled.packed_metadata, None, None, None,
            *arguments, *addresses, *rest,
        )  # fmt: skip

    def _encoding(self, place: int, descriptor: Descriptor) -> list[Any]:
        """The launcher's arguments for one descriptor: the tensor map, sizes and strides."""
        return self._encode(descriptor.like(self._checked[place]), self._facts[place][1], *self._unused)


class _Slot:
    """One descriptor of a prepared launch: its position among the arguments, and encodings of recent tensors."""

    __slots__ = ("_encodings", "_geometry", "_index", "_variant", "last", "place")

    def __init__(self, variant: Variant, index: int, geometry: Geometry, place: int) -> None:
        self._variant, self._index, self._geometry, self.place = variant, index, geometry, place
        # One tuple, so that two threads never mix an address with the encoding of another.
        self.last: tuple[int, Any] = (-1, None)
        self._encodings: dict[int, Any] = {}

    def encoding(self, address: int, base: torch.Tensor) -> Any:
        """The tensor map of ``base``, whose address is ``address``."""
        found = self._encodings.get(address)
        if found is None:
            if len(self._encodings) >= _SLOT_LIMIT:
                self._encodings.clear()
            found = self._variant._encoding(self._index, Descriptor(base, *self._geometry))[0]
            self._encodings[address] = found
        self.last = (address, found)
        return found


class Repeated:
    """The launch of a variant with everything but the tensors known; see ``launching.Launch``."""

    __slots__ = (
        "_after", "_arguments", "_before", "_device", "_first_pointer", "_function", "_geometries", "_nested",
        "_programs", "_rest", "_slots", "_stream", "_variant",
    )  # fmt: skip

    def __init__(
        self,
        variant: Variant,
        programs: int,
        device: int,
        geometries: tuple[Geometry | None, ...],
        pointers: int,
        rest: tuple[object, ...],
    ) -> None:
        self._variant, self._programs, self._device = variant, programs, device
        self._geometries, self._rest = geometries, rest
        self._function: Any = None
        if variant._launcher is None:
            return
        self._stream = variant._stream
        arguments: list[Any] = []
        slots: list[_Slot | None] = []
        for index, geometry in enumerate(geometries):
            slots.append(None if geometry is None else _Slot(variant, index, geometry, len(arguments)))
            arguments += [None] if geometry is None else [None, *geometry.shape, *geometry.strides]
        self._slots, self._first_pointer = slots, len(arguments)
        self._arguments = [*arguments, *[None] * pointers, *rest]
        self._function, self._before, self._after, self._nested = _innermost(
            variant._launcher, programs, variant._compiled, tuple(self._arguments)
        )

    def __call__(self, pointers: tuple[torch.Tensor | None, ...], bases: tuple[torch.Tensor | None, ...]) -> None:
        """Run it on the current stream of its device, which must be the current device."""
        if self._function is None or _listened_to():
            self._through_triton(pointers, bases)
            return
        arguments = self._arguments.copy()
        for slot, base in zip(self._slots, bases, strict=True):
            if base is not None and slot is not None:
                address = base.data_ptr()
                known, encoding = slot.last
                arguments[slot.place] = encoding if known == address else slot.encoding(address, base)
        place = self._first_pointer
        for pointer in pointers:
            if pointer is not None:
                arguments[place] = pointer.data_ptr()
            place += 1
        if self._nested:
            self._function(*self._before, self._stream(self._device), *self._after, tuple(arguments))
        else:
            self._function(*self._before, self._stream(self._device), *self._after, *arguments)

    def _through_triton(
        self, pointers: tuple[torch.Tensor | None, ...], bases: tuple[torch.Tensor | None, ...]
    ) -> None:
        described = zip(bases, self._geometries, strict=True)
        descriptors = tuple([None if b is None or g is None else Descriptor(b, *g) for b, g in described])
        addresses = [None if pointer is None else pointer.data_ptr() for pointer in pointers]
        self._variant.launch(self._programs, self._device, descriptors, pointers, addresses, self._rest)


def _listened_to() -> bool:
    """Whether a launch hook is set; a hook chain without hooks counts as none."""
    hooks = triton.knobs.runtime
    before, after = hooks.launch_enter_hook, hooks.launch_exit_hook
    return bool(getattr(before, "calls", before) or getattr(after, "calls", after))


_STREAM = object()


def _innermost(
    launcher: Any, programs: int, compiled: Any, arguments: tuple[Any, ...]
) -> tuple[Any, tuple[Any, ...], tuple[Any, ...], bool]:
    """(launch function, its arguments before and after the stream, whether the kernel's arguments form one tuple).

    Triton's Python launcher allocates scratch memory, of which kernels here need none, and calls a C function. One call
    with a recorder in place of that function shows its arguments; if they are unexpected, the Python launcher is used.
    """
    given = (programs, 1, 1, _STREAM, compiled.function, compiled.packed_metadata, None, None, None, *arguments)
    itself = (launcher, given[:3], given[4:9], False)
    sizes = [getattr(launcher, name, None) for name in ("global_scratch_size", "profile_scratch_size")]
    if sizes != [0, 0] or getattr(launcher, "gsan_enabled", False) or not callable(getattr(launcher, "launch", None)):
        return itself
    watched, calls = copy.copy(launcher), []
    watched.launch = lambda *each: calls.append(each)
    watched(*given)
    if len(calls) != 1:
        return itself
    (call,) = calls
    streams = [place for place, each in enumerate(call) if each is _STREAM]
    nested = bool(call) and isinstance(call[-1], tuple) and _same(call[-1], arguments)
    fixed = call[:-1] if nested else call[: len(call) - len(arguments)]
    if len(streams) != 1 or streams[0] >= len(fixed) or not (nested or _same(call[len(fixed) :], arguments)):
        return itself
    return launcher.launch, fixed[: streams[0]], fixed[streams[0] + 1 :], nested


def _same(left: tuple[Any, ...], right: tuple[Any, ...]) -> bool:
    """Whether both hold the same objects."""
    return len(left) == len(right) and all(one is other for one, other in zip(left, right, strict=True))


def _is_known(driver: Any, backend: Any, compiled: Any) -> bool:
    """Whether Triton's launcher has the interfaces that this file relies on."""
    encode = getattr(backend, "make_tensordesc_arg", None)
    kind = getattr(driver, "launcher_cls", None)
    if not inspect.isfunction(encode) or not inspect.isclass(kind):
        return False
    call = tuple(inspect.signature(kind.__call__).parameters)
    described = [kind for kind in compiled.src.signature.values() if _describes(kind)]
    meta = getattr(compiled.metadata, "tensordesc_meta", None) or ()
    return (
        tuple(inspect.signature(encode).parameters) in _ENCODING_PARAMETERS
        and call[: len(_LAUNCHER_PARAMETERS)] == _LAUNCHER_PARAMETERS
        and tuple(inspect.signature(kind).parameters) == ("src", "metadata")
        and hasattr(driver, "get_current_stream")
        and len(meta) == len(described)
        and all(isinstance(each, dict) for each in meta)
    )


def _describes(kind: Any) -> bool:
    return isinstance(kind, str) and kind.startswith("tensordesc")


def _launcher(driver: Any, compiled: Any, checked: list[Any]) -> Any:
    """Triton's launcher of a kernel, built for encoded descriptors: tensor map, sizes and strides."""
    given = [descriptor for descriptor in checked if descriptor is not None]
    if not given:
        return compiled.run
    signature: dict[Any, Any] = {}
    ranks = iter([len(descriptor.shape) for descriptor in given])
    for name, kind in compiled.src.signature.items():
        if not _describes(kind):
            signature[name] = kind
            continue
        rank = next(ranks)
        for part, each in enumerate(["nvTmaDesc", *["i32"] * rank, *["i64"] * rank]):
            signature[name, part] = each
    source = SimpleNamespace(fn=compiled.src.fn, constants=compiled.src.constants, signature=signature)
    return driver.launcher_cls(source, compiled.metadata._replace(tensordesc_meta=None))


def _by_place(compiled: Any, checked: list[Any]) -> list[Any]:
    """For each descriptor (short id of its encoding, Triton's metadata for it); None where there is no descriptor."""
    facts: list[Any] = []
    metas = iter(getattr(compiled.metadata, "tensordesc_meta", None) or ())
    for descriptor in checked:
        if descriptor is None:
            facts.append(None)
            continue
        meta = next(metas)
        named = tuple((name, repr(value)) for name, value in sorted(meta.items()))
        facts.append((_encodings.setdefault(named, len(_encodings)), meta))
    return facts
