"""Prepared calls are found again for calls like them, and nothing that matters may have changed."""

from __future__ import annotations

import gc
import os
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.utils.flop_counter import FlopCounterMode

import fusedlayers as fl
from fusedlayers.functional import operation, recalling
from fusedlayers.functional.ffn import FFN
from fusedlayers.functional.operation import CALLS, OPERATIONS, Operation
from fusedlayers.functional.prepared import Prepared
from fusedlayers.functional.recalling import call_key
from fusedlayers.kernels import torch_internals
from tests.support.operands import DEVICE, Allocations, forget_calls, needs_kernels

LINEAR = OPERATIONS["linear"]
OPTIONS = (None, "auto", "workspace", None)


@pytest.fixture(autouse=True)
def nothing_is_remembered() -> Iterator[None]:
    forget_calls()
    yield
    forget_calls()


@pytest.fixture
def tensors() -> list[Tensor | None]:
    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(6, 8, device=DEVICE))
    return [torch.randn(5, 8, device=DEVICE), weight, nn.Parameter(torch.randn(6, device=DEVICE))]


def found(operation: Operation, tensors: tuple[Tensor | None, ...], options: tuple[Any, ...]) -> Prepared | None:
    return CALLS.find(call_key(operation.name, tensors, options), tensors)


def recalled(tensors: list[Tensor | None], options: tuple[Any, ...] = OPTIONS) -> Prepared | None:
    return found(LINEAR, tuple(tensors), options)


def prepared(tensors: list[Tensor | None]) -> Prepared:
    call = LINEAR.prepared(tuple(tensors), OPTIONS)
    assert recalled(tensors) is call
    return call


def test_other_addresses_are_the_same_call(tensors: list[Tensor | None]) -> None:
    call = prepared(tensors)
    assert recalled([tensors[0] + 1, *tensors[1:]]) is call  # type: ignore[operator]
    other = nn.Parameter(torch.randn(6, 8, device=DEVICE))
    assert recalled([tensors[0], other, tensors[2]]) is call


def transposed(x: Tensor) -> Tensor:
    return x.t().contiguous().t()


def shifted(x: Tensor) -> Tensor:
    return torch.empty(x.numel() + 1, device=x.device)[1:].view_as(x).copy_(x)


