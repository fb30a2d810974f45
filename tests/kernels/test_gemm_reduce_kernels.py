"""GEMM-reduce: splits, packed rows, masks, layouts, and values that are not finite."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from fusedlayers import functional, reference
from fusedlayers.kernels import gemm_reduce as kernels
from fusedlayers.kernels.gemm_reduce import ReduceArithmetic, ReduceOperands
from fusedlayers.kernels.tuning import ReduceConfig
from tests.support.operands import (
    DEVICE,
    INTEGERS,
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

DIMS = [-2, -1]


@pytest.mark.sampled
@needs_kernels
@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("splits", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("tiles", [ReduceConfig(32, 16, 16, 4, 1), ReduceConfig(16, 32, 16, 4, 1)], ids=str)
def test_exact_integers_for_any_number_of_splits(tiles: ReduceConfig, splits: int) -> None:
    """Ragged last blocks, and splits of which there are more than tiles."""
    inputs = reduce_inputs(17, 70, 20, draw=INTEGERS[torch.float32])
    a, b = inputs.values()
    mask = torch.rand(2, 70, device=DEVICE) < 0.7
    for op in ("sum", "max", "min", "mean"):
        arithmetic = ReduceArithmetic(op, "identity", "ieee", "exact")
        indices = op in INDEXED
        for atomic in {False, op == "sum"}:
            operands = ReduceOperands(a, b.mT, None, None, mask, None, None, arithmetic)
            values, index = kernels.reduce(
                operands, indices=indices, out_dtype=torch.float32, splits=splits, tiles=tiles, atomic=atomic
            )
            expected = reference.gemm_reduce(a, b, op=op, dim=-1, mask=mask, return_indices=indices)
            found = {"values": values, "index": None if index is None else index.to(torch.int64)}
            truth = dict(zip(("values", "index"), expected if indices else (expected, None), strict=True))
            assert_equal(found, truth)


@pytest.mark.sampled(together=2)
@needs_kernels
@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("splits", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("columns", [70, 72], ids=["no whole vectors", "vectors"])
@pytest.mark.parametrize("rows_of_memory", [False, True], ids=["transposed", "rows"])
def test_both_gradients_at_once(rows_of_memory: bool, columns: int, splits: int) -> None:
    """Ragged last blocks, more splits than blocks, masked rows, and an entry of which none takes part."""
    inputs = reduce_inputs(17, columns, 20, draw=INTEGERS[torch.float32])
    a, b = (None if tensor is None else tensor.requires_grad_() for tensor in inputs.values())
    mask, lengths = torch.rand(2, columns, device=DEVICE) < 0.7, torch.tensor([50, 0], device=DEVICE, dtype=torch.int32)
    biases = torch.arange(columns, device=DEVICE) % 3 - 1.0, torch.arange(17, device=DEVICE) % 2 + 0.0
    reduced = b.mT.contiguous() if rows_of_memory else b.mT
    for op, taking in (("sum", {}), ("sumsq", {}), ("sumsq", {"mask": mask, "lengths": lengths})):
        d = reference.gemm_reduce(a, b, op=op, dim=-1, bias=biases[0] + biases[1][:, None], activation="relu", **taking)
        g = upstream(d, INTEGERS[torch.float32])
        expected = dict(zip(("da", "db"), torch.autograd.grad(d, (a, b), g), strict=True))
        operands = ReduceOperands(
            a, reduced, biases[1], biases[0], taking.get("mask"), taking.get("lengths"), None,
            ReduceArithmetic(op, "relu", "ieee", "exact"),
        )  # fmt: skip
        tiles = ReduceConfig(32, 16, 32, 4, 1)
        da, d_reduced = kernels.both_gradients(operands, g, None, tiles=tiles, splits=splits)
        assert_equal({"da": da, "db": d_reduced.mT}, expected)


@needs_kernels
@pytest.mark.parametrize("op", ["logsumexp", "sumsq"])
def test_few_kept_rows_have_both_gradients_at_once(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Right ones, of as many rows as any GPU's tiles have, and only where both are wanted and the bias has none."""
    launched: list[str] = []

    def counted(name: str) -> Callable[..., Any]:
        launcher = getattr(kernels, name)

        def count(*given: Any, **asked: Any) -> Any:
            launched.append(name)
            return launcher(*given, **asked)

        return count

    for name in ("both_gradients", "kept_gradient", "reduced_gradient"):
        monkeypatch.setattr(kernels, name, counted(name))
    for rows in (1, 31, 33, 64, 129):
        inputs = reduce_inputs(rows, 150, 24, torch.float16, bias=True)
        assert_reduce_close(inputs, op=op, dim=-1, frozen=("bias",))
        assert launched == (["both_gradients"] if rows <= 64 else ["kept_gradient", "reduced_gradient"]), rows
        launched.clear()
    one_by_one = ["kept_gradient", "reduced_gradient"]
    for frozen, wanted in ((("a", "bias"), one_by_one[1:]), (("b", "bias"), one_by_one[:1]), ((), one_by_one)):
        assert_reduce_close(reduce_inputs(40, 150, 24, torch.float16, bias=True), op=op, dim=-1, frozen=frozen)
        assert launched == wanted
        launched.clear()


