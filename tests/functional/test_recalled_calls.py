"""Calls that were planned before skip checks and planning, and nothing that matters may have changed meanwhile."""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fusedlayers import SplitKLinear, functional, planning, reference
from fusedlayers.functional import call, dispatch, operation, recalling, switches
from fusedlayers.functional.dispatch import decisions
from fusedlayers.functional.ffn import FFN
from fusedlayers.functional.recalling import call_key, like_call
from tests.functional.test_arguments import EVERY_CALL
from tests.support.operands import forget_calls

H200 = planning.Device("cuda", "NVIDIA H200", "sm_90", sms=132, triton=True)


@pytest.fixture(autouse=True)
def nothing_is_remembered(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Auto mode, and no call from another test."""
    for name in switches.SWITCHES:
        monkeypatch.delenv(name, raising=False)
    forget_calls()
    yield
    forget_calls()


@pytest.fixture
def checked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The operations whose arguments were checked, in order."""
    seen: list[str] = []

    def watch(name: str, check: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any) -> Any:
            seen.append(name)
            return check(*arguments)

        return run

    for name in CALLS:
        kind = type(operation.OPERATIONS[name])
        monkeypatch.setattr(kind, "check", watch(name, kind.check))
    return seen


X, WEIGHT, BIAS = torch.randn(5, 8), torch.randn(6, 8), torch.randn(6)
CALLS = {name: functools.partial(function, **valid()) for name, (function, valid) in EVERY_CALL.items()}


@pytest.mark.parametrize("name", CALLS)
def test_a_call_is_checked_and_planned_once(name: str, checked: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    planned: list[str] = []
    choose = dispatch.dispatch

    def watch(problem: Any, device: torch.device) -> Any:
        planned.append(problem.operation)
        return choose(problem, device)

    monkeypatch.setattr(dispatch, "dispatch", watch)
    with decisions() as counted:
        first = CALLS[name]()
        assert len(checked) == len(planned) == 1
        for _ in range(3):
            again = CALLS[name]()
    assert len(checked) == len(planned) == 1
    assert list(counted.values()) == [4], "whoever counts paths counts recalled calls too"
    if isinstance(first, Tensor):
        assert torch.equal(first, again)


def test_no_two_operations_share_a_call_key() -> None:
    for run in CALLS.values():
        run()
    assert len(operation.CALLS.values()) == len(CALLS)
    assert {key[0] for key in operation.CALLS._values} == set(CALLS)


def test_every_option_is_part_of_a_call_key() -> None:
    options, others = ("relu", 2, 0.5, True), ("gelu", 3, 0.25, 1)  # True equals 1, and is another type
    known = call_key("linear", (X, WEIGHT), options)
    assert known == call_key("linear", (X, WEIGHT), options)
    for place, other in enumerate(others):
        assert call_key("linear", (X, WEIGHT), (*options[:place], other, *options[place + 1 :])) != known, other
    for activation in ("relu", None, "relu"):
        expected = reference.linear(X, WEIGHT, activation=activation or "identity")
        assert torch.equal(functional.linear(X, WEIGHT, activation=activation), expected)


@pytest.mark.parametrize("wanted", [(), (0,), (1,), (2,), (0, 1, 2)])
def test_autograd_of_a_torch_path_is_torchs_own(wanted: tuple[int, ...]) -> None:
    tensors = [t.clone().requires_grad_(place in wanted) for place, t in enumerate((X, WEIGHT, BIAS))]
    for _ in range(2):
        ours, theirs = functional.linear(*tensors), F.linear(*tensors)
        assert type(ours.grad_fn) is type(theirs.grad_fn)
        assert torch.equal(ours, theirs)


# What is set around a call, and whether it is another call then.
SETTINGS: dict[str, tuple[Callable[[], AbstractContextManager[Any]], bool]] = {
    "no grad": (torch.no_grad, True),
    "autocast": (lambda: torch.autocast("cpu", torch.bfloat16), True),
    "autocast to another dtype": (lambda: torch.autocast("cpu", torch.float16), True),
    "autocast that is off": (lambda: torch.autocast("cpu", enabled=False), False),
    "backend": (lambda: mock.patch.dict(os.environ, {"FUSEDLAYERS_BACKEND": "torch"}), True),
    "strict": (lambda: mock.patch.dict(os.environ, {"FUSEDLAYERS_STRICT": "0"}), True),
    "nothing": (nullcontext, False),
}


@pytest.mark.parametrize("setting", SETTINGS)
def test_settings_between_calls(setting: str, checked: list[str]) -> None:
    changed, another = SETTINGS[setting]
    x, weight = X.clone().requires_grad_(), WEIGHT.clone().requires_grad_()
    functional.linear(x, weight)
    for _ in range(2):
        with changed():
            y, expected = functional.linear(x, weight), F.linear(x, weight)
        assert y.dtype == expected.dtype
        assert y.requires_grad == expected.requires_grad
        assert torch.equal(y, expected)
        assert len(checked) == 1 + another
        assert functional.linear(x, weight).dtype == torch.float32
        assert len(checked) == 1 + another, "and back again"


def test_a_switch_is_read_at_every_call(monkeypatch: pytest.MonkeyPatch) -> None:
    functional.linear(X, WEIGHT)
    monkeypatch.setattr(dispatch, "describe", lambda device: planning.Device("cpu", "cpu"))
    functional.linear(X, WEIGHT)
    for name, value in (("FUSEDLAYERS_BACKEND", "triton"), ("FUSEDLAYERS_STRICT", "1")):
        monkeypatch.setenv(name, value)
        for _ in range(2):
            with pytest.raises(RuntimeError, match=f"{name}={value} is set"):
                functional.linear(X, WEIGHT)
        monkeypatch.setenv(name, "wrong")
        for _ in range(2):
            with pytest.raises(ValueError, match=f"{name} is 'wrong'"):
                functional.linear(X, WEIGHT)
        monkeypatch.delenv(name)
        functional.linear(X, WEIGHT)


def test_switches_are_those_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for beneath in (switches._beneath, None):
        monkeypatch.setattr(switches, "_beneath", beneath)
        unset = switches.switches()
        assert unset == (None,) * len(switches.SWITCHES)
        os.environ["FUSEDLAYERS_STRICT"] = "1"
        strict = switches.switches()
        assert strict != unset
        os.environ["FUSEDLAYERS_BACKEND"] = "torch"
        assert switches.switches() not in (strict, unset)
        with mock.patch.dict(os.environ, clear=True):
            assert switches.switches() == unset
        del os.environ["FUSEDLAYERS_BACKEND"]
        assert switches.switches() == strict
        # By hand: monkeypatch would set it again at the end.
        del os.environ["FUSEDLAYERS_STRICT"]
    monkeypatch.undo()
    monkeypatch.setattr(os, "environ", {"FUSEDLAYERS_BACKEND": "torch"})
    assert switches.switches() == ("torch", None, None)


def test_tensors_that_change_in_place(checked: list[str]) -> None:
    x, weight = X.clone(), WEIGHT.clone()
    functional.linear(x, weight)
    other = torch.randn(6, 8)
    weight.data = other
    assert torch.equal(functional.linear(x, weight), F.linear(x, other))
    weight.mul_(2)
    assert torch.equal(functional.linear(x, weight), F.linear(x, weight))
    weight.data = torch.randn(8, 6).T
    assert torch.equal(functional.linear(x, weight), F.linear(x, weight)), "other strides"
    assert len(checked) == 2, "another layout is another call"
    weight.requires_grad_()
    assert functional.linear(x, weight).requires_grad
    weight.requires_grad_(False)
    assert not functional.linear(x, weight).requires_grad
    assert len(checked) == 3
    weight.data = torch.randn(6, 9)
    with pytest.raises(ValueError, match=r"^x of shape"):
        functional.linear(x, weight)
    weight.data = torch.randn(6, 8, dtype=torch.float64)
    with pytest.raises(TypeError, match="expected the dtype of x"):
        functional.linear(x, weight)


def test_options_of_a_module_that_change() -> None:
    layer = SplitKLinear(8, 6)
    layer(X)
    layer.reduction = "atomic"
    layer(X)
    torch.use_deterministic_algorithms(True)
    try:
        for _ in range(2):
            with pytest.raises(RuntimeError, match="use_deterministic_algorithms"):
                layer(X)
        layer.reduction = "workspace"
        layer(X)
    finally:
        torch.use_deterministic_algorithms(False)
    layer.split_k = 1
    layer(X)
    layer.split_k = True
    with pytest.raises(TypeError, match="split_k"):
        layer(X)
    layer.split_k = "auto"
    assert layer(X).requires_grad
    assert not layer.requires_grad_(False)(X).requires_grad


def test_a_wrong_call_stays_wrong(checked: list[str]) -> None:
    functional.linear(X, WEIGHT)
    for number in range(2, 5):
        with pytest.raises(ValueError, match=r"^x of shape"):
            functional.linear(X, WEIGHT.T)
        assert len(checked) == number


def test_facts_of_the_device_that_change(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight = torch.ones(4, 2**16), torch.ones(4, 2**16)
    with decisions() as counted:
        functional.linear(x, weight)
        functional.linear(x, weight)
    assert dict(counted) == {"linear torch": 2}
    monkeypatch.setenv("FUSEDLAYERS_BACKEND", "triton")
    linear = operation.OPERATIONS["linear"]
    arguments = (x, weight, None), (None, "auto", "workspace", None)
    for facts in (H200, replace(H200, sms=16)):
        monkeypatch.setattr(dispatch, "describe", lambda device, facts=facts: facts)
        made = linear.prepared(*arguments)
        assert made.plan.path == "fused"
        assert made.plan == planning.plan(made.problem, facts, "triton")
        assert linear.prepared(*arguments) is made
    monkeypatch.setattr(dispatch, "describe", lambda device: H200)
    assert linear.prepared(*arguments) is not made, "the plan remembered was one for fewer SMs"


class OnGPU:
    """As much of a tensor on a GPU as is asked for."""

    is_cuda, is_nested, layout = True, False, torch.strided
    device, shape, requires_grad = torch.device("cuda", 0), (4, 4), False

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def is_neg(self) -> bool:
        return False

    def stride(self) -> tuple[int, int]:
        return 4, 1

    def data_ptr(self) -> int:
        return 256


@pytest.fixture
def capturing(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether a graph is captured; tensors that stand for some on a GPU are alike."""
    state = [False]
    for module in (call, recalling):
        monkeypatch.setattr(module, "is_capturing", lambda: state[0])
    monkeypatch.setattr(recalling, "like", lambda *given, **options: lambda others: True)
    monkeypatch.setattr(dispatch, "describe", lambda device: H200)
    return state


def test_a_capture_is_planned_by_itself(capturing: list[bool]) -> None:
    given = (OnGPU(torch.bfloat16),)
    launched = like_call(given, aligned=True)  # type: ignore[arg-type]
    capturing[0] = True
    recorded = like_call(given, aligned=True)  # type: ignore[arg-type]
    assert launched is not None
    assert recorded is not None
    assert (launched(given), recorded(given)) == (False, True)
    capturing[0] = False
    assert (launched(given), recorded(given)) == (True, False)


def test_float32_precision_is_part_of_a_call_on_a_gpu(capturing: list[bool]) -> None:
    single, half = (OnGPU(torch.float32),), (OnGPU(torch.float16),)
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("highest")
        of_single, of_half = (like_call(given, aligned=True) for given in (single, half))  # type: ignore[arg-type]
        assert of_single is not None
        assert of_half is not None
        assert of_single(single)
        assert of_half(half)
        torch.set_float32_matmul_precision("high")
        assert not of_single(single)
        assert of_half(half)
    finally:
        torch.set_float32_matmul_precision(before)


def test_threads_do_not_disturb_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Grad mode and autocast are a thread's own; the calls, forgotten again and again here, are not."""
    monkeypatch.setattr(recalling, "KEYS_LIMIT", 3)
    wrong: list[str] = []

    def work(number: int) -> None:
        weight = torch.randn(6, 8, requires_grad=True)
        grad, cast = number % 2 == 0, number % 3 == 0
        with torch.set_grad_enabled(grad), torch.autocast("cpu", torch.bfloat16, enabled=cast):
            for step in range(100):
                x = torch.randn(1 + (number + step) % 5, 8)
                y = functional.linear(x, weight)
                if y.requires_grad != grad or y.dtype != (torch.bfloat16 if cast else torch.float32):
                    wrong.append(f"{number}: {y.dtype}, {y.requires_grad}")
                if not torch.equal(y, F.linear(x, weight)):
                    wrong.append(f"{number}: numbers")

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert len(operation.CALLS.values()) <= 3 + len(threads)


def test_a_thread_never_meets_a_call_that_another_one_has_half_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first thread waits where it has found out what is kept, and has not noted it yet."""
    inside, go_on = threading.Event(), threading.Event()
    find_out = FFN.kept
    ended: list[str] = []

    def kept(wanted: Any) -> Any:
        if threading.current_thread().name == "first":
            inside.set()
            assert go_on.wait(30)
        return find_out(wanted)

    monkeypatch.setattr(FFN, "kept", kept)
    x, w_up, w_down = (torch.randn(*sizes, requires_grad=True) for sizes in ((6, 4), (8, 4), (4, 8)))

    def work() -> None:
        functional.ffn(x, w_up, w_down, activation="relu", recompute=True).sum().backward()
        ended.append(threading.current_thread().name)

    threads = [threading.Thread(target=work, name=name) for name in ("first", "second")]
    threads[0].start()
    assert inside.wait(30)
    threads[1].start()
    threads[1].join()
    go_on.set()
    threads[0].join()
    assert sorted(ended) == ["first", "second"]
