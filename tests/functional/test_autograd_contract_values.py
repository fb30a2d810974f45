"""Autograd's contract: what a call writes and keeps, graphs that are kept, derivatives of first and second order."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fusedlayers.functional.switches import switched
from tests.support.contract_cases import BACKENDS, DIFFERENTIABLE, Found, Made, assert_as_torch, made, named, upstream
from tests.support.operands import infinities

pytestmark = infinities
of_every_operation = pytest.mark.parametrize("name", DIFFERENTIABLE)
on_every_backend = pytest.mark.parametrize("backend", BACKENDS)


@on_every_backend
@of_every_operation
def test_graphs_that_are_kept(name: str, backend: str) -> None:
    """Each backward pass gives the same gradients; none writes to an operand or to the upstream gradient."""
    with switched({"FUSEDLAYERS_BACKEND": backend}):
        call = made(name)
        results = call()
        given = upstream(results)
        tensors = [each for each in (*call.arguments.values(), *given) if isinstance(each, Tensor)]
        before = [(tensor, tensor.detach().clone(), tensor._version) for tensor in tensors]
        first, *others = (
            torch.autograd.grad(results, call.leaves, given, retain_graph=kept) for kept in (True, True, False)
        )
        with pytest.raises(RuntimeError, match="backward through the graph a second time"):
            torch.autograd.grad(results, call.leaves, given)
    for other in others:
        assert all(map(torch.equal, first, other))
    assert [torch.equal(tensor, was) and tensor._version == version for tensor, was, version in before] == [True] * len(
        before
    )


@on_every_backend
@of_every_operation
def test_calls_without_a_graph(name: str, backend: str) -> None:
    """Where nothing asks for a gradient, results require none and nothing is saved."""
    saved: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    with (
        switched({"FUSEDLAYERS_BACKEND": backend}),
        torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor),
    ):
        call = made(name)
        found = [call(*(leaf.detach() for leaf in call.leaves))]
        for mode in (torch.no_grad, torch.inference_mode):
            with mode():
                found.append(call())
        assert not saved
        expected = call()
        assert saved
    for results in found:
        assert not any(result.requires_grad for result in results)
        for one, other in zip(results, expected, strict=True):
            torch.testing.assert_close(one, other.detach())


@pytest.mark.bits
@pytest.mark.usefixtures("poisoned_memory")
@on_every_backend
@of_every_operation
def test_uninitialised_memory_changes_nothing(name: str, backend: str) -> None:
    """Whatever it is filled with, and however often the call is repeated, results and gradients have the same bits."""
    with switched({"FUSEDLAYERS_BACKEND": backend}):
        runs = []
        for _ in range(2):
            call = made(name)
            results = call()
            runs.append([*results, *torch.autograd.grad(results, call.leaves, upstream(results))])
    assert all(map(torch.equal, *runs))


def second_derivatives(call: Made) -> Found:
    """Of a scalar made from all first gradients, to every leaf and to the upstream gradients."""
    results = call()
    given = [each.requires_grad_() for each in upstream(results)]
    first = torch.autograd.grad(results, call.leaves, given, create_graph=True)
    total = sum(gradient.square().sum() for gradient in first)
    *second, last = torch.autograd.grad(total, [*call.leaves, given[0]], allow_unused=True)
    return named(call, [each.detach() for each in first]) | named(call, second, "dd") | {"dd upstream": last}


@on_every_backend
@of_every_operation
def test_second_derivatives(name: str, backend: str) -> None:
    assert_as_torch(name, backend, "eager", second_derivatives)


@of_every_operation
def test_float64_against_finite_differences(name: str) -> None:
    """float64 runs through torch, and is right to the second order."""
    call = made(name, torch.float64, activation="gelu_tanh")
    assert all(result.dtype == torch.float64 for result in call())

    def results(*leaves: Tensor) -> tuple[Tensor, ...]:
        return tuple(call(*leaves))

    assert torch.autograd.gradcheck(results, call.leaves, fast_mode=True)
    assert torch.autograd.gradgradcheck(results, call.leaves, fast_mode=True)
