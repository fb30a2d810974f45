"""FLOP counters see our operations, in eager calls, too: the work of the model, whatever a kernel computes again."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from fusedlayers import FusedFFN
from fusedlayers.planning import Problem
from tests.support.compiled_cases import CALLS, ffn, given, outcome
from tests.support.operands import DEVICE, needs_kernels, on_path

ROWS = 5


def counted(name: str, frozen: str = "") -> int:
    """FLOPs of a call with its backward pass, without the gradient of one argument."""
    function, arguments = CALLS[name](ROWS)
    arguments |= {frozen: arguments[frozen].detach()} if frozen else {}
    with FlopCounterMode(display=False) as counter:
        outcome(function, arguments)
    return counter.get_total_flops()


@needs_kernels
@pytest.mark.parametrize("name", [name for name in CALLS if name not in ("recomputed ffn", "hidden_gradient")])
def test_kernels_count_as_torch_does(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSEDLAYERS_BACKEND", "torch")
    expected = counted(name)
    assert expected > 0
    monkeypatch.setenv("FUSEDLAYERS_BACKEND", "triton")
    assert counted(name) == expected


@needs_kernels
@pytest.mark.parametrize("frozen", ["x", "weight", "bias"])
def test_a_linear_layer_counts_the_gradients_that_are_wanted(frozen: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSEDLAYERS_BACKEND", "triton")
    product = 2 * 2 * ROWS * 16 * 24
    assert counted("linear", frozen) == (3 if frozen == "bias" else 2) * product


@pytest.mark.parametrize("path", [pytest.param("kernels", marks=needs_kernels), "chunked"])
@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
@pytest.mark.parametrize("frozen", [(), ("x",), ("w_up", "w_gate", "b_up", "w_down")], ids=["", "x", "weights"])
def test_an_ffn_counts_what_the_planner_says(path: str, gated: bool, frozen: tuple[str, ...]) -> None:
    function, arguments = ffn(ROWS, gated=gated)
    arguments = {name: t.detach() if name in frozen else t for name, t in arguments.items()}
    problem = Problem(
        operation="ffn", batch=1, M=2 * ROWS, K=16, N=24, O=16, dtype="float32", gated=gated,
        needs_data_gradient="x" not in frozen, needs_weight_gradient="w_up" not in frozen,
    )  # fmt: skip
    forward, backward = problem.model_flops
    unit = 2 * 2 * ROWS * 16 * 24
    assert forward == (3 if gated else 2) * unit
    with on_path(path) as options:
        with FlopCounterMode(display=False) as counter:
            [y] = given(function(**arguments, **options))
        assert counter.get_total_flops() == forward
        with FlopCounterMode(display=False) as counter:
            y.sum().backward()
        assert counter.get_total_flops() == backward


@needs_kernels
def test_a_call_without_gradients_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSEDLAYERS_BACKEND", "triton")
    function, arguments = ffn(ROWS)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        function(**arguments)
    assert counter.get_total_flops() == 2 * 2 * 2 * ROWS * 16 * 24


def test_a_module_counts_as_its_layers() -> None:
    """A counter hooks all modules, so that the children are called."""
    module = FusedFFN(16, 24).to(DEVICE)
    with FlopCounterMode(display=False) as counter:
        module(torch.randn(ROWS, 16, device=DEVICE))
    assert counter.get_flop_counts()["FusedFFN.up_proj"] == {torch.ops.aten.addmm: 2 * ROWS * 16 * 24}
