"""Which operands of a wide FFN the warp-specialised kernels read as they lie."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from fusedlayers.functional.ffn.arguments import generic_operand
from tests.support.operands import Tensors, ffn_inputs

WIDTH, HIDDEN = 512, 72


def named(changes: dict[str, Callable[[Tensor], Tensor]], gated: bool = True, width: int = WIDTH) -> str:
    """What is named after these changes; the last bias and the residual may lie anyhow."""
    tensors: Tensors = ffn_inputs(16, width, HIDDEN, width, torch.bfloat16, gated=gated)
    for name, change in changes.items():
        original = tensors[name]
        tensors[name] = change(original)
        assert torch.equal(tensors[name], original)
    return generic_operand(**{name: each for name, each in tensors.items() if name not in ("b_down", "residual")})  # type: ignore[arg-type]


def transposed(t: Tensor) -> Tensor:
    return t.T.contiguous().T


def sliced(t: Tensor) -> Tensor:
    return torch.nn.functional.pad(t, (8, 8))[..., 8:-8]


def one_further(t: Tensor) -> Tensor:
    return torch.nn.functional.pad(t, (1, 7))[..., 1:-7]


def odd_rows(t: Tensor) -> Tensor:
    return torch.nn.functional.pad(t, (0, 1))[..., :-1]


def with_gaps(t: Tensor) -> Tensor:
    return torch.stack((t, t), -1)[..., 0]


MATRICES = ("x", "w_up", "w_down", "w_gate")


def test_what_lies_as_it_was_made_is_read() -> None:
    assert named({}) == named({}, gated=False) == ""
    assert named(dict.fromkeys(MATRICES, sliced)) == ""


@pytest.mark.parametrize("role", MATRICES)
@pytest.mark.parametrize("change", [one_further, odd_rows, with_gaps])
def test_what_the_copy_engine_cannot_take_is_named(change: Callable[[Tensor], Tensor], role: str) -> None:
    assert named({role: change}) == role
    assert named({role: change}, width=64) == "", "narrow layers are not asked"


def test_weights_may_be_transposed_those_of_one_product_alike() -> None:
    assert named({"w_up": transposed, "w_down": transposed}, gated=False) == ""
    assert named({"w_down": transposed}) == ""
    assert named(dict.fromkeys(("w_up", "w_gate", "w_down"), transposed)) == ""
    assert named({"w_up": transposed}) == named({"w_gate": transposed}) == "w_gate"
    assert named({"x": transposed}) == "x"


def test_rows_of_transposed_weights_are_aligned_too() -> None:
    """In memory a row of w_up has an element of each hidden unit."""
    assert named({"w_up": lambda t: one_further(t.T).T}, gated=False) == "w_up"
    assert named({"w_up": lambda t: odd_rows(t.T).T}, gated=False) == "w_up"
    assert named({"w_up": lambda t: sliced(t.T).T}, gated=False) == ""


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
@pytest.mark.parametrize("role", ["x", "w_up", "w_gate", "w_down", "b_up"])
def test_what_is_no_dense_matrix_is_for_the_checks(role: str) -> None:
    tensors = ffn_inputs(16, WIDTH, HIDDEN, WIDTH, torch.bfloat16, gated=True)
    original = tensors[role]
    names = (*MATRICES, "b_up", "b_gate")
    rows = original.reshape(-1, original.shape[-1])
    for other in (original.to_sparse(), rows.to_sparse_csr(), original.flatten()[0], rows[None].mT):
        generic_operand(**{name: other if name == role else tensors[name] for name in names})  # type: ignore[arg-type]


@pytest.mark.parametrize("role", ["b_up", "b_gate"])
def test_biases_have_no_gaps(role: str) -> None:
    assert named({role: with_gaps}) == role
    assert named({role: one_further}) == "", "any address will do"
