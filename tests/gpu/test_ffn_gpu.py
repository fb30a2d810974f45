"""The FFN's kernels on a GPU: against float64, layouts, special values, autocast, and the same bits every time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from fusedlayers import functional, reference
from fusedlayers.closeness import assert_all_close, assert_close
from fusedlayers.kernels.activations import ACTIVATIONS
from tests.gpu.exact import exact_ffn
from tests.support.operands import (
    DEVICE,
    Tensors,
    assert_equal,
    assert_ffn_close,
    ffn_inputs,
    in_float64,
    leaves,
    like_result,
    on_path,
    results,
)

BFLOAT16, FLOAT16, FLOAT32 = torch.bfloat16, torch.float16, torch.float32
PLAIN_OR_GATED = pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
# (tokens, d_model, d_ff): a common one, one that no tile divides, and rows that are no multiple of 16 bytes.
SIZES = [(4096, 256, 1024), (4096, 64, 256), (1000, 128, 488), (777, 101, 333)]


def dtype_name(value: object) -> str:
    return str(value).removeprefix("torch.")


# The gate multiplies whatever the activation gives, so every pair in one dtype will do.
GATED_IN = {BFLOAT16: tuple(ACTIVATIONS), FLOAT16: ("gelu", "silu"), FLOAT32: ("silu",)}


@pytest.mark.parametrize(
    ("activation", "dtype", "gated"),
    [(activation, dtype, False) for dtype in GATED_IN for activation in ACTIVATIONS]
    + [(activation, dtype, True) for dtype, activations in GATED_IN.items() for activation in activations],
    ids=dtype_name,
)
def test_every_activation(activation: str, dtype: torch.dtype, gated: bool) -> None:
    with on_path("kernels") as options:
        inputs = ffn_inputs(1500, 64, 200, 64, dtype, gated=gated)
        assert_ffn_close(functional.ffn, inputs, options=options, activation=activation)


@PLAIN_OR_GATED
@pytest.mark.parametrize(
    ("size", "dtype"),
    # The widest rows of float32 do not fit on chip.
    [(size, dtype) for size in SIZES for dtype in GATED_IN if dtype != FLOAT32 or size[1] <= 128],
    ids=dtype_name,
)
def test_sizes(size: tuple[int, int, int], dtype: torch.dtype, gated: bool) -> None:
    tokens, d_model, d_ff = size
    inputs = ffn_inputs(tokens, d_model, d_ff, d_model, dtype, gated=gated, residual=True)
    activation = "silu" if gated else "gelu_tanh"
    with on_path("kernels") as options:
        assert_ffn_close(functional.ffn, inputs, options=options, activation=activation)
        assert_ffn_close(functional.ffn, inputs, options=options, activation=activation, dropout_p=0.1, manual_seed=3)


def test_long_sums() -> None:
    """The weight gradients of many tokens: the longest sums there are."""
    inputs = ffn_inputs(131_072, 64, 256, 64, BFLOAT16)
    with on_path("kernels") as options:
        assert_ffn_close(functional.ffn, inputs, options=options, activation="gelu_tanh")


@PLAIN_OR_GATED
def test_chunks_are_right(gated: bool) -> None:
    inputs = ffn_inputs(3000, 512, 1024, 512, BFLOAT16, gated=gated, residual=True)
    with on_path("chunked", chunk_rows=1024) as options:
        assert_ffn_close(functional.ffn, inputs, options=options, activation="silu", dropout_p=0.1, manual_seed=3)


@pytest.fixture
def tf32() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    yield
    torch.set_float32_matmul_precision(before)


def test_tf32_where_torch_is_allowed_it(tf32: None) -> None:
    inputs = ffn_inputs(1000, 64, 200, 64, FLOAT32)
    dy = like_result(inputs)
    truth = results(reference.ffn, in_float64(inputs), dy.double())
    with on_path("kernels") as options:
        ours = results(functional.ffn, inputs, dy, **options)
    theirs = results(reference.ffn, inputs, dy)
    # TF32 has float16's mantissa.
    assert_all_close(ours, theirs, truth, computed_in=FLOAT16, independent=1000 * 200)
    errors = [float((result["y"] - truth["y"]).abs().max()) for result in (ours, theirs)]
    assert min(errors) > 1e-4, f"{errors} are the errors of IEEE products: nobody used TF32"


@PLAIN_OR_GATED
@pytest.mark.parametrize("size", [(50_000, 64, 256), (20_000, 256, 1024)], ids=str)
def test_the_same_bits_every_time(size: tuple[int, int, int], gated: bool, poisoned_memory: None) -> None:
    tokens, d_model, d_ff = size
    inputs = ffn_inputs(tokens, d_model, d_ff, d_model, BFLOAT16, gated=gated, residual=True)
    dy = like_result(inputs)
    runs = []
    with on_path("kernels") as options:
        for _ in range(10):
            torch.manual_seed(5)
            runs.append(results(functional.ffn, inputs, dy, activation="gelu", dropout_p=0.1, **options))
    for run in runs:
        for name, tensor in run.items():
            assert tensor is None or tensor.isfinite().all(), name
        assert_equal(run, runs[0])


def test_nothing_that_comes_in_is_written() -> None:
    inputs = leaves(ffn_inputs(1000, 64, 200, 64, BFLOAT16, gated=True, residual=True))
    dy = like_result(inputs)
    before = {name: None if tensor is None else tensor.detach().clone() for name, tensor in inputs.items()}
    dy_before = dy.clone()
    with on_path("kernels") as options:
        y = functional.ffn(**inputs, dropout_p=0.1, **options)
        y_before = y.detach().clone()
        wanted = [tensor for tensor in inputs.values() if tensor is not None]
        first = torch.autograd.grad(y, wanted, dy, retain_graph=True)
        second = torch.autograd.grad(y, wanted, dy)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert_equal(inputs, before)
    assert torch.equal(dy, dy_before)
    assert torch.equal(y, y_before)


def sliced(tensor: Tensor) -> Tensor:
    """The same matrix inside a wider one: 16-byte aligned rows that do not follow one another."""
    return torch.nn.functional.pad(tensor, (8, 24), value=float("nan"))[..., 8:-24]


def odd_rows(tensor: Tensor) -> Tensor:
    return torch.nn.functional.pad(tensor, (0, 1), value=float("nan"))[..., :-1]


def off_by_one(tensor: Tensor) -> Tensor:
    """Dense, but its base pointer is no multiple of 16 bytes."""
    return torch.cat([tensor.new_full((1,), float("nan")), tensor.flatten()])[1:].view(tensor.shape)


def transposed(tensor: Tensor) -> Tensor:
    return tensor.mT.contiguous().mT


def chunked(tensor: Tensor) -> Tensor:
    return torch.cat([tensor.new_full(tensor.shape, float("nan")), tensor], dim=-1).chunk(2, dim=-1)[1]


LAYOUTS = [sliced, odd_rows, off_by_one, transposed, chunked]
EXACT_SIZE = (3, 100), 64, 200, 64


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("names", [("x",), ("dy",), ("w_up", "w_down", "w_gate"), ("residual",)], ids="-".join)
def test_layouts(layout: Callable[[Tensor], Tensor], names: tuple[str, ...], poisoned_memory: None) -> None:
    inputs, dy, expected = exact_ffn(*EXACT_SIZE, BFLOAT16, gated=True, residual=True, activation="relu")
    inputs = {name: layout(t) if name in names and t is not None else t for name, t in inputs.items()}
    dy = layout(dy) if "dy" in names else dy
    with on_path("kernels") as options:
        assert_equal(results(functional.ffn, inputs, dy, activation="relu", **options), expected)


def test_strided_biases() -> None:
    inputs, dy, expected = exact_ffn(*EXACT_SIZE, BFLOAT16, gated=True, activation="relu")
    for name in ("b_up", "b_gate", "b_down"):
        bias = inputs[name]
        inputs = {**inputs, name: torch.stack([bias, torch.full_like(bias, float("nan"))], 1)[:, 0]}
    with on_path("kernels") as options:
        assert_equal(results(functional.ffn, inputs, dy, activation="relu", **options), expected)


def test_expanded_x_and_the_gradient_of_a_sum() -> None:
    """Stride 0 in x, and in dy, which is what ``sum().backward()`` sends."""
    inputs, _, _ = exact_ffn(1, 64, 200, 64, BFLOAT16, activation="relu")
    x = inputs["x"]
    dense = leaves({**inputs, "x": x.expand(100, 64).contiguous()})
    truth = leaves(in_float64(dense))
    expected = reference.ffn(**truth, activation="relu")
    expected.sum().backward()
    expanded = leaves({**inputs, "x": x.expand(100, 64)})
    with on_path("kernels") as options:
        y = functional.ffn(**expanded, activation="relu", **options)
    assert torch.equal(y, expected.to(BFLOAT16))
    y.sum().backward()
    for name, tensor in truth.items():
        if tensor is not None:
            ours = expanded[name]
            assert torch.equal(ours.grad, tensor.grad.to(BFLOAT16)), name


def test_tied_weights() -> None:
    inputs, dy, _ = exact_ffn(300, 64, 200, 64, BFLOAT16, activation="relu")

    def tied(x: Tensor, w: Tensor, **options: Any) -> Tensor:
        return functional.ffn(x, w, w.T, activation="relu", **options)

    pair = {"x": inputs["x"], "w": inputs["w_up"]}
    truth = results(lambda x, w: reference.ffn(x, w, w.T, activation="relu"), in_float64(pair), dy.double())
    theirs = results(lambda x, w: reference.ffn(x, w, w.T, activation="relu"), pair, dy)
    with on_path("kernels") as options:
        assert_all_close(results(tied, pair, dy, **options), theirs, truth, independent=300 * 200)


def pattern(tensor: Tensor) -> Tensor:
    """Where a tensor is NaN (3), +inf (1), -inf (2) or finite (0)."""
    return tensor.isnan() * 3 + tensor.isposinf() * 1 + tensor.isneginf() * 2


@PLAIN_OR_GATED
# tanh is left out: torch rounds it to 1 in 16 bits, so that its slope is 0 where the float32 slope in a kernel is not.
@pytest.mark.parametrize("facts", [{}, {"backend": "generic"}], ids=str)
@pytest.mark.parametrize("activation", ["relu", "gelu", "gelu_tanh", "silu"])
@pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT16], ids=dtype_name)
def test_nan_and_infinity_come_out_where_torch_has_them(
    dtype: torch.dtype, activation: str, facts: dict[str, Any], gated: bool
) -> None:
    clean = ffn_inputs(150, 32, 72, 32, dtype, gated=gated, residual=True)
    clean_dy = like_result(clean)
    names = [name for name, tensor in clean.items() if tensor is not None]
    with on_path("kernels", **facts) as options:
        for where in (*names, "dy"):
            for value in (float("nan"), float("inf"), -float("inf")):
                planted = {name: None if t is None else t.clone() for name, t in clean.items()} | {
                    "dy": clean_dy.clone()
                }
                target = planted[where]
                target.view(-1)[target.numel() // 3] = value
                dy = planted.pop("dy")
                ours = results(functional.ffn, planted, dy, activation=activation, **options)
                theirs = results(reference.ffn, planted, dy, activation=activation)
                # An infinity may saturate, a NaN stays.
                assert value == value or any(t is not None and t.isnan().any() for t in theirs.values()), where
                for name, tensor in theirs.items():
                    differ = 0 if tensor is None else int((pattern(ours[name]) != pattern(tensor)).sum())
                    assert not differ, f"{name}: {value} in {where}, {differ} of {tensor.numel()} elements differ"


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT32], ids=dtype_name)
def test_activations_far_out(dtype: torch.dtype, activation: str) -> None:
    """With one feature and weights of 1, y is the activation of x and dx its slope."""
    far = [0.0, -0.0, 1e-30, 1.0, -1.0, 20.0, -20.0, 1e4, -1e4, 1e30, -1e30, float("inf"), -float("inf"), float("nan")]
    one = torch.ones(1, 1, dtype=dtype, device=DEVICE)
    inputs = {"x": torch.tensor(far, dtype=dtype, device=DEVICE)[:, None], "w_up": one, "w_down": one}
    dy = torch.ones_like(inputs["x"])
    frozen = ("w_up", "w_down")
    with on_path("kernels") as options:
        ours = results(functional.ffn, inputs, dy, frozen, activation=activation, **options)
    theirs = results(reference.ffn, inputs, dy, frozen, activation=activation)
    truth = results(reference.ffn, in_float64(inputs), dy.double(), frozen, activation=activation)
    for name in ("y", "dx"):
        assert torch.equal(pattern(ours[name]), pattern(theirs[name])), (name, ours[name], theirs[name])
        finite = theirs[name].isfinite()
        assert_close(ours[name][finite], theirs[name][finite], truth[name][finite], name)


@pytest.mark.parametrize("autocast_dtype", [BFLOAT16, FLOAT16], ids=dtype_name)
@pytest.mark.parametrize(
    ("x_dtype", "weight_dtype"), [(FLOAT32, FLOAT32), (BFLOAT16, FLOAT32), (FLOAT32, BFLOAT16)], ids=dtype_name
)
def test_autocast(x_dtype: torch.dtype, weight_dtype: torch.dtype, autocast_dtype: torch.dtype) -> None:
    """The forward pass under autocast, the backward pass outside; each gradient in its tensor's dtype."""
    values = ffn_inputs(500, 64, 200, 64, BFLOAT16, gated=True)
    inputs = {name: None if t is None else t.to(x_dtype if name == "x" else weight_dtype) for name, t in values.items()}
    dy = like_result(values).to(autocast_dtype)

    def under_autocast(call: Callable[..., Tensor], **options: Any) -> Tensors:
        def cast(**tensors: Tensor | None) -> Tensor:
            with torch.autocast(DEVICE.type, autocast_dtype):
                return call(**tensors, activation="silu", **options)

        return results(cast, inputs, dy)

    with on_path("kernels") as path:
        ours = under_autocast(functional.ffn, **path)
    theirs = under_autocast(reference.ffn)
    truth = results(reference.ffn, in_float64(inputs), dy.double(), activation="silu")
    assert ours["y"].dtype == autocast_dtype
    coarsest = BFLOAT16 if BFLOAT16 in (x_dtype, weight_dtype, autocast_dtype) else autocast_dtype
    assert_all_close(ours, theirs, truth, computed_in=coarsest, independent=500 * 200)


