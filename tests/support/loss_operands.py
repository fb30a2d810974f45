"""Inputs for the tests of the loss head, its results and gradients by name, and the choice of its path."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from fusedlayers import functional, planning, reference
from fusedlayers.functional import dispatch
from fusedlayers.functional.linear_cross_entropy import LINEAR_CROSS_ENTROPY
from fusedlayers.functional.linear_log_probs import LINEAR_LOG_PROBS
from fusedlayers.planning import linear_cross_entropy_chunks as cutting
from fusedlayers.planning.linear_cross_entropy import kernel_path
from tests.support.operands import DEVICE, Tensors, assert_draws_close, needs_kernels, recall_nothing

CHUNKED = pytest.param("chunked", marks=needs_kernels)
RECOMPUTED = pytest.param("recomputed", marks=needs_kernels)
KERNELS = [CHUNKED, RECOMPUTED]
PATHS = [*KERNELS, "torch"]
# Kernels that take no part in a backward pass, whose calls are made without gradients.
FUSED = pytest.param("fused", marks=needs_kernels)
EVERY_KERNEL = [*KERNELS, FUSED]
EVERY_PATH = [*PATHS, FUSED]
# Tokens of a chunk here: no test's number of tokens is a multiple of it.
CHUNK_ROWS = 8
# Columns whose gradient is in memory at once: most tests have more, and no whole number of them.
COLUMNS = 64
IGNORED = -100
REDUCTIONS = ["mean", "sum", "none"]
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "smoothing": {"label_smoothing": 0.1},
    "softcap": {"softcap": 3.0},
    "scale": {"logit_scale": 0.25},
    "z": {"z_loss": 1e-2},
    "all": {"label_smoothing": 0.2, "softcap": 5.0, "logit_scale": -0.5, "z_loss": 1e-3},
}
FLOATING = ("input", "linear_weight", "linear_bias")


def frozen_on(path: str) -> tuple[str, ...]:
    """The operands that are frozen because kernels compute no gradients on this path."""
    return FLOATING if path == "fused" else ()


@contextmanager
def on_path(path: str, rows: int | None = CHUNK_ROWS) -> Iterator[None]:
    """Sends every call to one path, in chunks of so many tokens (None: as planned). A call elsewhere fails.

    On the "fused" path every loss is told to recompute; where the backward pass is "recomputed", too, it takes few
    columns, or with ``rows`` None as many as planned. On the chunked path losses of single tokens take the fused one.
    """
    recomputing = path in ("fused", "recomputed")

    def plan(problem: planning.Call, device: planning.Device, wish: str) -> Any:
        made = planning.plan(problem, replace(device, avoided=frozenset()), wish)
        expected = kernel_path(problem) if path == "chunked" else "fused" if recomputing else path  # type: ignore[arg-type]
        assert problem.empty or made.path == expected, made  # type: ignore[attr-defined]
        return made

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FUSEDLAYERS_BACKEND", "torch" if path == "torch" else "triton")
        # No plan made here outlives the test, and none made before or under another patch is used.
        patch.setattr(dispatch, "_cached_plan", plan)
        recall_nothing(patch)
        if recomputing:
            for each in (LINEAR_CROSS_ENTROPY, LINEAR_LOG_PROBS):
                patch.setattr(type(each), "check", partial(_recomputing, each.check))
        if rows is not None:
            patch.setattr(cutting, "choose_rows", lambda problem: min(rows, problem.M))
            patch.setattr(cutting, "choose_columns", lambda problem: min(COLUMNS, problem.padded_columns))
        yield


def _recomputing(check: Callable[..., tuple[Any, ...]], *given: Any) -> tuple[Any, ...]:
    """The options that were checked, the last of which is ``recompute``."""
    return (*check(*given)[:-1], True)


def loss_inputs(
    leading: tuple[int, ...],
    K: int,
    V: int,
    dtype: torch.dtype = torch.float32,
    *,
    bias: bool = False,
    weight: bool = False,
    ignored: int = 1,
    peak: float = 1.0,
    draw: Callable[..., Tensor] = torch.randn,
) -> dict[str, Tensor | None]:
    """Tensors by name: input ~ N(0, 1), linear_weight ~ N(0, peak² / K), some targets ignored.

    Logits have a standard deviation of about ``peak``: with a large one, one class has almost all of the probability.
    """
    scale = peak / max(K, 1) ** 0.5 if draw is torch.randn else 1.0
    target = torch.randint(0, V, leading)
    target.view(-1)[:ignored] = IGNORED
    found = {
        "input": draw(*leading, K, dtype=torch.float64),
        "linear_weight": draw(V, K, dtype=torch.float64) * scale,
        "linear_bias": draw(V, dtype=torch.float64) * scale if bias else None,
    }
    floating = {name: None if tensor is None else tensor.to(DEVICE, dtype) for name, tensor in found.items()}
    # Class weights have a dtype of their own.
    weights = (torch.rand(V) + 0.5).to(DEVICE) if weight else None
    return floating | {"target": target.to(DEVICE)} | ({"weight": weights} if weight else {})


def in_float64(tensors: Tensors) -> dict[str, Tensor | None]:
    return {name: t.double() if t is not None and t.is_floating_point() else t for name, t in tensors.items()}


def results(
    call: Callable[..., Any],
    tensors: Tensors,
    frozen: Sequence[str] = (),
    upstream: Sequence[Tensor] | None = None,
    **options: Any,
) -> dict[str, Tensor | None]:
    """What the call gives and the gradients of what is not frozen, for random upstream gradients, always the same."""
    leaves = dict(tensors)
    for name in FLOATING:
        tensor = leaves.get(name)
        leaves[name] = None if tensor is None else tensor.detach().requires_grad_(name not in frozen)
    found = call(**leaves, **options)
    outputs = list(found) if isinstance(found, tuple) else [found]
    if outputs[0].requires_grad:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            drawn = [torch.randn(each.shape).to(each) for each in outputs] if upstream is None else list(upstream)
        torch.autograd.backward(outputs, drawn)
    gradients = {f"d{name}": tensor.grad for name in FLOATING if (tensor := leaves[name]) is not None}
    return {f"result {place}": each.detach() for place, each in enumerate(outputs)} | gradients


def assert_loss_close(
    *draws: Tensors,
    path: str = "chunked",
    rows: int | None = CHUNK_ROWS,
    name: str = "linear_cross_entropy",
    frozen: Sequence[str] = (),
    upstream: Sequence[Tensor] | None = None,
    again: int = 0,
    **options: Any,
) -> None:
    """The results and all gradients pass the closeness rule; several draws of one size are judged together.

    The last ``again`` of them judge again what fails in the others.
    """
    frozen, rows = (FLOATING, None) if path == "fused" else (frozen, rows)
    ours, oracle = getattr(functional, name), getattr(reference, name)

    def compared(inputs: Tensors) -> tuple[Tensors, Tensors, Tensors]:
        with on_path(path, rows):
            mine = results(ours, inputs, frozen, upstream, **options)
        theirs = results(oracle, inputs, frozen, upstream, **options)
        truth = results(oracle, in_float64(inputs), frozen, upstream, **options)
        assert {key: None if t is None else t.dtype for key, t in mine.items()} == {
            key: None if t is None else t.dtype for key, t in theirs.items()
        }
        return mine, theirs, truth

    input = draws[0]["input"]
    assert input is not None
    first = len(draws) - again
    found = [compared(inputs) for inputs in draws[:first]]
    assert_draws_close(found, independent=input.shape[:-1].numel(), again=map(compared, draws[first:]))
