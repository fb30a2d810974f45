"""Dropout in the adapters of an FFN: one mask for all paths, each adapter's own, and gradients by the same masks."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fusedlayers as fl
from fusedlayers import functional, planning, reference
from fusedlayers.functional.ffn import dropping
from fusedlayers.kernels.dropout import ADAPTER_PLACES, draw_seed, drop, keep_mask
from tests.functional.test_dropping import generator_state
from tests.functional.test_lora_ffn import ADAPTERS, H200, SCALES, assert_close_to_torch, inputs, outcome, problem
from tests.support.operands import DEVICE, DTYPES, infinities, needs_kernels, saved, seed_after

BACKENDS = ["torch", pytest.param("triton", marks=needs_kernels)]
ROWS, COLUMNS = 20, 70


def one(*shape: int) -> Tensor:
    return torch.ones(*shape, device=DEVICE)


def mask_of(name: str, training: bool, **options: Any) -> Tensor:
    """What a call drops of the ones that an adapter takes: all else lets it through."""
    x = torch.ones(ROWS, COLUMNS, device=DEVICE, requires_grad=training)
    nothing, same = torch.zeros(COLUMNS, COLUMNS, device=DEVICE), torch.eye(COLUMNS, device=DEVICE)
    weights = {"w_up": nothing, "w_gate": nothing, "w_down": nothing if name == "down" else same}
    biases = {f"b_{each}": one(COLUMNS) for each in ("up", "gate") if each != name}
    adapter = {f"{name}_a": same, f"{name}_b": same}
    options |= {"activation": "identity", "adapter_dropout_p": 0.5}
    return functional.lora_ffn(x, **weights, **biases, **adapter, **options).detach()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
def test_every_path_draws_the_same_masks(training: bool, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the generator moves on by one seed."""
    monkeypatch.setenv("FUSEDLAYERS_BACKEND", backend)
    seed = seed_after(5)
    masks = []
    for name, (row, column) in ADAPTER_PLACES.items():
        masks.append(keep_mask(seed, row, ROWS, COLUMNS, 0.5, torch.float32, column) * 2)
        torch.manual_seed(5)
        draw_seed(DEVICE)
        expected = generator_state()
        torch.manual_seed(5)
        assert torch.equal(mask_of(name, training), masks[-1])
        assert torch.equal(generator_state(), expected)
    kept = [mask != 0 for mask in masks]
    # Of two that have nothing to do with each other half of the elements are alike.
    alike = [one == other for one, other in itertools.combinations(kept, 2)]
    assert all(abs(share.float().mean() - 0.5) < 0.05 for share in (*kept, *alike))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
