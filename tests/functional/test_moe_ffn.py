"""Experts: as close to float64 as a loop over experts, in every layout, for any routing, with every gradient."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor

from fusedlayers import functional, reference
from fusedlayers.kernels.activations import ACTIVATIONS
from tests.gpu.exact import assert_says_something
from tests.support.moe_operands import (
    CLAMPED,
    LAYOUTS,
    PATHS,
    ROUTINGS,
    assert_moe_close,
    how,
    like_x,
    moe_inputs,
    results,
    wide,
)
from tests.support.operands import (
    DEVICE,
    DTYPES,
    INTEGERS,
    assert_equal,
    in_eighths,
    infinities,
    needs_kernels,
    on_path,
)


@pytest.mark.sampled(together=2)
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("clamped", [False, True])
def test_every_layout(
    path: str, dtype: torch.dtype, gated: bool, bias: bool, layout: str, transposed: bool, clamped: bool
) -> None:
    shape: dict[str, Any] = {"gated": gated, "layout": layout, "transposed": transposed}
    options: dict[str, Any] = {"bias": bias, "draw": in_eighths(3.0) if clamped else torch.randn}
    draw = functools.partial(moe_inputs, 19, 24, 20, 3, 2, dtype, **shape, **options)
    assert_moe_close(draw, path=path, **how(**shape, **(CLAMPED if clamped and gated else {})))


@pytest.mark.sampled
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_activations(activation: str, gated: bool, dtype: torch.dtype) -> None:
    assert_moe_close(lambda: moe_inputs(19, 24, 20, 2, 1, dtype, gated=gated), activation=activation)


@pytest.mark.sampled(together=2)
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("k", [1, 3])
def test_any_routing(path: str, routing: str, k: int) -> None:
    """Empty experts, one that takes all, the same expert more than once, indices that are no expert."""
    assert_moe_close(lambda: moe_inputs((2, 13), 24, 20, 5, k, routing=routing), path=path)


@pytest.mark.sampled
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("changed", range(4))
@pytest.mark.parametrize("size", [1, 3, 15, 17, 33, 65])
def test_sizes_one_at_a_time(path: str, changed: int, size: int) -> None:
    sizes = [17, 24, 20, 3]
    sizes[changed] = size
    tokens, K, N, E = sizes
    # Enough rows for each of many experts: of one or two, torch may have summed up a lucky few.
    tokens = max(tokens, 8 * E)
    assert_moe_close(lambda: moe_inputs(tokens, K, N, E, min(2, E)), path=path, draws=6 if E > 9 else None)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("k", [5, 8])
def test_many_experts_of_each_token(path: str, k: int) -> None:
    assert_moe_close(lambda: moe_inputs(9, 24, 20, 9, k), path=path)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("tokens", "K", "N", "E", "k"),
    [(0, 8, 6, 3, 2), (5, 0, 6, 3, 2), (5, 8, 0, 3, 2), (5, 8, 6, 0, 2), (5, 8, 6, 3, 0)],
)
def test_nothing_to_compute(path: str, tokens: int, K: int, N: int, E: int, k: int) -> None:
    tensors = moe_inputs((2, tokens), K, N, E, k, routing="random" if E else "nobody")
    with on_path(path):
        found = results(functional.moe_ffn, tensors, like_x(tensors))
    # A bias is all that is left of experts without hidden units.
    expected = results(reference.moe_ffn, tensors, like_x(tensors))
    torch.testing.assert_close({"y": found["y"]}, {"y": expected["y"]})
    for name, gradient in found.items():
        tensor = tensors.get(name.removeprefix("d"))
        assert tensor is None or (gradient is not None and gradient.shape == tensor.shape), name


@needs_kernels
@pytest.mark.sampled
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("routing", ["repeated", "one takes all", "sentinels"])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("recompute", [False, True])
def test_exact_integers(dtype: torch.dtype, routing: str, gated: bool, recompute: bool) -> None:
    """More rows of an expert than a tile has, in several tiles of columns, and blocks without a backward pass."""
    draw = INTEGERS[torch.bfloat16 if dtype != torch.float32 else torch.float16]
    tensors = moe_inputs(140, 40, 36, 3, 2, dtype, gated=gated, routing=routing, draw=draw)
    dy = like_x(tensors, draw)
    options: dict[str, Any] = {"activation": "relu"}
    truth = results(reference.moe_ffn, wide(tensors), dy.double(), **options)
    expected = {name: None if tensor is None else tensor.to(dtype) for name, tensor in truth.items()}
    assert max(float(t.abs().max()) for t in truth.values() if t is not None) <= 2 / torch.finfo(dtype).eps
    assert_says_something(expected)
    with on_path("epilogue"):
        assert_equal(results(functional.moe_ffn, tensors, dy, recompute=recompute, **options), expected)
        with torch.no_grad():
            assert_equal({"y": functional.moe_ffn(**tensors, **options)}, {"y": expected["y"]})


@needs_kernels
@pytest.mark.parametrize("each", [4, 40, 100])
def test_without_a_backward_pass_rows_are_in_smaller_blocks(each: int) -> None:
    """So many rows for each expert: a block holds them all, or it is the largest."""
    for dtype in DTYPES:
        draw = INTEGERS[torch.bfloat16 if dtype != torch.float32 else torch.float16]
        tensors = moe_inputs(each * 2, 40, 36, 4, 2, dtype, draw=draw)
        truth = reference.moe_ffn(**wide(tensors), activation="relu")
        with on_path("epilogue"), torch.no_grad():
            assert_equal({"y": functional.moe_ffn(**tensors, activation="relu")}, {"y": truth.to(dtype)})


@pytest.mark.bits
@needs_kernels
def test_layouts_change_nothing() -> None:
    """Operands with gaps, transposed, parts of larger tensors: the same bits."""
    tensors = moe_inputs((2, 9), 24, 20, 3, 2)
    dy = like_x(tensors)
    with on_path("epilogue"):
        expected = results(functional.moe_ffn, tensors, dy)
        strided = {name: None if t is None else _with_gaps(t) for name, t in tensors.items()}
        assert_equal(results(functional.moe_ffn, strided, dy), expected)
        turned = {n: t if t is None or t.dim() < 3 else t.mT.contiguous().mT for n, t in tensors.items()}
        assert_equal(results(functional.moe_ffn, turned, dy), expected)
        assert_equal(results(functional.moe_ffn, tensors, _with_gaps(dy)), expected)
        once = like_x(tensors)[:1, :1].expand_as(dy)
        assert_equal(
            results(functional.moe_ffn, tensors, once), results(functional.moe_ffn, tensors, once.contiguous())
        )


def _with_gaps(tensor: Tensor) -> Tensor:
    larger = tensor.new_zeros(*tensor.shape[:-1], 2 * tensor.shape[-1])
    larger[..., ::2] = tensor
    return larger[..., ::2]


@needs_kernels
@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("recompute", [False, True])
def test_what_nobody_writes_is_never_read(recompute: bool) -> None:
    for routing in ("random", "sentinels", "nobody"):
        tensors = moe_inputs(19, 24, 20, 5, 2, routing=routing)
        with on_path("epilogue"):
            found = results(functional.moe_ffn, tensors, like_x(tensors), recompute=recompute)
        assert all(t is None or bool(t.isfinite().all()) for t in found.values()), routing


@pytest.mark.bits
@infinities
@pytest.mark.parametrize("path", PATHS)
def test_special_values_stay_where_they_are(path: str) -> None:
    """NaN in a token, in an expert that nobody takes, and in the weight of an index that is no expert.

    In exact integers, as a product may round a row otherwise among other rows.
    """
    tensors = moe_inputs(12, 24, 20, 4, 2, routing="first and last", draw=INTEGERS[torch.float16])
    x, index, weights, w_up, b_down = (tensors[n] for n in ("x", "top_k_index", "top_k_weights", "w_up", "b_down"))
    right = reference.moe_ffn(**wide(tensors), activation="relu").to(x.dtype)
    with on_path(path):
        w_up[1], b_down[2] = torch.inf, torch.nan
        index[3, 0], weights[3, 0] = 4, torch.nan
        without = functional.moe_ffn(**tensors, activation="relu")
        x[5] = torch.nan
        index[7], upstream = 4, torch.zeros_like(x)
        upstream[7] = torch.nan
        found = results(functional.moe_ffn, tensors, upstream, activation="relu")
    others = [row for row in range(12) if row not in (3, 5, 7)]
    for same in (without, found["y"]):
        assert torch.equal(same[others], right[others])
    assert bool(without.isfinite().all())
    y, dw_up, dx, dweights = (found[name] for name in ("y", "dw_up", "dx", "dtop_k_weights"))
    assert bool(y[5].isnan().all())
    assert bool((dw_up[1:3] == 0).all())
    assert bool(dx[others].isfinite().all())
    assert bool((dx[7] == 0).all())
    assert bool((dweights[7] == 0).all())


@infinities
@needs_kernels
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("gated", [False, True])
def test_columns_behind_the_hidden_units(gated: bool, transposed: bool) -> None:
    """They are in no sum, whatever the activation is at 0 and the upstream gradient times 0."""
    shape: dict[str, Any] = {"gated": gated, "transposed": transposed}
    options = how(**shape, activation="sigmoid", up_offset=9.0 if gated else 0.0)
    tensors = moe_inputs(12, 24, 20, 3, 2, bias=False, routing="first and last", **shape)
    w_down = tensors["w_down"]
    # So that every term of the sums for the tokens' weights is positive: one infinite gradient makes them infinite.
    w_down.abs_()
    dy = like_x(tensors).abs()
    dy[3, 5] = torch.inf
    with on_path("epilogue"):
        clean = results(functional.moe_ffn, tensors, dy, **options)
        for name in ("w_up", "w_down", "w_gate"):
            if (weight := tensors[name]) is not None:
                weight[1] = torch.nan
        found = results(functional.moe_ffn, tensors, dy, **options)
    gradient = found["dtop_k_weights"]
    assert bool((gradient[3] == torch.inf).all())
    assert bool(gradient[:3].isfinite().all())
    assert_equal({"dtop_k_weights": gradient}, {"dtop_k_weights": clean["dtop_k_weights"]})


@pytest.mark.bits
@needs_kernels
def test_the_same_bits_every_time() -> None:
    tensors = moe_inputs(40, 24, 20, 3, 2, torch.float16, routing="repeated")
    dy = like_x(tensors)
    with on_path("epilogue"):
        first = results(functional.moe_ffn, tensors, dy)
        assert_equal(results(functional.moe_ffn, tensors, dy), first)
        # What is computed anew is what was kept.
        assert_equal(results(functional.moe_ffn, tensors, dy, recompute=True), first)


@needs_kernels
@pytest.mark.parametrize("recompute", [False, True])
def test_what_is_kept(recompute: bool) -> None:
    """The input, the routing, and unless it is recomputed each pre-activation once."""
    tokens, K, N, E, k = 150, 24, 20, 3, 2
    tensors = moe_inputs(tokens, K, N, E, k, torch.float16, bias=False)
    inputs = {n: t if t is None or not t.is_floating_point() else t.requires_grad_() for n, t in tensors.items()}
    known = {t.untyped_storage().data_ptr() for t in inputs.values() if t is not None}
    kept: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with on_path("epilogue"), torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        functional.moe_ffn(**inputs, recompute=recompute)
    rows = (tokens * k + E * 127) // 128 * 128
    routing = 4 * (rows + tokens * k + rows // 128 + E + 1 + 16)
    assert sum(kept.values()) <= routing + (0 if recompute else 2 * 2 * rows * N)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("weights_dtype", [torch.float32, torch.float64])
def test_weights_of_another_dtype(path: str, weights_dtype: torch.dtype) -> None:
    draw = functools.partial(moe_inputs, 19, 24, 20, 3, 2, torch.float16, weights_dtype=weights_dtype)
    assert_moe_close(draw, path=path)
    tensors = draw()
    with on_path(path):
        found = results(functional.moe_ffn, tensors, like_x(tensors))
    weights, y = found["dtop_k_weights"], found["y"]
    assert weights is not None and weights.dtype == weights_dtype  # noqa: PT018
    assert y is not None and y.dtype == torch.float16  # noqa: PT018


@pytest.mark.parametrize("path", PATHS)
def test_indices_of_32_bits(path: str) -> None:
    tensors = moe_inputs(19, 24, 20, 3, 2, routing="sentinels")
    index = tensors["top_k_index"]
    with on_path(path):
        expected = results(functional.moe_ffn, tensors, like_x(tensors) * 0 + 1)
        found = results(functional.moe_ffn, tensors | {"top_k_index": index.int()}, like_x(tensors) * 0 + 1)
    assert_equal(found, expected)


@pytest.mark.bits
@pytest.mark.parametrize("path", PATHS)
def test_autocast(path: str) -> None:
    tensors = moe_inputs((2, 9), 24, 20, 3, 2)
    inputs = {n: t if t is None or not t.is_floating_point() else t.requires_grad_() for n, t in tensors.items()}
    with on_path(path), torch.autocast(DEVICE.type, torch.float16):
        y = functional.moe_ffn(**inputs)
    assert y.dtype == torch.float16
    y.sum().backward()
    assert {t.grad.dtype for t in inputs.values() if t is not None and t.grad is not None} == {torch.float32}
    narrow = {n: t if t is None or not t.is_floating_point() else t.detach().half() for n, t in inputs.items()}
    narrow["top_k_weights"] = inputs["top_k_weights"]
    with on_path(path):
        assert torch.equal(functional.moe_ffn(**narrow), y)
