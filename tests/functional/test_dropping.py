"""Dropout by one kernel on torch's path, and one mask for all paths: with and without gradients, in checkpoints."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fusedlayers as fl
from fusedlayers import functional, reference
from fusedlayers.functional.ffn import dropping
from fusedlayers.kernels.dropout import draw_seed, drop, keep_mask
from tests.support.ffn_blocks import GatedBlock, mlp, rule_for
from tests.support.operands import (
    DEVICE,
    DTYPES,
    EPILOGUE,
    ON_GPU,
    PATHS,
    ffn_inputs,
    infinities,
    leaves,
    needs_kernels,
    on_path,
    seed_after,
)

RECOMPUTE = ["auto", True, False, 10_000]
BACKENDS = ["auto", "torch", pytest.param("triton", marks=needs_kernels)]


def generator_state() -> Tensor:
    return torch.cuda.get_rng_state() if ON_GPU else torch.get_rng_state()


def through(model: nn.Module, call: Callable[..., Any], x: Tensor, dy: Tensor) -> tuple[list[Tensor], Tensor]:
    """y and all gradients of a call after the same manual_seed, and the generator's state after it."""
    x = x.detach().requires_grad_()
    model.zero_grad()
    torch.manual_seed(7)
    y = call(x)
    state = generator_state()
    y.backward(dy)
    return [y.detach(), x.grad, *(parameter.grad for parameter in model.parameters())], state


def assert_checkpoints_agree(model: nn.Module, x: Tensor) -> None:
    dy = torch.randn_like(x)
    ours, state = through(model, model, x, dy)
    assert any(bool((tensor != 0).any()) for tensor in ours)
    for use_reentrant in (True, False):
        found, after = through(model, lambda x, r=use_reentrant: checkpoint(model, x, use_reentrant=r), x, dy)
        assert torch.equal(after, state)
        # Without gradients another path may have computed y.
        torch.testing.assert_close(found[0], ours[0])
        assert all(torch.equal(one, other) for one, other in zip(found[1:], ours[1:], strict=True)), use_reentrant


