"""GEMM-reduce: the kernels against torch in the same dtype and in float64, and against exact integers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import hypothesis
import pytest
import torch
from hypothesis import strategies
from torch import Tensor

from fusedlayers import functional, planning, reference
from fusedlayers.closeness import assert_all_close
from fusedlayers.functional import shapes
from fusedlayers.functional.gemm_reduce import GEMM_REDUCE
from fusedlayers.kernels.activations import ACTIVATIONS
from tests.support.operands import (
    DEVICE,
    DTYPES,
    INTEGERS,
    ON_GPU,
    PATHS,
    SIZES,
    Tensors,
    assert_equal,
    in_float64,
    infinities,
    needs_kernels,
    on_path,
)
from tests.support.reduce_operands import (
    DIFFERENTIABLE,
    INDEXED,
    assert_reduce_close,
    assert_reduce_close_or_again,
    reduce_inputs,
    reduce_results,
    upstream,
)
from tests.support.selection import draws

DIMS = [-2, -1]
TWO_PATHS = [PATHS[0], PATHS[2]]


@pytest.mark.parametrize("path", TWO_PATHS)
@pytest.mark.parametrize("op", ["max", "sum"])
def test_lengths_of_every_integer_dtype(op: str, path: str) -> None:
    inputs = reduce_inputs(20, 30, 16, batches=((3,), (3,)))
    with on_path(path):
        expected = functional.gemm_reduce(**inputs, op=op, lengths=torch.tensor([1, 11, 20], device=DEVICE))
        for dtype in shapes.DTYPES["integer"][1]:
            lengths = torch.tensor([1, 11, torch.iinfo(dtype).max], dtype=dtype, device=DEVICE)
            assert torch.equal(functional.gemm_reduce(**inputs, op=op, lengths=lengths), expected), dtype


@pytest.mark.sampled(together=2)
@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("op", DIFFERENTIABLE)
def test_operations(op: str, dim: int, dtype: torch.dtype) -> None:
    """With a bias and without an activation; the inner dimension takes one step of a product, and several."""
    for K in (24, 72):
        assert_reduce_close_or_again(partial(reduce_inputs, 20, 70, K, dtype, bias=True), op=op, dim=dim)


def moderate(op: str, inputs: Tensors) -> Tensors:
    """Half of the inputs of a logsumexp.

    Exponentials of large values would show how a product was rounded: forward and backward alike in torch, which keeps
    it, but not where it is computed again.
    """
    if op != "logsumexp":
        return inputs
    return {name: None if tensor is None else tensor / 2 for name, tensor in inputs.items()}


@pytest.mark.sampled
@needs_kernels
@pytest.mark.parametrize("activation", [name for name in ACTIVATIONS if name != "identity"])
@pytest.mark.parametrize(("op", "dim"), [("sum", -2), ("absmax", -1), ("logsumexp", -1)])
def test_activations(op: str, dim: int, activation: str) -> None:
    inputs = moderate(op, reduce_inputs(35, 21, 9, bias=True))
    assert_reduce_close(inputs, op=op, dim=dim, activation=activation)


BATCHES = [
    pytest.param((), (), id="none"),
    pytest.param((2, 3), (2, 3), id="two"),
    pytest.param((2, 1, 2, 2), (2, 1, 2, 2), id="four"),
    pytest.param((2, 3), (3,), id="broadcast"),
    pytest.param((), (3,), id="a shared"),
    pytest.param((4,), (), id="b shared"),
    pytest.param((2, 1), (1, 3), id="outer"),
]


@pytest.mark.sampled
@needs_kernels
@pytest.mark.parametrize("op", ["max", "sumsq"])
@pytest.mark.parametrize(("a", "b"), BATCHES)
def test_leading_dimensions(a: tuple[int, ...], b: tuple[int, ...], op: str) -> None:
    for dim in DIMS:
        assert_reduce_close(reduce_inputs(17, 19, 5, batches=(a, b)), op=op, dim=dim)


@needs_kernels
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("letter", ["M", "N", "K"])
def test_sizes_one_at_a_time(letter: str, size: int) -> None:
    sizes = {"M": 20, "N": 24, "K": 12} | {letter: size}
    for op, dim in (("max", -2), ("logsumexp", -1)):
        if size or letter != "M" or op != "max":
            assert_reduce_close(moderate(op, reduce_inputs(**sizes)), op=op, dim=dim)


@needs_kernels
@infinities
@hypothesis.settings(max_examples=60 if ON_GPU else draws(6, 15))
@hypothesis.given(
    sizes=strategies.tuples(*[strategies.integers(1, 70)] * 3),
    batch=strategies.lists(strategies.integers(0, 3), max_size=3),
    op=strategies.sampled_from(DIFFERENTIABLE),
    dim=strategies.sampled_from(DIMS),
    activation=strategies.sampled_from([None, *ACTIVATIONS]),
    masked=strategies.booleans(),
)
def test_random_combinations(
    sizes: tuple[int, int, int], batch: list[int], op: str, dim: int, activation: str | None, masked: bool
) -> None:
    inputs = moderate(op, reduce_inputs(*sizes, batches=(tuple(batch),) * 2))
    mask = torch.rand(sizes[0 if dim == -2 else 1], device=DEVICE) < 0.6 if masked else None
    assert_reduce_close(inputs, op=op, dim=dim, activation=activation, mask=mask)


@pytest.mark.parametrize("path", TWO_PATHS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("op", ["sum", "max", "min", "absmax", "sumsq"])
def test_exact_integers(op: str, dim: int, dtype: torch.dtype, path: str) -> None:
    """Many ties: the first index wins, and the whole gradient goes there."""
    draw = INTEGERS[dtype]
    inputs = reduce_inputs(49, 37, 5, dtype, bias=True, draw=draw)
    dy = upstream(torch.empty(2, 37 if dim == -2 else 49, device=DEVICE, dtype=dtype), draw)
    with on_path(path):
        ours = reduce_results(functional.gemm_reduce, inputs, dy, op=op, dim=dim, activation="relu")
    truth = reduce_results(reference.gemm_reduce, in_float64(inputs), dy.double(), op=op, dim=dim, activation="relu")
    assert_equal(in_float64(ours), truth)


@needs_kernels
@pytest.mark.parametrize("sms", [1, 64])
def test_shares_of_a_logsumexp_add_up_to_one(sms: int) -> None:
    """Far from 0 its rounding would show in all of them. Of integers, so that products are exact; with splits too."""
    inputs = reduce_inputs(300, 21, 5, bias=True, draw=INTEGERS[torch.float16])
    assert inputs["bias"] is not None
    inputs["bias"] += 10_000
    with on_path("kernels", sms=sms):
        found = reduce_results(functional.gemm_reduce, inputs, torch.ones(2, 21, device=DEVICE), op="logsumexp")
    torch.testing.assert_close(found["dbias"], torch.full_like(found["dbias"], 2.0), rtol=1e-6, atol=0.0)


@needs_kernels
@pytest.mark.parametrize("op", ["argmax", "argmin"])
@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("sms", [1, 64])
def test_indices(op: str, dim: int, sms: int) -> None:
    """Of many ties the first one: in a tile, in the tiles that one program has, and in those of several programs."""
    inputs = reduce_inputs(150, 190, 3, draw=INTEGERS[torch.float32])
    with on_path("kernels", sms=sms):
        ours = functional.gemm_reduce(**inputs, op=op, dim=dim)
    truth = reference.gemm_reduce(**in_float64(inputs), op=op, dim=dim)
    assert ours.dtype == torch.int64
    assert torch.equal(ours, truth)


@pytest.mark.parametrize("path", TWO_PATHS)
@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("op", INDEXED)
def test_values_with_indices_and_the_product(op: str, dim: int, path: str) -> None:
    inputs = reduce_inputs(33, 41, 3, bias=True, draw=INTEGERS[torch.float32])
    product = reference.gemm_reduce(**in_float64(inputs), activation="relu", return_product=True)[1]
    with on_path(path):
        d, index, written = functional.gemm_reduce(
            **inputs, op=op, dim=dim, activation="relu", return_indices=True, return_product=True
        )
    expected = reference.gemm_reduce(**in_float64(inputs), op=op, dim=dim, activation="relu", return_indices=True)
    found = {"d": d.double(), "index": index, "product": written.double()}
    assert_equal(found, {"d": expected[0], "index": expected[1], "product": product})


@needs_kernels
@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("op", ["sum", "absmax", "logsumexp"])
def test_the_gradient_of_the_product_is_added(op: str, dim: int) -> None:
    inputs = reduce_inputs(13, 17, 5, bias=True)
    lengths = torch.tensor([5, 11], device=DEVICE)

    def both(call: Callable[..., tuple[Tensor, Tensor]], **tensors: Tensor) -> Tensor:
        d, product = call(**tensors, op=op, dim=dim, lengths=lengths, activation="silu", return_product=True)
        return d + (product * upstream(product)).sum(dim)

    with on_path("kernels"):
        ours = reduce_results(lambda **t: both(functional.gemm_reduce, **t), inputs)
    theirs = reduce_results(lambda **t: both(reference.gemm_reduce, **t), inputs)
    truth = reduce_results(lambda **t: both(reference.gemm_reduce, **t), in_float64(inputs))
    assert_all_close(ours, theirs, truth, independent=34)


@needs_kernels
@pytest.mark.parametrize("op", ["sum", "mean", "sumsq"])
def test_atomic_sums(op: str) -> None:
    inputs = reduce_inputs(300, 41, 3, draw=INTEGERS[torch.float32])
    with on_path("kernels", sms=64):
        ours = reduce_results(functional.gemm_reduce, inputs, op=op, atomic=True)
    theirs = reduce_results(reference.gemm_reduce, inputs, op=op)
    truth = reduce_results(reference.gemm_reduce, in_float64(inputs), op=op)
    assert_all_close(ours, theirs, truth, independent=82)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64], ids=str)
@pytest.mark.parametrize("op", ["sum", "mean"])
@pytest.mark.parametrize("dim", DIMS)
def test_a_sum_needs_no_product(op: str, dim: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """The algebraic path, with masks, lengths, biases and leading dimensions that broadcast."""
    inputs = reduce_inputs(40, 30, 16, dtype, batches=((2, 3), (3,)), bias=True)
    size = 40 if dim == -2 else 30
    mask = torch.rand(2, 1, size, device=DEVICE) < 0.5
    lengths = torch.tensor([0, 11, 40], device=DEVICE)
    for given in ({}, {"mask": mask}, {"lengths": lengths[1:2]}, {"mask": mask, "lengths": lengths + 1}):
        problem = GEMM_REDUCE.problem_of(**inputs, op=op, dim=dim, **given)
        assert planning.plan(problem, planning.Device("cpu")).path == "algebraic"
        ours = reduce_results(functional.gemm_reduce, inputs, op=op, dim=dim, **given)
        theirs = reduce_results(reference.gemm_reduce, inputs, op=op, dim=dim, **given)
        truth = reduce_results(reference.gemm_reduce, in_float64(inputs), op=op, dim=dim, **given)
        assert_all_close(ours, theirs, truth, independent=180)