CHANGES: dict[str, Callable[[Tensor], Tensor | None]] = {
    "shape": lambda x: x[:4].clone(),
    "strides": transposed,
    "address": shifted,
    "dtype": lambda x: x.double(),
    "gradient": lambda x: x.clone().requires_grad_(),
    "negative": lambda x: torch._neg_view(x),
    "nothing": lambda x: None,
    "sparse": lambda x: x.to_sparse(),
    "subclass": lambda x: x.as_subclass(type("Other", (Tensor,), {})),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("place", [0, 1])
def test_a_tensor_that_changed_is_noticed(
    change: str, place: int, tensors: list[Tensor | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FUSEDLAYERS_BACKEND", "triton")
    prepared(tensors)
    others = list(tensors)
    given = others[place]
    assert given is not None
    given = given.detach() if place == 0 else given
    made = CHANGES[change](given)
    if made is not None and place == 1 and type(made) is Tensor and change not in ("negative", "sparse"):
        made = nn.Parameter(made.detach(), requires_grad=change != "gradient")
    others[place] = made
    if change == "nothing" and place == 0:
        return  # a call has a first tensor
    assert recalled(others) is None


def test_what_was_none_and_is_given_now_is_noticed(tensors: list[Tensor | None]) -> None:
    bias = tensors[2]
    prepared([*tensors[:2], None])
    assert recalled([*tensors[:2], bias]) is None


def test_options_are_compared_with_their_types(tensors: list[Tensor | None]) -> None:
    for split_k in (1, "auto"):
        LINEAR.prepared(tuple(tensors), (None, split_k, "workspace", None))
    for other in (True, 1.0, 2):
        assert recalled(tensors, (None, other, "workspace", None)) is None
    assert recalled(tensors, (None, 1, "workspace", None)) is not recalled(tensors)


@contextmanager
def dual_level() -> Iterator[None]:
    with forward_ad.dual_level():
        yield


SURROUNDINGS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "no gradients": torch.no_grad,
    "inference mode": torch.inference_mode,
    "autocast": lambda: torch.autocast(DEVICE.type, torch.bfloat16),
    "a switch": lambda: mock.patch.dict(os.environ, {"FUSEDLAYERS_BACKEND": "torch"}),
    "a dispatch mode": Allocations,
    "forward-mode derivatives": dual_level,
}


@pytest.mark.parametrize("name", SURROUNDINGS)
def test_surroundings_that_changed_are_noticed(name: str, tensors: list[Tensor | None]) -> None:
    prepared(tensors)
    x = tensors[0]
    assert x is not None
    with SURROUNDINGS[name]():
        given = [x.clone() if name == "inference mode" else x, *tensors[1:]]
        assert recalled(given) is None
    assert recalled(tensors) is not None


def test_another_dtype_of_autocast_is_noticed(tensors: list[Tensor | None]) -> None:
    with torch.autocast(DEVICE.type, torch.bfloat16):
        prepared(tensors)
    with torch.autocast(DEVICE.type, torch.float16):
        assert recalled(tensors) is None


def test_transforms_are_noticed(tensors: list[Tensor | None]) -> None:
    prepared(tensors)
    seen = []

    def run(x: Tensor) -> Tensor:
        seen.append(recalled([x, *tensors[1:]]))
        return x

    torch.func.vmap(run)(torch.randn(2, 5, 8, device=DEVICE))
    assert seen == [None]


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_only_kernels_mind_the_alignment_of_a_parameter(
    backend: str, tensors: list[Tensor | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FUSEDLAYERS_BACKEND", backend)
    prepared(tensors)
    weight = tensors[1]
    assert weight is not None
    weight.data = shifted(weight.data)
    assert (recalled(tensors) is None) == (backend == "triton")


@needs_kernels
@pytest.mark.parametrize("change", [transposed, shifted])
def test_a_module_minds_how_its_parameters_lie(change: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """It recalls its calls by their inputs alone; kernels would read new values as the old ones lay."""
    monkeypatch.setenv("FUSEDLAYERS_BACKEND", "triton")
    layer, x = fl.FusedFFN(8, 12, device=DEVICE), torch.randn(5, 8, device=DEVICE)
    with torch.no_grad():
        for _ in range(3):
            y = layer(x)
        layer.up_proj.weight.data = change(layer.up_proj.weight.data)
        assert torch.equal(layer(x), y)


def test_tensors_that_are_no_multiple_of_the_alignment_are_recalled_too(
    tensors: list[Tensor | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FUSEDLAYERS_BACKEND", "triton")
    x = tensors[0]
    assert x is not None
    prepared([shifted(x), *tensors[1:]])
    assert recalled([shifted(x), *tensors[1:]]) is not None
    assert recalled(tensors) is None


def test_one_tensor_twice() -> None:
    ffn = OPERATIONS["ffn"]
    x, other = torch.randn(5, 8, device=DEVICE), torch.randn(5, 8, device=DEVICE)
    w_up, w_down = torch.randn(6, 8, device=DEVICE), torch.randn(8, 6, device=DEVICE)
    twice, apart = ((x, w_up, w_down, None, None, None, None, residual, None) for residual in (x, other))
    options = ("relu", 0.0, "auto", None)
    y = ffn.call(twice, options)
    call = found(ffn, twice, options)
    assert call is not None
    assert torch.equal(ffn.call(twice, options), y)
    assert found(ffn, apart, options) is None
    torch.testing.assert_close(ffn.call(apart, options), y - x + other)
    assert found(ffn, twice, options) is call


def test_several_layouts_are_remembered(tensors: list[Tensor | None]) -> None:
    x = tensors[0]
    assert x is not None
    calls = [prepared([given, *tensors[1:]]) for given in (x, transposed(x), x[:3].clone())]
    assert [recalled([given, *tensors[1:]]) for given in (x, transposed(x), x[:3].clone())] == calls


def test_layouts_are_forgotten_before_they_fill_the_memory(
    tensors: list[Tensor | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recalling, "LAYOUTS_LIMIT", 3)
    for columns in range(8, 18):
        prepared([torch.randn(5, columns, device=DEVICE)[:, :8], *tensors[1:]])
        assert len(operation.CALLS.values()) <= 4


def test_calls_are_forgotten_before_they_fill_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recalling, "KEYS_LIMIT", 4)
    w_up, w_down = torch.ones(24, 16), torch.ones(16, 24)
    for rows in range(1, 11):
        fl.functional.ffn(torch.ones(rows, 16), w_up, w_down)
        assert len(operation.CALLS.values()) <= 4


def test_a_module_recalls_all_of_its_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, lengths = fl.FusedFFN(8, 12), (3, 5, 7)
    for _ in range(2):
        for rows in lengths:
            layer(torch.randn(rows, 8))
    monkeypatch.setattr(FFN, "call", None)
    for rows in lengths:
        layer(torch.randn(rows, 8))


def test_no_tensor_is_kept_alive() -> None:
    weight = nn.Parameter(torch.randn(6, 8, device=DEVICE))
    prepared([torch.randn(5, 8, device=DEVICE), weight, None])
    gone = weakref.ref(weight)
    del weight
    gc.collect()
    assert gone() is None


def test_a_torch_without_guards_prepares_every_call(
    tensors: list[Tensor | None], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It says so once."""
    monkeypatch.delattr(torch._C._dynamo.guards, "TensorGuards")
    torch_internals._tensor_guards.cache_clear()
    try:
        for _ in range(2):
            assert LINEAR.call(tuple(tensors), OPTIONS).shape == (5, 6)
            assert recalled(tensors) is None
    finally:
        torch_internals._tensor_guards.cache_clear()
    assert [record.getMessage() for record in caplog.records if record.levelname == "WARNING"] == [
        f"torch {torch.__version__} has no TensorGuards: every call is checked and planned anew"
    ]


@pytest.mark.parametrize(
    "change",
    ["rows", "dtype", "requires_grad", "grad mode", "autocast", "backend", "split_k", "dispatch mode", "tangents"],
)
def test_a_linear_layer_asks_again_when_anything_is_other(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What torch ran goes to torch at once, as long as the input and everything around it are the same."""
    layer, x = fl.SplitKLinear(8, 6), torch.randn(5, 8)
    asked: list[Any] = []
    own = LINEAR.call

    def watched(*given: Any, **options: Any) -> Any:
        asked.append(given)
        return own(*given, **options)

    monkeypatch.setattr(LINEAR, "call", watched)
    for _ in range(4):
        layer(x)
    assert len(asked) == 1, "the first call is prepared, and noted by the layer"
    around: Any = nullcontext()
    if change == "rows":
        x = torch.randn(7, 8)
    elif change == "dtype":
        layer, x = layer.double(), x.double()
    elif change == "requires_grad":
        x = x.requires_grad_()
    elif change == "grad mode":
        around = torch.no_grad()
    elif change == "autocast":
        around = torch.autocast("cpu")
    elif change == "backend":
        monkeypatch.setenv("FUSEDLAYERS_BACKEND", "torch")
    elif change == "split_k":
        layer.split_k = 3
    elif change == "dispatch mode":
        around = FlopCounterMode(display=False)
    else:
        around = forward_ad.dual_level()
    with around:
        layer(x)
    assert len(asked) == 2
