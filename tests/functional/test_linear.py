"""The linear layer that splits its sums: kernels and torch against float64, exact integers, layouts, bad input."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from fusedlayers import explain, functional, reference
from fusedlayers.closeness import assert_all_close
from fusedlayers.functional.linear import padded_gradients
from tests.support.operands import (
    DEVICE,
    INTEGERS,
    PATHS,
    Tensors,
    assert_equal,
    in_float64,
    needs_kernels,
    on_path,
    results,
)

KERNELS_AND_TORCH = [PATHS[0], PATHS[2]]


def inputs(
    leading: tuple[int, ...] | int,
    N: int,
    K: int,
    dtype: torch.dtype = torch.float32,
    *,
    bias: bool = True,
    draw: Callable[..., Tensor] = torch.randn,
) -> dict[str, Tensor | None]:
    """x ``[*leading, K]`` ~ N(0, 1), weight ``[N, K]`` / √K and bias ``[N]``, unless ``draw`` gives integers."""
    leading = (leading,) if isinstance(leading, int) else leading
    x, weight, b = (draw(*shape, dtype=torch.float64) for shape in ((*leading, K), (N, K), (N,)))
    if draw is torch.randn:
        weight = weight / max(K, 1) ** 0.5
    return {"x": x.to(DEVICE, dtype), "weight": weight.to(DEVICE, dtype), "bias": b.to(DEVICE, dtype) if bias else None}


def upstream(tensors: Tensors, draw: Callable[..., Tensor] = torch.randn) -> Tensor:
    x, weight = tensors["x"], tensors["weight"]
    return draw(*x.shape[:-1], weight.shape[0], dtype=torch.float64).to(x.device, x.dtype)


def assert_close_to_torch(tensors: Tensors, activation: str | None = None, **splitting: Any) -> None:
    """y and all gradients by the kernels pass the closeness rule."""
    dy = upstream(tensors)
    with on_path("kernels"):
        ours = results(functional.linear, tensors, dy, activation=activation, **splitting)
    theirs = results(reference.linear, tensors, dy, activation=activation)
    truth = results(reference.linear, in_float64(tensors), dy.double(), activation=activation)
    assert_all_close(ours, theirs, truth)


@pytest.mark.sampled(together=2)
@pytest.mark.parametrize("path", KERNELS_AND_TORCH)
@pytest.mark.parametrize("reduction", ["workspace", "atomic"])
@pytest.mark.parametrize("split_k", [1, 2, 3, 5, 8, "auto", 10**9])
@pytest.mark.parametrize("rows", [1, 21])
@pytest.mark.usefixtures("poisoned_memory")
def test_exact_integers_for_any_number_of_splits(rows: int, split_k: int | str, reduction: str, path: str) -> None:
    """Ragged last blocks on all axes, and more splits than blocks: those that would be empty are not launched."""
    dtype = torch.float16
    tensors = inputs(rows, 37, 333, dtype, draw=INTEGERS[dtype])
    dy = upstream(tensors, INTEGERS[dtype])
    options: dict[str, Any] = {"split_k": split_k, "reduction": reduction, "activation": "relu"}
    truth = results(reference.linear, in_float64(tensors), dy.double(), activation="relu")
    with on_path(path):
        ours = results(functional.linear, tensors, dy, **options)
        with torch.no_grad():
            y = functional.linear(**tensors, **options)
    assert_equal(in_float64(ours), truth)
    assert_equal({"y": y.double()}, {"y": truth["y"]})


@pytest.mark.sampled(together=2)
@needs_kernels
@pytest.mark.parametrize("activation", ["gelu", "silu", "tanh", "leaky_relu"])
@pytest.mark.parametrize("split_k", [1, 3])
@pytest.mark.parametrize("rows", [1, 18])
def test_activation_and_bias_are_applied_once(rows: int, split_k: int, activation: str) -> None:
    tensors = inputs(rows, 21, 134, torch.float16)
    assert_close_to_torch(tensors, activation=activation, split_k=split_k)
    with on_path("kernels"), torch.no_grad():
        ours = functional.linear(**tensors, activation=activation, split_k=split_k)
    theirs, truth = (reference.linear(**t, activation=activation) for t in (tensors, in_float64(tensors)))
    assert_all_close({"y": ours}, {"y": theirs}, {"y": truth})


BAD: list[tuple[dict[str, Any], type[Exception], str]] = [
    (
        {"weight": torch.ones(6, 3)},
        ValueError,
        r"x of .*: expected .* with K = 3, .*unless weight is meant to be transp",
    ),
    ({"activation": "rely"}, ValueError, "activation 'rely' is not known"),
    ({"split_k": 0}, ValueError, 'split_k must be "auto" or an int from 1 on, got 0'),
    ({"split_k": -2}, ValueError, "split_k must be .* got -2"),
    ({"split_k": 2.0}, TypeError, r"split_k must be .* got 2.0 \(float\)"),
    ({"split_k": True}, TypeError, r"split_k must be .* got True \(bool\)"),
    ({"split_k": "all"}, TypeError, r"split_k must be .* got 'all' \(str\)"),
    ({"reduction": "sum"}, ValueError, "reduction must be one of workspace, atomic, got 'sum'"),
    ({"reduction": None}, ValueError, "reduction must be one of workspace, atomic, got None"),
]


@pytest.mark.parametrize(("change", "error", "words"), BAD, ids=lambda value: str(value)[:30])
def test_bad_input(change: dict[str, Any], error: type[Exception], words: str) -> None:
    right = {"x": torch.ones(4, 6), "weight": torch.ones(3, 6), "bias": torch.ones(3)}
    functional.linear(**right)
    for call in (functional.linear, lambda **arguments: explain(functional.linear, **arguments)):
        with pytest.raises(error, match=words):
            call(**(right | change))


def test_atomic_addition_is_refused_where_order_matters() -> None:
    right = {"x": torch.ones(4, 6), "weight": torch.ones(3, 6)}
    functional.linear(**right, reduction="atomic")
    torch.use_deterministic_algorithms(True)
    functional.linear(**right)
    with pytest.raises(RuntimeError, match='reduction="atomic" adds in no fixed order'):
        functional.linear(**right, reduction="atomic")


@pytest.mark.parametrize(
    "wanted", [(True, True, True), (True, False, False), (False, True, False), (False, True, True)]
)
def test_gradients_from_padded_columns(wanted: tuple[bool, bool, bool]) -> None:
    tensors = inputs(7, 19, 40, torch.float64, draw=INTEGERS[torch.float32])
    x, weight = tensors["x"], tensors["weight"]
    dy = upstream(tensors, INTEGERS[torch.float32])
    found = padded_gradients(x if wanted[1] else None, weight if wanted[0] else None, dy, wanted, 24)
    expected = (dy @ weight, dy.T @ x, dy.sum(0))
    for made, right, want in zip(found, expected, wanted, strict=True):
        assert (made is not None) == want
        if made is not None:
            assert made.is_contiguous()
            assert made.untyped_storage().nbytes() == made.nbytes, "nothing keeps its padding alive"
            assert torch.equal(made, right)
