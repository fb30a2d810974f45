"""GEMM-reduce: the kernels against torch in the same dtype and in float64, and against exact integers."""

from __future__ import annotations

import math
from collections.abc import Callable

import hypothesis
import pytest
import torch
from hypothesis import strategies
from torch import Tensor

from fusedlayers import functional, planning, reference
from fusedlayers.closeness import assert_all_close
from fusedlayers.functional.reduce_arguments import gemm_reduce_problem
from fusedlayers.kernels import gemm_reduce as kernels
from fusedlayers.kernels.activations import ACTIVATIONS
from fusedlayers.kernels.gemm_reduce import ReduceArithmetic, ReduceOperands
from fusedlayers.kernels.tuning import ReduceConfig
from tests.operands import (
    DEVICE,
    DTYPES,
    INTEGERS,
    ON_GPU,
    PATHS,
    SIZES,
    assert_equal,
    in_float64,
    infinities,
    needs_kernels,
    on_path,
)
from tests.reduce_operands import (
    DIFFERENTIABLE,
    INDEXED,
    assert_reduce_close,
    reduce_inputs,
    reduce_results,
    upstream,
)

DIMS = [-2, -1]
TWO_PATHS = [PATHS[0], PATHS[2]]


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("op", DIFFERENTIABLE)
def test_operations(op: str, dim: int, dtype: torch.dtype) -> None:
    """With a bias and without an activation; the inner dimension takes one step of a product, and several."""
    for K in (24, 150):
        assert_reduce_close(reduce_inputs(37, 70, K, dtype, bias=True), op=op, dim=dim)


@needs_kernels
@pytest.mark.parametrize("activation", [name for name in ACTIVATIONS if name != "identity"])
@pytest.mark.parametrize("op", ["sum", "max", "absmax", "logsumexp"])
def test_activations(op: str, activation: str) -> None:
    for dim in DIMS:
        assert_reduce_close(reduce_inputs(35, 21, 9, bias=True), op=op, dim=dim, activation=activation)


BATCHES = [
    pytest.param((), (), id="none"),
    pytest.param((2, 3), (2, 3), id="two"),
    pytest.param((2, 1, 2, 2), (2, 1, 2, 2), id="four"),
    pytest.param((2, 3), (3,), id="broadcast"),
    pytest.param((), (3,), id="a shared"),
    pytest.param((4,), (), id="b shared"),
    pytest.param((2, 1), (1, 3), id="outer"),
]


@needs_kernels
@pytest.mark.parametrize("op", ["mean", "max", "logsumexp"])
@pytest.mark.parametrize(("a", "b"), BATCHES)
def test_leading_dimensions(a: tuple[int, ...], b: tuple[int, ...], op: str) -> None:
    for dim in DIMS:
        assert_reduce_close(reduce_inputs(17, 19, 5, batches=(a, b)), op=op, dim=dim)


@needs_kernels
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("letter", ["M", "N", "K"])
def test_sizes_one_at_a_time(letter: str, size: int) -> None:
    sizes = {"M": 20, "N": 24, "K": 12} | {letter: size}
    for op, dim in (("max", -2), ("logsumexp", -1), ("sumsq", -2)):
        if size or letter != "M" or op != "max":
            assert_reduce_close(reduce_inputs(**sizes), op=op, dim=dim)


