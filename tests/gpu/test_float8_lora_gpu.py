"""FFNs with adapters in 8 bits on a GPU: exact integers, noise, bits, graphs, compilers, weights that are kept."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from fusedlayers import functional, reference
from fusedlayers.closeness.noise import OF_LAYER, OF_WEIGHT_GRADIENT, sqnr
from fusedlayers.functional import float8
from fusedlayers.functional.dispatch import decisions
from fusedlayers.functional.switches import switched
from fusedlayers.kernels import gemm_epilogue as kernels
from fusedlayers.kernels.gemm_epilogue import LowRank, Scaled
from fusedlayers.kernels.matmul.arithmetic import Arithmetic
from fusedlayers.kernels.tuning import EPILOGUE_PIPELINES
from tests.functional.test_lora_ffn import ADAPTERS, SCALES, inputs
from tests.gpu.graphs import assert_replays_like_launched
from tests.gpu.launches import note_launches
from tests.gpu.test_float8_gpu import BFLOAT16, FLOAT16, GATED, pytestmark, wherever_it_can  # noqa: F401
from tests.support.operands import DEVICE

E4M3 = torch.float8_e4m3fn
# Tokens, inner axis, columns: whole tiles, tails of everything, less than a tile, sums in parts and a lone tile.
SIZES = [(1024, 512, 384), (1001, 592, 208), (3, 16, 16), (300, 4112, 272), (4096, 6144, 1536)]
# Of up, gate and down: one step and several, rows that TMA reads and others, and none.
RANKS = [(16, 16, 16), (4, 7, 12), (256, 64, 200), (0, 40, 0), (40, 0, 8), (0, 0, 64)]
IDENTITY = Arithmetic("identity", "half", "ieee")
KERNELS = ["sm90_hidden", "sm90_scaled_product", "sm90_epilogue_gradient"]
DROPPING = {"adapter_dropout_p": 0.1, "dropout_seed": torch.tensor([2**40 + 7])}


def integers(rows: int, columns: int) -> tuple[Scaled, Tensor]:
    """Sparse integers with scales of powers of two, and the numbers that they stand for."""
    taken = torch.rand(rows, columns, device=DEVICE) < min(1.0, 8 / columns**0.5)
    values = torch.randint(-2, 3, (rows, columns), device=DEVICE) * taken
    scale = torch.randint(-3, 4, (rows,), device=DEVICE).float().exp2()
    return Scaled(values.to(E4M3), scale), values.double() * scale[:, None]


def factor(of: Scaled, rank: int) -> Tensor:
    """One of an adapter, so that its products are integers times the scales of ``of``, too."""
    values = torch.randint(-1, 2, (len(of.scale), rank), device=DEVICE)
    return (values * of.scale[:, None]).to(BFLOAT16)


@GATED
@pytest.mark.parametrize("rank", [8, 16, 72, 200])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_exact_pre_activations(size: tuple[int, int, int], rank: int, gated: bool) -> None:
    M, K, N = size
    for _ in range(5):
        (x, x_meant), (w, w_meant), (gate, gate_meant) = integers(M, K), integers(N, K), integers(N, K)
        u, b, b_gate = factor(x, rank * (2 if gated else 1)), factor(w, rank), factor(gate, rank)
        low_rank = LowRank(u, b, b_gate if gated else None, rank if gated else 0)
        pipeline = EPILOGUE_PIPELINES["scaled_hidden", gated]
        _, z, z_gate = kernels.scaled_hidden(
            x, w, None, gate if gated else None, None, True, IDENTITY, pipeline, BFLOAT16, low_rank=low_rank
        )
        assert torch.equal(z, (x_meant @ w_meant.T + u[:, :rank].double() @ b.double().T).to(BFLOAT16))
        if gated:
            truth = x_meant @ gate_meant.T + u[:, rank:].double() @ b_gate.double().T
            assert torch.equal(z_gate, truth.to(BFLOAT16))


@GATED
@pytest.mark.parametrize("rank", [8, 72])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_exact_gradients_of_pre_activations(size: tuple[int, int, int], rank: int, gated: bool) -> None:
    """With a low-rank product, and with an addend in memory; dZ is dH, which a gate multiplies with Zg."""
    M, O, N = size
    pipeline = EPILOGUE_PIPELINES["scaled_hidden_gradient", gated]
    for _ in range(5):
        (dy, dy_meant), (w, w_meant) = integers(M, O), integers(N, O)
        z, z_gate = (torch.randint(-1, 2, (M, N), device=DEVICE).to(BFLOAT16) for _ in range(2))
        v, a = factor(dy, rank), factor(w, rank).T
        product = v.double() @ a.double()
        added = (torch.randint(-4, 5, (M, N), device=DEVICE) / 64).to(BFLOAT16)
        for options, more in (({"low_rank": LowRank(v, a)}, product), ({"added": added}, added.double())):
            for keep in (False, True):
                dz, d_gate, _ = kernels.scaled_hidden_gradient(
                    dy, w, z, z_gate if gated else None, keep, IDENTITY, pipeline, **options
                )
                d_hidden = dy_meant @ w_meant.T + more
                assert torch.equal(dz, (d_hidden * (z_gate.double() if gated else 1)).to(BFLOAT16))
                if gated:
                    assert torch.equal(d_gate, (d_hidden * z.double()).to(BFLOAT16))


@pytest.mark.parametrize("rank", [8, 16, 72, 200])
@pytest.mark.parametrize("size", [*SIZES, (2048, 20_000, 2176)], ids=str)
def test_exact_products(size: tuple[int, int, int], rank: int) -> None:
    """Also of programs with one tile, with two, and with three, and of several parts."""
    M, K, N = size
    for _ in range(5):
        left = torch.zeros(M, K, device=DEVICE).scatter_(1, torch.randint(K, (M, 12), device=DEVICE), 1.0)
        x, (w, w_meant) = Scaled(left.to(E4M3), torch.full((M,), 0.5, device=DEVICE)), integers(N, K)
        u, b = factor(x, rank), factor(w, rank)
        truth = 0.5 * left.double() @ w_meant.T + u.double() @ b.double().T
        pipeline = EPILOGUE_PIPELINES["scaled_product", False]
        found = kernels.scaled_product(x, w, None, pipeline, BFLOAT16, low_rank=LowRank(u, b.T))
        assert torch.equal(found, truth.to(BFLOAT16))


def operands(ranks: tuple[int, int, int], gated: bool, wanted: Any = None, dtype: Any = BFLOAT16) -> dict[str, Tensor]:
    return inputs(ranks, gated=gated, dtype=dtype, leading=(1061,), sizes=(528, 1040, 784), wanted=wanted)


def options_on_device(options: dict[str, Any]) -> dict[str, Any]:
    return {name: each.to(DEVICE) if isinstance(each, Tensor) else each for name, each in options.items()}


def lora_ffn(given: dict[str, Tensor], precision: str | None = "fp8", **options: Any) -> Tensor:
    return functional.lora_ffn(**given, activation="silu", precision=precision, **SCALES, **options_on_device(options))


def gradients(y: Tensor, given: dict[str, Tensor], dy: Tensor) -> dict[str, Tensor]:
    wanted = {name: each for name, each in given.items() if each.requires_grad}
    return dict(zip(wanted, torch.autograd.grad(y, list(wanted.values()), dy.to(y.dtype)), strict=True))


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert [name for name, value in expected.items() if not torch.equal(found[name], value)] == []


@GATED
@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("options", [{}, DROPPING], ids=["", "dropout"])
@pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT16], ids=str)
@pytest.mark.parametrize("ranks", RANKS, ids=str)
def test_noise(
    ranks: tuple[int, int, int], dtype: torch.dtype, options: dict[str, Any], gated: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    launched = note_launches(monkeypatch, dict(zip(KERNELS, KERNELS, strict=True)))
    given = operands(ranks, gated, dtype=dtype)
    y = lora_ffn(given, **options)
    dy = torch.randn(y.shape, device=DEVICE)
    found = gradients(y, given, dy)
    assert launched == [*KERNELS, "sm90_scaled_product"]
    exact = {name: each.detach().double().requires_grad_() for name, each in given.items()}
    of_torch = options_on_device({"seed" if name == "dropout_seed" else name: each for name, each in options.items()})
    truth = reference.lora_ffn(**exact, activation="silu", **SCALES, **of_torch)
    assert sqnr(y, truth) >= OF_LAYER
    expected = gradients(truth, exact, dy)
    for name, value in found.items():
        assert sqnr(value, expected[name]) >= (OF_LAYER if name == "x" else OF_WEIGHT_GRADIENT), name


@GATED
def test_what_adapters_add_has_16_bits(gated: bool) -> None:
    """Nothing else is left where weights are zeros, whose scales are the least ones."""
    for dtype in (BFLOAT16, FLOAT16):
        given = operands((16, 16, 16), gated, dtype=dtype)
        for name, each in given.items():
            if name.startswith("w_"):
                each.detach().zero_()
        y = lora_ffn(given)
        dy = torch.randn(y.shape, device=DEVICE)
        exact = {name: each.detach().double().requires_grad_() for name, each in given.items()}
        truth = reference.lora_ffn(**exact, activation="silu", **SCALES)
        assert sqnr(y, truth) > 40
        expected = gradients(truth, exact, dy)
        for name, value in gradients(y, given, dy).items():
            assert name.startswith("w_") or sqnr(value, expected[name]) > 40, name


@GATED
@pytest.mark.parametrize("options", [{}, DROPPING], ids=["", "dropout"])
def test_the_same_bits_every_time_and_in_any_grad_mode(options: dict[str, Any], gated: bool) -> None:
    given = operands((16, 4, 40), gated)
    y = lora_ffn(given, **options)
    dy = torch.randn(y.shape, device=DEVICE)
    expected = gradients(y, given, dy)
    for _ in range(3):
        float8.forget_weights()
        with torch.no_grad():
            assert torch.equal(lora_ffn(given, **options), y)
        again = lora_ffn(given, **options)
        assert torch.equal(again, y)
        assert_same(gradients(again, given, dy), expected)
    checkpointed = checkpoint(
        lambda *each: lora_ffn(dict(zip(given, each, strict=True)), **options), *given.values(), use_reentrant=False
    )
    assert torch.equal(checkpointed, y)
    assert_same(gradients(checkpointed, given, dy), expected)


@GATED
def test_each_frozen_subset(gated: bool) -> None:
    given = operands((16, 4, 40), gated)
    y = lora_ffn(given)
    dy = torch.randn(y.shape, device=DEVICE)
    expected = gradients(y, given, dy)
    for name in given:
        alone = {other: each.detach().requires_grad_(other == name) for other, each in given.items()}
        found = gradients(lora_ffn(alone), alone, dy)[name]
        # The hidden alone is torch's, from pre-activations that were rounded.
        assert sqnr(found, expected[name]) > 40 if name in ("w_down", "down_a") else torch.equal(found, expected[name])


@pytest.mark.parametrize("options", [{}, DROPPING], ids=["", "dropout"])
def test_replays(options: dict[str, Any]) -> None:
    given = operands((16, 16, 16), True, wanted=("x", *ADAPTERS))
    dy = torch.randn(1061, 784, device=DEVICE)
    # Seeds are copied to the device before a graph is recorded.
    options = options_on_device(options)

    def step() -> tuple[Tensor, ...]:
        y = lora_ffn(given, **options)
        return y, *gradients(y, given, dy).values()

    assert_replays_like_launched(step, [given["x"], given["w_gate"], given["down_a"]], 3)


def test_compiled() -> None:
    torch._dynamo.reset()
    given = operands((16, 16, 16), True, wanted=("x", *ADAPTERS))
    y = lora_ffn(given)
    dy = torch.randn(y.shape, device=DEVICE)
    expected = gradients(y, given, dy)
    for mode in ("default", "reduce-overhead"):
        compiled = torch.compile(lambda given: lora_ffn(given), fullgraph=True, mode=mode)
        for _ in range(3):
            torch.compiler.cudagraph_mark_step_begin()
            found = compiled(given)
            assert torch.equal(found, y)
            assert_same(gradients(found, given, dy), expected)
    torch._dynamo.reset()


def test_frozen_weights_are_quantised_once_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    given = operands((16, 16, 16), True, wanted=("x", *ADAPTERS))
    given = {name: torch.nn.Parameter(each.detach(), each.requires_grad) for name, each in given.items()}
    of_weights = {tuple(given["w_up"].shape), tuple(given["w_down"].shape)}
    count = []
    for name in ("quantise_rows", "quantise_transposed"):
        made = getattr(float8, name)
        monkeypatch.setattr(
            float8, name, lambda x, *more, made=made, **given: (count.append(x.shape), made(x, *more, **given))[1]
        )
    optimizer = torch.optim.AdamW([given[name] for name in ADAPTERS], lr=1e-3)
    for _ in range(2):
        for micro_batch in range(2):
            count.clear()
            lora_ffn(given).square().mean().backward()
            assert sum(tuple(shape) in of_weights for shape in count) == (0 if micro_batch else 5)
        # As adapters are merged: the version counter does not change.
        given["w_gate"].data.mul_(2)
        optimizer.step()
        optimizer.zero_grad()
    found = lora_ffn(given)
    float8.forget_weights()
    assert torch.equal(lora_ffn(given), found)


@pytest.mark.parametrize("rows", [16_384, 64])
def test_auto_mode_takes_8_bits_for_large_calls_alone(rows: int) -> None:
    given = inputs((16, 16, 16), dtype=BFLOAT16, leading=(rows,), sizes=(2048, 8192, 2048), wanted=ADAPTERS)
    with switched({"FUSEDLAYERS_BACKEND": "auto"}):
        for _ in range(3):
            with decisions() as taken:
                lora_ffn(given)
            assert (set(taken) == {"lora_ffn float8"}) == (rows > 64), taken
