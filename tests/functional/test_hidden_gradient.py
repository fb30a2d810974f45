"""Gradient of the pre-activations with its sums: the kernel against torch in the same dtype and in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from fusedlayers import functional, reference
from fusedlayers.kernels import gemm_epilogue as kernels
from fusedlayers.kernels.activations import ACTIVATIONS
from fusedlayers.kernels.matmul.arithmetic import Arithmetic
from fusedlayers.kernels.tuning import ColumnSumTiles, EpilogueTiles
from tests.support.number_cases import NUMBERS
from tests.support.operands import (
    DTYPES,
    INTEGERS,
    Tensors,
    assert_equal,
    in_float64,
    leaves,
    needs_kernels,
)

NAMES = ("dz", "dz_gate", "db_up", "db_gate")
Call = Callable[..., "tuple[Tensor | None, ...]"]


def drawn(gated: bool, *how: Any, **sizes: int) -> dict[str, Tensor | None]:
    """dy, w_down, z and z_gate, which is None without a gate."""
    tensors = NUMBERS["gated hidden_gradient"].inputs(*how, **sizes)
    return tensors | {"z_gate": tensors["z_gate"] if gated else None}


def found(call: Call, tensors: Tensors, **options: Any) -> dict[str, Tensor | None]:
    results = call(**tensors, **options)
    return {name: t if t is None else t.detach() for name, t in zip(NAMES, results, strict=True)}


@pytest.mark.sampled(together=2)
@needs_kernels
@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("row_tiles", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
@pytest.mark.parametrize("inner", [16, 0], ids=["one kernel", "torch multiplies"])
def test_exact_integers_for_any_number_of_row_tiles(
    inner: int, gated: bool, dtype: torch.dtype, row_tiles: int
) -> None:
    """Ragged last tiles on all axes, and a last program with fewer tiles than the others."""
    tensors = drawn(gated, dtype, INTEGERS[dtype], M=70, N=37, O=21)
    dy, w_down, z, z_gate = tensors.values()
    truth = in_float64(tensors)
    expected = found(reference.hidden_gradient, truth, activation="relu")
    expected["hidden"] = reference.hidden(truth["z"], truth["z_gate"], activation="relu")
    tiles = EpilogueTiles(16, 32, inner, 4, 1)
    summed: dict[str, Any] = {"column_sums": ColumnSumTiles(16, 16, 5)}
    for more in ({}, {"for_products": True}, {"keep_hidden": True}, summed):
        ours = kernels.hidden_gradient(
            dy, w_down, z, z_gate, True, row_tiles, Arithmetic("relu", "exact", "ieee"), tiles, **more
        )._asdict()
        kept = None if "keep_hidden" not in more else expected["hidden"]
        db_down = truth["dy"].sum(0) if more is summed else None
        assert_equal(in_float64(ours), expected | {"hidden": kept, "db_down": db_down})


@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
@pytest.mark.parametrize("activation", list(ACTIVATIONS))
def test_it_is_the_gradient_of_the_hidden(activation: str, gated: bool) -> None:
    """What autograd gives for the feed-forward block itself."""
    tensors = in_float64(drawn(gated, M=9, N=7, O=5))
    dy, w_down, z, z_gate = leaves(tensors).values()
    act = ACTIVATIONS[activation].torch
    hidden = act(z) if z_gate is None else act(z_gate) * z
    wanted = [tensor for tensor in (z, z_gate) if tensor is not None]
    expected = torch.autograd.grad(hidden @ w_down.T, wanted, dy.detach())
    ours = functional.hidden_gradient(**tensors, activation=activation)
    assert all(torch.allclose(one, two) for one, two in zip(ours, expected, strict=False))
    assert torch.allclose(ours[2], expected[0].sum(0))


BAD: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"w_down": torch.ones(5, 3)}, ValueError, r"dy of shape \[4, 3\].*O = 5, as w_down is .*, unless w_down is"),
    ({"bias": torch.ones(5)}, TypeError, "bias must be True or False, got Tensor"),
    ({"activation": "swoosh"}, ValueError, "activation 'swoosh' is not known"),
    ({"activation": 3}, TypeError, "activation must be a name"),
]


@pytest.mark.parametrize(("change", "error", "words"), BAD, ids=lambda value: str(value)[:30])
def test_bad_input(change: dict[str, Any], error: type[Exception], words: str) -> None:
    good = {"dy": torch.ones(4, 3), "w_down": torch.ones(3, 5), "z": torch.ones(4, 5), "activation": "relu"}
    with pytest.raises(error, match=words):
        functional.hidden_gradient(**(good | change))