@needs_kernels
@infinities
@hypothesis.settings(max_examples=60 if ON_GPU else 15)
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
    inputs = reduce_inputs(*sizes, batches=(tuple(batch),) * 2)
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
@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("splits", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("tiles", [ReduceConfig(32, 16, 16, 4, 1), ReduceConfig(16, 32, 16, 4, 1)], ids=str)
def test_exact_integers_for_any_number_of_splits(tiles: ReduceConfig, splits: int) -> None:
    """Ragged last blocks, and splits of which there are more than tiles."""
    inputs = reduce_inputs(33, 70, 20, draw=INTEGERS[torch.float32])
    a, b = inputs.values()
    assert a is not None
    assert b is not None
    mask = torch.rand(2, 70, device=DEVICE) < 0.7
    for op in ("sum", "max", "min", "absmax", "sumsq", "mean"):
        arithmetic = ReduceArithmetic(op, "identity", "ieee", "exact")
        indices = op in INDEXED
        for atomic in {False, op in ("sum", "mean", "sumsq") and op != "mean"}:
            operands = ReduceOperands(a, b.mT, None, None, mask, None, None, arithmetic)
            values, index = kernels.reduce(
                operands, indices=indices, out_dtype=torch.float32, splits=splits, tiles=tiles, atomic=atomic
            )
            expected = reference.gemm_reduce(a, b, op=op, dim=-1, mask=mask, return_indices=indices)
            found = {"values": values, "index": None if index is None else index.to(torch.int64)}
            truth = dict(zip(("values", "index"), expected if indices else (expected, None), strict=True))
            assert_equal(found, truth)


@needs_kernels
@infinities
@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize("op", DIFFERENTIABLE)
def test_packed_rows(op: str, splits: int) -> None:
    """Entries that lie behind one another, one of them with no rows, are those of a padded batch with lengths."""
    lengths = torch.tensor([5, 0, 40, 16], dtype=torch.int32, device=DEVICE)
    inputs = reduce_inputs(40, 18, 7, batches=((4,), (4,)), draw=INTEGERS[torch.float32])
    padded, other = inputs["a"], inputs["b"]
    assert padded is not None
    assert other is not None
    rows = torch.cat([entry[:length] for entry, length in zip(padded, lengths.tolist(), strict=True)])
    offsets = torch.cat((lengths.new_zeros(1), lengths.cumsum(0, dtype=torch.int32)))
    arithmetic = ReduceArithmetic(op, "identity", "ieee", "exact")
    tiles = ReduceConfig(16, 16, 16, 4, 1)
    packed = ReduceOperands(other.mT, rows, None, None, None, None, offsets, arithmetic, longest=40)
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
    assert d_kept is not None
    assert other_d_kept is not None
    assert d_padded is not None
    assert d_rows is not None
    assert torch.equal(d_kept, other_d_kept)
    assert bool(d_kept.any())
    unpadded = [entry[:length] for entry, length in zip(d_padded, lengths.tolist(), strict=True)]
    assert torch.equal(d_rows, torch.cat(unpadded))
    assert not torch.cat([entry[length:] for entry, length in zip(d_padded, lengths.tolist(), strict=True)]).any()


@needs_kernels
@infinities
@pytest.mark.parametrize("op", DIFFERENTIABLE)
@pytest.mark.parametrize("dim", DIMS)
def test_masks_and_lengths(op: str, dim: int) -> None:
    """Some rows, one row, and no row at all take part: values and gradients are torch's of a masked fill."""
    inputs = reduce_inputs(21, 23, 6, batches=((3,), (3,)), bias=True)
    size = 21 if dim == -2 else 23
    mask = torch.rand(3, size, device=DEVICE) < 0.5
    mask[0], mask[1] = False, torch.arange(size, device=DEVICE) == 7
    lengths = torch.tensor([4, 0, 99], device=DEVICE)
    expanded = torch.rand(size, device=DEVICE) < 0.5
    for given in (
        {"mask": mask},
        {"mask": mask[:, None].expand(3, 3, size)[:, 1]},
        {"mask": expanded},
        {"lengths": lengths},
        {"lengths": lengths.to(torch.int16)[:1]},
        {"mask": mask, "lengths": lengths},
    ):
        ours = assert_reduce_close(inputs, op=op, dim=dim, **given)
        for name in ("da", "db", "dbias"):
            gradient = ours[name]
            assert gradient is not None
            assert bool(gradient.isfinite().all())


@needs_kernels
@pytest.mark.parametrize("op", ["argmax", "argmin"])
@pytest.mark.parametrize("dim", DIMS)
def test_indices(op: str, dim: int) -> None:
    inputs = reduce_inputs(33, 41, 3, draw=INTEGERS[torch.float32])
    with on_path("kernels"):
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
    with on_path("kernels", processors=64):
        ours = reduce_results(functional.gemm_reduce, inputs, op=op, atomic=True)
    theirs = reduce_results(reference.gemm_reduce, inputs, op=op)
    truth = reduce_results(reference.gemm_reduce, in_float64(inputs), op=op)
    assert_all_close(ours, theirs, truth, independent=82)


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "sliced columns": lambda t: torch.cat((t, torch.full_like(t[..., :3], math.nan)), -1)[..., : t.shape[-1]],
    "every other row": lambda t: torch.stack((t, torch.full_like(t, math.nan)), -2).flatten(-3, -2)[..., ::2, :],
    "transposed": lambda t: t.mT.contiguous().mT,
    "batch last": lambda t: t.movedim(0, -1).contiguous().movedim(-1, 0),
    "one element off": lambda t: torch.cat((t.new_full((1,), math.nan), t.flatten()))[1:].view(t.shape),
}


@needs_kernels
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("op", ["max", "sumsq"])
def test_layouts_change_nothing(layout: str, op: str) -> None:
    inputs = reduce_inputs(35, 21, 9, draw=INTEGERS[torch.float32])
    lay = LAYOUTS[layout]
    strided = {name: lay(tensor) for name, tensor in inputs.items() if tensor is not None}
    for dim in DIMS:
        dy = upstream(torch.empty(2, 21 if dim == -2 else 35, device=DEVICE), INTEGERS[torch.float32])
        with on_path("kernels"):
            expected = reduce_results(functional.gemm_reduce, inputs, dy, op=op, dim=dim)
            assert_equal(reduce_results(functional.gemm_reduce, strided, lay(dy[None])[0], op=op, dim=dim), expected)


@needs_kernels
@infinities
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("op", DIFFERENTIABLE)
def test_special_values_come_out_as_in_torch(op: str, value: float) -> None:
    for role, dim in (("a", -2), ("a", -1), ("b", -2), ("bias", -1)):
        inputs = reduce_inputs(18, 20, 5, bias=True)
        tensor = inputs[role]
        assert tensor is not None
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
    assert tensor is not None
    tensor[-1, -1, -2] = value
    with on_path("kernels"):
        ours = reduce_results(functional.gemm_reduce, inputs, op=op, activation="relu")
    truth = reduce_results(reference.gemm_reduce, in_float64(inputs), op=op, activation="relu")
    for name, found in ours.items():
        other = truth[name]
        assert found is not None
        assert other is not None
        assert torch.equal(found.isnan(), other.isnan()), name


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
        problem = gemm_reduce_problem(**inputs, op=op, dim=dim, **given)
        assert planning.plan(problem, planning.Device("cpu")).path == "algebraic"
        ours = reduce_results(functional.gemm_reduce, inputs, op=op, dim=dim, **given)
        theirs = reduce_results(reference.gemm_reduce, inputs, op=op, dim=dim, **given)
        truth = reduce_results(reference.gemm_reduce, in_float64(inputs), op=op, dim=dim, **given)
        assert_all_close(ours, theirs, truth, independent=180)
