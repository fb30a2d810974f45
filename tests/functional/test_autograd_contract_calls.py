"""Autograd's contract: what dispatch modes and checkpoints see, gradients of any layout, hooks, threads, copies."""

from __future__ import annotations

import copy
import functools
import io
import pickle
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import fusedlayers as fl
from fusedlayers import functional
from fusedlayers.functional import operation
from fusedlayers.functional.ffn import FFN
from fusedlayers.functional.operation import OPERATIONS, Operation, Prepared
from fusedlayers.functional.switches import switched
from tests.support.contract_cases import (
    BACKENDS,
    CONTRACT,
    DIFFERENTIABLE,
    Made,
    Recorder,
    assert_near,
    made,
    named,
    upstream,
)
from tests.support.ffn_blocks import mlp
from tests.support.operands import DEVICE, forget_calls, infinities, needs_kernels, on_path

pytestmark = infinities
# A mean is one number.
LAID_OUT = [name for name in DIFFERENTIABLE if name not in ("linear_cross_entropy", "recomputed loss")]


def operation_of(name: str) -> Operation:
    return OPERATIONS[CONTRACT[name](3)[0].__name__]


def gradients(call: Made, given: Callable[[Tensor], Tensor] = lambda dy: dy) -> list[Tensor]:
    results = call()
    return list(torch.autograd.grad(results, call.leaves, [given(each) for each in upstream(results)]))


def assert_same(ours: list[Tensor], theirs: list[Tensor]) -> None:
    assert [torch.equal(one, other) for one, other in zip(ours, theirs, strict=True)] == [True] * len(theirs)


@needs_kernels
@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_a_dispatch_mode_sees_one_operation_each_way(name: str) -> None:
    """Whether it was entered before the call, or around the backward pass alone."""
    own = operation_of(name)
    backward = [f"{own.name}_backward"] if own.has_backward else []
    with switched({"FUSEDLAYERS_BACKEND": "triton"}):
        plain = gradients(made(name))
        for before in (True, False):
            call = made(name, way="observed") if before else made(name)
            results = call()
            if before:
                with Recorder() as forward:
                    made(name)()
                assert forward.ours() == [f"{own.name}_forward"]
            with Recorder() as mode:
                found = torch.autograd.grad(results, call.leaves, upstream(results))
            assert mode.ours() == backward
            assert_same(list(found), plain)


@pytest.mark.sampled
@needs_kernels
@pytest.mark.parametrize(
    "policy", [CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_RECOMPUTE], ids=lambda p: p.name
)
@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_selective_checkpoints(name: str, policy: CheckpointPolicy, monkeypatch: pytest.MonkeyPatch) -> None:
    """What must be saved does not run again, and the gradients are those of a plain call."""
    own, runs = operation_of(name), []
    forward = own.forward

    def counted(*arguments: Any) -> Any:
        runs.append(own.name)
        return forward(*arguments)

    def decide(_: Any, function: Any, *arguments: Any, **options: Any) -> CheckpointPolicy:
        chosen: bool = function is getattr(torch.ops.fusedlayers, f"{own.name}_forward").default
        return policy if chosen else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = functools.partial(create_selective_checkpoint_contexts, decide)
    with switched({"FUSEDLAYERS_BACKEND": "triton"}):
        # Known so well that the next call like it would be recognised at a glance.
        plain = [gradients(made(name)) for _ in range(3)][-1]
        call = made(name)
        monkeypatch.setattr(own, "forward", counted)
        results = checkpoint(call, *call.leaves, use_reentrant=False, context_fn=contexts)
        found = torch.autograd.grad(results, call.leaves, upstream(results))
    assert len(runs) == (1 if policy is CheckpointPolicy.MUST_SAVE else 2)
    assert_same(list(found), plain)


