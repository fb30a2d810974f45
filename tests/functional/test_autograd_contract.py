"""Autograd's contract: batched and dual upstream gradients, who requires a gradient, whose memory a gradient has."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor

from fusedlayers import functional
from fusedlayers.functional.switches import switched
from tests.support.compiled_cases import nothing_compiled  # noqa: F401
from tests.support.contract_cases import (
    BACKENDS,
    DIFFERENTIABLE,
    NAMES,
    WAYS,
    WIDE,
    Found,
    Made,
    assert_as_torch,
    assert_near,
    made,
    named,
    upstream,
)
from tests.support.operands import DEVICE, infinities, needs_kernels, saved

# What torch says of itself: of forward-mode rules, which are scripted, and of compilation.
pytestmark = [
    infinities,
    pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:`isinstance\\(treespec, LeafSpec\\)` is deprecated:FutureWarning"),
]
# Compilation takes long: one call of each operation, and the chunked path.
COMPILED = ["ffn", "recomputed ffn", "wide ffn", "gemm_gemm", "gemm_reduce", "maxsim", "linear"]
CASES = [
    pytest.param(name, *backend.values, way, marks=backend.marks, id=f"{name}-{backend.values[0]}-{way}")
    for name, backend, way in itertools.product(
        DIFFERENTIABLE, [each if hasattr(each, "values") else pytest.param(each) for each in BACKENDS], WAYS
    )
    if way != "compiled" or name in COMPILED
]


def batched(call: Made) -> Found:
    results = call()
    return named(call, torch.autograd.grad(results, call.leaves, upstream(results, 4), is_grads_batched=True))


@pytest.mark.sampled(together=2)
@pytest.mark.parametrize(("name", "backend", "way"), CASES)
def test_batched_upstream_gradients(name: str, backend: str, way: str) -> None:
    assert_as_torch(name, backend, way, batched)


@pytest.mark.sampled
@pytest.mark.parametrize(("name", "backend", "way"), [case for case in CASES if "compiled" not in case.values])
def test_batched_upstream_gradients_that_are_differentiated_again(name: str, backend: str, way: str) -> None:
    def twice(call: Made) -> Found:
        results = call()
        given = upstream(results, 4)
        first = torch.autograd.grad(results, call.leaves, given, is_grads_batched=True, create_graph=True)
        total = sum(gradient.square().sum() for gradient in first)
        second = torch.autograd.grad(total, call.leaves, allow_unused=True)
        return named(call, first) | named(call, second, "dd")

    assert_as_torch(name, backend, way, twice)


@pytest.mark.sampled
@pytest.mark.parametrize(("name", "backend", "way"), [case for case in CASES if "eager" in case.values])
def test_vectorized_jacobians(name: str, backend: str, way: str) -> None:
    def jacobians(call: Made) -> Found:
        found = torch.autograd.functional.jacobian(
            lambda *leaves: tuple(call(*leaves)), tuple(call.leaves), vectorize=True
        )
        return {key: value for place, row in enumerate(found) for key, value in named(call, row, f"{place}: d").items()}

    assert_as_torch(name, backend, way, jacobians)


def forward_over_reverse(call: Made) -> Found:
    """Gradients of a graph that was built before, and their tangents."""
    results = call()
    with forward_ad.dual_level():
        given = map(forward_ad.make_dual, upstream(results), upstream(results, seed=3))
        found = torch.autograd.grad(results, call.leaves, list(given))
        parts = [forward_ad.unpack_dual(gradient) for gradient in found]
    return named(call, [part.primal for part in parts]) | named(call, [part.tangent for part in parts], "tangent of d")


@pytest.mark.sampled(together=2)
@pytest.mark.parametrize(("name", "backend", "way"), CASES)
def test_forward_over_reverse(name: str, backend: str, way: str) -> None:
    assert_as_torch(name, backend, way, forward_over_reverse, activation="gelu_tanh")


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_tangent_that_torch_has_no_rule_for_is_refused_and_not_lost(backend: str) -> None:
    with switched({"FUSEDLAYERS_BACKEND": backend}), pytest.raises(NotImplementedError, match="silu_backward"):
        forward_over_reverse(made("gated ffn"))


@pytest.mark.filterwarnings("ignore:(There is a performance drop|torch.searchsorted)")
@pytest.mark.parametrize("name", [name for name in NAMES if "packed" not in name])
@pytest.mark.parametrize("backend", ["auto", "torch"])
def test_calls_are_mapped_over_a_batch(name: str, backend: str) -> None:
    """``vmap`` over the first operand gives what a call for each of the batch gives, planned and recalled."""
    with switched({"FUSEDLAYERS_BACKEND": backend}):
        call = made(name, dropout_p=0.0, adapter_dropout_p=0.0)
        first, *others = (leaf.detach() for leaf in call.leaves)
        batch = torch.stack([first, first.flip(0)])
        expected = [call(each, *others) for each in batch]
        for _ in range(2):
            found = torch.func.vmap(lambda leaf: tuple(call(leaf, *others)))(batch)
            for place, alone in enumerate(expected):
                if name == WIDE:
                    assert_near({"y": found[0][place]}, {"y": alone[0]})
                else:
                    torch.testing.assert_close([each[place] for each in found], alone)


@pytest.mark.parametrize("name", ["ffn", "recomputed ffn", "gemm_gemm", "maxsim", "linear", "mean with product"])
@pytest.mark.parametrize("backend", ["auto", "torch"])
def test_hessian_vector_products_of_torch_func(name: str, backend: str) -> None:
    def products(call: Made) -> Found:
        def total(*leaves: Tensor) -> Tensor:
            return sum((result.square().sum() for result in call(*leaves)), torch.zeros((), device=DEVICE))

        places = tuple(range(len(call.leaves)))
        leaves = tuple(leaf.detach() for leaf in call.leaves)
        _, found = torch.func.jvp(torch.func.grad(total, places), leaves, tuple(upstream(list(leaves))))
        return named(call, found)

    assert_as_torch(name, backend, "eager", products)


@needs_kernels
def test_hessian_vector_products_in_kernels_are_refused() -> None:
    """Inside a transform only torch's operations run, and whoever asks for kernels is told so."""
    call = made("ffn")
    with switched({"FUSEDLAYERS_BACKEND": "triton"}), pytest.raises(RuntimeError, match=r"torch\.func|forward-mode"):
        torch.func.grad(lambda x: call(x, *call.leaves[1:])[0].sum())(call.leaves[0].detach())


