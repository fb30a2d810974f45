"""The FFN with adapters of low rank: torch's path and the kernels against torch in the same dtype and in float64."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import fusedlayers as fl
from fusedlayers import functional, planning, reference
from fusedlayers.closeness import assert_all_close
from fusedlayers.functional.dispatch import decisions
from fusedlayers.kernels.gemm_epilogue import LowRank
from fusedlayers.kernels.matmul.low_rank import low_rank_copies
from fusedlayers.planning.lora_ffn import LoRAProblem
from tests.support import seeds
from tests.support.operands import (
    DEVICE,
    DTYPES,
    Tensors,
    assert_close_or_again,
    assert_draws_close,
    infinities,
    needs_kernels,
    saved,
)
from tests.support.records import H200

ADAPTERS = ("up_a", "up_b", "down_a", "down_b", "gate_a", "gate_b")
SCALES = {"up_scale": 0.5, "down_scale": 2.0, "gate_scale": 1.5}


def inputs(
    ranks: tuple[int, int, int] = (4, 6, 3),
    *,
    gated: bool = True,
    bias: bool = True,
    dtype: torch.dtype = torch.float32,
    leading: tuple[int, ...] = (37,),
    sizes: tuple[int, int, int] = (24, 40, 32),
    wanted: Sequence[str] | None = None,
    draw: Callable[..., Tensor] = torch.randn,
) -> dict[str, Tensor]:
    """x ~ N(0, 1), W, A and B ~ N(0, 1 / in), by name; ``ranks`` are those of up, gate and down, 0 for no adapter."""
    K, N, O = sizes
    linears = {"up": (N, K, ranks[0]), "gate": (N, K, ranks[1]), "down": (O, N, ranks[2])}
    found = {"x": draw(*leading, K, dtype=torch.float64)}
    for name, (outer, inner, rank) in linears.items():
        if name == "gate" and not gated:
            continue
        scale = inner**-0.5 if draw is torch.randn else 1
        found[f"w_{name}"] = draw(outer, inner, dtype=torch.float64) * scale
        if bias:
            found[f"b_{name}"] = draw(outer, dtype=torch.float64)
        if rank:
            found[f"{name}_a"] = draw(rank, inner, dtype=torch.float64) * scale
            # Gradients of high ranks would be beyond float16 otherwise.
            found[f"{name}_b"] = draw(outer, rank, dtype=torch.float64) * (rank**-0.5 if draw is torch.randn else 1)
    return {
        name: tensor.to(DEVICE, dtype).requires_grad_(wanted is None or name in wanted)
        for name, tensor in found.items()
    }


def outcome(call: Callable[..., Tensor], tensors: dict[str, Tensor], **options: Any) -> dict[str, Tensor | None]:
    """The result, and the gradients of what wants one, of a random upstream gradient."""
    y = call(**tensors, **options)
    leaves = {name: tensor for name, tensor in tensors.items() if tensor.requires_grad}
    found: dict[str, Tensor | None] = {"y": y.detach()}
    if leaves:
        upstream = torch.randn(y.shape, dtype=torch.float64, generator=seeds.generator(5)).to(y)
        gradients = torch.autograd.grad(y, list(leaves.values()), upstream, allow_unused=True)
        found |= {f"d{name}": gradient for name, gradient in zip(leaves, gradients, strict=True)}
    return found


def assert_close_to_torch(*draws: dict[str, Tensor], path: str = "epilogue", **options: Any) -> None:
    """The result and all gradients pass the closeness rule, all draws together."""
    assert_draws_close([compared(each, path, **options) for each in draws])


def compared(tensors: dict[str, Tensor], path: str = "epilogue", **options: Any) -> tuple[Tensors, Tensors, Tensors]:
    """Ours, torch's and the float64 results."""
    theirs_too = {"seed" if name == "dropout_seed" else name: value for name, value in options.items()}
    with decisions() as paths:
        ours = outcome(functional.lora_ffn, tensors, **options)
    assert set(paths) == {f"lora_ffn {path}"}
    wide = {name: tensor.detach().double().requires_grad_(tensor.requires_grad) for name, tensor in tensors.items()}
    theirs, truth = (outcome(reference.lora_ffn, given, **theirs_too) for given in (tensors, wide))
    return ours, theirs, truth


@pytest.fixture
def in_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSEDLAYERS_BACKEND", "triton")


