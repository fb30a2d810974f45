"""torch.jit.trace: the graph of every function and module is torch's own operations, and right for other data."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fusedlayers as fl
from fusedlayers import functional
from fusedlayers.replacing import LinearRule
from tests.support.compiled_cases import given
from tests.support.contract_cases import CONTRACT, WIDE, assert_near, made
from tests.support.ffn_blocks import mlp
from tests.support.operands import DEVICE, needs_kernels


def normal(*shape: int) -> Callable[[], Tensor]:
    return lambda: torch.randn(*shape, device=DEVICE)


def mask(*shape: int) -> Callable[[], Tensor]:
    return lambda: torch.rand(*shape, device=DEVICE) < 0.7


def lengths(limit: int, count: int) -> Callable[[], Tensor]:
    return lambda: torch.randint(1, limit, (count,), device=DEVICE)


PRODUCT = normal(2, 9, 7), normal(2, 7, 5)
FFN = normal(2, 9, 7), normal(12, 7), normal(7, 12)
TARGET = lambda: torch.randint(5, (2, 9), device=DEVICE)  # noqa: E731

Call = tuple[Callable[..., Any], tuple[Callable[[], Tensor], ...]]
# What beside the calls of every operation has other data: seeds, masks, lengths, classes.
CALLS: dict[str, Call] = {
    "ffn, one row": (lambda x, up, down: functional.ffn(x, up, down, activation="relu"), (normal(7), *FFN[1:])),
    "ffn, dropout": (
        lambda x, up, down, seed: functional.ffn(x, up, down, dropout_p=0.5, dropout_seed=seed),
        (*FFN, lambda: torch.randint(2**40, (1,), device=DEVICE)),
    ),
    "lora_ffn, dropout": (
        lambda x, up, down, a, b, seed: functional.lora_ffn(
            x, up, down, up_a=a, up_b=b, up_scale=2.0, adapter_dropout_p=0.5, dropout_seed=seed
        ),
        (*FFN, normal(3, 7), normal(12, 3), lambda: torch.randint(2**40, (1,), device=DEVICE)),
    ),
    "maxsim, masks": (functional.maxsim, (normal(3, 4, 7), normal(5, 6, 7), mask(3, 4), mask(5, 6))),
    "linear_cross_entropy, classes": (
        lambda x, w, target: functional.linear_cross_entropy(x, w, target, reduction="none", z_loss=0.1),
        (normal(2, 9, 7), normal(5, 7), TARGET),
    ),
    "linear_log_probs, classes": (
        lambda x, w, target: functional.linear_log_probs(x, w, target, return_entropy=True, softcap=5.0),
        (normal(2, 9, 7), normal(5, 7), TARGET),
    ),
    "SplitKLinear": (fl.SplitKLinear(7, 5, device=DEVICE), (normal(2, 9, 7),)),
    "MaxSim": (fl.MaxSim(), (normal(3, 4, 7), normal(5, 6, 7))),
    "FusedFFN": (fl.FusedFFN(7, 12, gated=True, device=DEVICE), (normal(2, 9, 7), normal(2, 9, 7))),
}
for _op in ("sum", "mean", "max", "min", "absmax", "sumsq", "logsumexp", "argmax", "argmin"):
    CALLS[f"gemm_reduce {_op}"] = lambda a, b, op=_op: functional.gemm_reduce(a, b, op=op), PRODUCT
    CALLS[f"gemm_reduce {_op}, masked"] = (
        lambda a, b, taking, rows, op=_op: functional.gemm_reduce(a, b, op=op, mask=taking, lengths=rows),
        (*PRODUCT, mask(2, 9), lengths(9, 2)),
    )


def contract_call(name: str) -> Call:
    """A call of the contract tests as a function of those of its tensors that have gradients."""
    call = made(name, dropout_p=0.0, adapter_dropout_p=0.0)

    def function(*leaves: Tensor) -> Any:
        arguments = call.arguments | dict(zip(call.names, leaves, strict=True))
        found = given(call.function(**arguments))
        return found[0] if len(found) == 1 else tuple(found)

    return function, tuple(normal(*leaf.shape) for leaf in call.leaves)


@pytest.fixture(autouse=True)
def _warnings_are_errors() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        # torch.jit is deprecated as a whole.
        warnings.filterwarnings("ignore", r"`torch\.jit\.trace", (DeprecationWarning, FutureWarning)[0])
        warnings.filterwarnings("ignore", r"`torch\.jit\.trace")
        yield


def drawn(makers: tuple[Callable[[], Tensor], ...], seed: int) -> tuple[Tensor, ...]:
    torch.manual_seed(seed)
    return tuple(make() for make in makers)


@pytest.mark.sampled
@needs_kernels
@pytest.mark.parametrize("backend", ["auto", "triton"])
@pytest.mark.parametrize("name", [*CALLS, *CONTRACT])
def test_a_traced_call_is_right_for_other_data(name: str, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    function, makers = CALLS.get(name) or contract_call(name)
    monkeypatch.setenv("FUSEDLAYERS_BACKEND", "torch")
    others = drawn(makers, 2)
    expected = function(*others)
    monkeypatch.setenv("FUSEDLAYERS_BACKEND", backend)
    traced = torch.jit.trace(function, drawn(makers, 1), check_trace=False)
    graph = str(traced.inlined_graph if isinstance(function, nn.Module) else traced.graph)
    assert "PythonOp" not in graph
    assert "fusedlayers::" not in graph
    found = traced(*others)
    if name == WIDE:
        assert_near({"y": found}, {"y": expected})
    else:
        torch.testing.assert_close(found, expected, equal_nan=True)


def offsets(*ends: int) -> Tensor:
    return torch.tensor([0, *ends], device=DEVICE)


@needs_kernels
@pytest.mark.parametrize("backend", ["auto", "triton"])
def test_sizes_may_be_others_than_those_of_the_example(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def packed(queries: Tensor, ends: Tensor, documents: Tensor, document_ends: Tensor) -> Tensor:
        return functional.maxsim(queries, documents, cu_seqlens_queries=ends, cu_seqlens_documents=document_ends)

    dropout, makers = CALLS["ffn, dropout"]
    masked, _ = CALLS["gemm_reduce mean, masked"]
    weights, seed = drawn(makers, 1)[1:3], torch.tensor([3], device=DEVICE)
    x, a, b = (normal(3, 90, 7)() for _ in range(3))
    calls: list[tuple[Callable[..., Any], tuple[Tensor, ...], tuple[Tensor, ...]]] = [
        (dropout, (x[:2, :9], *weights, seed), (x, *weights, seed + 1)),
        (packed, (a[0, :9], offsets(4, 9), b[0, :5], offsets(5)), (a[1], offsets(1, 1, 90), b[1], offsets(30, 88, 90))),
        (
            masked,
            (a[:, :9], b[:, :7], a[:, :9, 0] > -1, offsets(7, 9)),
            (a, b[:, 7:14], a[..., 0] > -1, offsets(60, 90)),
        ),
        (functional.linear, (a, b[0, :4]), (a[0], b[0, :9])),
    ]
    for function, example, others in calls:
        monkeypatch.setenv("FUSEDLAYERS_BACKEND", backend)
        traced = torch.jit.trace(function, example, check_trace=False)
        monkeypatch.setenv("FUSEDLAYERS_BACKEND", "torch")
        torch.testing.assert_close(traced(*others), function(*others), equal_nan=True)


@pytest.mark.parametrize("backend", ["auto", "triton"])
def test_a_traced_model_is_right_for_other_sizes_and_in_training(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(*mlp(), fl.SplitKLinear(6, 4), nn.Linear(4, 3)).to(DEVICE)
    fl.replace(model, rules=[LinearRule()])
    monkeypatch.setenv("FUSEDLAYERS_BACKEND", backend)
    traced = torch.jit.trace(model, torch.randn(5, 6, device=DEVICE))
    monkeypatch.setenv("FUSEDLAYERS_BACKEND", "torch")
    x = torch.randn(2, 8, 6, device=DEVICE)
    torch.testing.assert_close(traced(x), model(x))
    traced(x).square().sum().backward()
    found = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    model(x).square().sum().backward()
    torch.testing.assert_close(found, [parameter.grad for parameter in model.parameters()])