@pytest.mark.parametrize("scale", [1.0, 2.0**60])
def test_a_gradient_scaler_skips_when_it_skips_for_torch(scale: float) -> None:
    values = ffn_inputs(300, 64, 200, 64, FLOAT32)
    outcomes = {}
    for name, call in (("ours", functional.ffn), ("torch", reference.ffn)):
        inputs = leaves({key: None if t is None else t.clone() for key, t in values.items()})
        weights = [t for key, t in inputs.items() if t is not None and key != "x"]
        optimizer = torch.optim.SGD(weights, lr=1e-3)
        scaler = torch.amp.GradScaler(DEVICE.type, init_scale=scale, growth_interval=1)
        with on_path("kernels") as path, torch.autocast(DEVICE.type, FLOAT16):
            y = call(**inputs, activation="gelu", **(path if name == "ours" else {}))
        scaler.scale(y.float().square().mean()).backward()
        before = [weight.detach().clone() for weight in weights]
        scaler.step(optimizer)
        scaler.update()
        moved = [not torch.equal(weight, old) for weight, old in zip(weights, before, strict=True)]
        outcomes[name] = (moved, scaler.get_scale())
    assert outcomes["ours"] == outcomes["torch"]
    moved, new_scale = outcomes["torch"]
    assert (any(moved), new_scale > scale) == ((True, True) if scale == 1 else (False, False))