def test_the_reference_is_that_of_merged_weights() -> None:
    tensors = inputs(dtype=torch.float64, leading=(2, 9))
    merged = {
        f"w_{name}": tensors[f"w_{name}"] + SCALES[f"{name}_scale"] * tensors[f"{name}_b"] @ tensors[f"{name}_a"]
        for name in ("up", "gate", "down")
    }
    plain = {name: tensor for name, tensor in tensors.items() if name not in ADAPTERS} | merged
    expected = reference.ffn(**plain, activation="silu")
    torch.testing.assert_close(reference.lora_ffn(**tensors, activation="silu", **SCALES), expected)


@needs_kernels
@pytest.mark.usefixtures("in_kernels")
@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
@pytest.mark.parametrize("ranks", list(itertools.product((0, 4), (0, 6), (0, 3))), ids=str)
def test_any_of_the_linears_is_adapted(ranks: tuple[int, int, int], gated: bool) -> None:
    assert_close_or_again(lambda _: compared(inputs(ranks, gated=gated), activation="silu", **SCALES))


@needs_kernels
@infinities
@pytest.mark.usefixtures("in_kernels")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rank", [1, 16, 33])
def test_ranks_and_dtypes(rank: int, dtype: torch.dtype) -> None:
    def drawn(_: int) -> tuple[Tensors, Tensors, Tensors]:
        tensors = inputs((rank, rank + 1, rank), dtype=dtype, leading=(2, 19), bias=False)
        return compared(tensors, activation="gelu_tanh", **SCALES)

    assert_close_or_again(drawn)


