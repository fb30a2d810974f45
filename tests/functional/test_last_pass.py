"""What the forward pass made is written over in the last backward pass alone, and only where nobody else holds it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from fusedlayers import functional
from fusedlayers.functional.ffn import epilogue
from fusedlayers.functional.last_pass import hooks_are_set
from fusedlayers.functional.switches import switched
from tests.functional.test_autograd_contract_calls import assert_same, gradients, operation_of
from tests.support.contract_cases import DIFFERENTIABLE, Made, made, upstream
from tests.support.operands import ffn_inputs, infinities, leaves, needs_kernels, on_path

pytestmark = infinities
OVERWRITING = [name for name in DIFFERENTIABLE if operation_of(name).last_backward is not None]
Held = list[Tensor]


def by_a_hook(call: Made, held: Held) -> list[Tensor]:
    def note(tensor: Tensor) -> Tensor:
        held.append(tensor)
        return tensor

    with saved_tensors_hooks(note, lambda tensor: tensor):
        return call()


def by_a_hook_that_gives_views(call: Made, held: Held) -> list[Tensor]:
    def note(tensor: Tensor) -> Tensor:
        held.append(tensor)
        return tensor

    with saved_tensors_hooks(note, lambda tensor: tensor.view_as(tensor)):
        return call()


def by_a_hook_alone(call: Made, held: Held) -> list[Tensor]:
    """That gives the same tensor again and again, as one on the CPU does that moves tensors there."""
    with save_on_cpu():
        results = call()
    _note(results, held, lambda tensor: tensor)
    return results


def by_a_node(call: Made, held: Held) -> list[Tensor]:
    results = call()
    _note(results, held, lambda tensor: tensor)
    return results


def by_a_view(call: Made, held: Held) -> list[Tensor]:
    results = call()
    _note(results, held, lambda tensor: tensor.view(-1)[:5] if tensor.is_contiguous() else tensor.detach())
    return results


def by_another_node(call: Made, held: Held) -> list[Tensor]:
    """Which saved it for the gradient of something else."""
    results = call()
    _note(results, held, lambda tensor: tensor * torch.ones(1, requires_grad=True))
    return results


def _note(results: list[Tensor], held: Held, hold: Callable[[Tensor], Tensor]) -> None:
    """Walks over the graph, and holds what is saved there."""
    nodes = [result.grad_fn for result in results]
    seen: set[Any] = set()
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        nodes += [each for each, _ in node.next_functions]
        held += [hold(tensor) for tensor in getattr(node, "saved_tensors", ()) if tensor is not None]


def memory(tensor: Tensor) -> Tensor:
    """A copy of its bytes: padding is whatever it was, also NaN, which is not equal to itself."""
    return tensor.detach().clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8)


HOLDERS = [by_a_hook, by_a_hook_that_gives_views, by_a_hook_alone, by_a_node, by_a_view, by_another_node]


@needs_kernels
@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_what_somebody_holds_keeps_its_bytes(name: str) -> None:
    """After the backward pass, and after somebody has changed the gradients that it gave; whoever holds it."""
    with switched({"FUSEDLAYERS_BACKEND": "triton"}):
        expected = gradients(made(name))
        for hold in HOLDERS:
            call, held = made(name), []
            results = hold(call, held)
            before = [memory(tensor) for tensor in held]
            assert before, hold.__name__
            found = torch.autograd.grad(results, call.leaves, upstream(results))
            assert_same(list(found), expected)
            for gradient in found:
                gradient.fill_(7.0)
            assert_same(before, [memory(tensor) for tensor in held])


@pytest.fixture
def overwritten(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Of every backward pass by kernels, whether it was one that may write over what was made for it."""
    found: list[bool] = []

    def noted(function: Callable[..., Any], last: bool, *arguments: Any) -> Any:
        found.append(last)
        return function(*arguments)

    for own in {operation_of(name) for name in OVERWRITING}:
        monkeypatch.setattr(own, "last_backward", functools.partial(noted, own.last_backward, True))
        monkeypatch.setattr(own, "backward", functools.partial(noted, own.backward, False))
    return found


