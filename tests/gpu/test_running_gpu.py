"""How the kernels run on a GPU: memory kept and allocated, CUDA graphs, a second device, and how often they compile."""

from __future__ import annotations

import gc
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from fusedlayers import FusedFFN, functional
from fusedlayers.devices import describe
from fusedlayers.planning.ffn_chunked import WORKSPACE_COPIES
from tests.gpu.graphs import assert_replays_like_launched, recorded
from tests.support.operands import (
    DEVICE,
    Allocations,
    assert_equal,
    assert_ffn_close,
    ffn_inputs,
    leaves,
    like_result,
    on_path,
    results,
)

BFLOAT16 = torch.bfloat16
PLAIN_OR_GATED = pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])


@pytest.fixture
def allocated() -> Iterator[Any]:
    """``allocated()``: bytes in tensors now, and the most there were since the last time it was asked."""
    # What an earlier test left in reference cycles is not to go while this one counts.
    gc.collect()
    torch.cuda.empty_cache()

    def now_and_peak() -> tuple[int, int]:
        torch.cuda.synchronize()
        # What was asked for: the allocator's own blocks can be larger.
        found = torch.cuda.memory_stats()
        torch.cuda.reset_peak_memory_stats()
        return found["requested_bytes.all.current"], found["requested_bytes.all.peak"]

    now_and_peak()
    yield now_and_peak
    torch.cuda.empty_cache()


def size_in_bytes(*tensors: Tensor | None) -> int:
    return sum(t.numel() * t.element_size() for t in tensors if t is not None)


@PLAIN_OR_GATED
def test_fused_keeps_x_and_nothing_else(gated: bool, allocated: Any) -> None:
    tokens, d_model, d_ff = 131_072, 128, 512
    inputs = leaves(ffn_inputs(tokens, d_model, d_ff, d_model, BFLOAT16, gated=gated))
    dy = like_result(inputs)
    hidden_bytes = tokens * d_ff * 2
    kept: list[Tensor] = []
    with on_path("kernels") as options:
        before, _ = allocated()
        with torch.autograd.graph.saved_tensors_hooks(lambda t: (kept.append(t), t)[1], lambda t: t):
            y = functional.ffn(**inputs, **options)
        after, peak = allocated()
        assert after - before == size_in_bytes(y)
        assert peak == after
        known = {t.data_ptr(): t.shape for t in inputs.values() if t is not None}
        assert {t.data_ptr(): t.shape for t in kept}.items() <= known.items()
        assert len(kept) == len(known) - 1, "all but the last bias, which no gradient needs"
        y.backward(dy)
        _, peak = allocated()
        gradients = size_in_bytes(*(t.grad for t in inputs.values() if t is not None))
        assert peak - after - gradients < hidden_bytes


@pytest.mark.xdist_group("large")
@PLAIN_OR_GATED
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_recompute_never_allocates_a_hidden(gated: bool, dropout: float, allocated: Any) -> None:
    """d_model 1024, which the kernels do not cover: in chunks, forward and backward."""
    tokens, d_model, d_ff = 65_536, 1024, 8192
    layer = FusedFFN(d_model, d_ff, "silu", gated, dropout=dropout, recompute=True, device=DEVICE, dtype=BFLOAT16)
    x = torch.randn(tokens, d_model, device=DEVICE, dtype=BFLOAT16, requires_grad=True)
    dy = torch.randn_like(x)

    def largest_and_extra() -> tuple[int, int]:
        """Elements of the largest tensor of a step, and the most bytes beside its result and gradients."""
        x.grad = None
        layer.zero_grad()
        before, _ = allocated()
        with Allocations() as allocations:
            y = layer(x)
            y.backward(dy)
        _, peak = allocated()
        assert len(allocations.elements) > 10, "nothing was watched"
        results_and_gradients = size_in_bytes(y, x.grad, *(p.grad for p in layer.parameters()))
        return max(allocations.elements), peak - before - results_and_gradients

    largest_and_extra()  # cuBLAS takes its workspace once, and keeps it
    largest, extra = largest_and_extra()
    assert largest < tokens * d_ff
    assert extra <= WORKSPACE_COPIES * size_in_bytes(x)
    layer.recompute = False
    largest, extra = largest_and_extra()
    assert largest >= tokens * d_ff
    assert extra > WORKSPACE_COPIES * size_in_bytes(x)


def test_recompute_on_the_fused_path_allocates_no_hidden(allocated: Any) -> None:
    tokens, d_model, d_ff = 262_144, 64, 2048
    inputs = leaves(ffn_inputs(tokens, d_model, d_ff, d_model, BFLOAT16))
    dy = like_result(inputs)
    with on_path("kernels"), Allocations() as allocations:
        before, _ = allocated()
        functional.ffn(**inputs, recompute=True).backward(dy)
        _, peak = allocated()
    assert max(allocations.elements) < tokens * d_ff
    assert peak - before < tokens * d_ff * 2


def test_without_gradients_nothing_is_kept(allocated: Any) -> None:
    inputs = ffn_inputs(131_072, 64, 256, 64, BFLOAT16)
    before, _ = allocated()
    with on_path("kernels") as options:
        y = functional.ffn(**inputs, **options)
        assert allocated() == (before + size_in_bytes(y), before + size_in_bytes(y))


