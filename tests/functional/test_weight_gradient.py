"""Weight and bias gradient in one pass: the kernel against torch in the same dtype, in float64, and exact integers."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import strategies
from torch import Tensor

from fusedlayers import functional, reference
from fusedlayers.closeness import assert_all_close
from fusedlayers.devices import describe
from fusedlayers.functional.gradients import WEIGHT_GRADIENT, planned_weight_gradient
from fusedlayers.kernels import weight_gradient as kernels
from fusedlayers.kernels.tuning.grouped_gemm import GroupedTiles
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
)
from tests.support.selection import draws

KERNELS_AND_TORCH = [PATHS[0], PATHS[2]]
Call = Callable[..., "tuple[Tensor, Tensor | None]"]


def inputs(
    leading: tuple[int, ...] | int,
    O: int,
    K: int,
    dtype: torch.dtype = torch.float32,
    draw: Callable[..., Tensor] = torch.randn,
) -> dict[str, Tensor]:
    """dy ``[*leading, O]`` and x ``[*leading, K]``."""
    leading = (leading,) if isinstance(leading, int) else leading
    return {
        name: draw(*leading, columns, dtype=torch.float64).to(DEVICE, dtype) for name, columns in (("dy", O), ("x", K))
    }


def found(call: Call, tensors: Tensors, **options: Any) -> dict[str, Tensor | None]:
    dw, db = call(**tensors, **options)
    return {"dw": dw.detach(), "db": None if db is None else db.detach()}


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sums_by_a_kernel_beside_torchs_product(dtype: torch.dtype) -> None:
    tensors = inputs(700, 24, 40, dtype)
    problem = WEIGHT_GRADIENT.problem_of(**tensors)
    plan = replace(problem.plan(describe(DEVICE), "torch"), path="sums")
    dw, db = planned_weight_gradient(tensors["dy"], tensors["x"], plan, {})
    ours = {"dw": dw, "db": db}
    theirs, truth = (found(reference.weight_gradient, each) for each in (tensors, in_float64(tensors)))
    assert_all_close(ours, theirs, truth)


def assert_close_to_torch(tensors: Tensors, **options: Any) -> None:
    with on_path("kernels"):
        ours = found(functional.weight_gradient, tensors, **options)
    theirs = found(reference.weight_gradient, tensors, **options)
    assert_all_close(ours, theirs, found(reference.weight_gradient, in_float64(tensors), **options))


@needs_kernels
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("leading", [(), (70,), (2, 35), (2, 5, 7), (3, 1, 2, 11)], ids=str)
def test_leading_dimensions_are_rows(leading: tuple[int, ...], dtype: torch.dtype, bias: bool) -> None:
    tensors = inputs(leading, 37, 70, dtype)
    assert_close_to_torch(tensors, bias=bias)
    with on_path("kernels"):
        dw, db = functional.weight_gradient(**tensors, bias=bias)
    assert (dw.shape, dw.dtype) == ((37, 70), dtype)
    assert (db is not None and (db.shape, db.dtype) == ((37,), dtype)) if bias else db is None


@pytest.mark.parametrize("path", KERNELS_AND_TORCH)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_exact_integers(dtype: torch.dtype, path: str) -> None:
    tensors = inputs(149, 37, 70, dtype, draw=INTEGERS[dtype])
    with on_path(path):
        ours = found(functional.weight_gradient, tensors)
    assert_equal(in_float64(ours), found(reference.weight_gradient, in_float64(tensors)))


@pytest.mark.sampled(together=2)
@needs_kernels
@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("splits", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tiles", [GroupedTiles(32, 16, 16, 4, 1), GroupedTiles(16, 64, 32, 4, 1)])
def test_exact_integers_for_any_number_of_splits(
    tiles: GroupedTiles, dtype: torch.dtype, splits: int, bias: bool
) -> None:
    """Ragged last blocks on all three axes, several tiles on each, and empty splits: 70 rows are three blocks of 32."""
    tensors = inputs(70, 37, 85, dtype, draw=INTEGERS[dtype])
    dw, db = kernels.weight_gradient(tensors["dy"], tensors["x"], bias, splits, "ieee", tiles)
    truth = found(reference.weight_gradient, in_float64(tensors), bias=bias)
    assert_equal(in_float64({"dw": dw, "db": db}), truth)


@needs_kernels
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("letter", ["M", "O", "K"])
def test_sizes_one_at_a_time(letter: str, size: int) -> None:
    sizes = {"leading": 40, "O": 20, "K": 24} | {letter.replace("M", "leading"): size}
    assert_close_to_torch(inputs(**sizes))


@needs_kernels
@hypothesis.settings(max_examples=60 if ON_GPU else draws(6, 25))
@hypothesis.given(
    leading=strategies.lists(strategies.integers(0, 9), max_size=4),
    O=strategies.integers(0, 70),
    K=strategies.integers(0, 70),
    bias=strategies.booleans(),
    dtype=strategies.sampled_from(DTYPES[:2]),
)
def test_sizes_in_random_combinations(leading: list[int], O: int, K: int, bias: bool, dtype: torch.dtype) -> None:
    assert_close_to_torch(inputs(tuple(leading), O, K, dtype), bias=bias)


@pytest.mark.parametrize("path", KERNELS_AND_TORCH)
def test_no_rows_give_zeros(path: str) -> None:
    with on_path(path):
        dw, db = functional.weight_gradient(**inputs((2, 0), 5, 6))
    assert db is not None
    assert torch.equal(dw, torch.zeros_like(dw))
    assert torch.equal(db, torch.zeros_like(db))


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "sliced columns": lambda t: torch.cat((t, torch.full_like(t[..., :3], math.nan)), -1)[..., : t.shape[-1]],
    "every other row": lambda t: torch.stack((t, torch.full_like(t, math.nan)), -2).flatten(-3, -2)[..., ::2, :],
    "transposed": lambda t: t.mT.contiguous().mT,
    "batch last": lambda t: t.movedim(0, -1).contiguous().movedim(-1, 0),
    "chunk of a cat": lambda t: torch.cat((torch.full_like(t, math.nan), t), -1).chunk(2, -1)[1],
    "one element off": lambda t: torch.cat((t.new_full((1,), math.nan), t.flatten()))[1:].view(t.shape),
}


@needs_kernels
@pytest.mark.parametrize("leading", [(45,), (3, 15)], ids=str)
@pytest.mark.parametrize("role", ["dy", "x"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_change_nothing(layout: str, role: str, leading: tuple[int, ...]) -> None:
    tensors = inputs(leading, 21, 34, draw=INTEGERS[torch.float32])
    strided = {**tensors, role: LAYOUTS[layout](tensors[role])}
    assert torch.equal(strided[role], tensors[role])
    with on_path("kernels"):
        expected = found(functional.weight_gradient, tensors)
        assert_equal(found(functional.weight_gradient, strided), expected)


@needs_kernels
@pytest.mark.parametrize("shape", [(1, 1), (45, 1), (1, 21)], ids=["one number", "a column", "a row"])
def test_expanded_gradients(shape: tuple[int, int]) -> None:
    """``.sum().backward()`` sends back one number, ``.mean(0)`` one row: stride 0, read as they are."""
    tensors = inputs(45, 21, 34, draw=INTEGERS[torch.float32])
    tensors["dy"] = tensors["dy"][: shape[0], : shape[1]].expand(45, 21)
    assert 0 in tensors["dy"].stride()
    with on_path("kernels"):
        ours = found(functional.weight_gradient, tensors)
    assert_equal(in_float64(ours), found(reference.weight_gradient, in_float64(tensors)))


@needs_kernels
@infinities
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("role", ["dy", "x"])
def test_special_values_spread_as_in_torch(role: str, value: float) -> None:
    tensors = inputs(50, 21, 34)
    tensors[role][-1, -2] = value
    with on_path("kernels"):
        ours = found(functional.weight_gradient, tensors)
    for name, truth in found(reference.weight_gradient, in_float64(tensors)).items():
        tensor = ours[name]
        assert tensor is not None
        assert truth is not None
        assert torch.equal(tensor.isnan(), truth.isnan()), name
        infinite = tensor.isinf() | truth.isinf()
        assert torch.equal(tensor[infinite].double(), truth[infinite]), name


def gradients(call: Call, tensors: Tensors, upstream: Tensors, **options: Any) -> dict[str, Tensor | None]:
    """Of dy and x, for the given gradients of dW and db."""
    wanted = leaves(tensors)
    outputs = dict(zip(("dw", "db"), call(**wanted, **options), strict=True))
    chosen = [name for name in upstream if outputs[name] is not None]
    grads = torch.autograd.grad(
        [outputs[name] for name in chosen], list(wanted.values()), [upstream[name] for name in chosen],
        materialize_grads=True,
    )  # fmt: skip
    return dict(zip(wanted, grads, strict=True))


@pytest.mark.parametrize("path", KERNELS_AND_TORCH)
@pytest.mark.parametrize("asked", [("dw", "db"), ("dw",), ("db",)], ids=" and ".join)
def test_gradients(asked: tuple[str, ...], path: str) -> None:
    tensors = inputs((2, 25), 21, 34)
    upstream = {name: torch.randn(shape, device=DEVICE) for name, shape in (("dw", (21, 34)), ("db", (21,)))}
    upstream = {name: upstream[name] for name in asked}
    with on_path(path):
        ours = gradients(functional.weight_gradient, tensors, upstream)
    theirs = gradients(reference.weight_gradient, tensors, upstream)
    truth = gradients(reference.weight_gradient, in_float64(tensors), in_float64(upstream))
    assert_all_close(ours, theirs, truth)


@pytest.mark.parametrize("path", KERNELS_AND_TORCH)
@pytest.mark.parametrize("frozen", ["dy", "x"])
def test_frozen_operands(frozen: str, path: str) -> None:
    """The other one is not kept, and the gradient is right."""
    wanted = leaves(inputs(30, 7, 9), frozen=(frozen,))
    kept: list[tuple[int, ...]] = []

    def pack(tensor: Tensor) -> Tensor:
        kept.append(tuple(tensor.shape))
        return tensor

    with on_path(path), torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        dw, _ = functional.weight_gradient(**wanted)
    if path == "kernels":
        assert kept == [(30, 7) if frozen == "dy" else (30, 9)]
    (gradient,) = torch.autograd.grad(dw.square().sum(), [wanted["x" if frozen == "dy" else "dy"]])
    truth = in_float64(leaves(wanted))
    dy, x = (truth[name] for name in ("dy", "x"))
    assert dy is not None
    assert x is not None
    expected = dy @ (2 * dy.T @ x) if frozen == "dy" else x @ (2 * dy.T @ x).T
    assert_all_close({"gradient": gradient}, {"gradient": expected.float()}, {"gradient": expected.detach()})


@pytest.mark.parametrize("path", KERNELS_AND_TORCH)
def test_autocast(path: str) -> None:
    tensors = inputs(50, 21, 34)

    def call(function: Call) -> dict[str, Tensor | None]:
        with torch.autocast(DEVICE.type, torch.float16):
            return found(function, tensors)

    with on_path(path):
        ours = call(functional.weight_gradient)
    half = {name: tensor.half() for name, tensor in tensors.items()}
    theirs = found(reference.weight_gradient, half)
    assert ours["dw"] is not None
    assert ours["dw"].dtype == torch.float16
    assert_all_close(ours, theirs, found(reference.weight_gradient, in_float64(tensors)), computed_in=torch.float16)


BAD: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"dy": None}, TypeError, "dy must be a torch.Tensor, got None"),
    ({"x": 3.0}, TypeError, "x must be a torch.Tensor, got float"),
    ({"dy": torch.ones(4, 3, dtype=torch.int64)}, TypeError, r"dy of shape \[4, 3\] and dtype torch.int64 .*floating"),
    ({"x": torch.ones(4, 5, dtype=torch.float64)}, TypeError, "x of .*float64.*: expected the dtype of dy"),
    ({"x": torch.ones(4, 5, device="meta")}, ValueError, "x of .*meta: expected the device of dy"),
    ({"x": torch.ones(5, 5)}, ValueError, r"x of shape \[5, 5\].*: expected \[\*B, M, K\] with \*B, M = \[4\]"),
    ({"x": torch.ones(2, 2, 5)}, ValueError, r"x of shape \[2, 2, 5\].*as dy is \[\*B, M, O\] = \[4, 3\]"),
    ({"dy": torch.ones(())}, ValueError, r"dy of shape \[\].*: expected \[\*B, M, O\], at least one dimension"),
    ({"bias": torch.ones(3)}, TypeError, "bias must be True or False, got Tensor"),
    ({"bias": 1}, TypeError, r"bias must be True or False, got 1 \(int\)"),
]


@pytest.mark.parametrize(("change", "error", "words"), BAD, ids=lambda value: str(value)[:30])
def test_bad_input(change: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        functional.weight_gradient(**({"dy": torch.ones(4, 3), "x": torch.ones(4, 5)} | change))
