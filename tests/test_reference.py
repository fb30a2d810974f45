"""The reference against operations that torch's own modules spell, and the chunks' promise about memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fusedlayers import functional, planning, reference
from fusedlayers.closeness import assert_all_close
from fusedlayers.kernels.activations import ACTIVATIONS
from tests.operands import (
    INTEGERS,
    Allocations,
    Tensors,
    assert_equal,
    assert_ffn_close,
    ffn_inputs,
    in_float64,
    leaves,
    like_result,
    on_path,
    results,
    seed_after,
)

CPU = torch.device("cpu")


def filled(module: nn.Module, values: dict[str, Tensor | None]) -> nn.Module:
    module.double().load_state_dict({name: tensor.double() for name, tensor in values.items() if tensor is not None})
    return module


def test_the_ffn_of_a_sequential() -> None:
    for bias in (True, False):
        t = ffn_inputs((2, 5), 6, 18, 4, torch.float64, biases=("b_up", "b_down") if bias else (), device=CPU)
        sequential = nn.Sequential(nn.Linear(6, 18, bias=bias), nn.GELU(), nn.Linear(18, 4, bias=bias))
        names = {"0.weight": "w_up", "0.bias": "b_up", "2.weight": "w_down", "2.bias": "b_down"}
        expected = filled(sequential, {key: t[name] for key, name in names.items()})(t["x"])
        torch.testing.assert_close(reference.ffn(**t), expected)


def test_the_ffn_of_a_gated_block() -> None:
    """As Llama's MLP spells it: ``down(act(gate(x)) * up(x))``."""
    t = ffn_inputs((2, 5), 6, 18, 4, torch.float64, gated=True, residual=True, device=CPU)
    x = t["x"]
    hidden = F.silu(x @ t["w_gate"].T + t["b_gate"]) * (x @ t["w_up"].T + t["b_up"])
    expected = hidden @ t["w_down"].T + t["b_down"] + t["residual"]
    torch.testing.assert_close(reference.ffn(**t, activation="silu"), expected)


def test_the_ffn_of_a_transformer_layer() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 24, dropout=0.0, activation="relu").double()
    x = torch.randn(3, 5, 8, dtype=torch.float64)
    up, down = layer.linear1, layer.linear2
    ours = reference.ffn(x, up.weight, down.weight, up.bias, down.bias, activation="relu", residual=x)
    torch.testing.assert_close(ours, x + layer._ff_block(x))


@pytest.mark.parametrize("activation", [None, *ACTIVATIONS])
def test_gemm_gemm_is_two_batched_products(activation: str | None) -> None:
    a, b, c = (torch.randn(2, 3, *shape, dtype=torch.float64) for shape in ((5, 4), (4, 6), (6, 2)))
    middle = torch.einsum("...mk,...kn->...mn", a, b)
    middle = middle if activation is None else ACTIVATIONS[activation].torch(middle)
    expected = torch.einsum("...mn,...no->...mo", middle, c)
    torch.testing.assert_close(reference.gemm_gemm(a, b, c, activation=activation), expected)


def test_dropout_of_the_reference_is_torchs() -> None:
    t = ffn_inputs(30, 6, 18, 4, device=CPU)
    torch.manual_seed(8)
    ours = reference.ffn(**t, dropout_p=0.4)
    torch.manual_seed(8)
    hidden = F.dropout(F.gelu(F.linear(t["x"], t["w_up"], t["b_up"])), 0.4)
    assert torch.equal(ours, F.linear(hidden, t["w_down"], t["b_down"]))


@pytest.mark.parametrize("dropout_p", [0.0, 0.5])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("chunk_rows", [1, 7, 30, 31, 64])
def test_chunks_of_any_size_give_the_same(chunk_rows: int, gated: bool, dropout_p: float) -> None:
    """Exact integers, so that the order of summation does not count; the mask does not restart at a chunk."""
    draw = INTEGERS[torch.float32]
    t = ffn_inputs(31, 5, 18, 4, gated=gated, residual=True, draw=draw, device=CPU)
    dy = like_result(t, draw)
    seed = torch.tensor([99])
    arithmetic: dict[str, Any] = {"activation": "relu", "dropout_p": dropout_p, "seed": seed}
    expected = results(reference.ffn, t, dy, **arithmetic)
    names = ("x", "w_up", "w_down", "b_up", "b_down", "w_gate", "b_gate")
    tensors = tuple(t[name] for name in names)
    y = reference.ffn_chunked(*tensors, residual=t["residual"], chunk_rows=chunk_rows, **arithmetic)
    wanted = tuple(tensor is not None for tensor in tensors)
    gradients = reference.ffn_chunked_gradients(dy, tensors, wanted, chunk_rows=chunk_rows, **arithmetic)
    ours = {"y": y} | {f"d{name}": gradient for name, gradient in zip(names, gradients, strict=True)}
    assert_equal(ours, {name: expected.get(name) for name in ours})


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_chunks_are_summed_in_float32(dtype: torch.dtype) -> None:
    """3000 times one: 16 bits would stop counting at 2048 or at 256, chunk by chunk."""
    x, w, b = torch.ones(3000, 1, dtype=dtype), torch.ones(1, 1, dtype=dtype), torch.zeros(1, dtype=dtype)
    gradients = reference.ffn_chunked_gradients(
        torch.ones_like(x), (x, w, w, b, b, None, None), (False, *[True] * 4, False, False), chunk_rows=10,
        activation="identity",
    )  # fmt: skip
    found = [None if gradient is None else float(gradient) for gradient in gradients]
    assert found == [None, *[float(torch.tensor(3000.0).to(dtype))] * 4, None, None]


