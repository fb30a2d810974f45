"""The linear layer that splits its sums: kernels and torch against float64, exact integers, layouts, bad input."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import strategies
from torch import Tensor

from fusedlayers import explain, functional, reference
from fusedlayers.closeness import assert_all_close
from fusedlayers.functional.linear import padded_gradients
from tests.support.operands import (
    DEVICE,
    DTYPES,
    INTEGERS,
    ON_GPU,
    PATHS,
    SIZES,
    Tensors,
    assert_equal,
    in_float64,
    infinities,
    leaves,
    needs_kernels,
    on_path,
    results,
)
from tests.support.selection import draws

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
    assert x is not None
    assert weight is not None
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
@needs_kernels
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("leading", [(), (1,), (40,), (2, 3, 7), (3, 1, 2, 5)], ids=str)
def test_leading_dimensions_are_rows(leading: tuple[int, ...], dtype: torch.dtype, bias: bool) -> None:
    tensors = inputs(leading, 37, 300, dtype, bias=bias)
    assert_close_to_torch(tensors)
    with on_path("kernels"):
        y = functional.linear(**tensors)
    assert (y.shape, y.dtype) == ((*leading, 37), dtype)


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


@needs_kernels
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("letter", ["M", "N", "K"])
def test_sizes_one_at_a_time(letter: str, size: int) -> None:
    sizes = {"leading": 20, "N": 24, "K": 70} | {letter.replace("M", "leading"): size}
    assert_close_to_torch(inputs(**sizes))


@needs_kernels
@hypothesis.settings(max_examples=60 if ON_GPU else draws(6, 15))
@hypothesis.given(
    leading=strategies.lists(strategies.integers(0, 6), max_size=4),
    N=strategies.integers(0, 70),
    K=strategies.integers(0, 150),
    bias=strategies.booleans(),
    split_k=strategies.sampled_from([1, 2, 3, "auto"]),
    dtype=strategies.sampled_from(DTYPES[:2]),
)
def test_sizes_in_random_combinations(
    leading: list[int], N: int, K: int, bias: bool, split_k: int | str, dtype: torch.dtype
) -> None:
    assert_close_to_torch(inputs(tuple(leading), N, K, dtype, bias=bias), split_k=split_k)


@pytest.mark.parametrize("path", KERNELS_AND_TORCH)
@pytest.mark.parametrize("leading", [(0,), (2, 0)], ids=str)
def test_no_rows(leading: tuple[int, ...], path: str) -> None:
    tensors = leaves(inputs(leading, 5, 6))
    with on_path(path):
        y = functional.linear(**tensors)
    assert y.shape == (*leading, 5)
    y.sum().backward()
    for tensor in tensors.values():
        assert tensor is not None
        assert torch.equal(tensor.grad, torch.zeros_like(tensor))


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "sliced columns": lambda t: torch.cat((t, torch.full_like(t[..., :3], math.nan)), -1)[..., : t.shape[-1]],
    "every other row": lambda t: torch.stack((t, torch.full_like(t, math.nan)), -2).flatten(-3, -2)[..., ::2, :],
    "transposed": lambda t: t.mT.contiguous().mT,
    "chunk of a cat": lambda t: torch.cat((torch.full_like(t, math.nan), t), -1).chunk(2, -1)[1],
    "one element off": lambda t: torch.cat((t.new_full((1,), math.nan), t.flatten()))[1:].view(t.shape),
}


@pytest.mark.sampled(together=2)
@needs_kernels
@pytest.mark.parametrize("rows", [1, 19])
@pytest.mark.parametrize("columns", [(21, 134), (20, 132)], ids=["no whole vectors", "whole vectors"])
@pytest.mark.parametrize("role", ["x", "weight", "dy"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_change_nothing(layout: str, role: str, columns: tuple[int, int], rows: int) -> None:
    tensors = inputs(rows, *columns, draw=INTEGERS[torch.float32])
    given = {**tensors, "dy": upstream(tensors, INTEGERS[torch.float32])}
    strided = {**given, role: LAYOUTS[layout](given[role])}
    assert torch.equal(strided[role], given[role])
    with on_path("kernels"):
        expected, found = (
            results(functional.linear, {name: t[name] for name in tensors}, t["dy"], split_k=2)
            for t in (given, strided)
        )
    assert_equal(found, expected)


@needs_kernels
def test_expanded_operands() -> None:
    """``.sum().backward()`` sends back one number, a broadcast x is one row: stride 0, read as they are."""
    tensors = inputs(1, 21, 134, draw=INTEGERS[torch.float32])
    x, bias = tensors["x"], torch.ones(1, device=DEVICE).expand(21)
    assert x is not None
    tensors = {**tensors, "x": x.expand(18, 134), "bias": bias}
    dy = torch.ones((), device=DEVICE).expand(18, 21)
    with on_path("kernels"):
        ours = results(functional.linear, tensors, dy)
    assert_equal(in_float64(ours), results(reference.linear, in_float64(tensors), dy.double()))


@pytest.mark.sampled(together=2)
@needs_kernels
@infinities
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("role", ["x", "weight", "bias", "dy"])
@pytest.mark.parametrize("rows", [1, 20])
def test_special_values_spread_as_in_torch(rows: int, role: str, value: float) -> None:
    tensors = inputs(rows, 21, 134)
    dy = upstream(tensors)
    changed = dy if role == "dy" else tensors[role]
    assert changed is not None
    changed.view(-1)[-2] = value
    with on_path("kernels"):
        ours = results(functional.linear, tensors, dy, activation="relu", split_k=3)
        with torch.no_grad():
            ours["y without gradients"] = functional.linear(**tensors, activation="relu", split_k=3)
    truth = results(reference.linear, in_float64(tensors), dy.double(), activation="relu")
    truth["y without gradients"] = truth["y"]
    for name, tensor in truth.items():
        found = ours[name]
        assert found is not None
        assert tensor is not None
        assert torch.equal(found.isnan(), tensor.isnan()), name
        infinite = found.isinf() | tensor.isinf()
        assert torch.equal(found[infinite].double(), tensor[infinite]), name


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
    ({"x": None}, TypeError, "x must be a torch.Tensor, got None"),
    ({"weight": 3.0}, TypeError, "weight must be a torch.Tensor, got float"),
    ({"x": torch.ones(4, 6, dtype=torch.int64)}, TypeError, r"x of shape \[4, 6\] and dtype torch.int64 .*floating"),
    ({"weight": torch.ones(3, 6).double()}, TypeError, "weight of .*float64.*: expected the dtype of x"),
    ({"bias": torch.ones(3).half()}, TypeError, "bias of .*float16.*: expected the dtype of x"),
    ({"bias": torch.ones(3, device="meta")}, ValueError, "bias of .*meta: expected the device of x"),
    ({"x": torch.ones(())}, ValueError, r"x of shape \[\].*: expected \[\*B, M, K\], at least one dimension"),
    (
        {"x": torch.ones(4, 5)},
        ValueError,
        r"x of shape \[4, 5\].*: .* with K = 6, as weight is \[N, K\] = \[3, 6\]$",
    ),
    (
        {"weight": torch.ones(6, 3)},
        ValueError,
        r"x of .*: expected .* with K = 3, .*unless weight is meant to be transp",
    ),
    ({"weight": torch.ones(6)}, ValueError, r"weight of shape \[6\].*: expected \[N, K\], two dimensions"),
    (
        {"bias": torch.ones(1)},
        ValueError,
        r"bias of shape \[1\].*: expected \[N\] = \[3\], as weight is .* = \[3, 6\]$",
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
    assert x is not None
    assert weight is not None
    found = padded_gradients(x if wanted[1] else None, weight if wanted[0] else None, dy, wanted, 24)
    expected = (dy @ weight, dy.T @ x, dy.sum(0))
    for made, right, want in zip(found, expected, wanted, strict=True):
        assert (made is not None) == want
        if made is not None:
            assert made.is_contiguous()
            assert torch.equal(made, right)