@pytest.mark.sampled(together=2)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("recompute", RECOMPUTE, ids=str)
@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
def test_checkpoints_of_a_module(gated: bool, recompute: Any, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reentrant checkpoint runs without gradients first, which may be another path than the one that follows."""
    monkeypatch.setenv("FUSEDLAYERS_BACKEND", backend)
    layer = fl.FusedFFN(64, 96, gated=gated, dropout=0.5, recompute=recompute, device=DEVICE)
    assert_checkpoints_agree(layer, torch.randn(32, 64, device=DEVICE))


@pytest.mark.sampled(together=2)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("recompute", [*RECOMPUTE[:3], 300], ids=str)
@pytest.mark.parametrize(
    ("make", "rules"), [(lambda: mlp(p=0.5), []), (lambda: GatedBlock(p=0.5), [rule_for(GatedBlock)])]
)
def test_checkpoints_of_a_replaced_block(
    make: Callable[[], nn.Module], rules: list[Any], recompute: Any, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FUSEDLAYERS_BACKEND", backend)
    block = make().to(DEVICE)
    assert len(fl.replace(block, rules=rules, recompute=recompute).replaced) == 1
    assert_checkpoints_agree(block, torch.randn(9, 6, device=DEVICE))


@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("path", [*PATHS, EPILOGUE])
def test_every_path_draws_one_mask(path: str, training: bool) -> None:
    """Through operands that let the mask through; and the generator moves on by one seed, whatever the path."""
    rows, columns = 20, 70
    seed = seed_after(5)
    mask = keep_mask(seed, 0, rows, columns, 0.5, torch.float32) * 2
    draw_seed(DEVICE)
    expected = generator_state()
    x = torch.ones(rows, 1, device=DEVICE, requires_grad=training)
    w_up, w_down = torch.ones(columns, 1, device=DEVICE), torch.eye(columns, device=DEVICE)
    torch.manual_seed(5)
    with on_path(path) as options:
        y = functional.ffn(x, w_up, w_down, activation="identity", dropout_p=0.5, **options)
    assert torch.equal(y, mask)
    assert torch.equal(generator_state(), expected)


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [(0, 5), (4, 0), (1, 1), (37, 83), (20, 512), (9, 300)], ids=str)
@pytest.mark.usefixtures("poisoned_memory")
def test_the_kernel_drops_what_the_reference_drops(size: tuple[int, int], dtype: torch.dtype) -> None:
    rows, columns = size
    seed = draw_seed(DEVICE)
    wide = torch.randn(rows, columns + 3, device=DEVICE).to(dtype)
    turned = torch.randn(columns, rows, device=DEVICE).to(dtype).T
    expanded = torch.randn(1, columns, device=DEVICE).to(dtype).expand(rows, -1)
    for values in (wide[:, :columns], wide[:, 3:], turned, expanded):
        assert torch.equal(drop(values, seed, 0.3), reference.dropped(values, 0.3, seed))
        # From a row on that int32 does not hold, and into the values themselves.
        expected, own = (
            reference.dropped(values, 0.3, seed, (2**40 + 3, 0)),
            values.clone(memory_format=torch.contiguous_format),
        )
        assert torch.equal(drop(own, seed, 0.3, 2**40 + 3, own), expected)
        assert torch.equal(own, expected)


@infinities
@needs_kernels
def test_what_is_not_finite_is_dropped_as_torch_does() -> None:
    seed = draw_seed(DEVICE)
    values = torch.tensor([torch.inf, -torch.inf, torch.nan, -0.0, 0.0], device=DEVICE).repeat(8, 20)
    theirs = reference.dropped(values, 0.5, seed)
    ours = drop(values, seed, 0.5)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(ours.signbit()[~ours.isnan()], theirs.signbit()[~theirs.isnan()])


@pytest.fixture
def launching(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """On a CPU, too, the kernel drops what plain calls compute; the list grows with every launch."""
    launches: list[int] = []

    def counted(*arguments: Any) -> Tensor:
        launches.append(1)
        return drop(*arguments)

    if not ON_GPU:
        monkeypatch.setattr(dropping, "_has_kernel", lambda values: True)
    monkeypatch.setattr(dropping.kernels, "drop", counted)
    return launches


@needs_kernels
def test_the_kernel_is_differentiable_and_keeps_the_seed_alone(launching: list[int]) -> None:
    values, upstream = (torch.randn(2, 7, 90, device=DEVICE, requires_grad=True) for _ in range(2))
    seed = draw_seed(DEVICE)
    factor = reference.dropped(torch.ones_like(values), 0.25, seed)
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (kept.append(t), t)[1], lambda t: t):
        y = dropping.dropped(values, 0.25, seed)
    assert len(kept) == 1
    assert kept[0].data_ptr() == seed.data_ptr()
    assert torch.equal(y, values * factor)
    (gradient,) = torch.autograd.grad(y, values, upstream, create_graph=True)
    assert torch.equal(gradient, upstream * factor)
    (second,) = torch.autograd.grad(gradient, upstream, values)
    assert torch.equal(second, values * factor)
    assert len(launching) == 3
    several = torch.randn(3, *values.shape, device=DEVICE)
    y = dropping.dropped(values, 0.25, seed)
    (batched,) = torch.autograd.grad(y, values, several, is_grads_batched=True)
    assert torch.equal(batched, several * factor)
    with torch.no_grad():
        assert torch.equal(dropping.dropped(values, 0.25, seed), values * factor)


@needs_kernels
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
def test_transforms_and_traces_of_a_call(launching: list[int]) -> None:
    """They take torch's expression, with the mask of the same seed."""
    inputs = ffn_inputs(6, 5, 70, 4)
    seed = draw_seed(DEVICE)
    x = inputs.pop("x")

    def call(x: Tensor) -> Tensor:
        return functional.ffn(x, **inputs, dropout_p=0.5, dropout_seed=seed)

    with on_path("torch", None):
        plain = call(x)
        assert launching == [1]
        torch.testing.assert_close(torch.func.vjp(call, x)[0], plain)
        torch.testing.assert_close(torch.func.jvp(call, (x,), (x,))[0], plain)
        torch.testing.assert_close(torch.vmap(call)(x[None])[0], plain)
        graph = import_module("torch.fx.experimental.proxy_tensor").make_fx(call)(x)
        torch.testing.assert_close(graph(x), plain)
        assert launching == [1]
        drawn = torch.vmap(lambda x: functional.ffn(x, **inputs, dropout_p=0.5), randomness="different")
        one, other = drawn(torch.stack([x, x]))
        assert not torch.equal(one, other)


@needs_kernels
def test_the_gradients_of_a_call(launching: list[int]) -> None:
    for gated, frozen in itertools.product((False, True), ((), ("w_up", "b_up", "x", "w_gate", "b_gate"))):
        inputs = ffn_inputs((2, 9), 5, 70, 4, gated=gated, residual=True)
        frozen = tuple(name for name in frozen if inputs.get(name) is not None)
        seed = draw_seed(DEVICE)
        found = []
        for call, name in ((functional.ffn, "dropout_seed"), (reference.ffn, "seed")):
            tensors = leaves(inputs, frozen)
            with on_path("torch", None):
                y = call(**tensors, activation="silu", dropout_p=0.5, **{name: seed})
            y.sum().backward()
            found.append([y, *(t.grad for t in tensors.values() if t is not None and t.requires_grad)])
        for ours, theirs in zip(*found, strict=True):
            torch.testing.assert_close(ours, theirs)
    assert launching


DTENSOR = """
import warnings

import torch
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor, init_device_mesh

from fusedlayers import functional

warnings.simplefilter("ignore")
torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
mesh = init_device_mesh("cpu", (1,))
x, w_up, w_down = (distribute_tensor(torch.ones(shape), mesh, [Replicate()]) for shape in ((5, 6), (64, 6), (6, 64)))
y = functional.ffn(x, w_up, w_down, activation="identity", dropout_p=0.5)
assert isinstance(y, DTensor)
assert len(set(y.to_local()[:, 0].tolist())) > 1
torch.distributed.destroy_process_group()
"""


@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch has no distributed package")
def test_dtensors_draw_their_own_masks(run_python: Callable[..., object]) -> None:
    run_python(DTENSOR)
