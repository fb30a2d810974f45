"""Autograd's contract: what a call writes and keeps, graphs that are kept, derivatives of first and second order."""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor

from fusedlayers.functional.switches import switched
from tests.support.contract_cases import (
    BACKENDS,
    DIFFERENTIABLE,
    Found,
    Made,
    assert_as_torch,
    assert_near,
    made,
    named,
    upstream,
)
from tests.support.operands import DEVICE, forget_calls, infinities, needs_kernels

pytestmark = infinities
of_every_operation = pytest.mark.parametrize("name", DIFFERENTIABLE)
on_every_backend = pytest.mark.parametrize("backend", BACKENDS)


@on_every_backend
@of_every_operation
def test_graphs_that_are_kept(name: str, backend: str) -> None:
    """Each backward pass gives the same gradients, each alone, too; none writes to operands or upstream ones."""
    with switched({"FUSEDLAYERS_BACKEND": backend}):
        call = made(name)
        results = call()
        given = upstream(results)
        tensors = [each for each in (*call.arguments.values(), *given) if isinstance(each, Tensor)]
        before = [(tensor, tensor.detach().clone(), tensor._version) for tensor in tensors]
        alone = [torch.autograd.grad(results, leaf, given, retain_graph=True)[0] for leaf in call.leaves]
        first, *others = (
            torch.autograd.grad(results, call.leaves, given, retain_graph=kept) for kept in (True, True, False)
        )
        with pytest.raises(RuntimeError, match="backward through the graph a second time"):
            torch.autograd.grad(results, call.leaves, given)
        # Also where gradients add up, the first of which may be the upstream gradient itself.
        for _ in range(2):
            torch.autograd.backward(call(), given)
        assert all(torch.equal(leaf.grad, 2 * each) for leaf, each in zip(call.leaves, first, strict=True))
    for other in (alone, *others):
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


@on_every_backend
@of_every_operation
def test_results_may_be_changed_in_place(name: str, backend: str) -> None:
    """As by an activation that writes over its input: the gradients are those of a change out of place."""
    if (name, backend) == ("logsumexp", "torch"):
        pytest.skip("torch's own logsumexp keeps its result")
    with switched({"FUSEDLAYERS_BACKEND": backend}):
        found = []
        for change in (lambda result: result.clone().mul(2), lambda result: result.mul_(2)):
            call = made(name)
            results = [change(result) for result in call()]
            found.append([*results, *torch.autograd.grad(results, call.leaves, upstream(results))])
    assert all(map(torch.equal, *found))


@on_every_backend
@of_every_operation
def test_an_operand_that_changes_before_the_backward_pass_is_noticed(name: str, backend: str) -> None:
    """Unless its values are not read, so that the gradients are still right; see also test_changed_biases.py."""
    with switched({"FUSEDLAYERS_BACKEND": backend}):
        call = made(name)
        expected = torch.autograd.grad(call(), call.leaves, upstream(call()))
        noticed = []
        for key in call.names:
            call = made(name)
            results = call()
            with torch.no_grad():
                call.arguments[key].add_(1)
            try:
                found = torch.autograd.grad(results, call.leaves, upstream(results))
            except RuntimeError as error:
                assert re.search("modified (by an )?inplace", str(error))  # noqa: PT017
                noticed.append(key)
            else:
                assert_near(named(call, found), named(call, expected))
    assert noticed or name == "sum"


@pytest.mark.parametrize("backend", BACKENDS[:1])
@of_every_operation
def test_a_backward_pass_inside_autocast_is_not_cast_again(name: str, backend: str) -> None:
    with switched({"FUSEDLAYERS_BACKEND": backend}):
        call = made(name)
        results = call()
        expected = torch.autograd.grad(results, call.leaves, upstream(results), retain_graph=True)
        with torch.autocast(DEVICE.type, torch.float16):
            found = torch.autograd.grad(results, call.leaves, upstream(results))
    assert all(map(torch.equal, found, expected))


def tied(call: Made) -> Found:
    """Gradients where one tensor takes the place of all operands of its shape, and its transpose that of others."""
    shared: dict[tuple[int, ...], Tensor] = {}
    given = []
    for leaf in call.leaves:
        turned = leaf.shape[:-2] + leaf.shape[-2:][::-1]
        if leaf.dim() > 1 and tuple(turned) in shared and turned != leaf.shape:
            given.append(shared[tuple(turned)].mT)
        else:
            given.append(shared.setdefault(tuple(leaf.shape), leaf))
    results = call(*given)
    owners = list(shared.values())
    first = torch.autograd.grad(results, owners, upstream(results), create_graph=True)
    second = torch.autograd.grad(sum(each.square().sum() for each in first), owners, allow_unused=True)
    return {
        f"{order}{place}": each if each is None else each.detach()
        for order, found in (("d", first), ("dd", second))
        for place, each in enumerate(found)
    }


@on_every_backend
@of_every_operation
def test_one_tensor_in_several_places(name: str, backend: str) -> None:
    """As tied weights are: its gradient is the sum of those of all places."""
    assert_as_torch(name, backend, "eager", tied)


# With many rows sums are split, and the parts added up by a launch of their own.
SPLIT = ("ffn", "gated ffn", "gemm_gemm", "sum", "logsumexp", "maxsim", "weight_gradient", "linear", "split linear")


@pytest.mark.bits
@needs_kernels
@pytest.mark.parametrize(("name", "rows"), [*((name, 3) for name in DIFFERENTIABLE), *((name, 40) for name in SPLIT)])
def test_a_repeated_call_reads_its_own_tensors(name: str, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first call prepares its launches; later ones have other numbers elsewhere."""
    monkeypatch.setattr("tests.support.contract_cases.ROWS", rows)

    def run(turn: int) -> list[Tensor]:
        call = made(name)
        torch.manual_seed(turn)
        leaves = [torch.randn_like(leaf).requires_grad_() for leaf in call.leaves]
        results = call(*leaves)
        return [*results, *torch.autograd.grad(results, leaves, upstream(results, seed=turn))]

    with switched({"FUSEDLAYERS_BACKEND": "triton"}):
        forget_calls()
        repeated = [run(turn) for turn in range(3)]
        for turn, found in enumerate(repeated):
            forget_calls()
            assert all(map(torch.equal, found, run(turn))), turn