@needs_kernels
@pytest.mark.usefixtures("in_kernels")
def test_strided_operands_and_expanded_gradients() -> None:
    tensors = inputs(leading=(2, 3, 5))
    strided = {
        name: tensor.detach().mT.contiguous().mT.requires_grad_() if tensor.dim() > 1 else tensor
        for name, tensor in tensors.items()
    }

    def summed(call: Callable[..., Tensor], tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        y = call(**tensors, **SCALES)
        return {"y": y.detach()} | dict(zip(tensors, torch.autograd.grad(y.sum(), list(tensors.values())), strict=True))

    ours, theirs = summed(functional.lora_ffn, strided), summed(reference.lora_ffn, tensors)
    assert_all_close(ours, theirs, summed(reference.lora_ffn, {n: t.double() for n, t in tensors.items()}))


@needs_kernels
@pytest.mark.usefixtures("in_kernels", "poisoned_memory")
def test_ranks_whose_rows_are_padded() -> None:
    assert_close_to_torch(inputs((3, 2, 1)), activation="relu", **SCALES)


@pytest.mark.parametrize("rows", [0, 1])
def test_few_rows(rows: int) -> None:
    assert_close_to_torch(inputs(leading=(rows,)), path="torch", activation="silu", **SCALES)


def test_a_vector() -> None:
    tensors = inputs(leading=())
    assert functional.lora_ffn(**tensors).shape == (32,)


@needs_kernels
@pytest.mark.usefixtures("in_kernels")
def test_what_is_kept_for_the_backward_pass() -> None:
    """x, the pre-activations, and the products with A; and not a copy more of anything as large as the hidden."""
    wanted = ("x", *ADAPTERS)
    tensors = inputs((8, 8, 8), wanted=wanted, sizes=(32, 64, 32))
    made = saved(lambda: functional.lora_ffn(**tensors, activation="silu"), *tensors.values())
    assert sorted(tuple(tensor.shape) for tensor in made) == [(37, 8), (37, 16), (37, 64), (37, 64)]
    ranks = {"rank_up": 8, "rank_gate": 8, "rank_down": 8}
    plan = planning.plan(problem(M=37, K=32, N=64, O=32, dtype="float32", **ranks), H200, "triton")
    assert plan.saved_bytes == 4 * 37 * (32 + 8 + 16 + 64 + 64)


def test_autocast_takes_adapters_of_another_dtype() -> None:
    tensors = inputs()
    mixed = {name: t if name in ADAPTERS else t.detach().to(torch.bfloat16) for name, t in tensors.items()}
    with pytest.raises(TypeError, match=r"up_a of shape .* expected the dtype of x"):
        functional.lora_ffn(**mixed)
    with torch.autocast("cpu", torch.bfloat16):
        y = functional.lora_ffn(**mixed)
    y.sum().backward()
    assert y.dtype is torch.bfloat16
    assert all(mixed[name].grad.dtype is torch.float32 for name in ADAPTERS)  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"up_a": None}, ValueError, "up_a must be given with up_b"),
        ({"down_b": None}, ValueError, "down_b must be given with down_a"),
        ({"w_gate": None, "b_gate": None}, ValueError, "gate_a must be None, because w_gate is None"),
        (
            {"up_a": torch.ones(0, 24), "up_b": torch.ones(40, 0)},
            ValueError,
            r"up_a of shape \[0, 24\] .*: expected a rank of at least 1",
        ),
        ({"up_scale": "2"}, TypeError, "up_scale must be a finite number, got '2'"),
        ({"down_scale": True}, TypeError, "down_scale must be a finite number, got True"),
        ({"gate_scale": math.nan}, ValueError, "gate_scale must be a finite number, got nan"),
        ({"up_scale": -math.inf}, ValueError, "up_scale must be a finite number, got -inf"),
        ({"activation": "sine"}, ValueError, "sine"),
    ],
)
def test_wrong_arguments(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        functional.lora_ffn(**(inputs() | changes))


def test_explained() -> None:
    tensors = inputs((4, 0, 3), bias=False)
    text = fl.explain(functional.lora_ffn, **tensors, activation="silu", details=True)
    assert "lora_ffn: h W_downᵀ + s (h Aᵀ) Bᵀ, h = act(x W_gateᵀ) ⊙ (x W_upᵀ + s (x Aᵀ) Bᵀ), act = silu: z σ(z)" in text
    assert "ranks up 4, gate 0, down 3, float32, forward and backward" in text


def problem(**changes: Any) -> LoRAProblem:
    wanted = {"needs_data_gradient": True, "needs_adapter_gradient": True}
    sizes = {"batch": 1, "M": 8192, "K": 2048, "N": 8192, "O": 2048, "rank_up": 16, "rank_gate": 16, "rank_down": 16}
    return LoRAProblem(**{"operation": "lora_ffn", "dtype": "bfloat16", "gated": True} | sizes | wanted | changes)


def test_planned_as_the_ffn_without_adapters() -> None:
    plan = planning.plan(problem(), H200)
    assert plan.path == "epilogue"
    assert plan.epilogue.hidden_pipeline is not None
    assert plan.saved_bytes == 2 * 8192 * (2048 + 2 * 8192 + 3 * 16)
    unit, adapters = 2 * 8192 * 2048 * 8192, 2 * 8192 * 16 * 3 * (2048 + 8192)
    assert problem().model_flops == (3 * unit + adapters, 3 * unit + 2 * adapters)
    assert planning.plan(problem(M=64), H200).path == "torch"
    assert planning.plan(problem(K=64, O=64), H200).path == "torch"
    assert planning.plan(problem(dtype="float64"), H200, "triton").path == "torch"
    inference = problem(needs_data_gradient=False, needs_adapter_gradient=False)
    assert inference.model_flops[1] == planning.plan(inference, H200).saved_bytes == 0


def test_copies_by_tma() -> None:
    """What is copied where: the gate's columns of u are behind those of up, and all begin and end at 16 bytes."""
    blocks = (64, 64), (64, 64)
    u, up, gate = (torch.zeros(*size, dtype=torch.bfloat16) for size in ((64, 24), (128, 8), (128, 12)))
    copies = low_rank_copies(LowRank(u, up, gate, 8), False, *blocks)
    assert (copies.columns, copies.first) == (24, 8)
    assert [geometry.shape for geometry in copies.geometries if geometry] == [[64, 24], [128, 8], [128, 16]]
    transposed = low_rank_copies(LowRank(u, up, gate, 8), True, *blocks)
    assert [geometry.shape for geometry in transposed.geometries if geometry] == [[64, 24], [8, 128], [12, 128]]
    assert low_rank_copies(LowRank(u, up, gate, 4), False, *blocks) is None
    assert low_rank_copies(LowRank(u[:, :20], up, gate, 8), False, *blocks) is None
    assert low_rank_copies(LowRank(u.T.contiguous().T, up, gate, 8), False, *blocks) is None


@pytest.mark.parametrize("first", [0, 3, 5])
def test_joined_operands_compute_the_sum(first: int) -> None:
    x, u = torch.randn(5, 4), torch.randn(5, 9)
    w, w_gate, b, b_gate = torch.randn(6, 4), torch.randn(6, 4), torch.randn(6, 3), torch.randn(6, 4)
    left, right, other = LowRank(u, b, b_gate, first).joined(x, w, w_gate, 1)
    torch.testing.assert_close(left @ right.T, x @ w.T + u[:, :3] @ b.T)
    torch.testing.assert_close(left @ other.T, x @ w_gate.T + u[:, first : first + 4] @ b_gate.T)
