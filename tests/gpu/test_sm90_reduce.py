"""The warp-specialised kernel of GEMM-reduce on Hopper: every shape of its tiles, layouts, ranges, special values."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from fusedlayers import functional, planning, reference
from fusedlayers.devices import describe
from fusedlayers.functional.gemm_reduce import GEMM_REDUCE
from fusedlayers.kernels.gemm_reduce import ReduceArithmetic, ReduceOperands, sm90
from fusedlayers.kernels.tuning import sm90_reduce_config
from tests.gpu.exact import exact_reduction
from tests.gpu.reductions import Reduction, watch_reductions
from tests.support.operands import DEVICE, Tensors, assert_equal, integers, on_path, results
from tests.support.reduce_operands import DIFFERENTIABLE, INDEXED, assert_reduce_close

BFLOAT16, FLOAT16 = torch.bfloat16, torch.float16
EXACT = ["sum", "max", "min", "absmax", "sumsq"]
# (batch, kept rows, reduced rows, K) -> (consumers, reduced rows of a block), where neither mask nor indices cost much.
CASES = {
    (3, 40, 16, 64): (1, 64),
    (2, 64, 30, 128): (1, 64),
    (5, 33, 500, 72): (1, 64),
    (2, 130, 16, 80): (4, 64),
    (2, 120, 32, 8): (2, 64),
    (70, 200, 60, 64): (4, 64),
    (2, 128, 300, 128): (2, 64),
    (3, 104, 128, 64): (2, 64),
    (2, 500, 300, 72): (4, 64),
    (3, 296, 104, 64): (4, 64),
    (2, 120, 600, 64): (2, 128),
    (1, 257, 2061, 128): (4, 128),
    (1, 136, 1000, 72): (4, 128),
}
RANGES = (1, 2, 3, 7)
SMS = 16  # so that programs take several tiles
BAND = 256  # elements before and behind an output

pytestmark = pytest.mark.skipif(describe(DEVICE).backend != "sm90", reason="no Hopper GPU with Gluon")
Size = tuple[int, int, int, int]


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[Reduction]:
    return watch_reductions(monkeypatch)


def of_product(size: Size, dim: int) -> Size:
    """The sizes (batch, M, N, K) of a product with these kept and reduced rows."""
    batch, kept, reduced, width = size
    return (batch, reduced, kept, width) if dim == -2 else (batch, kept, reduced, width)


def rows_in_memory(tensors: Tensors, dim: int, transposed: tuple[bool, bool] = (False, False)) -> dict[str, Tensor]:
    """a and b, whose kept and reduced rows lie behind one another in memory, or transposed."""
    of_kept, of_reduced = transposed
    # Columns of b are the rows of its side.
    turned = {"a": of_reduced if dim == -2 else of_kept, "b": not (of_kept if dim == -2 else of_reduced)}
    found: dict[str, Tensor] = {}
    for name, turn in turned.items():
        tensor = tensors[name]
        found[name] = tensor.mT.contiguous().mT if turn else tensor.contiguous()
    return found


def assert_planned(inputs: Tensors, size: Size, op: str, dim: int, costly: bool, **options: Any) -> None:
    """The plan of a call names the sm90 kernel, with the tiles of the table."""
    _, kept, reduced, width = size
    problem = GEMM_REDUCE.problem_of(**inputs, op=op, dim=dim, **options)
    plan = planning.plan(problem, replace(describe(DEVICE), sms=SMS), "triton")
    assert plan.forward_tiles.sm90 == sm90_reduce_config(kept, reduced, width, SMS, costly)


def values(inputs: Tensors, **options: Any) -> Any:
    return functional.gemm_reduce(**{n: None if t is None else t.detach() for n, t in inputs.items()}, **options)


def test_cases_have_every_tile() -> None:
    tiles = set()
    for (_, kept, reduced, width), expected in CASES.items():
        config = sm90_reduce_config(kept, reduced, width, SMS)
        assert (config.consumers, config.block) == expected
        tiles.add(expected)
    assert {consumers for consumers, _ in tiles} == {1, 2, 4}
    assert {block for _, block in tiles} == {64, 128}


@pytest.mark.parametrize("dim", [-2, -1])
@pytest.mark.parametrize("size", CASES, ids=str)
@pytest.mark.parametrize("op", EXACT)
def test_exact_integers_again_and_again(
    op: str, size: Size, dim: int, launched: list[Reduction], poisoned_memory: None
) -> None:
    """With and without gradients (which need indices), for 16-bit formats in turn."""
    dtype = BFLOAT16 if dim == -2 else FLOAT16
    inputs, dy, expected = exact_reduction(op, dim, of_product(size, dim), dtype)
    inputs = rows_in_memory(inputs, dim)
    assert_planned(inputs, size, op, dim, costly=False)
    for splits in RANGES:
        with pytest.MonkeyPatch.context() as patch, on_path("kernels", sms=SMS):
            patch.setattr(planning.gemm_reduce, "choose_reduced_splits", lambda *arguments, splits=splits: splits)
            launched.clear()
            for _ in range(20):
                assert_equal({"y": values(inputs, op=op, dim=dim)}, {"y": expected["y"]})
                assert_equal(results(functional.gemm_reduce, inputs, dy, op=op, dim=dim), expected)
        assert [(config.consumers, config.block) for config, _, _ in launched[::2]] == [CASES[size]] * 20
        assert [found for _, found, _ in launched] == [splits] * 40


@pytest.mark.parametrize("taking", ["mask", "lengths", "both"])
@pytest.mark.parametrize("size", [size for size in CASES if size[0] > 1], ids=str)
@pytest.mark.parametrize("op", EXACT)
def test_masks_and_lengths(op: str, size: Size, taking: str, launched: list[Reduction], poisoned_memory: None) -> None:
    """Entries without any row, whole ones, and more rows than there are."""
    batch, _, rows, _ = size
    mask = (torch.rand(batch, rows) < 0.6).to(DEVICE)
    mask[0] = False
    lengths = torch.randint(1, rows + 1, (batch,)).to(DEVICE)
    lengths[:2] = torch.tensor([0, rows + 5])
    given: dict[str, Tensor] = {} if taking == "lengths" else {"mask": mask}
    given |= {} if taking == "mask" else {"lengths": lengths}
    inputs, dy, expected = exact_reduction(op, -1, of_product(size, -1), BFLOAT16, **given)
    inputs = rows_in_memory(inputs, -1)
    assert_planned(inputs, size, op, -1, costly=True, **given)
    for splits in (1, 3):
        with pytest.MonkeyPatch.context() as patch, on_path("kernels", sms=SMS):
            patch.setattr(planning.gemm_reduce, "choose_reduced_splits", lambda *arguments, splits=splits: splits)
            for _ in range(10):
                assert_equal({"y": values(inputs, op=op, dim=-1, **given)}, {"y": expected["y"]})
                assert_equal(results(functional.gemm_reduce, inputs, dy, op=op, dim=-1, **given), expected)
    assert len(launched) == 40


@pytest.mark.parametrize("transposed", [(True, False), (False, True), (True, True)], ids=str)
@pytest.mark.parametrize(
    "size",
    [
        (3, 40, 16, 64), (3, 104, 128, 64), (3, 296, 104, 64), (1, 136, 1000, 72), (3, 40, 504, 72), (2, 136, 16, 80),
        (2, 120, 32, 8), (5, 504, 304, 120),
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("op", ["sumsq", "max"])
def test_transposed_operands(op: str, size: Size, transposed: tuple[bool, bool], launched: list[Reduction]) -> None:
    for dim in (-2, -1):
        inputs, dy, expected = exact_reduction(op, dim, of_product(size, dim), BFLOAT16)
        laid = rows_in_memory(inputs, dim, transposed)
        with on_path("kernels", sms=SMS):
            for _ in range(20):
                assert_equal({"y": values(laid, op=op, dim=dim)}, {"y": expected["y"]})
                assert_equal(results(functional.gemm_reduce, laid, dy, op=op, dim=dim), expected)
    assert [found for _, _, found in launched] == [transposed] * 80


@pytest.mark.parametrize("transposed", [(False, False), (True, False), (False, True), (True, True)], ids=str)
@pytest.mark.parametrize("size", [(3, 40, 504, 72), (3, 136, 16, 80), (3, 504, 304, 120)], ids=str)
@pytest.mark.parametrize("op", ["logsumexp", "max"])
def test_padding_is_not_read_from_the_next_entry(
    op: str, size: Size, transposed: tuple[bool, bool], launched: list[Reduction]
) -> None:
    """NaN of an entry, on either side, is in its own results and gradients alone."""
    batch, kept, reduced, width = size
    a, b = (torch.randn(batch, rows, width, device=DEVICE, dtype=BFLOAT16) for rows in (kept, reduced))
    a[1] = b[1] = float("nan")
    inputs = rows_in_memory({"a": a, "b": b.mT}, -1, transposed)
    dy = torch.randn(batch, kept, device=DEVICE, dtype=BFLOAT16)
    with on_path("kernels", sms=SMS):
        found = results(functional.gemm_reduce, inputs, dy, op=op, dim=-1)
    assert launched
    for name, tensor in found.items():
        assert bool(tensor[[0, 2]].isfinite().all()), name
    assert bool(found["y"][1].isnan().all())  # type: ignore[index]


def test_one_matrix_for_every_entry(launched: list[Reduction]) -> None:
    draw = integers(0.2)
    a, b = (draw(*shape, dtype=torch.float64).to(DEVICE) for shape in ((200, 64), (3, 64, 96)))
    for dim in (-2, -1):
        inputs = rows_in_memory({"a": a.to(BFLOAT16), "b": b.to(BFLOAT16)}, dim)
        with on_path("kernels"):
            assert torch.equal(values(inputs, op="max", dim=dim).double(), (a @ b).amax(dim))
    assert len(launched) == 2


@pytest.mark.parametrize("size", CASES, ids=str)
@pytest.mark.parametrize("op", INDEXED)
def test_the_first_of_many_ties(op: str, size: Size, launched: list[Reduction], poisoned_memory: None) -> None:
    batch, kept, reduced, width = size
    a, b = (torch.randint(-1, 2, (batch, rows, width)).to(DEVICE, torch.float64) for rows in (kept, reduced))
    # Sums of few: many of them are alike.
    a[..., 3:] = 0
    product = a @ b.mT
    best = {"max": product.amax(-1), "min": product.amin(-1), "absmax": product.abs().amax(-1)}[op]
    first = ((product.abs() if op == "absmax" else product) == best.unsqueeze(-1)).int().argmax(-1)
    inputs = rows_in_memory({"a": a.to(BFLOAT16), "b": b.mT.to(BFLOAT16)}, -1)
    for splits in RANGES:
        with pytest.MonkeyPatch.context() as patch, on_path("kernels", sms=SMS):
            patch.setattr(planning.gemm_reduce, "choose_reduced_splits", lambda *arguments, splits=splits: splits)
            for _ in range(20):
                found, index = values(inputs, op=op, dim=-1, return_indices=True)
                assert torch.equal(found.double(), best)
                assert torch.equal(index, first)
    assert len(launched) == 20 * len(RANGES)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("size", [(3, 40, 16, 64), (5, 33, 500, 72), (3, 104, 128, 64), (2, 500, 300, 72)], ids=str)
@pytest.mark.parametrize("op", DIFFERENTIABLE)
def test_nan_and_infinity(op: str, size: Size, value: float, launched: list[Reduction], poisoned_memory: None) -> None:
    """Rows of either side that hold them, the last one too; and the index of the first NaN."""
    batch, kept, reduced, width = size
    for side in ("a", "b"):
        a, b = (torch.randn(batch, rows, width, device=DEVICE, dtype=BFLOAT16) for rows in (kept, reduced))
        planted = a if side == "a" else b
        planted[0, -1, 3] = planted[-1, planted.shape[1] // 3, -1] = planted[-1, -1, 0] = value
        inputs = {"a": a, "b": b.mT}
        with on_path("kernels", sms=SMS):
            ours = values(inputs, op=op, dim=-1)
        theirs = reference.gemm_reduce(**inputs, op=op, dim=-1)
        for what in (torch.isnan, torch.isposinf, torch.isneginf):
            assert torch.equal(what(ours), what(theirs)), f"{what.__name__} of {side}"
        if op in INDEXED:
            with on_path("kernels", sms=SMS):
                index = values(inputs, op=op, dim=-1, return_indices=True)[1]
            product = a.double() @ b.double().mT
            first = product.isnan().int().argmax(-1)
            assert torch.equal(index[product.isnan().any(-1)], first[product.isnan().any(-1)])
    assert len(launched) == 2 * (1 + (op in INDEXED))


@pytest.mark.parametrize("size", CASES, ids=str)
@pytest.mark.parametrize("op", ["mean", "logsumexp"])
def test_means_and_logarithms(op: str, size: Size, launched: list[Reduction]) -> None:
    batch, kept, reduced, width = size
    a, b = (torch.randn(batch, rows, width, device=DEVICE, dtype=BFLOAT16) for rows in (kept, reduced))
    inputs = {"a": a, "b": b.mT / width**0.5}
    lengths = torch.randint(1, reduced + 1, (batch,), device=DEVICE)
    for splits in (1, 3):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(planning.gemm_reduce, "choose_reduced_splits", lambda *arguments, splits=splits: splits)
            for given in ({}, {"lengths": lengths}, {"mask": torch.rand(batch, reduced, device=DEVICE) < 0.9}):
                assert_reduce_close(inputs, op=op, dim=-1, **given)
    assert len(launched) == 6


def banded(*shape: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """A buffer of what no computation survives unseen, and the contiguous tensor in its middle."""
    filling = float("nan") if dtype.is_floating_point else torch.iinfo(dtype).max
    buffer = torch.full((torch.Size(shape).numel() + 2 * BAND,), filling, dtype=dtype, device=DEVICE)
    return buffer, buffer[BAND:-BAND].view(shape)


def assert_bands_untouched(buffer: Tensor) -> None:
    for band in (buffer[:BAND], buffer[-BAND:]):
        assert bool((band != band).all() if band.is_floating_point() else (band == torch.iinfo(band.dtype).max).all())


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("kept", [40, 100, 300])
@pytest.mark.parametrize("op", ["max", "sumsq", "logsumexp"])
def test_packed_rows_and_the_bands_around_outputs(op: str, kept: int, splits: int) -> None:
    """Entries of any length, one of none, behind one another; and nothing is written beside the outputs."""
    lengths, width = [33, 0, 300, 64, 1, 129], 72
    draw = integers(0.2)
    a, b = (draw(rows, width, dtype=torch.float64).to(DEVICE) for rows in (kept, sum(lengths)))
    offsets = torch.tensor([0, *lengths]).cumsum(0).to(DEVICE, torch.int32)
    indices = op == "max"
    config = sm90_reduce_config(kept, 88, width, SMS, costly=indices)
    operands = ReduceOperands(
        a.to(BFLOAT16).expand(len(lengths), -1, -1), b.to(BFLOAT16), None, None, None, None, offsets,
        ReduceArithmetic(op, "identity", "ieee", "half"),
    )  # fmt: skip
    matrices = sm90.takes(operands, config)
    shape = (splits, len(lengths), kept)
    buffers = [
        banded(*shape, dtype=torch.float32),
        banded(*shape, dtype=torch.int32),
        banded(*shape, dtype=torch.float32),
    ]
    (_, found), (_, index), (_, sums) = buffers
    launch = sm90.prepare_reduce(operands, matrices, splits, config)
    for _ in range(20):
        sums_of_parts = sums if splits > 1 and op == "logsumexp" else None
        launch((*operands.pointers(), None, found, index if indices else None, sums_of_parts, None))
        for buffer, _ in buffers:
            assert_bands_untouched(buffer)
        for entry, rows in enumerate(b.split(lengths)):
            product = a @ rows.T
            got = found[:, entry].double()
            if op == "sumsq":
                assert torch.equal(got.sum(0), product.square().sum(1))
            elif op == "max" and not len(rows):
                assert bool((got == -float("inf")).all())
            elif op == "max":
                best, place = got.max(0)
                assert torch.equal(best, product.amax(1))
                chosen = index[:, entry].gather(0, place[None])[0].long()
                assert torch.equal(product.gather(1, chosen[:, None])[:, 0], best)
                if splits == 1:
                    assert torch.equal(chosen, (product == best[:, None]).int().argmax(1))
            else:
                if splits > 1:
                    got = (got.nan_to_num(neginf=-1e30) + sums[:, entry].double().log()).logsumexp(0, keepdim=True)
                torch.testing.assert_close(got[0], product.logsumexp(1), rtol=1e-5, atol=1e-5)
