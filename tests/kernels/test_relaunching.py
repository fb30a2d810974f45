"""What a kernel's second launch skips, with stand-ins for Triton's driver: nothing that could have changed."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from fusedlayers.kernels import launching, relaunching
from fusedlayers.kernels.device import HAS_TRITON, triton
from fusedlayers.kernels.hopper import matrix
from fusedlayers.kernels.launching import Launch
from tests.support.stand_in_launchers import BACKEND, Checked, Compiled, Launcher, Metadata, stand_in_driver

pytestmark = pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed")


@pytest.fixture(autouse=True)
def device_0_is_current(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launching, "current_device", lambda: 0)


@pytest.fixture
def encoded() -> Iterator[list[int]]:
    """The addresses of what is encoded, in order, by a backend like Triton's."""
    with stand_in_driver() as seen:
        yield seen


def tensor(rows: int = 16) -> Tensor:
    return torch.zeros(rows, 64, dtype=torch.bfloat16)


def launched(variant: relaunching.Variant, given: Tensor, pointer: Tensor) -> None:
    found = matrix(given)
    launch = Launch(None, 3, (5,), (), (), geometries=(found.geometry(8, 64), None))
    launch._device, launch._variant = 0, variant
    launch((given, None, pointer))


def test_the_function_in_c_is_called_with_encodings_and_addresses(encoded: list[int]) -> None:
    compiled = Compiled()
    variant = relaunching.Variant(compiled, [Checked([16, 64]), None])
    assert variant.direct
    launcher = Launcher.made[-1]
    assert launcher.signature == ["nvTmaDesc", "i32", "i32", "i64", "i64", "constexpr", "*fp32", "i32"]
    assert launcher.meta is None
    whole, pointer = tensor(), torch.zeros(4)
    for view, sizes in ((whole, (16, 64, 64, 1)), (whole[:8], (8, 64, 64, 1)), (whole[::2], (8, 64, 128, 1))):
        launched(variant, view, pointer)
        told = (f"map of {view.data_ptr()}", *sizes, None, pointer.data_ptr(), 5)
        assert launcher.calls.pop() == (3, 1, 1, 7, "function", "packed", told)
    assert compiled.plain == launcher.calls == []


def test_no_tensor_is_kept_alive(encoded: list[int]) -> None:
    checked = Checked([16, 64])
    checked.base = tensor()  # type: ignore[assignment]
    relaunching.Variant(Compiled(), [checked, None])
    assert checked.base is None


def test_hooks_hear_of_launches_through_tritons_interface(encoded: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = Compiled()
    variant = relaunching.Variant(compiled, [Checked([16, 64]), None])
    given, pointer = tensor(), torch.zeros(4)
    monkeypatch.setattr(triton.knobs.runtime.launch_exit_hook, "calls", [print])
    launched(variant, given, pointer)
    assert Launcher.made[-1].calls == encoded == []
    ((grid, arguments),) = compiled.plain
    assert grid == (3, 1, 1)
    assert arguments[0].base is given
    assert arguments[1:] == (None, pointer, 5)
    monkeypatch.setattr(triton.knobs.runtime.launch_exit_hook, "calls", [])
    launched(variant, given, pointer)
    assert len(Launcher.made[-1].calls) == 1


class OneByOne(Launcher):
    def __call__(self, *arguments: Any) -> None:
        self.launch(*arguments[:5], False, *arguments[9:])


def test_arguments_may_be_told_one_by_one() -> None:
    with stand_in_driver(OneByOne):
        variant = relaunching.Variant(Compiled({"p": "*fp32", "n": "i32"}, OneByOne), [])
        variant.run(3, 0, (16, 5))
    assert Launcher.made[-1].calls == [(3, 1, 1, 7, "function", False, 16, 5)]


class WithScratch(Launcher):
    global_scratch_size = 128


class Twice(Launcher):
    def __call__(self, *arguments: Any) -> None:
        for _ in range(2):
            super().__call__(*arguments)


class Shuffled(Launcher):
    def __call__(self, *arguments: Any) -> None:
        self.launch(*arguments[:4], *reversed(arguments[4:]))


class StreamFirst(Launcher):
    def __call__(self, *arguments: Any) -> None:
        self.launch(arguments[3], *arguments[:3], *arguments[4:])


class OtherParameters(Launcher):
    def __call__(self, grid: tuple[int, int, int], *, stream: int) -> None:  # type: ignore[override]
        raise NotImplementedError


class DoesNothing(Launcher):
    def __call__(self, *arguments: Any) -> None:
        pass


@pytest.mark.parametrize(
    "change", ["encoding", "metadata", WithScratch, Twice, Shuffled, StreamFirst, OtherParameters, DoesNothing]
)
def test_a_triton_that_is_built_otherwise_is_asked_as_before(
    change: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A warning says once that launches take longer."""
    relaunching._warn.cache_clear()
    with stand_in_driver(Launcher if isinstance(change, str) else change) as encoded:
        compiled = Compiled()
        if change == "encoding":
            monkeypatch.setattr(sys.modules[BACKEND], "make_tensordesc_arg", lambda arg, metadata, more, still: None)
        elif change == "metadata":
            compiled.metadata = Metadata([None])
        variants = [relaunching.Variant(compiled, [Checked([16, 64]), None]) for _ in range(2)]
        for variant in variants:
            assert not variant.direct
            launched(variant, tensor(), torch.zeros(4))
        assert len(compiled.plain) == 2
        assert encoded == []
    [record] = caplog.records
    assert "launches kernels in a way that is not known here" in record.getMessage()
    relaunching._warn.cache_clear()


@pytest.mark.skipif(sys.modules.get("triton.backends.nvidia.driver") is None, reason="no backend for NVIDIA GPUs")
def test_the_installed_triton_is_known() -> None:
    """Without a GPU its driver cannot be made, but its parts can be looked at: an unknown release fails here."""
    backend = sys.modules["triton.backends.nvidia.driver"]
    assert relaunching._encodes(backend.make_tensordesc_arg, [Checked([16, 64])], [{}])
    launcher = object.__new__(backend.CudaLauncher)
    vars(launcher).update(
        global_scratch_size=0, global_scratch_align=1, profile_scratch_size=0, profile_scratch_align=1, num_ctas=1,
        launch_cooperative_grid=False, launch_pdl=False, arg_annotations=(), kernel_signature=b"", launch=print,
    )  # fmt: skip
    assert tuple(inspect.signature(backend.CudaLauncher).parameters) == ("src", "metadata")
    found = relaunching._c_function(launcher, Compiled())
    assert found[0] is print
    assert "function" in found[1]