@pytest.mark.sampled(together=2)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("way", ["eager", "observed"])
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_checkpoints(name: str, reentrant: bool, way: str, backend: str) -> None:
    """With one dropout, and the generator left alike."""
    with switched({"FUSEDLAYERS_BACKEND": backend}):
        call = made(name, way=way)
        plain = call()
        state = torch.get_rng_state()
        expected = torch.autograd.grad(plain, call.leaves, upstream(plain))
        results = checkpoint(lambda *leaves: tuple(call(*leaves)), *call.leaves, use_reentrant=reentrant)
        assert torch.equal(torch.get_rng_state(), state)
        torch.autograd.backward(results, upstream(results))
    assert_same([leaf.grad for leaf in call.leaves], list(expected))


def _expanded(dy: Tensor) -> Tensor:
    return dy[..., :1].clone().expand(dy.shape)


def _misaligned(dy: Tensor) -> Tensor:
    memory = dy.new_empty(dy.numel() + 1)
    return memory[1:].view(dy.shape).copy_(dy)


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "expanded": _expanded,
    "a sum's": lambda dy: torch.ones((), device=dy.device).expand(dy.shape),
    "transposed": lambda dy: dy.transpose(0, -1).contiguous().transpose(0, -1),
    "sliced": lambda dy: torch.cat((dy, dy[..., :1]), -1)[..., : dy.shape[-1]],
    "misaligned": _misaligned,
    "negated": lambda dy: torch.complex(torch.zeros_like(dy), -dy).conj().imag,
}


# Layouts are told apart in one place for all operations.
@pytest.mark.sampled
@needs_kernels
@pytest.mark.parametrize("rows", [3, 1])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", [each for each in LAID_OUT if operation_of(each).has_backward])
def test_the_layout_of_an_upstream_gradient(name: str, layout: str, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes the kernels of a contiguous one, in the variant that was prepared for that, and gives the same bits."""
    monkeypatch.setattr("tests.support.contract_cases.ROWS", rows)
    forget_calls()
    read: list[tuple[Any, ...]] = []
    own = operation_of(name)
    # What runs where the graph is not kept.
    last = "backward" if own.last_backward is None else "last_backward"
    backward = getattr(own, last)

    def recorded(call: Prepared, operands: Any, kept: Any, wanted: Any, given: Any) -> Any:
        read.append(tuple((each.stride(), each.data_ptr() % 16) for each in given if each is not None))
        return backward(call, operands, kept, wanted, given)

    monkeypatch.setattr(own, last, recorded)
    with switched({"FUSEDLAYERS_BACKEND": "triton"}):
        call = made(name)
        expected = gradients(
            call, lambda dy: LAYOUTS[layout](dy).resolve_neg().clone(memory_format=torch.contiguous_format)
        )
        # A call that adds up in no fixed order is not remembered.
        prepared = operation.CALLS.values()
        variants = [_variants(each.ready) for each in prepared]
        found = gradients(call, LAYOUTS[layout])
    assert_same(found, expected)
    assert len(read) == 2
    assert read[0] == read[1]
    assert operation.CALLS.values() == prepared
    assert [_variants(each.ready) for each in prepared] == variants


@needs_kernels
def test_the_gradient_of_one_row_has_the_stride_of_its_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row of a wider matrix counts as contiguous, whatever its stride."""
    strides: list[tuple[int, ...]] = []
    backward = FFN.last_backward

    def recorded(call: Prepared, operands: Any, kept: Any, wanted: Any, given: Any) -> Any:
        strides.append(given[0].stride())
        return backward(call, operands, kept, wanted, given)

    monkeypatch.setattr(FFN, "last_backward", recorded)
    x, w_up, w_down = (
        torch.randn(*shape, device=DEVICE, requires_grad=True) for shape in ((1, 16), (24, 16), (16, 24))
    )
    with switched({"FUSEDLAYERS_BACKEND": "triton"}):
        functional.ffn(x, w_up, w_down).backward(torch.randn(1, 17, device=DEVICE)[:, :16])
    assert strides == [(16, 1)]


def _variants(ready: dict[Any, Any]) -> set[Any]:
    inner = {(key, each) for key, value in ready.items() if isinstance(value, dict) for each in value}
    return set(ready) | inner


@pytest.mark.sampled
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", DIFFERENTIABLE)
@pytest.mark.parametrize("way", ["eager", "observed"])
def test_what_is_saved_may_lie_otherwise_when_it_is_read(name: str, way: str, backend: str) -> None:
    """Packed to another layout, kept on the CPU, and swapped for an equal tensor by an assignment to ``.data``."""

    def otherwise(tensor: Tensor) -> Tensor:
        return torch.stack((tensor, tensor), -1)[..., 0]

    with switched({"FUSEDLAYERS_BACKEND": backend}):
        call = made(name, way=way)
        plain = gradients(call)
        with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, otherwise):
            packed = gradients(call)
        with torch.autograd.graph.save_on_cpu():
            on_cpu = gradients(call)
        results = call()
        for leaf in call.leaves:
            leaf.data = otherwise(leaf.data)
        swapped = torch.autograd.grad(results, call.leaves, upstream(results))
    for found in (packed, on_cpu, swapped):
        assert_near(named(call, found), named(call, plain))


