"""The FFN's operands and upstream gradients in any layout, tied weights, and how rows of hidden units lie."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fusedlayers import functional, reference
from fusedlayers.closeness import assert_all_close
from fusedlayers.kernels import gemm_epilogue as kernels
from fusedlayers.kernels.matmul.arithmetic import Arithmetic
from fusedlayers.kernels.tuning import EpilogueTiles
from tests.functional.test_ffn import GATED, exact_case
from tests.support.operands import (
    DEVICE,
    DTYPES,
    EPILOGUE,
    INTEGERS,
    PATHS,
    Tensors,
    assert_equal,
    ffn_inputs,
    in_float64,
    like_result,
    on_path,
    results,
)


def strided_vector(tensor: Tensor) -> Tensor:
    return torch.stack((tensor, torch.full_like(tensor, math.nan)), -1)[..., 0]


# The same values in another layout; what lies between them is NaN.
LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "sliced, odd row stride": lambda t: torch.cat((t, torch.full_like(t[..., :1], math.nan)), -1)[..., : t.shape[-1]],
    "middle of three chunks": lambda t: torch.cat((t * math.nan, t, t * math.nan), -1).chunk(3, -1)[1],
    "every other column": strided_vector,
    "transposed": lambda t: t.mT.contiguous().mT if t.dim() > 1 else strided_vector(t),
    "first axis last": lambda t: t.movedim(0, -1).contiguous().movedim(-1, 0),
    "one element off": lambda t: torch.cat((t.new_full((1,), math.nan), t.flatten()))[1:].view(t.shape),
}


@pytest.mark.sampled(together=2)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("path", [*PATHS[:2], EPILOGUE])
def test_layouts_change_nothing(path: str, dtype: torch.dtype, layout: str) -> None:
    """All operands and the gradient of y at once, in exact integers."""
    inputs, dy = exact_case(True, dtype, (2, 19))
    lay = LAYOUTS[layout]
    strided = {name: None if tensor is None else lay(tensor) for name, tensor in inputs.items()}
    assert_equal(strided, inputs)
    with on_path(path) as options:
        expected = results(functional.ffn, inputs, dy, activation="relu", **options)
        assert_equal(results(functional.ffn, strided, lay(dy), activation="relu", **options), expected)


@pytest.mark.parametrize("path", [*PATHS[:2], EPILOGUE])
def test_expanded_operands_change_nothing(path: str) -> None:
    """Stride 0: rows of x that are one row, biases that are one number, and the gradient that ``.sum()`` sends back."""
    inputs, _ = exact_case(False, torch.float32, (4, 5))
    for name in ("b_up", "b_down"):
        bias = inputs[name]
        assert bias is not None
        inputs[name] = bias[:1].expand(len(bias))
    inputs["x"] = inputs["x"][:1, :1].expand(4, 5, -1)
    inputs["residual"] = inputs["residual"][:, :1].expand(4, 5, -1)
    dy = torch.ones(1, 1, 1, device=DEVICE).expand(4, 5, 6)
    dense = {name: None if tensor is None else tensor.contiguous() for name, tensor in inputs.items()}
    with on_path(path) as options:
        ours = results(functional.ffn, inputs, dy, activation="relu", **options)
        assert_equal(ours, results(functional.ffn, dense, dy.contiguous(), activation="relu", **options))


@pytest.mark.parametrize(
    "consume",
    [
        pytest.param(lambda y, g: y.sum() + 0 * g.sum(), id="sum"),
        pytest.param(lambda y, g: (torch.cat((g, y), -1) * torch.cat((y.detach(), g), -1)).sum(), id="cat"),
        pytest.param(lambda y, g: (y.split(3, -1)[1] * g[..., 3:6]).sum(), id="split"),
        pytest.param(lambda y, g: (y.mT @ g).square().sum(), id="transposed"),
    ],
)
@pytest.mark.parametrize("path", [*PATHS[:2], EPILOGUE])
def test_gradients_as_other_operations_send_them(path: str, consume: Callable[..., Tensor]) -> None:
    inputs = ffn_inputs((2, 19), 9, 21, 7, residual=True)
    weight = like_result(inputs)

    def run(call: Callable[..., Tensor], tensors: Tensors, g: Tensor, **options: Any) -> dict[str, Tensor | None]:
        named = {name: tensor.detach().requires_grad_() for name, tensor in tensors.items() if tensor is not None}
        found = torch.autograd.grad(consume(call(**named, **options), g), list(named.values()))
        return dict(zip(named, found, strict=True))

    with on_path(path) as options:
        ours = run(functional.ffn, inputs, weight, **options)
    theirs, truth = run(reference.ffn, inputs, weight), run(reference.ffn, in_float64(inputs), weight.double())
    assert_all_close(ours, theirs, truth, independent=38 * 21)


@pytest.mark.parametrize("create_graph", [False, True])
@pytest.mark.parametrize("path", [*PATHS, EPILOGUE])
def test_tied_weights(path: str, create_graph: bool) -> None:
    """One parameter is w_up, w_gate and, transposed, w_down; another is x and residual: their gradients add up."""
    tied = ffn_inputs(13, 9, 21, 9)

    def run(call: Callable[..., Tensor], dtype: torch.dtype, **options: Any) -> dict[str, Tensor]:
        x, w = (tied[name].to(dtype).detach().requires_grad_() for name in ("x", "w_up"))
        y = call(x, w, w.T, w_gate=w, residual=x, activation="silu", **options)
        dx, dw = torch.autograd.grad(y.square().sum(), (x, w), create_graph=create_graph)
        return {"dx": dx.detach(), "dw": dw.detach()}

    with on_path(path) as options:
        ours = run(functional.ffn, torch.float32, **options)
    theirs, truth = run(reference.ffn, torch.float32), run(reference.ffn, torch.float64)
    assert_all_close(ours, theirs, truth, independent=13 * 21)


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
