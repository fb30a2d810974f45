"""The FFN with adapters on a GPU: sm90 and generic kernels, any rank, the same bits again, memory, graphs."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fusedlayers import functional
from fusedlayers.devices import describe
from tests.functional.test_lora_ffn import ADAPTERS, SCALES, assert_close_to_torch, inputs, outcome
from tests.gpu.graphs import assert_replays_like_launched
from tests.gpu.launches import note_launches
from tests.support.operands import DEVICE

BFLOAT16, FLOAT16 = torch.bfloat16, torch.float16
GATED = pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
# Ranks of up, gate and down: one step of the inner axis and several, rows that TMA reads and others, and none.
RANKS = [(16, 16, 16), (4, 7, 12), (256, 64, 200), (0, 40, 0), (40, 0, 8), (0, 0, 64)]
BOTH = ["sm90_hidden", "sm90_epilogue_gradient"]
# Judged together: the largest error of a tile is that of few large values.
DRAWS = 12

on_hopper = pytest.mark.skipif(describe(DEVICE).backend != "sm90", reason="no Hopper GPU with Gluon")


@pytest.fixture(autouse=True)
def in_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSEDLAYERS_BACKEND", "triton")


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Which of the sm90 kernels run; where they do not, the generic ones do."""
    return note_launches(monkeypatch, dict(zip(BOTH, BOTH, strict=True)))


@on_hopper
@GATED
@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT16], ids=str)
@pytest.mark.parametrize("ranks", RANKS, ids=str)
def test_close_to_torch(ranks: tuple[int, int, int], dtype: torch.dtype, gated: bool, launched: list[str]) -> None:
    draws = [inputs(ranks, gated=gated, dtype=dtype, leading=(1061,), sizes=(520, 1032, 776)) for _ in range(DRAWS)]
    assert_close_to_torch(*draws, activation="silu", **SCALES)
    assert launched == DRAWS * BOTH


@on_hopper
def test_transposed_weights(launched: list[str]) -> None:
    def draw() -> dict[str, Tensor]:
        return {
            name: tensor.detach().T.contiguous().T.requires_grad_() if name.startswith("w_") else tensor
            for name, tensor in inputs((4, 7, 12), dtype=BFLOAT16, leading=(1061,), sizes=(520, 1032, 776)).items()
        }

    assert_close_to_torch(*(draw() for _ in range(DRAWS)), activation="gelu_tanh", **SCALES)
    assert launched == DRAWS * BOTH


@GATED
def test_generic_kernels(gated: bool, launched: list[str]) -> None:
    draws = [
        inputs((4, 7, 12), gated=gated, dtype=BFLOAT16, leading=(1061,), sizes=(515, 1029, 775)) for _ in range(DRAWS)
    ]
    assert_close_to_torch(*draws, activation="silu", **SCALES)
    assert launched == []


@on_hopper
@GATED
@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT16], ids=str)
@pytest.mark.parametrize("ranks", [(4, 7, 12), (0, 0, 64), (40, 0, 0)], ids=str)
def test_dropout(ranks: tuple[int, int, int], dtype: torch.dtype, gated: bool, launched: list[str]) -> None:
    draws = [inputs(ranks, gated=gated, dtype=dtype, leading=(1061,), sizes=(520, 1032, 776)) for _ in range(DRAWS)]
    options = {"adapter_dropout_p": 0.1, "dropout_seed": torch.tensor([2**40 + 7], device="cuda")}
    assert_close_to_torch(*draws, activation="silu", **SCALES, **options)
    assert launched == DRAWS * BOTH


@on_hopper
def test_a_mask_of_gate_and_up_projection(launched: list[str]) -> None:
    draws = [inputs((4, 7, 12), dtype=BFLOAT16, leading=(1061,), sizes=(520, 1032, 776)) for _ in range(DRAWS)]
    options = {"adapter_dropout_p": 0.1, "shared_dropout": True, "dropout_seed": torch.tensor([7], device="cuda")}
    assert_close_to_torch(*draws, activation="silu", **SCALES, **options)
    assert launched == DRAWS * BOTH


@GATED
def test_dropout_in_generic_kernels(gated: bool, launched: list[str]) -> None:
    draws = [
        inputs((4, 7, 12), gated=gated, dtype=BFLOAT16, leading=(1061,), sizes=(515, 1029, 775)) for _ in range(DRAWS)
    ]
    options = {"adapter_dropout_p": 0.1, "dropout_seed": torch.tensor([7], device="cuda")}
    assert_close_to_torch(*draws, activation="silu", **SCALES, **options)
    assert launched == []


@on_hopper
def test_the_same_bits_again_and_again() -> None:
    tensors = inputs((16, 16, 16), dtype=BFLOAT16, leading=(4097,), sizes=(512, 1024, 512))
    first = outcome(functional.lora_ffn, tensors, activation="silu")
    for _ in range(20):
        again = outcome(functional.lora_ffn, tensors, activation="silu")
        assert all(torch.equal(first[name], again[name]) for name in first)  # type: ignore[arg-type]


@on_hopper
def test_nothing_as_wide_as_the_hidden_is_written_for_an_adapter() -> None:
    """The forward pass allocates the pre-activations, the hidden, and what has few columns; with dropout one more."""
    tensors = inputs((16, 16, 16), dtype=BFLOAT16, bias=False, leading=(8192,), sizes=(512, 4096, 512), wanted=ADAPTERS)
    y = functional.lora_ffn(**tensors, activation="silu")
    del y
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    y = functional.lora_ffn(**tensors, activation="silu")
    hidden, narrow = 2 * 8192 * 4096, 2 * 8192 * (512 + 3 * 16)
    assert torch.cuda.max_memory_allocated() - before <= 3 * hidden + narrow + 2**20
    del y
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    y = functional.lora_ffn(**tensors, activation="silu", adapter_dropout_p=0.1)
    # The hidden as its adapter takes it; what is kept is as large as without dropout.
    assert torch.cuda.max_memory_allocated() - before <= 4 * hidden + narrow + 2**20
    assert torch.cuda.memory_allocated() - before <= 2 * hidden + narrow + 2**20
    del y


@on_hopper
def test_in_a_graph() -> None:
    tensors = inputs((16, 16, 16), dtype=BFLOAT16, leading=(1024,), sizes=(512, 1024, 512))
    upstream = torch.randn(1024, 512, dtype=BFLOAT16, device="cuda")

    def step() -> tuple[Tensor, ...]:
        y = functional.lora_ffn(**tensors, activation="silu")
        return (y.detach(), *torch.autograd.grad(y, list(tensors.values()), upstream))

    assert_replays_like_launched(step, [tensors["x"], tensors["up_b"], upstream], replays=3)