@pytest.mark.parametrize("change", ["dtype", "shape"])
def test_what_comes_back_is_what_was_saved(change: str) -> None:
    """The launches of a backward pass are those of the call before, and read tensors of the same kind."""

    def change_it(tensor: Tensor) -> Tensor:
        return tensor.half() if change == "dtype" else tensor[:-1]

    queries, documents = torch.randn(2, 5, 8, requires_grad=True), torch.randn(3, 4, 8, requires_grad=True)
    with on_path("kernels"):
        functional.maxsim(queries, documents).sum().backward()
        with torch.autograd.graph.saved_tensors_hooks(change_it, lambda tensor: tensor):
            scores = functional.maxsim(queries, documents)
        with pytest.raises(RuntimeError, match=r"maxsim saved torch.float32 \[2, 5, 8\] .* and got .* back"):
            scores.sum().backward()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ["gated ffn", "recomputed ffn", "wide gated ffn", "linear", "maxsim", "gemm_reduce"])
def test_two_threads_go_backward_at_once(name: str, backend: str) -> None:
    with switched({"FUSEDLAYERS_BACKEND": backend}):
        calls = [made(name), made(name)]
        graphs = [call() for call in calls]
        given = upstream(graphs[0])
        expected = torch.autograd.grad(graphs[0], calls[0].leaves, given, retain_graph=True)
        found: dict[int, Any] = {}

        def run(place: int) -> None:
            found[place] = torch.autograd.grad(graphs[place], calls[place].leaves, given)

        # The interpreter itself patches Triton's language for the time of a launch, so there it is one after the other.
        threads = [threading.Thread(target=run, args=(place,)) for place in range(2)]
        for thread in threads:
            thread.start()
            if backend == "triton" and DEVICE.type == "cpu":
                thread.join()
        for thread in threads:
            thread.join()
    for place in range(2):
        assert_same(list(found[place]), list(expected))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("make", [
    lambda: fl.FusedFFN(16, 24, gated=True, dropout=0.5, device=DEVICE),
    lambda: fl.SplitKLinear(16, 24, device=DEVICE),
    lambda: _replaced(),
])  # fmt: skip
def test_copies_of_a_module_hold_no_prepared_call(make: Callable[[], nn.Module], backend: str) -> None:
    """They are as large after many calls as after one, name nothing of ours but classes, and compute the same."""
    model = make()
    width = next(model.parameters()).shape[-1]
    x = torch.randn(5, width, device=DEVICE, requires_grad=True)
    sizes = []
    with switched({"FUSEDLAYERS_BACKEND": backend}):
        for _ in range(4):
            model(x).sum().backward()
            model.zero_grad()
            stored = pickle.dumps(model)
            assert not any(name in stored for name in (b"Recalled", b"ModuleCalls", b"Prepared", b"Guard", b"planning"))
            sizes.append(len(stored))
        assert len(set(sizes)) == 1
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        copies = (pickle.loads(pickle.dumps(model)), copy.deepcopy(model), torch.load(file, weights_only=False))
        for twin in copies:
            for one in (model, twin):
                torch.manual_seed(3)
                one.output = one(x).detach()
            assert torch.equal(model.output, twin.output)
            del model.output


def _replaced() -> nn.Module:
    model = mlp(p=0.5).to(DEVICE)
    assert fl.replace(model).replaced
    return model