@pytest.mark.sampled(together=2)
@needs_kernels
@infinities
@pytest.mark.parametrize("transposed", [False, True], ids=["rows", "transposed"])
@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize("op", DIFFERENTIABLE)
def test_packed_rows(op: str, splits: int, transposed: bool) -> None:
    """Entries that lie behind one another, one of them with no rows, are those of a padded batch with lengths.

    Transposed, all of them together are whole vectors, and no entry is.
    """
    lengths = torch.tensor([5, 0, 40, 19], dtype=torch.int32, device=DEVICE)
    inputs = reduce_inputs(40, 18, 7, batches=((4,), (4,)), draw=INTEGERS[torch.float32])
    padded, other = inputs["a"], inputs["b"]
    rows = torch.cat([entry[:length] for entry, length in zip(padded, lengths.tolist(), strict=True)])
    rows = rows.mT.contiguous().mT if transposed else rows
    offsets = torch.cat((lengths.new_zeros(1), lengths.cumsum(0, dtype=torch.int32)))
    arithmetic = ReduceArithmetic(op, "identity", "ieee", "exact")
    tiles = ReduceConfig(16, 16, 16, 4, 1)
    packed = ReduceOperands(other.mT, rows, None, None, None, None, offsets, arithmetic)
    ragged = ReduceOperands(other.mT, padded, None, None, None, lengths, None, arithmetic)
    indices = op in INDEXED
    values, index = kernels.reduce(packed, indices=indices, out_dtype=torch.float32, splits=splits, tiles=tiles)
    same, same_index = kernels.reduce(ragged, indices=indices, out_dtype=torch.float32, splits=splits, tiles=tiles)
    assert torch.equal(values.nan_to_num(nan=3.0), same.nan_to_num(nan=3.0))
    g = upstream(values, INTEGERS[torch.float32])
    saved = values
    if index is not None and same_index is not None:
        assert torch.equal(index, same_index)
        (weight, d_kept), (_, other_d_kept) = (
            kernels.route(operands, g, index, kept_gradient=True) for operands in (packed, ragged)
        )
        g, saved = weight, index
    else:
        (d_kept, _), (other_d_kept, _) = (
            kernels.kept_gradient(operands, g, saved, matrix=True, bias=False, tiles=tiles)
            for operands in (packed, ragged)
        )
    (d_rows, _), (d_padded, _) = (
        kernels.reduced_gradient(operands, g, saved, matrix=True, bias=False, tiles=tiles)
        for operands in (packed, ragged)
    )
    assert torch.equal(d_kept, other_d_kept)
    assert bool(d_kept.any())
    unpadded = [entry[:length] for entry, length in zip(d_padded, lengths.tolist(), strict=True)]
    assert torch.equal(d_rows, torch.cat(unpadded))
    assert not torch.cat([entry[length:] for entry, length in zip(d_padded, lengths.tolist(), strict=True)]).any()


@pytest.mark.sampled
@needs_kernels
@infinities
@pytest.mark.parametrize("op", DIFFERENTIABLE)
@pytest.mark.parametrize("dim", DIMS)
def test_masks_and_lengths(op: str, dim: int) -> None:
    """Some rows, one row, and no row at all take part: values and gradients are torch's of a masked fill."""
    size = 21 if dim == -2 else 23
    mask = torch.rand(3, size, device=DEVICE) < 0.5
    mask[0], mask[1] = False, torch.arange(size, device=DEVICE) == 7
    lengths = torch.tensor([4, 0, 99], device=DEVICE)
    expanded = torch.rand(size, device=DEVICE) < 0.5
    for given in (
        {"mask": mask},
        {"mask": mask[:, None].expand(3, 3, size)[:, 1]},
        {"mask": expanded, "lengths": lengths.to(torch.int16)[:1]},
        {"lengths": lengths},
        {"mask": mask, "lengths": lengths},
    ):
        ours = assert_reduce_close_or_again(
            lambda: reduce_inputs(21, 23, 6, batches=((3,), (3,)), bias=True), op=op, dim=dim, **given
        )
        for name in ("da", "db", "dbias"):
            gradient = ours[name]
            assert bool(gradient.isfinite().all())


@pytest.mark.sampled
@needs_kernels
@infinities
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("op", DIFFERENTIABLE)
def test_special_values_come_out_as_in_torch(op: str, value: float) -> None:
    for role, dim in (("a", -2), ("a", -1), ("b", -2), ("bias", -1)):
        inputs = reduce_inputs(18, 20, 5, bias=True)
        tensor = inputs[role]
        tensor.view(-1)[-2] = value
        indices = op in INDEXED
        with on_path("kernels"):
            ours = functional.gemm_reduce(**inputs, op=op, dim=dim, return_indices=indices)
        truth = reference.gemm_reduce(**in_float64(inputs), op=op, dim=dim, return_indices=indices)
        if indices:
            assert torch.equal(ours[1], truth[1])
            ours, truth = ours[0], truth[0]
        assert torch.equal(ours.isnan(), truth.isnan())
        infinite = ours.isinf() | truth.isinf()
        assert torch.equal(ours[infinite].double(), truth[infinite])


@needs_kernels
@infinities
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("op", ["sumsq", "logsumexp", "sum"])
def test_gradients_have_special_values_where_torch_has_them(op: str, value: float) -> None:
    inputs = reduce_inputs(18, 20, 5)
    tensor = inputs["b"]
    tensor[-1, -1, -2] = value
    with on_path("kernels"):
        ours = reduce_results(functional.gemm_reduce, inputs, op=op, activation="relu")
    truth = reduce_results(reference.gemm_reduce, in_float64(inputs), op=op, activation="relu")
    for name, found in ours.items():
        other = truth[name]
        assert torch.equal(found.isnan(), other.isnan()), name