def test_gate_and_up_projection_may_share_a_mask(training: bool, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSEDLAYERS_BACKEND", backend)
    masks = []
    for name, shared in (("up", False), ("up", True), ("gate", True), ("gate", False)):
        torch.manual_seed(5)
        masks.append(mask_of(name, training, shared_dropout=shared))
    assert torch.equal(masks[0], masks[1])
    assert torch.equal(masks[0], masks[2])
    assert not torch.equal(masks[0], masks[3])


@needs_kernels
@pytest.mark.parametrize("ranks", [(4, 6, 3), (5, 0, 0), (0, 6, 0)], ids=str)
@pytest.mark.parametrize("wanted", [None, ("up_a",), ("gate_a", "x"), ADAPTERS], ids=str)
def test_a_shared_mask_is_close_to_torch(
    wanted: tuple[str, ...] | None, ranks: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FUSEDLAYERS_BACKEND", "triton")
    options = {"adapter_dropout_p": 0.25, "shared_dropout": True, "dropout_seed": draw_seed(DEVICE)}
    given = {} if wanted is None else {"wanted": wanted}
    assert_close_to_torch(inputs(ranks, gated=True, **given), activation="silu", **SCALES, **options)


def test_the_reference_shares_a_mask_of_torchs_generator() -> None:
    tensors = inputs((4, 4, 0), gated=True, dtype=torch.float64)
    tensors |= {"gate_a": tensors["up_a"]}
    torch.manual_seed(1)
    together = reference.lora_ffn(**tensors, adapter_dropout_p=0.5, shared_dropout=True)
    torch.manual_seed(1)
    x = F.dropout(tensors["x"], 0.5)
    up, gate = (F.linear(tensors["x"], tensors[f"w_{name}"], tensors[f"b_{name}"]) for name in ("up", "gate"))
    up, gate = up + x @ tensors["up_a"].T @ tensors["up_b"].T, gate + x @ tensors["up_a"].T @ tensors["gate_b"].T
    torch.testing.assert_close(together, F.linear(F.gelu(gate) * up, tensors["w_down"], tensors["b_down"]))


@needs_kernels
@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
@pytest.mark.parametrize("ranks", [(4, 6, 3), (0, 0, 3), (5, 0, 0), (0, 6, 0)], ids=str)
def test_close_to_torch(ranks: tuple[int, int, int], gated: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSEDLAYERS_BACKEND", "triton")
    options = {"adapter_dropout_p": 0.25, "dropout_seed": draw_seed(DEVICE)}
    assert_close_to_torch(inputs(ranks, gated=gated), activation="silu", **SCALES, **options)


@needs_kernels
@infinities
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dtypes_and_leading_dims(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSEDLAYERS_BACKEND", "triton")
    tensors = inputs((16, 17, 16), dtype=dtype, leading=(2, 19), bias=False)
    assert_close_to_torch(tensors, activation="gelu_tanh", adapter_dropout_p=0.1, dropout_seed=draw_seed(DEVICE))


def test_gradients_by_finite_differences() -> None:
    tensors = inputs((2, 3, 2), dtype=torch.float64, leading=(3,), sizes=(4, 5, 3))
    seed = draw_seed(DEVICE)
    names = [name for name, tensor in tensors.items() if tensor.requires_grad]

    def call(*given: Tensor) -> Tensor:
        named = dict(zip(names, given, strict=True))
        return functional.lora_ffn(**named, activation="silu", **SCALES, adapter_dropout_p=0.5, dropout_seed=seed)

    assert torch.autograd.gradcheck(call, tuple(tensors.values()), fast_mode=True)


@needs_kernels
def test_no_mask_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """The seed beside what is kept without dropout."""
    monkeypatch.setenv("FUSEDLAYERS_BACKEND", "triton")
    tensors = inputs((8, 8, 8), wanted=("x", *ADAPTERS), sizes=(32, 64, 32))
    made = saved(lambda: functional.lora_ffn(**tensors, activation="silu", adapter_dropout_p=0.5), *tensors.values())
    assert sorted(tuple(tensor.shape) for tensor in made) == [(1,), (37, 8), (37, 16), (37, 64), (37, 64)]


@needs_kernels
def test_torch_on_a_gpu_keeps_no_mask_either(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU, too, the kernel drops what plain calls compute, by the masks of the reference."""
    places: list[int] = []

    def launched(values: Tensor, seed: Tensor, dropout_p: float, first_row: int) -> Tensor:
        places.append(first_row)
        return drop(values, seed, dropout_p, first_row)

    monkeypatch.setenv("FUSEDLAYERS_BACKEND", "torch")
    tensors, seed = inputs(), draw_seed(DEVICE)
    theirs = outcome(reference.lora_ffn, tensors, adapter_dropout_p=0.25, seed=seed)
    monkeypatch.setattr(dropping, "_has_kernel", lambda values: True)
    monkeypatch.setattr(dropping.kernels, "drop", launched)
    ours = outcome(functional.lora_ffn, tensors, adapter_dropout_p=0.25, dropout_seed=seed)
    # Forward and backward.
    assert sorted(places) == sorted(2 * [row for row, _ in ADAPTER_PLACES.values()])
    for name, tensor in ours.items():
        torch.testing.assert_close(tensor, theirs[name])


def test_nothing_changes_without_a_probability(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: Any) -> None:
        raise AssertionError("a mask was drawn")

    tensors = inputs()
    state = generator_state()
    expected = functional.lora_ffn(**tensors)
    monkeypatch.setattr(dropping.kernels, "draw_seed", refused)
    assert torch.equal(functional.lora_ffn(**tensors, adapter_dropout_p=0.0), expected)
    # Nor where there is no adapter that could drop anything.
    plain = {name: tensor for name, tensor in tensors.items() if name not in ADAPTERS}
    functional.lora_ffn(**plain, adapter_dropout_p=0.5)
    assert torch.equal(generator_state(), state)


def test_planned_as_without_dropout() -> None:
    plain, dropping_too = (planning.plan(problem(adapter_dropout=drops), H200) for drops in (False, True))
    assert dropping_too.path == plain.path == "epilogue"
    assert dropping_too.epilogue == plain.epilogue
    assert dropping_too.saved_bytes == plain.saved_bytes
    assert dropping_too.workspace_bytes == plain.workspace_bytes + 2 * 8192 * 8192
    # In bfloat16, and booleans for each; x and hidden themselves are kept for adapters without dropout alone.
    dropped = (2 + 1) * 8192 * (2 * 2048 + 8192) - 2 * 8192 * (2048 + 8192)
    assert problem(adapter_dropout=True).kept_by_torch(H200) == problem().kept_by_torch(H200) + dropped
    # With one mask x is dropped once.
    shared = problem(adapter_dropout=True, shared_dropout=True).kept_by_torch(H200)
    assert shared == problem(adapter_dropout=True).kept_by_torch(H200) - (2 + 1) * 8192 * 2048


def test_explained_and_verified() -> None:
    tensors = inputs((4, 0, 3), bias=False)
    text = fl.explain(functional.lora_ffn, **tensors, activation="silu", adapter_dropout_p=0.5, details=True)
    assert "h W_downᵀ + s (dropout(h) Aᵀ) Bᵀ, h = act(x W_gateᵀ) ⊙ (x W_upᵀ + s (dropout(x) Aᵀ) Bᵀ)" in text
    assert "ranks up 4, gate 0, down 3, dropout in the adapters, float32" in text
    seed = draw_seed(DEVICE)
    assert fl.verify(functional.lora_ffn, **tensors, adapter_dropout_p=0.5, dropout_seed=seed).ok
    with pytest.raises(ValueError, match="draws random numbers"):
        fl.verify(functional.lora_ffn, **tensors, adapter_dropout_p=0.5)


@pytest.mark.parametrize("dropout_p", [-0.1, 1.0, 1.5, float("nan")])
def test_a_wrong_probability_is_named(dropout_p: float) -> None:
    with pytest.raises(ValueError, match=r"adapter_dropout_p must be a number in"):
        functional.lora_ffn(**inputs(), adapter_dropout_p=dropout_p)


@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        ({"adapter_dropout_p": "0.5"}, TypeError, "adapter_dropout_p must be a number"),
        ({"adapter_dropout_p": True}, TypeError, "adapter_dropout_p must be a number"),
        ({"dropout_seed": torch.ones(1)}, TypeError, r"dropout_seed of shape \[1\].*torch.int64"),
        ({"dropout_seed": 3}, TypeError, "dropout_seed must be a torch.Tensor or None"),
        ({"shared_dropout": 1}, TypeError, r"shared_dropout must be True or False, got 1 \(int\)"),
        (
            {"shared_dropout": True, "w_gate": None, "b_gate": None, "gate_a": None, "gate_b": None},
            ValueError,
            "shared_dropout must be False, because w_gate is None",
        ),
    ],
)
def test_wrong_arguments(wrong: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        functional.lora_ffn(**(inputs() | wrong))