@PLAIN_OR_GATED
def test_a_cuda_graph_replays_forward_and_backward(gated: bool) -> None:
    inputs = leaves(ffn_inputs(2000, 64, 256, 64, BFLOAT16, gated=gated, residual=True))
    dy = like_result(inputs)
    wanted = [tensor for tensor in inputs.values() if tensor is not None]

    def step() -> tuple[Tensor, ...]:
        y = functional.ffn(**inputs, **options)
        return (y.detach(), *torch.autograd.grad(y, wanted, dy))

    with on_path("kernels") as options:
        assert_replays_like_launched(step, [*wanted, dy], 100)


def test_each_replay_of_a_cuda_graph_draws_its_own_dropout() -> None:
    # With unit weights and x = 1, y is twice the mask, and dx of dy = 1 twice the mask that backward replays.
    eye = torch.eye(64, device=DEVICE, dtype=BFLOAT16)
    x = torch.ones(500, 64, device=DEVICE, dtype=BFLOAT16, requires_grad=True)

    def step() -> tuple[Tensor, Tensor]:
        y = functional.ffn(x, eye, eye, activation="identity", dropout_p=0.5, **options)
        return y.detach(), torch.autograd.grad(y, x, torch.ones_like(y))[0]

    with on_path("kernels") as options:
        step()
        graph, (y, dx) = recorded(step)
        masks = []
        for _ in range(3):
            graph.replay()
            assert torch.equal(y, dx)
            assert 0.45 < float((y == 2).double().mean()) < 0.55
            assert bool(((y == 0) | (y == 2)).all())
            masks.append(y.clone())
    assert not torch.equal(masks[0], masks[1])
    assert not torch.equal(masks[1], masks[2])


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_the_second_device_while_the_first_is_current() -> None:
    first = ffn_inputs(300, 64, 200, 64, BFLOAT16, gated=True, device=torch.device("cuda", 0))
    second = {name: None if tensor is None else tensor.to("cuda:1") for name, tensor in first.items()}
    dy = like_result(first)
    torch.cuda.set_device(0)
    with on_path("kernels") as options:
        expected = results(functional.ffn, first, dy, **options)
        found = results(functional.ffn, second, dy.to("cuda:1"), **options)
        torch.cuda.manual_seed(1)
        functional.ffn(**second, dropout_p=0.1, **options)
    assert torch.cuda.current_device() == 0
    assert {tensor.device.index for tensor in found.values() if tensor is not None} == {1}
    assert_equal({name: None if t is None else t.to("cuda:0") for name, t in found.items()}, expected)


def test_a_stream_that_is_not_the_default() -> None:
    inputs = ffn_inputs(30_000, 64, 256, 64, BFLOAT16)
    dy = like_result(inputs)
    stream = torch.cuda.Stream()
    with on_path("kernels") as options:
        expected = results(functional.ffn, inputs, dy, **options)
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            # Work in front of the kernels, on their stream only: launched on another, they would not wait for it.
            torch.cuda._sleep(20_000_000)
            late = {name: None if t is None else t.clone() for name, t in inputs.items()}
            found = results(functional.ffn, late, dy, **options)
        torch.cuda.synchronize()
    assert_equal(found, expected)


# No other test has these widths, so nothing of them is compiled yet.
@pytest.mark.parametrize(
    ("width", "prefix"),
    [
        (42, "_"),
        pytest.param(
            56, "_sm90_",
            marks=pytest.mark.skipif(describe(DEVICE).backend != "sm90", reason="no Hopper GPU with Gluon"),
        ),
    ],
)  # fmt: skip
def test_few_compilations_for_many_numbers_of_tokens(width: int, prefix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    triton = pytest.importorskip("triton")
    compiled: dict[str, set[str]] = defaultdict(set)

    def count(**event: Any) -> None:
        compiled[event["fn"].name.rpartition(".")[2]].add(event["key"])

    monkeypatch.setattr(triton.knobs.runtime, "jit_cache_hook", count)
    for tokens in (1, 2, 3, 7, 15, 16, 17, 31, 33, 64, 100, 127, 128, 255, 512, 777, 1024, 2048, 3000, 4096):
        inputs = ffn_inputs(tokens, width, 160, width, BFLOAT16)
        with on_path("kernels") as options:
            results(functional.ffn, inputs, like_result(inputs), **options)
    kernels = {f"{prefix}{name}_kernel" for name in ("forward", "data_gradient", "weight_gradient")}
    assert kernels <= compiled.keys()
    assert {name: len(compiled[name]) for name in kernels if len(compiled[name]) > 3} == {}


@pytest.mark.parametrize("size", [(131_072, 64, 256), (200, 64, 256), (300, 512, 1024)], ids=str)
def test_whatever_the_planner_chooses_is_right(size: tuple[int, int, int]) -> None:
    tokens, d_model, d_ff = size
    inputs = ffn_inputs(tokens, d_model, d_ff, d_model, BFLOAT16)
    assert_ffn_close(functional.ffn, inputs, options={"recompute": "auto"}, activation="gelu_tanh")
