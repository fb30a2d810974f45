"""GEMM-reduce as a function of torch: bad input, plans, derivatives, autocast, what is saved, launched and written."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fusedlayers import explain, functional, planning, reference
from fusedlayers.kernels import gemm_reduce as kernels
from fusedlayers.planning import Device, ReduceProblem
from tests.support.operands import (
    DEVICE,
    PATHS,
    assert_equal,
    needs_kernels,
    on_path,
)
from tests.support.records import where
from tests.support.reduce_operands import DIFFERENTIABLE, reduce_inputs, reduce_results

TWO_PATHS = [PATHS[0], PATHS[2]]
H200 = Device("cuda", "NVIDIA H200", "sm_90", 132, triton=True, backend="sm90")
A, B = torch.zeros(2, 5, 3), torch.zeros(2, 3, 4)


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"op": "median"}, ValueError, "op must be one of sum, mean, max"),
        ({"dim": 0}, ValueError, "dim must be -2 (over M) or -1 (over N), got 0"),
        ({"dim": True}, ValueError, "dim must be"),
        ({"bias": torch.zeros(5)}, ValueError, "bias of shape [5] and dtype torch.float32 on cpu: expected [N] = [4]"),
        ({"mask": torch.ones(5)}, TypeError, "mask of shape [5] and dtype torch.float32 on cpu: expected torch.bool"),
        ({"mask": [True]}, TypeError, "mask must be a torch.Tensor or None, got list"),
        ({"mask": torch.ones(4, dtype=torch.bool)}, ValueError, "mask of shape [4]"),
        ({"mask": torch.ones(3, 5, dtype=torch.bool)}, ValueError, "a shape that broadcasts to [*B, M] = [2, 5]"),
        ({"mask": torch.ones(1, 2, 5, dtype=torch.bool)}, ValueError, "mask of shape [1, 2, 5]"),
        ({"mask": torch.ones(5, dtype=torch.bool, device="meta")}, ValueError, "expected the device of a, cpu"),
        ({"lengths": torch.ones(2)}, TypeError, "lengths of shape [2] and dtype torch.float32 on cpu: expected an"),
        ({"lengths": torch.ones(3, dtype=torch.int32)}, ValueError, "broadcasts to [*B] = [2]"),
        ({"activation": "swoosh"}, ValueError, "activation 'swoosh' is not known"),
        ({"return_indices": True}, ValueError, "expected op to be one of max, min, absmax, got 'sum'"),
        ({"op": "argmax", "return_indices": True}, ValueError, "argmax and argmin return indices alone"),
        ({"return_product": 1}, TypeError, "return_product must be True or False, got 1"),
        ({"atomic": True, "op": "max"}, ValueError, "atomic=True: expected op to be one of sum, mean, sumsq"),
        ({"a": A[:, :0], "op": "max"}, ValueError, "expected M > 0, as the max of no elements does not exist"),
        ({"b": B[:, :, :0], "op": "argmin", "dim": -1}, ValueError, "expected N > 0, as the argmin of no elements"),
    ],
)  # fmt: skip
def test_bad_input(change: dict[str, Any], error: type[Exception], words: str) -> None:
    for call in (functional.gemm_reduce, lambda **given: explain(functional.gemm_reduce, **given)):
        with pytest.raises(error) as raised:
            call(**({"a": A, "b": B} | change))
        assert words in str(raised.value)


def test_atomic_is_refused_under_deterministic_algorithms() -> None:
    torch.use_deterministic_algorithms(True)
    with pytest.raises(RuntimeError, match="atomic=True adds in no fixed order"):
        functional.gemm_reduce(A, B, atomic=True)


@pytest.mark.parametrize("path", TWO_PATHS)
@pytest.mark.parametrize("dim", [-2, -1])
def test_empty_axes(dim: int, path: str) -> None:
    """Nothing to reduce, nothing to keep, no batch entry, and an inner dimension of 0."""
    with on_path(path):
        none = {"a": A[:, :0], "b": B} if dim == -2 else {"a": A, "b": B[..., :0]}
        for op, value in (("sum", 0.0), ("sumsq", 0.0), ("mean", torch.nan), ("logsumexp", -torch.inf)):
            d = functional.gemm_reduce(**none, op=op, dim=dim)
            expected = torch.full((2, 4 if dim == -2 else 5), value)
            assert torch.equal(d.nan_to_num(nan=7.0, neginf=8.0), expected.nan_to_num(nan=7.0, neginf=8.0)), op
        kept = {"a": A, "b": B[..., :0]} if dim == -2 else {"a": A[:, :0], "b": B}
        for op in DIFFERENTIABLE:
            assert functional.gemm_reduce(**kept, op=op, dim=dim).shape == (2, 0)
            assert functional.gemm_reduce(A[:0], B[:0], op=op, dim=dim).shape[0] == 0
        inner = reduce_results(functional.gemm_reduce, {"a": A[..., :0], "b": B[:, :0], "bias": torch.ones(4)}, dim=dim)
        assert torch.equal(inner["d"], torch.full((2, 4), 5.0) if dim == -2 else torch.full((2, 5), 4.0))


@pytest.mark.sampled
@pytest.mark.parametrize("op", DIFFERENTIABLE)
@pytest.mark.parametrize("dim", [-2, -1])
def test_float64_and_its_derivatives(op: str, dim: int) -> None:
    """float64 runs through torch and is right to the second order."""
    tensors = [torch.randn(2, *shape, dtype=torch.float64, requires_grad=True) for shape in ((4, 3), (3, 5))]
    bias = torch.randn(5, dtype=torch.float64, requires_grad=True)
    mask = torch.tensor([True, False, True, True, True])[: 4 if dim == -2 else 5]

    def call(a: Tensor, b: Tensor, bias: Tensor) -> Tensor:
        return functional.gemm_reduce(a, b, bias=bias, op=op, dim=dim, mask=mask)

    assert call(*tensors, bias).dtype == torch.float64
    assert torch.autograd.gradcheck(call, (*tensors, bias))
    assert torch.autograd.gradgradcheck(call, (*tensors, bias))


@pytest.mark.sampled
@pytest.mark.parametrize("path", TWO_PATHS)
@pytest.mark.parametrize("op", DIFFERENTIABLE)
def test_every_subset_of_frozen_operands(op: str, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Right gradients, None elsewhere, and no kernel for a gradient that nobody wants."""
    launched: set[str] = set()

    def counted(name: str) -> Any:
        launcher = getattr(kernels, name)

        def count(*args: Any, **options: Any) -> Any:
            asked = {"matrix", "bias", "kept_gradient"} & options.keys()
            launched.update(f"{name} {what}" for what in asked if options[what])
            return launcher(*args, **options)

        return count

    for name in ("route", "kept_gradient", "reduced_gradient"):
        monkeypatch.setattr(kernels, name, counted(name))
    inputs = reduce_inputs(5, 6, 4, bias=True)
    # a is what is reduced over M, and the bias belongs to the columns that are kept.
    kept = "route kept_gradient" if op in ("max", "min", "absmax") else "kept_gradient matrix"
    matrices = {"a": "reduced_gradient matrix", "b": kept, "bias": "kept_gradient bias"}
    with on_path(path):
        everything = reduce_results(functional.gemm_reduce, inputs, op=op, activation="silu")
        for frozen in (("a",), ("b",), ("bias",), ("a", "b"), ("a", "bias"), ("b", "bias")):
            launched.clear()
            ours = reduce_results(functional.gemm_reduce, inputs, None, frozen, op=op, activation="silu")
            assert_equal(ours, everything | {f"d{name}": None for name in frozen})
            if path == "kernels":
                wanted = {matrices[name] for name in matrices if name not in frozen}
                assert launched == wanted - ({"kept_gradient bias"} if op in ("max", "min", "absmax") else set())


