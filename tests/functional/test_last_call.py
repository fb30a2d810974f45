"""What a module keeps of its last call: the next one is recognised, and nothing that matters may have changed."""

from __future__ import annotations

import copy
import gc
import os
import pickle
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
from fusedlayers.functional import last_call
from fusedlayers.functional.last_call import LastCall
from fusedlayers.functional.operation import OPERATIONS
from tests.support.operands import DEVICE, Allocations

LINEAR = OPERATIONS["linear"]
OPTIONS = (None, "auto", "workspace", None)


@pytest.fixture(params=["torch's guards", "python"], autouse=True)
def guards(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "python":
        monkeypatch.setattr(last_call, "_Guards", None)


@pytest.fixture
def tensors() -> list[Tensor | None]:
    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(6, 8, device=DEVICE))
    return [torch.randn(5, 8, device=DEVICE), weight, nn.Parameter(torch.randn(6, device=DEVICE))]


def kept(tensors: list[Tensor | None], inputs: tuple[int, ...] | None = None, *, guarded: bool = False) -> LastCall:
    last = LastCall(inputs, guarded=guarded)
    call = LINEAR.prepared(tuple(tensors), OPTIONS)
    last._keep(call, tensors, OPTIONS)
    assert last.again(tensors, OPTIONS) is call
    return last


def test_other_addresses_are_the_same_call(tensors: list[Tensor | None]) -> None:
    last = kept(tensors)
    assert last.again([tensors[0] + 1, *tensors[1:]], OPTIONS) is not None  # type: ignore[operator]
    other = nn.Parameter(torch.randn(6, 8, device=DEVICE))
    assert last.again([tensors[0], other, tensors[2]], OPTIONS) is not None


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
    last = kept(tensors)
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
    assert last.again(others, OPTIONS) is None


def test_what_was_none_and_is_given_now_is_noticed(tensors: list[Tensor | None]) -> None:
    bias = tensors[2]
    last = kept([*tensors[:2], None])
    assert last.again([*tensors[:2], bias], OPTIONS) is None


def test_options_are_compared_by_identity(tensors: list[Tensor | None]) -> None:
    last = kept(tensors)
    assert last.again(tensors, (None, 1, "workspace", None)) is None


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
    last = kept(tensors)
    x = tensors[0]
    assert x is not None
    with SURROUNDINGS[name]():
        given = [x.clone() if name == "inference mode" else x, *tensors[1:]]
        assert last.again(given, OPTIONS) is None
    with nullcontext():
        assert last.again(tensors, OPTIONS) is not None


def test_another_dtype_of_autocast_is_noticed(tensors: list[Tensor | None]) -> None:
    with torch.autocast(DEVICE.type, torch.bfloat16):
        last = kept(tensors)
    with torch.autocast(DEVICE.type, torch.float16):
        assert last.again(tensors, OPTIONS) is None


def test_transforms_are_noticed(tensors: list[Tensor | None]) -> None:
    last, seen = kept(tensors), []

    def run(x: Tensor) -> Tensor:
        seen.append(last.again([x, *tensors[1:]], OPTIONS))
        return x

    torch.func.vmap(run)(torch.randn(2, 5, 8, device=DEVICE))
    assert seen == [None]


@pytest.mark.parametrize("guarded", [False, True])
@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("inputs", [None, (0,)])
def test_parameters_that_lie_otherwise(
    inputs: tuple[int, ...] | None, backend: str, guarded: bool, tensors: list[Tensor | None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Kernels would read new values as the old ones lay. torch's expression takes a module's parameters as they are."""
    monkeypatch.setenv("FUSEDLAYERS_BACKEND", backend)
    last = kept(tensors, inputs, guarded=guarded)
    weight = tensors[1]
    assert weight is not None
    weight.data = transposed(weight.data)
    compared = inputs is None or (backend == "triton" and not guarded)
    assert (last.again(tensors, OPTIONS) is None) == compared


@pytest.mark.parametrize("guarded", [False, True])
def test_kernels_mind_the_alignment_of_every_parameter(
    guarded: bool, tensors: list[Tensor | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FUSEDLAYERS_BACKEND", "triton")
    last = kept(tensors, (0,), guarded=guarded)
    weight = tensors[1]
    assert weight is not None
    weight.data = shifted(weight.data)
    assert last.again(tensors, OPTIONS) is None


def test_an_input_that_is_a_parameter_is_compared(tensors: list[Tensor | None]) -> None:
    x = tensors[0]
    assert x is not None
    last = kept([nn.Parameter(x), *tensors[1:]], (0,), guarded=True)
    assert last.again([nn.Parameter(x[:3].clone()), *tensors[1:]], OPTIONS) is None


def test_tensors_that_are_no_multiple_of_the_alignment_are_recognised_too(
    tensors: list[Tensor | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FUSEDLAYERS_BACKEND", "triton")
    x = tensors[0]
    assert x is not None
    last = kept([shifted(x), *tensors[1:]])
    assert last.again([shifted(x), *tensors[1:]], OPTIONS) is not None
    assert last.again(tensors, OPTIONS) is None


def test_one_tensor_twice(tensors: list[Tensor | None]) -> None:
    ffn = OPERATIONS["ffn"]
    x = torch.randn(5, 8, device=DEVICE)
    given = (x, torch.randn(6, 8, device=DEVICE), torch.randn(8, 6, device=DEVICE), None, None, None, None, x, None)
    last, options = LastCall(), ("relu", 0.0, "auto", None)
    y = ffn.repeat(last, given, options)
    assert last.again(given, options) is None, "once is not yet a habit"
    assert torch.equal(ffn.repeat(last, given, options), y)
    assert last.again(given, options) is not None


def test_copies_begin_without_a_last_call(tensors: list[Tensor | None]) -> None:
    last = kept(tensors)
    for other in (copy.deepcopy(last), copy.copy(last), pickle.loads(pickle.dumps(last))):
        assert other is None


def test_no_tensor_is_kept_alive() -> None:
    weight = nn.Parameter(torch.randn(6, 8, device=DEVICE))
    last = kept([torch.randn(5, 8, device=DEVICE), weight, None])
    gone = weakref.ref(weight)
    del weight
    gc.collect()
    assert gone() is None
    assert last is not None


@pytest.mark.parametrize(
    "change",
    ["rows", "dtype", "requires_grad", "grad mode", "autocast", "backend", "split_k", "dispatch mode", "tangents"],
)
def test_a_linear_layer_asks_again_when_anything_is_other(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What torch ran goes to torch at once, as long as the input and everything around it are the same."""
    if last_call._Guards is None:
        pytest.skip("without torch's own comparison every call asks")
    layer, x = fl.SplitKLinear(8, 6), torch.randn(5, 8)
    asked: list[Any] = []
    repeat = LINEAR.repeat

    def watched(*given: Any) -> Any:
        asked.append(given)
        return repeat(*given)

    monkeypatch.setattr(LINEAR, "repeat", watched)
    for _ in range(4):
        layer(x)
    assert len(asked) == 2, "the first call is remembered, the second one kept"
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
    assert len(asked) == 3