def plainly(call: Made) -> list[Tensor]:
    return call()


def in_a_checkpoint(call: Made) -> list[Tensor]:
    return list(checkpoint(lambda *leaves: tuple(call(*leaves)), *call.leaves, use_reentrant=False))


def moved(call: Made) -> list[Tensor]:
    """As hooks do that bring back a copy each time: from the CPU, from a file."""
    with saved_tensors_hooks(lambda tensor: tensor.clone(), lambda tensor: tensor.clone()):
        return call()


@needs_kernels
@pytest.mark.parametrize("way", [plainly, in_a_checkpoint, moved], ids=lambda way: way.__name__)
@pytest.mark.parametrize("name", OVERWRITING)
def test_what_nobody_holds_is_written_over(
    name: str, way: Callable[..., list[Tensor]], overwritten: list[bool]
) -> None:
    """In the last pass over a graph; those before it leave it as it is, and give the same bits."""
    with switched({"FUSEDLAYERS_BACKEND": "triton"}):
        call = made(name)
        results = way(call)
        found = [
            torch.autograd.grad(results, call.leaves, upstream(results), retain_graph=keep)
            for keep in ((False,) if way is in_a_checkpoint else (True, True, False))
        ]
    # Where nothing can be written over, the last pass goes on as the others do.
    assert overwritten[: len(found)] == [False] * (len(found) - 1) + [True]
    for again in found[1:]:
        assert_same(list(again), list(found[0]))


@pytest.mark.sampled
@needs_kernels
@pytest.mark.parametrize("hold", HOLDERS, ids=lambda hold: hold.__name__)
@pytest.mark.parametrize("name", OVERWRITING)
def test_what_somebody_holds_is_not(name: str, hold: Callable[..., list[Tensor]], overwritten: list[bool]) -> None:
    with switched({"FUSEDLAYERS_BACKEND": "triton"}):
        call, held = made(name), []
        results = hold(call, held)
        torch.autograd.grad(results, call.leaves, upstream(results))
    # Of the fused and the chunked FFN there is nothing to hold that was made for the backward pass.
    assert not any(overwritten) or operation_of(name).name == "ffn"


def test_hooks_are_known() -> None:
    assert not hooks_are_set()
    with saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
        assert hooks_are_set()
    assert not hooks_are_set()


@needs_kernels
@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
@pytest.mark.parametrize("rows", [30, 300], ids=["few rows", "many rows"])
@pytest.mark.parametrize("units", [64, 70])
def test_gradients_of_pre_activations_take_their_place(
    units: int, rows: int, gated: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the last pass alone, unless dz and dz_gate lie side by side; with the same bits in every pass."""
    inputs = leaves(ffn_inputs(rows, 32, units, 32, gated=gated))
    wanted = [tensor for tensor in inputs.values() if tensor is not None]
    places: list[list[bool]] = []
    hidden_gradient = epilogue.kernels.hidden_gradient

    def noted(dy: Tensor, w_down: Tensor, z: Tensor, z_gate: Tensor | None, *rest: Any, **options: Any) -> Any:
        found = hidden_gradient(dy, w_down, z, z_gate, *rest, **options)
        pairs = [(z, found.dz), (z_gate, found.dz_gate)]
        places.append([one.data_ptr() == other.data_ptr() for one, other in pairs if one is not None])
        return found

    monkeypatch.setattr(epilogue.kernels, "hidden_gradient", noted)
    with on_path("epilogue"):
        y = functional.ffn(**inputs, activation="silu")
        dy = torch.randn_like(y)
        found = [torch.autograd.grad(y, wanted, dy, retain_graph=keep) for keep in (True, True, False)]
    joined = gated and 2 * units < rows and units % 8 == 0
    parts = 2 if gated else 1
    assert places == [[False] * parts, [False] * parts, [not joined] * parts]
    for again in found[1:]:
        assert_same(list(again), list(found[0]))
