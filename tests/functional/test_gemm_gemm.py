"""Batched GEMM-GEMM: the kernels against torch in the same dtype and in float64, and against exact integers."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from fusedlayers import functional, reference
from fusedlayers.closeness import assert_all_close
from fusedlayers.kernels import gemm_gemm as kernels
from fusedlayers.kernels.gemm_gemm import Arithmetic, Operands, WeightGradients
from fusedlayers.kernels.tuning import TileConfig
from tests.support.operands import (
    DEVICE,
    DTYPES,
    INTEGERS,
    PATHS,
    Tensors,
    assert_equal,
    in_float64,
    needs_kernels,
    on_path,
    results,
)

BATCHES = [
    pytest.param((), (), (), id="none"),
    pytest.param((3,), (3,), (3,), id="one"),
    pytest.param((2, 3), (2, 3), (2, 3), id="two"),
    pytest.param((2, 1, 3), (2, 1, 3), (2, 1, 3), id="three"),
    pytest.param((2, 1, 2, 2), (2, 1, 2, 2), (2, 1, 2, 2), id="four"),
    pytest.param((2, 3), (3,), (2, 1), id="broadcast"),
    pytest.param((), (3,), (1,), id="a and c shared"),
    pytest.param((4,), (), (), id="b and c shared"),
]


def inputs(
    M: int,
    K: int,
    N: int,
    O: int,
    dtype: torch.dtype = torch.float32,
    batches: tuple[tuple[int, ...], ...] = ((2,), (2,), (2,)),
    draw: Callable[..., Tensor] = torch.randn,
) -> dict[str, Tensor | None]:
    """a ~ N(0, 1), b and c / √fan_in, or integers."""
    scales = [1, max(K, 1), max(N, 1)] if draw is torch.randn else [1, 1, 1]
    shapes = [(M, K), (K, N), (N, O)]
    return {
        name: (draw(*batch, *shape, dtype=torch.float64) / scale**0.5).to(DEVICE, dtype)
        for name, batch, shape, scale in zip("abc", batches, shapes, scales, strict=True)
    }


def gradient_for(operands: Tensors, draw: Callable[..., Tensor] = torch.randn) -> Tensor:
    result = reference.gemm_gemm(**operands)
    return draw(*result.shape, dtype=torch.float64).to(result)


def assert_close_to_torch(operands: Tensors, activation: str | None, frozen: tuple[str, ...] = ()) -> None:
    dy = gradient_for(operands)
    with on_path("kernels"):
        ours = results(plain(functional.gemm_gemm), operands, dy, frozen, activation=activation)
    theirs = results(reference.gemm_gemm, operands, dy, frozen, activation=activation)
    truth = results(reference.gemm_gemm, in_float64(operands), dy.double(), frozen, activation=activation)
    b = operands["b"]
    assert_all_close(ours, theirs, truth, independent=max(1, dy.shape[:-1].numel() * b.shape[-1]))


def plain(call: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda a, b, c, **options: call(a, b, c, **options)


@needs_kernels
@pytest.mark.parametrize(("a", "b", "c"), BATCHES)
def test_leading_dimensions(a: tuple[int, ...], b: tuple[int, ...], c: tuple[int, ...]) -> None:
    assert_close_to_torch(inputs(17, 5, 19, 6, batches=(a, b, c)), "silu")


@pytest.mark.sampled(together=2)
@needs_kernels
@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("splits", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tiles", [TileConfig(32, 16, 4, 1), TileConfig(16, 32, 4, 1, 2)], ids=str)
def test_exact_integers_for_any_number_of_splits(tiles: TileConfig, dtype: torch.dtype, splits: int) -> None:
    """Ragged last blocks, empty splits (70 rows are three tiles of 32), and both layouts of the gradients."""
    draw = INTEGERS[dtype]
    operands = inputs(70, 5, 37, 6, dtype, draw=draw)
    dy = gradient_for(operands, draw)
    truth = results(reference.gemm_gemm, in_float64(operands), dy.double(), activation="relu")
    a, b, c = operands.values()
    kernel_operands = Operands(a, b.mT, c.mT, None, None, None, None, Arithmetic("relu", 0.0, "ieee", "exact"))
    for transposed in (False, True):
        found = kernels.weight_gradients(
            kernel_operands, dy, WeightGradients(up=True, down=True), splits, tiles, transposed
        )
        db, dc = (found.up, found.down) if transposed else (found.up.mT, found.down.mT)
        assert_equal(in_float64({"db": db, "dc": dc}), {"db": truth["db"], "dc": truth["dc"]})


@pytest.mark.gpu
def test_seventy_thousand_tiny_products() -> None:
    """More batch entries than the second and third axis of a grid can count."""
    assert_close_to_torch(inputs(3, 4, 5, 2, torch.float16, batches=((70_000,),) * 3), "relu")


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "sliced columns": lambda t: torch.cat((t, torch.full_like(t[..., :3], math.nan)), -1)[..., : t.shape[-1]],
    "every other row": lambda t: torch.stack((t, torch.full_like(t, math.nan)), -2).flatten(-3, -2)[..., ::2, :],
    "transposed": lambda t: t.mT.contiguous().mT,
    "batch last": lambda t: t.movedim(0, -1).contiguous().movedim(-1, 0),
    "one element off": lambda t: torch.cat((t.new_full((1,), math.nan), t.flatten()))[1:].view(t.shape),
}


@pytest.mark.sampled(together=2)
@needs_kernels
@pytest.mark.parametrize("sizes", [(35, 9, 21, 7), (35, 8, 24, 12)], ids=["no whole vectors", "whole vectors"])
@pytest.mark.parametrize("roles", ["a b c dy", "b", "c", "b c"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_change_nothing(layout: str, roles: str, sizes: tuple[int, int, int, int]) -> None:
    draw = INTEGERS[torch.float32]
    operands = inputs(*sizes, draw=draw)
    given = {**operands, "dy": gradient_for(operands, draw)}
    strided = given | {role: LAYOUTS[layout](given[role]) for role in roles.split()}  # type: ignore[arg-type]
    assert all(torch.equal(strided[name], given[name]) for name in given)  # type: ignore[arg-type]
    with on_path("kernels"):
        expected, found = (
            results(functional.gemm_gemm, {name: t[name] for name in operands}, t["dy"], activation="relu")
            for t in (given, strided)
        )
    assert_equal(found, expected)


@pytest.mark.parametrize("path", [PATHS[0], PATHS[2]])
def test_every_subset_of_frozen_operands(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Right gradients, None elsewhere, and no kernel for a gradient that nobody wants."""
    launched: list[object] = []
    data_gradient, weight_gradients = kernels.data_gradient, kernels.weight_gradients

    def counted_data(*args: Any, **options: Any) -> Any:
        launched.append("a")
        return data_gradient(*args, **options)

    def counted_weights(operands: Operands, dy: Tensor, wanted: WeightGradients, *args: Any, **named: Any) -> Any:
        launched.extend(name for name, want in (("b", wanted.up), ("c", wanted.down)) if want)
        return weight_gradients(operands, dy, wanted, *args, **named)

    monkeypatch.setattr(kernels, "data_gradient", counted_data)
    monkeypatch.setattr(kernels, "weight_gradients", counted_weights)
    operands = inputs(5, 4, 6, 3)
    dy = gradient_for(operands)
    with on_path(path):
        everything = results(functional.gemm_gemm, operands, dy, activation="silu")
        for frozen in ((), ("a",), ("b",), ("c",), ("a", "b"), ("a", "c"), ("b", "c")):
            launched.clear()
            ours = results(functional.gemm_gemm, operands, dy, frozen, activation="silu")
            dropped = {f"d{name}": None for name in frozen}
            assert_equal(ours, everything | dropped)
            assert launched == ([name for name in "abc" if name not in frozen] if path == "kernels" else [])
