"""The chunked path: right however it is cut, and the promise that recompute=True makes about memory."""

from __future__ import annotations

import dataclasses
from importlib import import_module
from typing import Any

import pytest
import torch

from fusedlayers import functional, planning, reference
from fusedlayers.functional import dispatch, operation
from fusedlayers.functional.ffn.arguments import ffn_problem
from fusedlayers.functional.recalling import Recalled
from fusedlayers.kernels.activations import ACTIVATIONS
from fusedlayers.kernels.dropout import draw_seed
from tests.support.allocations import AllocatedBytes
from tests.support.operands import (
    DEVICE,
    INTEGERS,
    Tensors,
    assert_equal,
    assert_ffn_close,
    ffn_inputs,
    leaves,
    like_result,
    needs_kernels,
    on_path,
    results,
    small_chunks,
)

CPU = torch.device("cpu")
GATED = pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
# Tokens at a time forward, hidden units at a time backward, for 31 tokens and 24 hidden units: ragged ones, single
# ones, all of one axis.
CHUNKS = [(1, 24), (7, 5), (30, 23), (31, 8), (16, 4), (64, 1)]


def cut(monkeypatch: pytest.MonkeyPatch, rows: int, columns: int, hidden_columns: int | None = None) -> None:
    """Chunks of so many tokens, and groups of so many hidden units, from now on."""
    monkeypatch.setattr(
        planning.ffn_chunked, "plan", lambda problem, *rest: small_chunks(problem, rows, columns, hidden_columns)
    )


def force_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks in the kernels of the epilogue path, however narrow the layer is."""
    monkeypatch.setenv("FUSEDLAYERS_BACKEND", "triton")
    monkeypatch.setattr(planning.gemm_gemm, "why_unsupported", lambda problem, device: "too wide")
    # Without the caches: no plan made here outlives the test, and none made before is used.
    monkeypatch.setattr(functional.dispatch, "_cached_plan", planning.plan)
    monkeypatch.setattr(operation, "CALLS", Recalled())


@pytest.mark.sampled(together=2)
@GATED
@pytest.mark.parametrize("dropout_p", [0.0, 0.5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("chunk", CHUNKS, ids=str)
def test_chunks_of_any_size_give_the_same(
    chunk: tuple[int, int], dtype: torch.dtype, dropout_p: float, gated: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exact integers, so that the order of summation does not count; the mask does not restart at a chunk."""
    draw = INTEGERS[dtype]
    t = ffn_inputs(31, 5, 24, 4, dtype, gated=gated, residual=True, draw=draw, device=CPU)
    dy = like_result(t, draw)
    seed = torch.tensor([99])
    arithmetic: dict[str, Any] = {"activation": "relu", "dropout_p": dropout_p}
    expected = results(reference.ffn, t, dy, seed=seed, **arithmetic)
    with on_path("chunked", None) as options:
        cut(monkeypatch, *chunk)
        assert_equal(results(functional.ffn, t, dy, dropout_seed=seed, **arithmetic, **options), expected)


