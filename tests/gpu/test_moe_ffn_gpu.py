"""Experts on a GPU: published sizes, every routing, exact integers again and again, graphs, memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fusedlayers import functional, reference
from fusedlayers.devices import describe
from tests.gpu.exact import assert_says_something
from tests.gpu.graphs import recorded
from tests.support.moe_operands import (
    CLAMPED,
    LAYOUTS,
    ROUTINGS,
    assert_moe_close,
    how,
    like_x,
    moe_inputs,
    results,
    wide,
)
from tests.support.operands import DEVICE, assert_equal, in_eighths, integers, on_path

BFLOAT16, FLOAT16, FLOAT32 = torch.bfloat16, torch.float16, torch.float32
MIB = 2**20
REPEATS = 10
DENSITIES = (0.2, 0.12, 0.07, 0.05, 0.04, 0.035, 0.03, 0.025, 0.02)
Sizes = tuple[int, int, int, int, int]
# Tokens, width, hidden units, experts, experts of a token: whole tiles of the sm90 kernels, tails, and what their
# copies cannot take.
WHOLE, RAGGED, ODD = (1024, 512, 256, 8, 2), (1061, 328, 200, 8, 3), (700, 131, 77, 8, 2)
MACHINES: dict[str, dict[str, Any]] = {"all": {}, "few": {"sms": 4}, "generic": {"backend": "generic"}}


@pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT16, FLOAT32], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("clamped", [False, True])
@pytest.mark.parametrize("sizes", [WHOLE, RAGGED], ids=["whole", "ragged"])
def test_layouts(dtype: torch.dtype, layout: str, transposed: bool, clamped: bool, sizes: Sizes) -> None:
    shape: dict[str, Any] = {"layout": layout, "transposed": transposed}
    draw = in_eighths(1.5) if clamped else torch.randn
    assert_moe_close(
        lambda: moe_inputs(*sizes, dtype, draw=draw, **shape), **how(**shape, **(CLAMPED if clamped else {}))
    )


@pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT16], ids=str)
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("N", [256, 272, 328])
def test_columns_behind_the_hidden_units(N: int, gated: bool, transposed: bool, dtype: torch.dtype) -> None:
    """Where an activation is not 0 at 0, and the next expert's weights lie there, which may be NaN."""
    shape: dict[str, Any] = {"gated": gated, "transposed": transposed}
    options = how(**shape, activation="sigmoid", up_offset=1.0 if gated else 0.0)
    assert_moe_close(lambda: moe_inputs(1024, 512, N, 4, 2, dtype, **shape), **options)
    tensors = moe_inputs(1024, 512, N, 4, 2, dtype, routing="first and last", **shape)
    dy = like_x(tensors)
    with on_path("epilogue"):
        clean = results(functional.moe_ffn, tensors, dy, **options)
        for name in ("w_up", "w_down", "w_gate"):
            if (weight := tensors[name]) is not None:
                weight[1] = torch.nan
        assert_equal(results(functional.moe_ffn, tensors, dy, **options), clean)


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("recompute", [False, True])
def test_routings(routing: str, gated: bool, recompute: bool) -> None:
    assert_moe_close(
        lambda: moe_inputs(*RAGGED, BFLOAT16, gated=gated, routing=routing),
        own={"recompute": recompute},
        activation="gelu_tanh",
    )


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT16], ids=str)
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("routing", ["repeated", "one takes all", "sentinels"])
@pytest.mark.parametrize("sizes", [WHOLE, RAGGED, ODD], ids=["whole", "ragged", "odd"])
def test_exact_integers(machine: str, dtype: torch.dtype, gated: bool, routing: str, sizes: Sizes) -> None:
    """The same bits again and again, in the last backward pass and in one before it."""
    for density in DENSITIES:
        draw = integers(density)
        tensors = moe_inputs(*sizes, dtype, gated=gated, routing=routing, draw=draw)
        dy = like_x(tensors, draw)
        truth = results(reference.moe_ffn, wide(tensors), dy.double(), activation="relu")
        if max(float(t.abs().max()) for t in truth.values() if t is not None) <= 2 / torch.finfo(dtype).eps:
            break
    else:
        raise AssertionError("no density keeps the integers exact")
    expected = {name: None if tensor is None else tensor.to(dtype) for name, tensor in truth.items()}
    # With a gate sums grow fast, and bfloat16 counts to 256: a few hundred numbers of each weight gradient are not 0.
    assert_says_something(expected, 0.0002 if dtype == BFLOAT16 and gated else 0.005)
    with on_path("epilogue", **MACHINES[machine]):
        for _ in range(REPEATS):
            assert_equal(results(functional.moe_ffn, tensors, dy, activation="relu"), expected)
        with torch.no_grad():
            assert_equal({"y": functional.moe_ffn(**tensors, activation="relu")}, {"y": expected["y"]})


