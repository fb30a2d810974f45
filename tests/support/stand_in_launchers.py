"""Stand-ins for Triton's driver, its launchers and its compiled kernels, which remember what they are called with."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar, NamedTuple
from unittest import mock

from fusedlayers.kernels.device import triton

BACKEND = "stand_in_backend"
META = {"swizzle": 3, "elem_size": 2, "elem_type": 10, "block_size": [8, 64], "fp4_padded": False}


class Metadata(NamedTuple):
    tensordesc_meta: Any


class Checked:
    """As much of Gluon's own descriptor as is needed, after the first launch."""

    def __init__(self, shape: list[int]) -> None:
        self.base, self.shape, self.strides = None, shape, [1] * len(shape)


class Launcher:
    """Triton's launcher: remembers what it is made for, and what its function in C is called with."""

    global_scratch_size = profile_scratch_size = 0
    made: ClassVar[list[Launcher]] = []

    def __init__(self, src: Any, metadata: Any) -> None:
        self.signature, self.meta = list(src.signature.values()), metadata.tensordesc_meta
        self.calls: list[tuple[Any, ...]] = []
        self.launch = lambda *arguments: self.calls.append(arguments)
        self.made.append(self)

    def __call__(self, gridX: int, gridY: int, gridZ: int, stream: int, function: str, *args: Any) -> None:
        self.launch(gridX, gridY, gridZ, stream, function, args[0], args[4:])


class Compiled:
    """A compiled kernel of two descriptors, one of them not there, a pointer and a number."""

    def __init__(self, signature: dict[str, str] | None = None, launcher: type = Launcher) -> None:
        signature = signature or {"a": "tensordesc<bf16[8, 64]>", "b": "constexpr", "p": "*fp32", "n": "i32"}
        self.src = SimpleNamespace(fn=SimpleNamespace(arg_names=list(signature)), constants={}, signature=signature)
        self.metadata = Metadata([META for kind in signature.values() if kind.startswith("tensordesc")])
        self.packed_metadata, self.function = "packed", "function"
        self.run = launcher(self.src, self.metadata)
        self.plain: list[tuple[Any, ...]] = []

    def __getitem__(self, grid: tuple[int, int, int]) -> Callable[..., None]:
        return lambda *arguments: self.plain.append((grid, arguments))


@contextmanager
def stand_in_driver(launcher: type = Launcher) -> Iterator[list[int]]:
    """Inside, Triton's driver has this launcher; yields the addresses of what is encoded, in order."""
    seen: list[int] = []

    def make_tensordesc_arg(arg: Any, metadata: Any) -> list[Any]:
        assert metadata is META
        seen.append(arg.base.data_ptr())
        return [f"map of {arg.base.data_ptr()}", *arg.shape, *arg.strides]

    backend = ModuleType(BACKEND)
    vars(backend)["make_tensordesc_arg"] = make_tensordesc_arg
    driver = type("Driver", (), {"__module__": BACKEND, "launcher_cls": launcher})()
    driver.get_current_stream = lambda device: 7
    before = triton.runtime.driver.active if triton.runtime.driver._active is not None else None
    triton.runtime.driver.set_active(driver)
    with mock.patch.dict(sys.modules, {BACKEND: backend}):
        yield seen
    triton.runtime.driver.set_active(before)