def problem(**change: Any) -> ReduceProblem:
    facts: dict[str, Any] = {"batch": 64, "kept": 1024, "reduced": 1024, "K": 128, "dtype": "bfloat16", "op": "max"}
    return ReduceProblem(**facts | change)


@pytest.mark.parametrize(
    ("change", "backend", "path", "words"),
    [
        ({}, "triton", "fused", "never write the product"),
        ({}, "torch", "torch", "no other path"),
        ({"op": "sum"}, "auto", "algebraic", "the sum of a product is the product of a sum"),
        ({"op": "mean"}, "auto", "algebraic", "the mean of a product"),
        ({"op": "sum"}, "torch", "torch", "no other path"),
        ({"op": "sum"}, "triton", "fused", "the kernels never write the product"),
        ({"op": "sum", "activation": "relu"}, "auto", "torch", "no other path"),
        ({"op": "sum", "product": True}, "auto", "torch", "no other path"),
        ({"op": "sum", "atomic": True}, "auto", "fused", "the kernels never write the product"),
        ({"op": "sum", "dtype": "float64"}, "auto", "algebraic", "no product of matrices"),
        ({"op": "sum", "dtype": "float64"}, "triton", "algebraic", "no product of matrices"),
        ({"dtype": "float64"}, "auto", "torch", "no other path"),
        ({"K": 0}, "auto", "torch", "no other path"),
        ({"subclass": "DTensor", "op": "sum"}, "auto", "torch", "no other path"),
    ],
)  # fmt: skip
def test_plans(change: dict[str, Any], backend: str, path: str, words: str) -> None:
    faster = {"algebraic": 0.4, "fused": 0.5} if change.get("op") in ("sum", "mean") else {"fused": 1.5}
    made = planning.plan(problem(**change), where(H200, problem(**{**change, "dtype": "bfloat16"}), faster), backend)
    assert made.path == path
    assert words in made.reason
    assert {name for name, _ in made.rejected} == {"fused", "algebraic", "torch"} - {path}


