"""Inputs for the tests of GEMM-reduce, and its results and gradients by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fusedlayers import functional, reference
from fusedlayers.closeness import assert_all_close
from tests.support.operands import DEVICE, Tensors, assert_draws_close, in_float64, leaves, on_path

DIFFERENTIABLE = ["sum", "mean", "max", "min", "absmax", "sumsq", "logsumexp"]
INDEXED = ["max", "min", "absmax"]


def reduce_inputs(
    M: int,
    N: int,
    K: int,
    dtype: torch.dtype = torch.float32,
    *,
    batches: tuple[tuple[int, ...], tuple[int, ...]] = ((2,), (2,)),
    bias: bool = False,
    draw: Callable[..., Tensor] = torch.randn,
) -> dict[str, Tensor | None]:
    """a ~ N(0, 1) and b / √K, or integers; a bias on request."""
    scale = max(K, 1) ** 0.5 if draw is torch.randn else 1.0
    found = {
        "a": draw(*batches[0], M, K, dtype=torch.float64),
        "b": draw(*batches[1], K, N, dtype=torch.float64) / scale,
    }
    found |= {"bias": draw(N, dtype=torch.float64)} if bias else {}
    return {name: tensor.to(DEVICE, dtype) for name, tensor in found.items()}


def reduce_results(
    call: Callable[..., Any], tensors: Tensors, dy: Tensor | None = None, frozen: tuple[str, ...] = (), **options: Any
) -> dict[str, Tensor | None]:
    """D, and the gradient of every tensor that is not frozen for the gradient dy of D (None: random, the same)."""
    inputs = leaves(tensors, frozen)
    d = call(**inputs, **options)
    if d.requires_grad:
        d.backward(upstream(d) if dy is None else dy)
    gradients = {f"d{name}": tensor.grad for name, tensor in inputs.items() if tensor is not None}
    return {"d": d.detach()} | gradients


def upstream(d: Tensor, draw: Callable[..., Tensor] = torch.randn) -> Tensor:
    """A gradient for D that depends on its shape alone, rounded to 16 bits so that it is the same in any dtype."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return draw(*d.shape, dtype=torch.float64).to(torch.bfloat16).to(d.device, d.dtype)


def assert_reduce_close(
    tensors: Tensors, frozen: tuple[str, ...] = (), path: str = "kernels", **options: Any
) -> dict[str, Tensor | None]:
    """D and all gradients pass the closeness rule; returns ours."""
    found = compared_reductions(tensors, frozen, path, **options)
    assert_all_close(*found, independent=_results_of(found))
    return found[0]


def assert_reduce_close_or_again(draw: Callable[[], Tensors], **options: Any) -> dict[str, Tensor | None]:
    """The same of tensors that are drawn, judged again by a second draw if need be."""
    first = compared_reductions(draw(), **options)
    another = (compared_reductions(draw(), **options) for _ in range(1))
    assert_draws_close([first], independent=_results_of(first), again=another)
    return first[0]


def _results_of(found: tuple[Tensors, Tensors, Tensors]) -> int:
    d = found[0]["d"]
    assert d is not None
    return max(1, d.numel())


def compared_reductions(
    tensors: Tensors, frozen: tuple[str, ...] = (), path: str = "kernels", **options: Any
) -> tuple[Tensors, Tensors, Tensors]:
    """Ours, torch's and the float64 results."""
    with on_path(path):
        ours = reduce_results(functional.gemm_reduce, tensors, None, frozen, **options)
    theirs = reduce_results(reference.gemm_reduce, tensors, None, frozen, **options)
    truth = reduce_results(reference.gemm_reduce, in_float64(tensors), None, frozen, **options)
    # An infinite D (nothing takes part) is compared by value, the rule is for numbers.
    expected = truth["d"]
    assert expected is not None
    finite = expected.isfinite()
    for results in (ours, theirs, truth):
        d = results["d"]
        assert d is not None
        assert torch.equal(_without_infinities(d[~finite]), _without_infinities(expected[~finite]).to(d.dtype))
        results["d"] = torch.where(finite, d, 0)
    return ours, theirs, truth


def _without_infinities(tensor: Tensor) -> Tensor:
    return tensor.nan_to_num(nan=1.0, posinf=2.0, neginf=3.0)
