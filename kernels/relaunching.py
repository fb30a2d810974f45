"""A compiled kernel launched again, without what Triton does anew in every launch although nothing has changed.

Its launcher encodes each descriptor for the copy engine, asks the driver about each pointer, and prepares a report for
hooks that nobody has set. Here a descriptor is encoded once for each place in memory that it describes, pointers are
numbers, and a launcher made for descriptors in their encoded form takes both. All of that is Triton's own code, called
with other arguments; where this Triton is built otherwise than it is known here, launches go through its public
interface as before.
"""

import inspect
import sys
from types import SimpleNamespace
from typing import Any

import torch

from .device import triton
from .hopper import Descriptor

# What is encoded depends on the address and the geometry alone, so that nobody needs to know whose memory it is.
_encoded: dict[tuple[object, ...], list[Any]] = {}
_ENCODED_LIMIT = 4096  # addresses that change with every call must not fill the memory
# How descriptors of one block are encoded, as Triton's compiler has it -> a short name for it.
_encodings: dict[tuple[object, ...], int] = {}

# The parameters of Triton's function that encodes a descriptor; the last is not used there, and not everywhere.
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
        """Runs it on the current stream of ``device``, which is the current one."""
        hooks = triton.knobs.runtime
        before, after = hooks.launch_enter_hook, hooks.launch_exit_hook
        # A chain without hooks is one that nobody listens to.
        heard = getattr(before, "calls", before) or getattr(after, "calls", after)
        if self._launcher is None or heard:
            alike = [None if d is None else d.like(other) for d, other in zip(descriptors, self._checked, strict=True)]
            self._compiled[(programs, 1, 1)](*alike, *pointers, *rest)
            return
        arguments: list[Any] = []
        for place, descriptor in enumerate(descriptors):
            if descriptor is None:
                arguments.append(None)
                continue
            key = (self._facts[place][0], descriptor.base.data_ptr(), *descriptor.shape, *descriptor.strides)
            arguments += _encoded.get(key) or self._encoding(key, place, descriptor)
        compiled = self._compiled
        self._launcher(
            programs, 1, 1, self._stream(device), compiled.function, compiled.packed_metadata, None, None, None,
            *arguments, *addresses, *rest,
        )  # fmt: skip

    def _encoding(self, key: tuple[object, ...], place: int, descriptor: Descriptor) -> list[Any]:
        if len(_encoded) >= _ENCODED_LIMIT:
            _encoded.clear()
        made = self._encode(descriptor.like(self._checked[place]), self._facts[place][1], *self._unused)
        _encoded[key] = made
        return made


def _is_known(driver: Any, backend: Any, compiled: Any) -> bool:
    """Whether Triton's launcher is put together as it must be for what is done with it here."""
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
    """Triton's launcher of a kernel, for descriptors in their encoded form: the map, sizes and strides."""
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
    """For each descriptor a short name of its encoding, and Triton's facts of it; None where there is none."""
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