def test_activations_are_exact_where_their_errors_would_choose_the_minimum() -> None:
    """The least of many values around the minimum of a gelu: the slope there depends on which one it is."""
    for change, accuracy in (
        ({"op": "min", "activation": "gelu"}, "exact"),
        ({"op": "min", "activation": "silu"}, "exact"),
        ({"op": "min", "activation": "relu"}, "half"),
        ({"op": "max", "activation": "gelu"}, "half"),
        ({"op": "max", "activation": "gelu", "dtype": "float32"}, "exact"),
    ):
        assert planning.plan(problem(**change), H200, "triton").accuracy == accuracy


def test_explain() -> None:
    text = explain(functional.gemm_reduce, A, B, details=True)
    assert "gemm_reduce: sum of a @ b over M" in text
    assert "algebraic: the sum of a product is the product of a sum" in text
    assert "not torch" in text
    text = explain(functional.gemm_reduce, A.double(), B.double(), op="absmax", dim=-1, activation="relu", details=True)
    assert "absmax of act(a @ b) over N, act = relu" in text
    assert "B=2 kept 5 reduced 4 K=3, float64, forward" in text
    assert (
        "the kernels take" in text or "the kernels need a CUDA or ROCm GPU" in text or "Triton is not installed" in text
    )


@needs_kernels
def test_explain_names_tiles_and_splits() -> None:
    with on_path("kernels", sms=64):
        text = explain(functional.gemm_reduce, A.new_zeros(3000, 8), A.new_zeros(8, 5), details=True)
    assert "64 kept × 64 reduced × 16 inner" in text
    assert "12 ranges of the reduced axis, combined in a fixed order" in text


@pytest.mark.parametrize("op", ["max", "min", "absmax"])
def test_torch_looks_for_no_index_that_nobody_wants(op: str) -> None:
    a, b = torch.randn(2, 5, 3, device=DEVICE), torch.randn(2, 3, 4, device=DEVICE)
    a[0, 1], a[1, 2, 0] = torch.nan, torch.inf
    with on_path("torch"), torch.profiler.profile() as profile:
        found = functional.gemm_reduce(a, b, op=op)
    assert f"aten::{'amin' if op == 'min' else 'amax'}" in {event.name for event in profile.events()}
    torch.testing.assert_close(found, reference.gemm_reduce(a, b, op=op), rtol=0, atol=0, equal_nan=True)