@needs_kernels
@GATED
@pytest.mark.parametrize("dropout_p", [0.0, 0.5])
@pytest.mark.parametrize("chunk", [(32, 64, 24), (32, 64, 64), (20, 24, 24), (70, 16, 16), (9, 128, 128)], ids=str)
def test_kernels_compute_chunks(
    chunk: tuple[int, int, int], dropout_p: float, gated: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the mask of the whole hidden, drawn where the chunk lies in it; the hidden in its own memory, and in dx."""
    draw = INTEGERS[torch.float16]
    t = ffn_inputs(70, 24, 128, 16, torch.float16, gated=gated, residual=True, draw=draw)
    dy = like_result(t, draw)
    seed = draw_seed(DEVICE)
    arithmetic: dict[str, Any] = {"activation": "relu", "dropout_p": dropout_p}
    expected = results(reference.ffn, t, dy, seed=seed, **arithmetic)
    force_kernels(monkeypatch)
    cut(monkeypatch, *chunk)
    launched = []
    kernels = import_module("fusedlayers.functional.ffn.chunked").kernels
    for name in ("hidden", "hidden_gradient"):
        kernel = getattr(kernels, name)
        monkeypatch.setattr(kernels, name, lambda *a, _of=kernel, **o: launched.append(_of.__name__) or _of(*a, **o))
    for _ in range(2):
        launched.clear()
        assert_equal(results(functional.ffn, t, dy, dropout_seed=seed, recompute=True, **arithmetic), expected)
        units = [min(chunk[1], 128 - first) for first in range(0, 128, chunk[1])]
        gradients = sum(-(-each // chunk[2]) for each in units)
        assert launched == ["hidden"] * -(-70 // chunk[0]) + ["hidden_gradient"] * gradients


@needs_kernels
@GATED
def test_kernels_compute_chunks_of_what_is_wanted(gated: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """One gradient alone, and all but one: there may be no dx in whose memory the hidden could lie."""
    draw = INTEGERS[torch.float16]
    t = ffn_inputs(33, 24, 48, 16, torch.float16, gated=gated, draw=draw)
    dy = like_result(t, draw)
    names = [name for name, tensor in t.items() if tensor is not None]
    force_kernels(monkeypatch)
    cut(monkeypatch, 20, 20)
    expected = results(reference.ffn, t, dy, activation="relu")
    for alone in names:
        for frozen in ((alone,), tuple(name for name in names if name != alone)):
            found = results(functional.ffn, t, dy, frozen=frozen, activation="relu", recompute=True)
            assert_equal(found, {key: None if key[1:] in frozen else value for key, value in expected.items()})


@GATED
@pytest.mark.parametrize("wanted", ["x", "w_up", "w_down"])
def test_a_backward_pass_for_one_gradient_of_all(wanted: str, gated: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan is made for all of them, and the hidden may lie in dx, which is not there then."""
    t = ffn_inputs(33, 24, 48, 16, torch.bfloat16, gated=gated, device=CPU)
    with on_path("chunked", None) as options:
        cut(monkeypatch, 20, 20)
        named = leaves(t)
        y = functional.ffn(**named, **options)
        dy = torch.randn_like(y)
        [alone] = torch.autograd.grad(y, [named[wanted]], dy, retain_graph=True)
        y.backward(dy)
    assert torch.equal(alone, named[wanted].grad)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("sizes", [(3000, 1), (1, 3000)], ids=["tokens", "hidden units"])
def test_gradients_are_summed_in_float32(
    sizes: tuple[int, int], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """3000 times one: 16 bits would stop counting at 2048 or at 256, group by group of hidden units, row by row."""
    tokens, d_ff = sizes
    t = {
        "x": torch.ones(tokens, 1),
        "w_up": torch.ones(d_ff, 1),
        "w_down": torch.ones(1, d_ff),
        "b_up": torch.zeros(d_ff),
    }
    t = {name: tensor.to(dtype) for name, tensor in t.items()}
    with on_path("chunked", None) as options:
        cut(monkeypatch, 10, 10)
        found = results(functional.ffn, t, torch.ones_like(t["x"]), activation="identity", **options)
    exact = torch.tensor(3000.0).to(dtype)
    assert all(bool((found[f"d{name}"] == exact).all()) for name in (["x"] if d_ff > 1 else ["w_up", "w_down", "b_up"]))


@GATED
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_recompute_is_as_exact_as_torch(dtype: torch.dtype, gated: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also dx, of sixteen groups of hidden units."""
    tensors = ffn_inputs((4, 96), 64, 512, 64, dtype, gated=gated, residual=True, device=CPU)
    with on_path("chunked", None) as options:
        cut(monkeypatch, 160, 32)
        assert_ffn_close(functional.ffn, tensors, options=options)


@needs_kernels
def test_partial_sums_lie_in_the_gradient_of_w_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """A workspace of exactly eight times x has no other room for them; without that gradient, groups are smaller."""
    draw = INTEGERS[torch.float16]
    t = ffn_inputs(300, 24, 96, 16, torch.float16, draw=draw)
    dy = like_result(t, draw)
    force_kernels(monkeypatch)
    cut(monkeypatch, 100, 48)
    kernels = import_module("fusedlayers.functional.ffn.chunked").kernels
    launch, groups = kernels.hidden_gradient, []

    def noting(*arguments: Any, **options: Any) -> Any:
        made, room = launch(*arguments, **options), options["partials_into"]
        z, tiles = arguments[2], arguments[7]
        groups.append(z.stride(0))
        if room is not None:
            bands, columns = -(-300 // tiles.block_m), z.shape[1]
            partial = room[: bands * columns].view(bands, columns)
            assert torch.equal(partial.sum(0).to(torch.float16), options["sums_into"][0])
        return made

    monkeypatch.setattr(kernels, "hidden_gradient", noting)
    expected = results(reference.ffn, t, dy, activation="relu")
    for frozen, columns in (((), 48), (("w_up",), 24)):
        groups.clear()
        found = results(functional.ffn, t, dy, frozen=frozen, activation="relu", recompute=True)
        assert groups == [columns] * 4
        assert_equal(found, {key: None if key[1:] in frozen else value for key, value in expected.items()})


@needs_kernels
@GATED
def test_many_groups_in_kernels_are_as_exact_as_torch(gated: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    force_kernels(monkeypatch)
    cut(monkeypatch, 96, 32)
    tensors = ffn_inputs((2, 48), 64, 512, 64, torch.float16, gated=gated, residual=True)
    assert_ffn_close(functional.ffn, tensors, options={"recompute": True})


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight times the bytes of x however small it is, through torch: small tensors reach the bound."""
    monkeypatch.setenv("FUSEDLAYERS_BACKEND", "torch")
    monkeypatch.setattr(planning.ffn_chunked, "LEAST_WORKSPACE", 0)
    monkeypatch.setattr(functional.dispatch, "_cached_plan", planning.plan)
    monkeypatch.setattr(operation, "CALLS", Recalled())


def allocated(tensors: Tensors, **options: Any) -> tuple[AllocatedBytes, AllocatedBytes, int, int]:
    """What the forward and the backward pass allocate, and the bytes of y and of all gradients."""
    named = leaves(tensors)
    seed = torch.tensor([3])
    with AllocatedBytes() as forward:
        y = functional.ffn(**named, dropout_seed=seed, **options)
    dy = torch.randn_like(y)
    with AllocatedBytes() as backward:
        y.backward(dy)
    gradients = [tensor.grad for tensor in named.values() if tensor is not None and tensor.grad is not None]
    # That of the residual is dy itself.
    made = sum(gradient.nbytes for gradient in gradients if gradient.data_ptr() != dy.data_ptr())
    return forward, backward, y.nbytes, made


def scratch(tokens: int, d_model: int, dtype: torch.dtype) -> int:
    """What torch's own products allocate beside their results: oneDNN's memory for 16 bits, the same for any tokens."""
    x, h = torch.ones(tokens, d_model, dtype=dtype), torch.ones(tokens, 2 * d_model, dtype=dtype)
    weight = torch.empty(2 * d_model, d_model, dtype=dtype)
    with AllocatedBytes() as found:
        torch.mm(h.T, x, out=weight)
        torch.mm(x, weight.T, out=h)
        torch.mm(h, weight, out=x)
    return max(found.blocks, default=0)


@pytest.mark.sampled
@GATED
# The mask is drawn alike for all activations, and slowly: it goes with the one that needs most memory.
@pytest.mark.parametrize(("activation", "dropout_p"), [("relu2", 0.25), *((name, 0.0) for name in ACTIVATIONS)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.usefixtures("small")
def test_the_allocator_never_gives_a_hidden(
    activation: str, dtype: torch.dtype, dropout_p: float, gated: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither a block of tokens × d_ff elements, nor more than eight times x beside the result and the gradients."""
    # The operations of a mask are so many that to record them takes all the time: few tokens, and without oneDNN, which
    # would take more memory for its products of 16 bits than all tensors have.
    tokens, d_model, d_ff = (84, 24, 72) if dropout_p else (4096, 32, 256)
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", not dropout_p)
    tensors = ffn_inputs(tokens, d_model, d_ff, d_model, dtype, gated=gated, residual=True, device=CPU)
    # Beside the plan's own sum: results of a few numbers, such as a probability.
    limit = 8 * tokens * d_model * dtype.itemsize + 4096 + scratch(tokens, d_model, dtype)
    hidden = tokens * d_ff * dtype.itemsize
    call = {"activation": activation, "dropout_p": dropout_p}
    forward, backward, y, gradients = allocated(tensors, recompute=True, **call)
    assert len(backward.blocks) > 10, "nothing was recorded"
    assert max(forward.blocks + backward.blocks) < hidden
    assert forward.peak - y <= limit
    assert backward.peak - gradients <= limit
    # The recorder does see a hidden where there is one.
    forward, backward, y, gradients = allocated(tensors, recompute=False, **call)
    assert max(forward.blocks) >= hidden
    assert max(backward.blocks) >= hidden
    assert backward.peak - gradients > 0


@pytest.mark.sampled
@GATED
@pytest.mark.parametrize(("tokens", "d_ff"), [(62, 8), (14, 70)])
@pytest.mark.usefixtures("small")
def test_the_mask_of_few_columns_is_no_larger_than_they_are(tokens: int, d_ff: int, gated: bool) -> None:
    tensors = ffn_inputs(tokens, 8, d_ff, 8, gated=gated, device=CPU)
    limit = 8 * tokens * 8 * 4
    forward, backward, y, gradients = allocated(tensors, recompute=True, activation="relu2", dropout_p=0.25)
    assert max(forward.blocks + backward.blocks) <= max(tokens * d_ff * 4, y)
    assert forward.peak - y <= limit + 4096
    assert backward.peak - gradients <= limit + 4096


@pytest.mark.parametrize("tokens", [2, 33, 500])
def test_recompute_keeps_its_promise_however_small_the_problem(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With 256 MiB to take, a problem that would fit one chunk is cut all the same."""
    monkeypatch.setenv("FUSEDLAYERS_BACKEND", "torch")
    forward, backward, *_ = allocated(ffn_inputs(tokens, 1, 640, 1, gated=True, device=CPU), recompute=True)
    assert max(forward.blocks + backward.blocks) < max(tokens * 640 * 4, 3 * 640 * 4 + 1)


def test_a_budget_of_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSEDLAYERS_BACKEND", "torch")
    named = leaves(ffn_inputs(50, 6, 18, 6, device=CPU))
    problem = ffn_problem(**named, activation="gelu", dropout_p=0.0, recompute="auto")
    needed = planning.plan(problem, dispatch.describe(CPU)).saved_bytes
    with dispatch.decisions() as counted:
        for budget in (needed, needed - 1, 2):
            functional.ffn(**named, recompute=budget).sum().backward()
    assert counted == {"ffn torch": 1, "ffn chunked": 2}


def test_plans_of_chunks_are_data() -> None:
    made = planning.plan(planning.Problem("ffn", 1, 64, 8, 16, 8, "float32", recompute=True), planning.Device("cpu"))
    assert all(type(value) in (int, bool) for value in dataclasses.astuple(made.chunks))
    assert made.chunks.columns == 0, "nothing is wanted of a backward pass"
