"""Which code a call reaches, what the user's switches change about that, and the one line that says so."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.flop_counter import FlopCounterMode

from fusedlayers import FusedFFN, functional, planning
from fusedlayers.functional import dispatch, operation
from fusedlayers.functional.operands import input_precision
from fusedlayers.functional.recalling import call_key
from fusedlayers.planning import Device
from fusedlayers.planning.record import Record, Row
from tests.support.operands import forget_calls
from tests.support.records import A100, CPU, where

H200 = Device("cuda", "NVIDIA H200", "sm_90", sms=132, triton=True)
LOGGER = "fusedlayers"


@pytest.fixture(autouse=True)
def nothing_is_remembered() -> Iterator[None]:
    """No plan, and no line already said, from another test."""
    for remembered in (dispatch._cached_plan, dispatch._log_once):
        remembered.cache_clear()
    forget_calls()
    yield
    for remembered in (dispatch._cached_plan, dispatch._log_once):
        remembered.cache_clear()


@pytest.fixture
def reached(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What calls reach, in order: ``kernels``, ``chunked`` or ``torch``; the kernels are stand-ins here."""
    seen: list[str] = []

    def spy(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            seen.append(name)
            return function(*arguments, **options)

        return call

    def stand_in(operands: Any, *arguments: Any) -> Tensor:
        return operands.x.new_zeros(*operands.x.shape[:-1], operands.down.shape[-2])

    kernels = import_module("fusedlayers.kernels.gemm_gemm")
    monkeypatch.setattr(kernels, "forward", spy("kernels", stand_in))
    for name in ("ffn", "gemm_gemm"):
        through = operation.OPERATIONS[name]
        monkeypatch.setattr(through, "through_torch", spy("torch", through.through_torch))
    chunks = import_module("fusedlayers.functional.ffn.chunked")
    monkeypatch.setattr(chunks, "forward", spy("chunked", lambda call, operands: torch.zeros_like(operands[0])))
    return seen


@pytest.fixture
def pretend(monkeypatch: pytest.MonkeyPatch) -> Callable[[Device], None]:
    """``pretend(device)``: from now on every tensor is said to lie on that device."""

    def describe(device: Device) -> None:
        monkeypatch.setattr(dispatch, "describe", lambda where: device)

    return describe


def ffn(tokens: int = 5, width: int = 16, **options: Any) -> Tensor:
    return functional.ffn(torch.ones(tokens, width), torch.ones(24, width), torch.ones(width, 24), **options)


def gemm_gemm() -> Tensor:
    return functional.gemm_gemm(torch.ones(2, 5, 16), torch.ones(2, 16, 24), torch.ones(2, 24, 16))


def module() -> Tensor:
    return FusedFFN(16, 24)(torch.ones(5, 16))


@pytest.mark.parametrize("call", [ffn, gemm_gemm, module])
@pytest.mark.parametrize(
    ("device", "backend", "expected"),
    [
        (CPU, None, "torch"),
        (CPU, "auto", "torch"),
        (CPU, "torch", "torch"),
        (A100, "auto", "torch"),
        (A100, "triton", "kernels"),
        (A100, "torch", "torch"),
        (H200, "triton", "kernels"),
    ],
)
def test_the_backend_decides(
    call: Callable[[], Tensor],
    device: Device,
    backend: str | None,
    expected: str,
    reached: list[str],
    pretend: Callable[[Device], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pretend(device)
    if backend is not None:
        monkeypatch.setenv("FUSEDLAYERS_BACKEND", backend)
    call()
    assert reached == [expected]


@pytest.mark.parametrize(
    ("device", "backend", "expected"),
    [(CPU, "auto", "chunked"), (CPU, "torch", "chunked"), (A100, "auto", "chunked"), (A100, "triton", "kernels")],
)
def test_recompute_decides_too(
    device: Device,
    backend: str,
    expected: str,
    reached: list[str],
    pretend: Callable[[Device], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pretend(device)
    monkeypatch.setenv("FUSEDLAYERS_BACKEND", backend)
    ffn(recompute=True)
    assert reached == [expected]


def test_auto_takes_faster_kernels(reached: list[str], pretend: Callable[[Device], None]) -> None:
    rows = [Row("ffn", "gelu", (M, 16, 24), {"torch": 1, "generic": time}, {}) for M, time in ((64, 0.5), (4, 2))]
    pretend(replace(H200, override=Record(rows)))
    with torch.no_grad():
        x = torch.ones(64, 16, dtype=torch.bfloat16)
        w_up, w_down = x.new_ones(24, 16), x.new_ones(16, 24)
        functional.ffn(x, w_up, w_down)
        functional.ffn(x[:4], w_up, w_down)
    assert reached == ["kernels", "torch"]


def test_strict_minds_what_cannot_run_and_not_what_is_slower(
    reached: list[str], pretend: Callable[[Device], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FUSEDLAYERS_STRICT", "1")
    pretend(A100)
    ffn()
    pretend(CPU)
    for options in ({}, {"recompute": True}):
        with pytest.raises(
            RuntimeError, match=r"^FUSEDLAYERS_STRICT=1 is set, but ffn cannot run in Triton: the kernels need"
        ):
            ffn(**options)
    with pytest.raises(RuntimeError, match="gemm_gemm cannot run"):
        gemm_gemm()
    ffn(tokens=0)
    monkeypatch.setenv("FUSEDLAYERS_BACKEND", "torch")
    ffn()
    monkeypatch.setenv("FUSEDLAYERS_BACKEND", "auto")
    monkeypatch.setenv("FUSEDLAYERS_STRICT", "0")
    ffn()
    assert reached == ["torch"] * 4


def test_the_problem_says_what_the_call_is(pretend: Callable[[Device], None], monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr(planning, "plan", lambda *arguments: (seen.append(arguments), made(*arguments))[1])
    x = torch.ones(2, 3, 16, requires_grad=True)
    w_up, w_gate, w_down = torch.ones(24, 16), torch.ones(24, 16), torch.ones(8, 24)
    functional.ffn(x, w_up, w_down, w_gate=w_gate, activation="swish", dropout_p=0.1, recompute=False)
    with torch.no_grad():
        functional.ffn(x, w_up, w_down)
    a, b, c = torch.ones(5, 1, 3, 16), torch.ones(4, 16, 24), torch.ones(1, 4, 24, 8, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        functional.gemm_gemm(a, b, c)
    (first, device, wish), (second, _, _), (third, _, _) = seen
    shape = {"M": 6, "K": 16, "N": 24, "O": 8, "dtype": "float32"}
    assert first == planning.Problem(
        "ffn", 1, **shape, activation="silu", gated=True, dropout=True, needs_data_gradient=True, recompute=False
    )
    assert second == planning.Problem("ffn", 1, **shape, activation="gelu")
    shape |= {"M": 3, "dtype": "bfloat16"}
    assert third == planning.Problem("gemm_gemm", 20, **shape, needs_weight_gradient=True)
    assert (device.kind, wish) == ("cpu", "auto")


made = planning.plan


def test_the_problem_says_whether_a_call_is_compiled() -> None:
    """What is launched one by one has thresholds of its own."""
    x, weight = torch.ones(3, 5), torch.ones(7, 5)
    forget_calls()
    with dispatch.decisions() as taken:
        functional.linear(x, weight)
        make_fx(lambda *given: functional.linear(*given))(x, weight)
    assert [problem.compiled for problem in taken.problems] == [False, True]


@pytest.mark.parametrize("frozen", ["x", "w_up", "w_down", "b_up", "w_gate", "b_gate", "b_down"])
def test_the_last_bias_needs_no_gradient_through_the_hidden(frozen: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr(planning, "plan", lambda *arguments: (seen.append(arguments[0]), made(*arguments))[1])
    shapes = {"x": (5, 16), "w_up": (24, 16), "w_gate": (24, 16), "w_down": (16, 24)}
    shapes |= {"b_up": (24,), "b_gate": (24,), "b_down": (16,)}
    functional.ffn(**{name: torch.ones(shape, requires_grad=name == frozen) for name, shape in shapes.items()})
    (problem,) = seen
    assert problem.needs_data_gradient == (frozen == "x")
    assert problem.needs_weight_gradient == (frozen not in ("x", "b_down"))


def test_one_line_says_which_path_and_why(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, LOGGER)
    for _ in range(3):
        ffn()
    ffn(tokens=7)
    gemm_gemm()
    ffn(recompute=True)
    lines = [record.getMessage() for record in caplog.records]
    assert {(record.name, record.levelno) for record in caplog.records} == {(LOGGER, logging.INFO)}
    reason = dict(
        made(planning.Problem("ffn", 1, 5, 16, 24, 16, "float32"), dispatch.describe(torch.device("cpu"))).rejected
    )
    assert lines == [
        f"auto mode takes the torch path: {reason['fused']}",
        "ffn takes the chunked path: recompute=True forbids keeping the hidden, which no kernel here holds on chip",
    ]


def test_the_line_of_a_loss_in_training_says_why(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, LOGGER)
    wanted = {"needs_data_gradient": True, "needs_weight_gradient": True}
    dispatch._cached_plan(
        planning.linear_cross_entropy.LossProblem(5, 16, 31, "float32", "mean", **wanted), Device("cpu", "cpu"), "auto"
    )
    [line] = [record.getMessage() for record in caplog.records]
    assert line.startswith("linear_cross_entropy takes the torch path: the kernels need a CUDA or ROCm GPU")


def test_many_lengths_do_not_write_many_lines(
    reached: list[str], pretend: Callable[[Device], None], caplog: pytest.LogCaptureFixture
) -> None:
    pretend(H200)
    caplog.set_level(logging.INFO, LOGGER)
    layer = FusedFFN(16, 24, dtype=torch.bfloat16)
    for tokens in range(1, 10):
        layer(torch.ones(tokens, 16, dtype=torch.bfloat16))
    assert reached == ["torch"] * 9
    assert len(caplog.records) == 1, [record.getMessage() for record in caplog.records]


def test_a_user_who_asks_for_no_lines_gets_none(capfd: pytest.CaptureFixture[str]) -> None:
    ffn()
    assert capfd.readouterr() == ("", "")


def test_meta_tensors_get_shapes() -> None:
    layer = FusedFFN(16, 24, "silu", gated=True, dropout=0.1, device="meta")
    for recompute in ("auto", True):
        layer.recompute = recompute
        x = torch.empty(2, 3, 16, device="meta", requires_grad=True)
        y = layer(x, residual=x)
        y.sum().backward()
        assert (y.shape, y.device.type) == ((2, 3, 16), "meta")
        assert x.grad is not None
        assert x.grad.shape == x.shape
    e = functional.gemm_gemm(*(torch.empty(shape, device="meta") for shape in ((4, 3, 8), (4, 8, 5), (4, 5, 2))))
    assert (e.shape, e.device.type) == ((4, 3, 2), "meta")


class Tagged(torch.Tensor):
    """A tensor subclass, as quantised and sharded tensors are."""


def test_subclasses_go_through_torch(
    reached: list[str], pretend: Callable[[Device], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(A100)
    w_up, w_down = torch.ones(24, 16), torch.ones(16, 24)
    functional.ffn(torch.ones(5, 16), nn.Parameter(w_up), w_down.as_subclass(Tagged), recompute="auto")
    monkeypatch.setenv("FUSEDLAYERS_BACKEND", "triton")
    functional.ffn(torch.ones(5, 16), nn.Parameter(w_up), nn.Parameter(w_down))
    with pytest.raises(RuntimeError, match="an operand is a Tagged"):
        functional.ffn(torch.ones(5, 16), w_up, w_down.as_subclass(Tagged))
    assert reached == ["torch", "kernels"]


@pytest.mark.parametrize(("precision", "expected"), [("highest", "ieee"), ("high", "tf32")])
def test_float32_precision_is_torchs(precision: str, expected: str) -> None:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        assert input_precision(torch.device("cuda", 0), torch.float32) == expected
        assert input_precision(torch.device("cuda", 0), torch.float16) == "ieee"
        assert input_precision(torch.device("cpu"), torch.float32) == "ieee"
    finally:
        torch.set_float32_matmul_precision(before)


def test_a_capture_takes_what_the_plan_for_graphs_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """At this size the kernels are faster inside a graph alone; nothing need have run before."""
    problem = planning.Problem("ffn", 1, 65_536, 64, 256, 64, "bfloat16", "gelu_tanh")
    known = where(H200, problem, {"fused": 2}, {"fused": 0.5})
    monkeypatch.setattr(dispatch, "describe", lambda device: known)
    device = torch.device("meta")
    assert dispatch.dispatch(problem, device).path == "torch"
    assert dispatch.dispatch(replace(problem, captured=True), device).path == "fused"


def test_some_calls_are_never_recalled() -> None:
    x, w_up, w_down = torch.ones(5, 16), torch.ones(24, 16), torch.ones(16, 24)
    for given in ((x.as_subclass(Tagged), w_up, w_down), (x, w_up.as_subclass(Tagged), w_down)):
        functional.ffn(*given)
    with FlopCounterMode(display=False):
        functional.ffn(x, w_up, w_down)
    torch.func.vmap(lambda row: functional.ffn(row, w_up, w_down))(x)
    assert operation.CALLS.values() == []
    assert call_key("ffn", (x, None), ("gelu", 0.0)) is not None
    assert call_key("ffn", (x, None), (["gelu"], 0.0)) is None
    assert call_key("ffn", (x, None), ("gelu", torch.tensor(0.0))) is None


def test_a_path_for_other_sizes_is_planned_as_the_user_wishes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where auto mode leaves some products of a linear layer to torch, a compiled graph does so too."""
    wanted = {"needs_data_gradient": True, "needs_weight_gradient": True, "captured": True}
    problem = planning.LinearProblem(64, 1024, 8192, "bfloat16", **wanted)
    known = where(H200, problem, {"fused": 0.5})
    monkeypatch.setattr(dispatch, "describe", lambda device: known)
    monkeypatch.setenv("FUSEDLAYERS_BACKEND", "auto")
    made = dispatch.plan_on_path(problem, "fused", torch.device("cuda"))
    assert made == planning.plan(problem, known)
    assert (made.forward.tiles is None, made.data_gradient.tiles is None) == (False, True)
    # Calls that auto mode leaves to torch altogether still take the path that was compiled.
    other = replace(problem, dtype="float32")
    assert planning.plan(other, known).path == "torch"
    assert dispatch.plan_on_path(other, "fused", torch.device("cuda")) == planning.plan(other, known, "triton")
