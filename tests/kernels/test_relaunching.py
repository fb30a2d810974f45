"""What a kernel's second launch skips, with stand-ins for Triton's driver: nothing that could have changed."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from fusedlayers.kernels import relaunching
from fusedlayers.kernels.device import HAS_TRITON, triton
from fusedlayers.kernels.hopper import Descriptor, matrix
from tests.support.stand_in_launchers import BACKEND, Checked, Compiled, Launcher, Metadata, stand_in_driver

pytestmark = pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed")


@pytest.fixture
def encoded() -> Iterator[list[int]]:
    """The addresses of what is encoded, in order, by a backend like Triton's."""
    with stand_in_driver() as seen:
        yield seen


def tensor(rows: int = 16) -> Tensor:
    return torch.zeros(rows, 64, dtype=torch.bfloat16)


def described(given: Tensor) -> Descriptor:
    found = matrix(given)
    assert found is not None
    return found.descriptor(8, 64)


def launched(variant: relaunching.Variant, given: Tensor, pointer: Tensor) -> None:
    variant.launch(3, 0, (described(given), None), (pointer,), [pointer.data_ptr()], (5,))


def test_a_matrix_is_encoded_once_for_each_place(encoded: list[int]) -> None:
    compiled = Compiled()
    variant = relaunching.Variant(compiled, [Checked([16, 64]), None])
    launcher = variant._launcher
    assert launcher.signature == ["nvTmaDesc", "i32", "i32", "i64", "i64", "constexpr", "*fp32", "i32"]
    assert launcher.meta is None
    given, other, pointer = tensor(), tensor(), torch.zeros(4)
    for each in (given, given, other, given):
        launched(variant, each, pointer)
    assert encoded == [given.data_ptr(), other.data_ptr()]
    arguments = [args for *_, args in launcher.calls]
    assert [args[4] for args in arguments] == [f"map of {each.data_ptr()}" for each in (given, given, other, given)]
    assert launcher.calls[0][:3] == (3, 7, "function")
    assert arguments[0][:4] == ("packed", None, None, None)
    assert arguments[0][5:] == (16, 64, 64, 1, None, pointer.data_ptr(), 5)
    assert compiled.plain == []


def test_other_sizes_or_strides_at_the_same_place_are_another_matrix(encoded: list[int]) -> None:
    variant = relaunching.Variant(Compiled(), [Checked([16, 64]), None])
    whole, pointer = tensor(), torch.zeros(4)
    views = [whole, whole[:8], whole[::2], whole[:, :32]]
    for _ in range(2):
        for view in views:
            launched(variant, view, pointer)
    assert encoded == [whole.data_ptr()] * len(views)
    sizes = [args[5:9] for *_, args in variant._launcher.calls[: len(views)]]
    assert sizes == [(16, 64, 64, 1), (8, 64, 64, 1), (8, 64, 128, 1), (16, 32, 64, 1)]


def test_encodings_are_forgotten_before_they_fill_the_memory(
    encoded: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relaunching, "_ENCODED_LIMIT", 4)
    variant = relaunching.Variant(Compiled(), [Checked([16, 64]), None])
    whole, pointer = tensor(64), torch.zeros(4)
    for row in range(10):
        launched(variant, whole[row:], pointer)
        assert len(relaunching._encoded) <= 4
    assert len(encoded) == 10


def test_no_tensor_is_kept_alive(encoded: list[int]) -> None:
    checked = Checked([16, 64])
    checked.base = tensor()  # type: ignore[assignment]
    variant = relaunching.Variant(Compiled(), [checked, None])
    launched(variant, tensor(), torch.zeros(4))
    assert checked.base is None
    assert not any(isinstance(each, Tensor) for made in relaunching._encoded.values() for each in made)


def test_hooks_hear_of_launches_through_tritons_interface(encoded: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = Compiled()
    variant = relaunching.Variant(compiled, [Checked([16, 64]), None])
    given, pointer = tensor(), torch.zeros(4)
    monkeypatch.setattr(triton.knobs.runtime.launch_exit_hook, "calls", [print])
    launched(variant, given, pointer)
    assert variant._launcher.calls == encoded == []
    ((grid, arguments),) = compiled.plain
    assert grid == (3, 1, 1)
    assert arguments[0].base is given
    assert arguments[1:] == (None, pointer, 5)
    monkeypatch.setattr(triton.knobs.runtime.launch_exit_hook, "calls", [])
    launched(variant, given, pointer)
    assert len(variant._launcher.calls) == 1


@pytest.mark.parametrize("change", ["encoding", "launcher", "metadata"])
def test_a_triton_that_is_built_otherwise_is_asked_as_before(
    encoded: list[int], monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    compiled = Compiled()
    driver: Any = triton.runtime.driver.active
    if change == "encoding":
        monkeypatch.setattr(sys.modules[BACKEND], "make_tensordesc_arg", lambda arg, metadata, more, still: None)
    elif change == "launcher":
        driver.launcher_cls = type("Launcher", (Launcher,), {"__call__": lambda self, grid, *args: None})
    else:
        compiled.metadata = Metadata([None])
    variant = relaunching.Variant(compiled, [Checked([16, 64]), None])
    for _ in range(2):
        launched(variant, tensor(), torch.zeros(4))
    assert len(compiled.plain) == 2
    assert encoded == []


def test_the_installed_triton_is_known() -> None:
    """Without a GPU its driver cannot be made, but its parts can be looked at."""
    backend = sys.modules.get("triton.backends.nvidia.driver")
    if backend is None:
        pytest.skip("this Triton has no backend for NVIDIA GPUs")
    driver = SimpleNamespace(launcher_cls=backend.CudaLauncher, get_current_stream=None)
    assert relaunching._is_known(driver, backend, Compiled())