TOKENS, D_MODEL, D_FF = 96, 16, 64


def large(tensors: Tensors, path: str, chunk_limit: int | None, **arithmetic: Any) -> tuple[list[int], list[int]]:
    """Element counts of at least tokens × d_ff that the forward and the backward pass allocate."""
    named = leaves(tensors)
    counts = []
    with pytest.MonkeyPatch.context() as patch, on_path(path, None) as options:
        if chunk_limit is not None:
            patch.setattr(planning.gemm_gemm, "CHUNK_LIMIT", chunk_limit)
        with Allocations() as forward:
            y = functional.ffn(**named, **arithmetic, **options)
        dy = torch.randn_like(y)
        with Allocations() as backward:
            y.backward(dy)
    limit = y.shape[:-1].numel() * named["w_up"].shape[0]
    for pass_ in (forward, backward):
        assert pass_.elements, "nothing was recorded"
        counts.append([count for count in pass_.elements if count >= limit])
    return counts[0], counts[1]


@pytest.mark.parametrize("dropout_p", [0.0, 0.25])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_recompute_never_allocates_the_hidden(activation: str, gated: bool, dropout_p: float) -> None:
    tensors = ffn_inputs((4, TOKENS // 4), D_MODEL, D_FF, D_MODEL, gated=gated, residual=True, device=CPU)
    limit = 20 * D_FF * 4 * planning.gemm_gemm.CHUNK_COPIES
    arithmetic = {"activation": activation, "dropout_p": dropout_p}
    assert large(tensors, "chunked", limit, **arithmetic) == ([], [])
    # The recorder does see a hidden where there is one.
    assert all(large(tensors, "torch", limit, **arithmetic))


@pytest.mark.parametrize("tokens", [2, 33, 500])
def test_recompute_keeps_its_promise_however_small_the_problem(tokens: int) -> None:
    """Without a patched limit: a problem that would fit one chunk is cut all the same."""
    tensors = ffn_inputs(tokens, 1, D_FF, 1, gated=True, device=CPU)
    assert large(tensors, "chunked", None, dropout_p=0.25) == ([], [])


@pytest.mark.parametrize("problem_rows", [1, 2, 10, 10_000])
@pytest.mark.parametrize("limit_rows", [0, 1, 3, 100])
@pytest.mark.parametrize("gated", [False, True])
def test_a_chunk_stays_within_its_limit(
    problem_rows: int, limit_rows: int, gated: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = planning.Problem("ffn", 1, problem_rows, 8, 50, 8, "float16", gated=gated, recompute=True)
    row = 50 * 2 * (2 if gated else 1) * planning.gemm_gemm.CHUNK_COPIES
    monkeypatch.setattr(planning.gemm_gemm, "CHUNK_LIMIT", limit_rows * row + 1)
    rows = planning.gemm_gemm.choose_chunk_rows(problem)
    assert 1 <= rows <= max(1, min(limit_rows, problem_rows))


@pytest.mark.parametrize("gated", [False, True])
def test_recompute_is_as_exact_as_torch(gated: bool) -> None:
    tensors = ffn_inputs((4, TOKENS // 4), D_MODEL, D_FF, D_MODEL, gated=gated, residual=True)
    with on_path("chunked") as options:
        assert_ffn_close(functional.ffn, tensors, options=options, dropout_p=0.25, manual_seed=17)


def test_recompute_agrees_with_the_mask_it_drew() -> None:
    """The derivative along a random direction, by differences of two forward passes with the same seed."""
    tensors = in_float64(ffn_inputs(40, 6, 18, 6, gated=True, device=CPU))
    dy = torch.randn(40, 6, dtype=torch.float64)
    direction = {name: torch.randn_like(tensor) for name, tensor in tensors.items() if tensor is not None}

    def loss(step: float) -> Tensor:
        seed_after(21)
        moved = {name: tensors[name] + step * way for name, way in direction.items()}
        return (functional.ffn(**moved, activation="silu", dropout_p=0.5, **options) * dy).sum()

    with on_path("chunked") as options:
        seed_after(21)
        found = results(functional.ffn, tensors, dy, activation="silu", dropout_p=0.5, **options)
        difference = (loss(1e-6) - loss(-1e-6)) / 2e-6
    along = sum((found[f"d{name}"] * way).sum() for name, way in direction.items())
    torch.testing.assert_close(difference, along)


def test_chunked_float32_is_judged_by_the_rule() -> None:
    """The gradients of the chunked launcher itself, wanted one by one, against torch and float64."""
    t = ffn_inputs(31, 5, 18, 4, gated=True, device=CPU)
    dy = like_result(t)
    names = ("x", "w_up", "w_down", "b_up", "b_down", "w_gate", "b_gate")
    theirs, truth = results(reference.ffn, t, dy), results(reference.ffn, in_float64(t), dy.double())
    for position, name in enumerate(names):
        wanted = tuple(place == position for place in range(len(names)))
        found = reference.ffn_chunked_gradients(
            dy, tuple(t[other] for other in names), wanted, chunk_rows=7, activation="gelu"
        )
        assert [gradient is not None for gradient in found] == list(wanted)
        assert_all_close(
            {name: found[position]}, {name: theirs[f"d{name}"]}, {name: truth[f"d{name}"]}, independent=31 * 18
        )
