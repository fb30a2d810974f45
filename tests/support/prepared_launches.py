"""What tests of prepared launches share: stand-ins for compiling and for Triton's launcher, and comparisons."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from fusedlayers import planning
from fusedlayers.kernels import hopper, launching, relaunching
from tests.support.stand_in_launchers import Compiled, stand_in_driver

HOPPER = planning.Device("cuda", "sm_90", "a Hopper GPU", 132, triton=True, backend="sm90")


def drawn(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape).to(dtype)


class Watched:
    """Stands in for compiling: every kernel becomes one of this launcher."""

    def __init__(self, launcher: type, monkeypatch: pytest.MonkeyPatch) -> None:
        self.launcher = launcher
        self.compiled = 0
        monkeypatch.setattr(launching.Launch, "_run_first", lambda launch, tensors: self.run_first(launch, tensors))
        monkeypatch.setattr(launching, "current_device", lambda: None)

    def run_first(self, launch: Any, tensors: tuple[Tensor | None, ...]) -> None:
        self.compiled += 1
        descriptors, pointers = launch._described(tensors)
        kinds = ["constexpr" if d is None else "tensordesc<bf16[8, 64]>" for d in descriptors]
        kinds += ["constexpr" if p is None else "*bf16" for p in pointers]
        signature = {str(place): kind for place, kind in enumerate([*kinds, *["i32"] * len(launch._rest)])}
        launch._device, launch._variant = None, relaunching.Variant(
            Compiled(signature, self.launcher), [None if d is None else CompleteDescriptor(d) for d in descriptors]
        )  # fmt: skip
        launch(tensors)


class CompleteDescriptor:
    def __init__(self, descriptor: hopper.Descriptor) -> None:
        self.base: Any = None
        self.shape, self.strides = descriptor.shape, descriptor.strides


def launcher_of(calls: list[tuple[Any, ...]], nested: bool) -> type:
    """Triton's launcher in Python around a function in C, which is told the arguments in one tuple or one by one."""

    class Wrapping:
        global_scratch_size = profile_scratch_size = 0

        def __init__(self, src: Any, metadata: Any) -> None:
            pass

        @staticmethod
        def launch(*arguments: Any) -> None:
            calls.append(arguments)

        def __call__(self, gridX: int, gridY: int, gridZ: int, stream: int, function: str, *args: Any) -> None:
            flags = (False, True)
            if nested:
                metadata, *hooks = args[:4]
                self.launch(
                    gridX, gridY, gridZ, stream, function, *flags, metadata, *hooks, None, None, "kinds", args[4:]
                )
            else:
                self.launch(gridX, gridY, gridZ, stream, function, *flags, None, None, *args)

    return Wrapping


def lie_again(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Results lie where they lay since the last call of what this gives, so that executions can be compared."""
    kept: list[Tensor] = []
    place = [0]

    def again(allocate: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def run(*arguments: Any, **options: Any) -> Tensor:
            fresh = allocate(*arguments, **options)
            if place[0] == len(kept):
                kept.append(fresh)
            found = kept[place[0]]
            place[0] += 1
            assert (found.shape, found.dtype) == (fresh.shape, fresh.dtype)
            return found

        return run

    monkeypatch.setattr(torch, "empty", again(torch.empty))
    monkeypatch.setattr(torch, "empty_like", again(torch.empty_like))
    monkeypatch.setattr(Tensor, "new_empty", again(Tensor.new_empty))
    return lambda: place.__setitem__(0, 0)  # type: ignore[return-value]


def assert_told_the_same(
    run: Callable[[dict[Any, Any] | None], None], nested: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the function in C receives, launch by launch: without preparation, at first with it, and then again."""
    buffers = lie_again(monkeypatch)
    calls: list[tuple[Any, ...]] = []
    launcher = launcher_of(calls, nested)
    watched = Watched(launcher, monkeypatch)
    with stand_in_driver(launcher) as encoded:
        told: list[list[tuple[Any, ...]]] = []
        ready: dict[Any, Any] = {}
        for given in (None, ready, ready, ready):
            buffers()
            calls.clear()
            compiled, seen = watched.compiled, len(encoded)
            run(given)
            told.append(list(calls))
        assert watched.compiled == compiled, "the third execution was prepared"
        assert len(encoded) == seen, "and encodes nothing that lies where it lay"
    assert len(told[0]) >= 3
    assert told[1:] == [told[0]] * 3
    assert {call[3] for call in told[0]} == {7}
