"""torch.compile on a GPU, with its default compiler: the kernels of eager calls, the same bits, CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

import fusedlayers as fl
from fusedlayers import functional
from fusedlayers.closeness import assert_all_close
from fusedlayers.devices import describe
from fusedlayers.functional import dispatch
from fusedlayers.functional.operation import OPERATIONS
from fusedlayers.planning import Problem
from tests.support.compiled_cases import outcome
from tests.support.operands import assert_equal, forget_calls, in_float64
from tests.support.records import where

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    # Inductor advises TF32 for float32 products, and more of the kind.
    pytest.mark.filterwarnings("ignore::UserWarning:torch"),
]
LENGTHS = (512, 768, 640)


@pytest.fixture(autouse=True)
def nothing_compiled() -> Iterator[None]:
    """No graph, and no kernel that ran, from another test."""
    torch._dynamo.reset()
    counters.clear()
    for each in OPERATIONS.values():
        each.kernel_operation.calls.clear()
    yield
    torch._dynamo.reset()


def ran_kernels() -> bool:
    """Whether a compiled graph called one of our operations."""
    return any(each.kernel_operation.calls.values() for each in OPERATIONS.values())


def leaf(*shape: int) -> Tensor:
    return (torch.randn(*shape, device="cuda") / shape[-1] ** 0.25).to(torch.bfloat16).requires_grad_()


def ffn(rows: int, **options: Any) -> dict[str, Any]:
    weights = {"w_up": leaf(256, 64), "w_down": leaf(64, 256), "b_up": leaf(256), "b_down": leaf(64)}
    return {"x": leaf(2, rows, 64)} | weights | {"residual": leaf(2, rows, 64)} | options


def gated(rows: int) -> dict[str, Any]:
    weights = {"w_up": leaf(768, 256), "w_down": leaf(256, 768), "w_gate": leaf(768, 256)}
    return {"x": leaf(2, rows, 256)} | weights | {"activation": "silu"}


def operands(rows: int, **options: Any) -> dict[str, Any]:
    return {"a": leaf(2, rows, 64), "b": leaf(2, 64, 256)} | options


def mixture(rows: int, **options: Any) -> dict[str, Any]:
    chosen = torch.randint(8, (2, rows, 2), device="cuda")
    given = {"x": leaf(2, rows, 256), "top_k_index": chosen, "top_k_weights": leaf(2, rows, 2)}
    return given | {"w_up": leaf(8, 256, 256), "w_down": leaf(8, 256, 128), "gate_and_up": "concatenated"} | options


CALLS: dict[str, tuple[Callable[..., Any], Callable[[int], dict[str, Any]]]] = {
    "ffn": (functional.ffn, ffn),
    "gated ffn": (functional.ffn, gated),
    "recomputed ffn": (functional.ffn, lambda rows: ffn(rows, recompute=True)),
    "gemm_gemm": (functional.gemm_gemm, lambda rows: operands(rows, c=leaf(2, 256, 64), activation="relu")),
    "max": (functional.gemm_reduce, lambda rows: operands(rows, op="max", dim=-2, return_indices=True)),
    "logsumexp": (functional.gemm_reduce, lambda rows: operands(rows, op="logsumexp", dim=-1)),
    "maxsim": (functional.maxsim, lambda rows: {"queries": leaf(8, 32, 128), "documents": leaf(16, rows, 128)}),
    "moe_ffn": (functional.moe_ffn, mixture),
    "recomputed moe_ffn": (functional.moe_ffn, lambda rows: mixture(rows, recompute=True)),
    "weight_gradient": (functional.weight_gradient, lambda rows: {"dy": leaf(2, rows, 256), "x": leaf(2, rows, 128)}),
    "hidden_gradient": (
        functional.hidden_gradient,
        lambda rows: {"dy": leaf(rows, 64), "w_down": leaf(64, 256), "z": leaf(rows, 256), "activation": "gelu"},
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_inductor_runs_the_kernels_of_eager_calls(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSEDLAYERS_BACKEND", "triton")
    function, make = CALLS[name]
    compiled = torch.compile(function, fullgraph=True)
    for rows in LENGTHS:
        arguments = make(rows)
        ours, eager = outcome(compiled, arguments), outcome(function, arguments)
        if name == "hidden_gradient":
            # Its own backward pass is torch's, which the compiler fuses and rounds otherwise.
            ours, eager = ({k: t for k, t in found.items() if "result" in k} for found in (ours, eager))
        assert_equal(ours, eager)
    assert counters["stats"]["unique_graphs"] == 2
    assert ran_kernels()


def test_inductor_fuses_the_path_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSEDLAYERS_BACKEND", "torch")
    compiled = torch.compile(functional.ffn, fullgraph=True)
    for rows in LENGTHS[:2]:
        arguments = ffn(rows)
        tensors = {name: t.detach() for name, t in arguments.items()}
        truth = {name: t.requires_grad_() for name, t in in_float64(tensors).items() if t is not None}
        ours, eager = outcome(compiled, arguments), outcome(functional.ffn, arguments)
        torch.manual_seed(2)
        dy = torch.randn_like(eager["result 0"])
        y = functional.ffn(**truth)
        gradients = torch.autograd.grad(y, list(truth.values()), dy.double())
        exact = {"result 0": y.detach()} | {f"d{name}": g for name, g in zip(truth, gradients, strict=True)}
        assert_all_close(ours, eager, exact, independent=2 * rows * 256)
    assert not ran_kernels()


@pytest.mark.parametrize("mode", ["reduce-overhead", "default"])
def test_the_mode_decides_how_small_a_problem_may_be(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In CUDA graphs the host costs nothing, so that smaller problems gain; replays have the bits of eager kernels."""
    # No multiple of eight hidden units: the generic kernels.
    ffn = fl.FusedFFN(64, 252, "gelu_tanh", device="cuda", dtype=torch.bfloat16)
    problem = Problem(
        "ffn", 1, 32_768, 64, 252, 64, "bfloat16", "gelu_tanh", needs_data_gradient=True, needs_weight_gradient=True
    )
    known = where(describe(torch.device("cuda", 0)), problem, {"fused": 2}, {"fused": 0.5})
    monkeypatch.setattr(dispatch, "describe", lambda device: known)
    forget_calls()
    compiled = torch.compile(ffn, fullgraph=True, mode=mode)
    parameters = dict(ffn.named_parameters())

    def step(module: Any, x: Tensor) -> dict[str, Tensor]:
        torch.compiler.cudagraph_mark_step_begin()
        found = outcome(lambda x, **_: module(x), {"x": x} | parameters)
        return {name: tensor.clone() for name, tensor in found.items()}

    for _ in range(5):
        x = torch.randn(32_768, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        ours = step(compiled, x)
        assert ran_kernels() == (mode == "reduce-overhead")
        if mode == "reduce-overhead":
            with monkeypatch.context() as patch:
                patch.setenv("FUSEDLAYERS_BACKEND", "triton")
                assert_equal(ours, step(ffn, x))


@pytest.mark.parametrize("width", [64, 512], ids=["fused", "epilogue"])
def test_dropout_is_drawn_anew_and_replayed(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSEDLAYERS_BACKEND", "triton")
    compiled = torch.compile(functional.ffn, fullgraph=True)
    identity = torch.eye(width, device="cuda", dtype=torch.bfloat16)
    x = torch.ones(512, width, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    masks = []
    for _ in range(2):
        y = compiled(x, identity, identity, activation="identity", dropout_p=0.25)
        [gradient] = torch.autograd.grad(y.sum(), x)
        assert torch.equal(y, gradient), "y = x ⊙ mask / (1 - p) and dx is the mask, too"
        masks.append(y.detach() > 0)
        assert abs(masks[-1].float().mean().item() - 0.75) < 4 * (0.75 * 0.25 / y.numel()) ** 0.5
    assert not torch.equal(*masks)
