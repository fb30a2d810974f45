"""Kernels may be loaded while a CUDA graph is captured: with stand-ins for the driver's function."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fusedlayers.kernels import capturing, launching, relaunching
from fusedlayers.kernels.device import HAS_TRITON, triton
from tests.support.stand_in_launchers import Compiled, stand_in_driver

GLOBAL, RELAXED = 0, 2


class Driver:
    """Swaps the mode of the one thread there is with the one that it is given."""

    def __init__(self, error: int = 0) -> None:
        self.mode, self.error = GLOBAL, error

    def __call__(self, mode: Any) -> int:
        if not self.error:
            given = ctypes.cast(mode, ctypes.POINTER(ctypes.c_int))
            self.mode, given[0] = given[0], self.mode
        return self.error


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    found = Driver()
    monkeypatch.setattr(capturing, "_exchange_mode", lambda: found)
    return found


@pytest.mark.parametrize("before", [GLOBAL, 1, RELAXED])
def test_the_mode_is_relaxed_inside_and_put_back(driver: Driver, before: int) -> None:
    driver.mode = before
    with capturing.loading_allowed():
        assert driver.mode == RELAXED
        with capturing.loading_allowed():
            assert driver.mode == RELAXED
        assert driver.mode == RELAXED
    assert driver.mode == before


def test_it_is_put_back_after_an_error(driver: Driver) -> None:
    with pytest.raises(KeyError), capturing.loading_allowed():
        raise KeyError
    assert driver.mode == GLOBAL


def test_a_driver_that_refuses_is_not_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    monkeypatch.setattr(capturing, "_exchange_mode", lambda: lambda mode: calls.append(1) or 3)
    with capturing.loading_allowed():
        pass
    assert calls == [1]


@pytest.mark.parametrize("missing", ["library", "function"])
def test_without_the_function_nothing_happens(monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    def load(name: str) -> Any:
        if missing == "library":
            raise OSError(name)
        return SimpleNamespace()

    monkeypatch.setattr(ctypes, "CDLL", load)
    capturing._exchange_mode.cache_clear()
    assert capturing._exchange_mode() is None
    with capturing.loading_allowed():
        pass
    capturing._exchange_mode.cache_clear()


@pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed")
def test_a_first_launch_loads_in_the_relaxed_mode_and_a_second_does_not_ask(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    modes: list[int] = []

    class Pointer:
        """A tensor on a GPU, as far as a launch looks at it."""

        is_cuda, dtype, device = True, torch.float32, torch.device("cuda", 0)

        def data_ptr(self) -> int:
            return 4096

    class Kernel:
        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            def compiled(*arguments: Any, **options: Any) -> Compiled:
                modes.append(driver.mode)
                return Compiled({"p": "*fp32", "n": "i32"})

            return compiled

    monkeypatch.setattr(launching, "_compiled", {})
    monkeypatch.setattr(launching, "current_device", lambda: 0)
    monkeypatch.setattr(triton.compiler, "CompiledKernel", Compiled)
    kernel, pointers = Kernel(), (Pointer(),)
    with stand_in_driver():
        prepared = launching.Launch(kernel, 3, (5,), (), ())
        for _ in range(3):
            prepared(pointers)  # type: ignore[arg-type]
            assert driver.mode == GLOBAL
        assert isinstance(prepared._variant, relaunching.Variant)
    assert modes == [RELAXED]