@pytest.mark.sampled(together=2)
@pytest.mark.parametrize(("name", "backend", "way"), [case for case in CASES if "compiled" not in case.values])
def test_results_and_gradients_have_memory_of_their_own(name: str, way: str, backend: str) -> None:
    """Each fills a storage of its own, but a residual's: in torch's addition, too, that is the upstream one."""
    with switched({"FUSEDLAYERS_BACKEND": backend}):
        # In 16 bits some kernels read padded copies.
        call = made(name, torch.float16, way)
        results = call()
        given = upstream(results)
        found = torch.autograd.grad(results, call.leaves, given)
    taken = {each.untyped_storage().data_ptr() for each in (*given, *call.leaves)}
    made_here = [(f"result {place}", result) for place, result in enumerate(results)]
    for key, tensor in (*made_here, *zip(call.names, found, strict=True)):
        if key == "residual":
            assert tensor.data_ptr() == given[0].data_ptr()
            continue
        storage = tensor.untyped_storage()
        assert storage.nbytes() == tensor.numel() * tensor.element_size(), key
        assert tensor.is_contiguous() or key in call.names, key
        assert storage.data_ptr() not in taken, key
        taken.add(storage.data_ptr())


SUBSETS = [(name, way) for name in NAMES for way in ("eager", "observed")]


@pytest.mark.sampled
@needs_kernels
@pytest.mark.parametrize(("name", "way"), SUBSETS)
def test_every_subset_of_operands_that_require_a_gradient(name: str, way: str) -> None:
    """Results require one where those of torch do; gradients are where torch's are, and are the usual ones."""

    def gradients(call: Made, wanted: tuple[str, ...]) -> tuple[list[bool], Found]:
        leaves = [
            leaf.detach().requires_grad_(key in wanted) for key, leaf in zip(call.names, call.leaves, strict=True)
        ]
        results = call(*leaves)
        requires = [result.requires_grad for result in results]
        outputs = [result for result in results if result.requires_grad]
        given = [dy for dy, required in zip(upstream(results), requires, strict=True) if required]
        asked = {key: leaf for key, leaf in zip(call.names, leaves, strict=True) if leaf.requires_grad}
        if not outputs:
            return requires, {}
        found = torch.autograd.grad(outputs, list(asked.values()), given, allow_unused=True)
        return requires, dict(zip(asked, found, strict=True))

    names = tuple(made(name).names)
    with switched({"FUSEDLAYERS_BACKEND": "triton"}):
        _, usual = gradients(made(name, way=way), names)
    for wanted in subsets(list(names)):
        with switched({"FUSEDLAYERS_BACKEND": "triton"}):
            requires, ours = gradients(made(name, way=way), wanted)
        with switched({"FUSEDLAYERS_BACKEND": "torch"}):
            expected, theirs = gradients(made(name, recompute=False), wanted)
        assert requires == expected, wanted
        assert [key for key, each in ours.items() if each is None] == [k for k, each in theirs.items() if each is None]
        assert_near(ours, {key: each if each is None else usual[key] for key, each in ours.items()})


def subsets(names: list[str]) -> list[tuple[str, ...]]:
    """All of a few; of many, none, each alone, each left out, and all."""
    sizes = range(len(names) + 1) if len(names) < 5 else {0, 1, len(names) - 1, len(names)}
    return [subset for size in sizes for subset in itertools.combinations(names, size)]


@needs_kernels
@pytest.mark.parametrize("alone", ["b_down", "residual"])
def test_a_backward_pass_that_reads_no_operand(alone: str) -> None:
    """Under a dispatch mode that is entered before the forward pass, or around the backward pass alone."""
    x, w_up, w_down = (torch.randn(*shape, device=DEVICE) for shape in ((5, 16), (24, 16), (16, 24)))
    shape = {"b_down": (16,), "residual": (5, 16)}[alone]
    expected: Callable[[Tensor], Tensor] = lambda dy: dy.sum(0) if alone == "b_down" else dy  # noqa: E731
    for before in (True, False):
        with switched({"FUSEDLAYERS_BACKEND": "triton"}):
            leaf = torch.randn(*shape, device=DEVICE, requires_grad=True)
            with torch.utils.flop_counter.FlopCounterMode(display=False) if before else torch.enable_grad():
                y = functional.ffn(x, w_up, w_down, **{alone: leaf})
            assert not saved(lambda leaf=leaf: functional.ffn(x, w_up, w_down, **{alone: leaf}))
            dy = torch.randn_like(y)
            with torch.utils.flop_counter.FlopCounterMode(display=False):
                (gradient,) = torch.autograd.grad(y, leaf, dy)
        torch.testing.assert_close(gradient, expected(dy))
