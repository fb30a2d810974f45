"""Weight and bias gradient in one pass: the kernel against torch in the same dtype, in float64, and exact integers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from fusedlayers import functional, reference
from fusedlayers.closeness import assert_all_close
from fusedlayers.devices import describe
from fusedlayers.functional.gradients import WEIGHT_GRADIENT, planned_weight_gradient
from fusedlayers.kernels import weight_gradient as kernels
from fusedlayers.kernels.tuning.grouped_gemm import GroupedTiles
from tests.support.number_cases import NUMBERS
from tests.support.operands import (
    DEVICE,
    DTYPES,
    INTEGERS,
    Tensors,
    assert_equal,
    in_float64,
    leaves,
    needs_kernels,
    on_path,
    saved,
)

Call = Callable[..., "tuple[Tensor, Tensor | None]"]


def found(call: Call, tensors: Tensors, **options: Any) -> dict[str, Tensor | None]:
    dw, db = call(**tensors, **options)
    return {"dw": dw.detach(), "db": None if db is None else db.detach()}


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sums_by_a_kernel_beside_torchs_product(dtype: torch.dtype) -> None:
    tensors = NUMBERS["weight_gradient"].inputs(dtype, M=700)
    problem = WEIGHT_GRADIENT.problem_of(**tensors)
    plan = replace(problem.plan(describe(DEVICE), "torch"), path="sums")
    dw, db = planned_weight_gradient(tensors["dy"], tensors["x"], plan, {})
    ours = {"dw": dw, "db": db}
    theirs, truth = (found(reference.weight_gradient, each) for each in (tensors, in_float64(tensors)))
    assert_all_close(ours, theirs, truth)


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
    tensors = NUMBERS["weight_gradient"].inputs(dtype, INTEGERS[dtype], M=70, O=37, K=85)
    dw, db = kernels.weight_gradient(tensors["dy"], tensors["x"], bias, splits, "ieee", tiles)
    truth = found(reference.weight_gradient, in_float64(tensors), bias=bias)
    assert_equal(in_float64({"dw": dw, "db": db}), truth)


@needs_kernels
@pytest.mark.parametrize("frozen", ["dy", "x"])
def test_the_other_operand_of_a_frozen_one_is_not_kept(frozen: str) -> None:
    wanted = leaves(NUMBERS["weight_gradient"].inputs(), frozen=(frozen,))
    with on_path("kernels"):
        kept = saved(lambda: functional.weight_gradient(**wanted))
    assert [tensor.shape for tensor in kept] == [wanted[frozen].shape]


@pytest.mark.parametrize("path", ["kernels", "torch"])
def test_the_gradient_of_the_sums_alone(path: str) -> None:
    wanted = leaves(NUMBERS["weight_gradient"].inputs())
    with on_path(path):
        _, db = functional.weight_gradient(**wanted)
    upstream = torch.randn_like(db)
    dy, x = torch.autograd.grad(db, list(wanted.values()), upstream, materialize_grads=True)
    assert torch.equal(dy, upstream.expand(dy.shape))
    assert not x.any()


BAD: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"bias": torch.ones(3)}, TypeError, "bias must be True or False, got Tensor"),
    ({"bias": 1}, TypeError, r"bias must be True or False, got 1 \(int\)"),
]


@pytest.mark.parametrize(("change", "error", "words"), BAD, ids=lambda value: str(value)[:30])
def test_bad_input(change: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        functional.weight_gradient(**({"dy": torch.ones(4, 3), "x": torch.ones(4, 5)} | change))
