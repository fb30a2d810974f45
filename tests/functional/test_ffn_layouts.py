"""The FFN's operands and upstream gradients in any layout, tied weights, and how rows of hidden units lie."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from fusedlayers.kernels import gemm_epilogue as kernels
from fusedlayers.kernels.matmul.arithmetic import Arithmetic
from fusedlayers.kernels.tuning import EpilogueTiles
from tests.functional.test_ffn import GATED
from tests.support.operands import (
    INTEGERS,
    assert_equal,
    ffn_inputs,
    like_result,
)


@pytest.mark.parametrize("gated", GATED)
@pytest.mark.parametrize("inner", [16, 0], ids=["one kernel", "torch multiplies"])
@pytest.mark.parametrize(("units", "row"), [(37, 40), (40, 40), (24, 24)])
def test_rows_for_products_begin_with_a_sector(units: int, row: int, inner: int, gated: bool) -> None:
    """Of 32 bytes; where such rows of few hidden units end with one, a gate's gradients are halves of one matrix."""
    inputs = ffn_inputs(49, 5, units, 6, gated=gated, draw=INTEGERS[torch.float32])
    dy = like_result(inputs, INTEGERS[torch.float32])
    x, w_up, b_up, w_gate, b_gate = (inputs[name] for name in ("x", "w_up", "b_up", "w_gate", "b_gate"))
    rest = (Arithmetic("relu", "exact", "ieee"), EpilogueTiles(32, 16, inner, 4, 1))
    plain = kernels.hidden(x, w_up, b_up, w_gate, b_gate, True, *rest)
    hidden, z, z_gate = kernels.hidden(x, w_up, b_up, w_gate, b_gate, True, *rest, for_products=True)
    kept = [z] if z_gate is None else [z, z_gate]
    # Torch's products lie as torch lays them.
    assert {(tuple(each.shape), each.is_contiguous()) for each in kept} == {((49, row if inner else units), True)}
    assert_equal({"z": z[:, :units]}, {"z": F.linear(x, w_up, b_up)})
    alone, *nothing = kernels.hidden(x, w_up, b_up, w_gate, b_gate, False, *rest, for_products=True)
    assert nothing == [None, None]
    assert_equal({"hidden": alone}, {"hidden": hidden})
    assert {(tuple(each.shape), each.stride()) for each in (hidden, alone)} == {((49, units), (row, 1))}
    pre_activations = [each if each is None else each[:, :units] for each in (z, z_gate)]
    assert_equal(dict(enumerate((hidden, *pre_activations))), dict(enumerate(plain)))
    gradient = (dy, inputs["w_down"], *pre_activations, True, 1, *rest)
    expected = kernels.hidden_gradient(*gradient, keep_hidden=True)
    found = kernels.hidden_gradient(*gradient, keep_hidden=True, for_products=True)
    assert_equal(found._asdict(), expected._asdict())
    assert found.hidden.stride() == (row, 1)
    together = gated and units == row and 2 * units < len(dy)
    assert found.dz.stride() == (2 * row if together else row, 1)
    if gated:
        assert (found.dz_gate.storage_offset() == found.dz.storage_offset() + units) == together