def test_a_graph_serves_any_routing() -> None:
    """Forward and backward, with nothing that waits for the device: the same bits as launched."""
    tokens, _, _, E, k = WHOLE
    tensors = moe_inputs(*WHOLE, BFLOAT16, layout="concatenated")
    inputs = {n: t.requires_grad_() if t is not None and t.is_floating_point() else t for n, t in tensors.items()}
    leaves = [t for t in inputs.values() if t is not None and t.requires_grad]
    dy, index = like_x(tensors), inputs["top_k_index"]

    def step() -> tuple[Tensor, ...]:
        y = functional.moe_ffn(**inputs, **how(layout="concatenated"))
        return (y.detach(), *torch.autograd.grad(y, leaves, dy))

    with on_path("epilogue"):
        step()
        graph, replayed = recorded(step)
        for routing in ROUTINGS.values():
            index.copy_(routing(tokens, E, k))
            graph.replay()
            now = [tensor.clone() for tensor in replayed]
            assert all(torch.equal(ours, launched) for ours, launched in zip(now, step(), strict=True))


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype:UserWarning")
def test_nothing_waits_for_the_device() -> None:
    tensors = moe_inputs(*WHOLE, BFLOAT16)
    dy = like_x(tensors)
    for path in ("epilogue", "torch"):
        with on_path(path):
            results(functional.moe_ffn, tensors, dy)
            mode = torch.cuda.get_sync_debug_mode()
            try:
                torch.cuda.set_sync_debug_mode("error")
                results(functional.moe_ffn, tensors, dy)
            finally:
                torch.cuda.set_sync_debug_mode(mode)


@pytest.mark.parametrize("recompute", [False, True])
def test_what_is_kept_and_allocated(recompute: bool) -> None:
    """At most what the plan says."""
    tensors = moe_inputs(16384, 1024, 512, 64, 6, BFLOAT16, bias=False, layout="concatenated")
    inputs = {n: t.requires_grad_() if t is not None and t.is_floating_point() else t for n, t in tensors.items()}
    with on_path("epilogue"):
        problem = functional.moe_ffn.__globals__["MOE_FFN"].problem_of(
            **inputs, **how(layout="concatenated"), recompute=recompute
        )
        plan = problem.plan(describe(DEVICE), "triton")
        # cuBLAS keeps a workspace of its own from its first product on.
        torch.mm(torch.ones(8, 8, device=DEVICE, dtype=BFLOAT16), torch.ones(8, 8, device=DEVICE, dtype=BFLOAT16))
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        y = functional.moe_ffn(**inputs, **how(layout="concatenated"), recompute=recompute)
        kept = torch.cuda.memory_allocated() - before
    x = inputs["x"]
    # The result is as large as the input, which was there before.
    assert y.numel() == x.numel()
    assert kept <= plan.saved_bytes + MIB
    assert kept <= (40 if recompute else 450) * MIB


@pytest.mark.xdist_group("large")
def test_more_than_2_to_the_31_elements() -> None:
    """Pre-activations, rows, and weights whose offsets need 64 bits, against a loop over the experts in use."""
    if torch.cuda.get_device_properties(0).total_memory < 100 * 2**30:
        pytest.skip("needs a GPU with 100 GB of memory")
    tokens, K, N, E, k = 60_000, 256, 20_000, 2, 2
    draw = integers(0.02)
    x = draw(tokens, K, dtype=torch.float32).to(DEVICE, BFLOAT16)
    index = torch.arange(2, device=DEVICE).expand(tokens, 2).contiguous()
    scores = torch.ones(tokens, k, device=DEVICE, dtype=BFLOAT16)
    w_up = draw(E, N, K, dtype=torch.float32).to(DEVICE, BFLOAT16)
    w_down = draw(E, K, N, dtype=torch.float32).to(DEVICE, BFLOAT16)
    given = {"x": x, "top_k_index": index, "top_k_weights": scores, "w_up": w_up, "w_down": w_down}
    dy = draw(tokens, K, dtype=torch.float32).to(DEVICE, BFLOAT16)
    with on_path("epilogue"):
        found = results(functional.moe_ffn, given, dy, activation="relu")
    last = slice(tokens - 500, tokens)
    part = {n: t[last] if n in ("x", "top_k_index", "top_k_weights") else t for n, t in given.items()}
    expected = results(reference.moe_ffn, wide(part), dy[last].double(), activation="relu")
    for name in ("y", "dx"):
        ours, theirs = found[name], expected[name]
        assert ours is not None and theirs is not None  # noqa: PT018
        torch.testing.assert_close(ours[last].double(), theirs, rtol=2**-7, atol=1.0)
