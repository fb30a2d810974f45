"""The weight and bias gradient on a GPU: both kernels, every pipeline with any splits, layouts, past 2^31 elements."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from fusedlayers import functional, reference
from fusedlayers.closeness import assert_all_close
from fusedlayers.devices import describe
from fusedlayers.kernels import weight_gradient as kernels
from fusedlayers.kernels.tuning import PIPELINES, WeightGradientPipeline
from fusedlayers.kernels.tuning.grouped_gemm import product_tiles
from tests.gpu.graphs import assert_replays_like_launched
from tests.gpu.launches import note_launches
from tests.support.operands import DEVICE, Tensors, assert_equal, leaves, on_path

BFLOAT16, FLOAT16, FLOAT32 = torch.bfloat16, torch.float16, torch.float32
# Rows, columns of dy, columns of x.
PUBLISHED = [(8192, 4096, 1024), (65536, 1024, 256), (131072, 512, 128), (131072, 256, 256), (16384, 4096, 4096)]
RAGGED = [(1, 8, 8), (63, 136, 264), (65, 520, 72), (1000, 8, 1032), (4099, 328, 400), (20_000, 136, 24)]
NAN = float("nan")

on_hopper = pytest.mark.skipif(describe(DEVICE).backend != "sm90", reason="no Hopper GPU with Gluon")


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Which of the two kernels runs."""
    return note_launches(monkeypatch, {"sm90_weight_and_bias_gradient": "sm90", "weight_and_bias_gradient": "generic"})


def integers(*shape: int, dtype: torch.dtype = BFLOAT16) -> Tensor:
    """From -2 to 2: their products add up exactly in float32, and one rounding is ours."""
    return torch.randint(-2, 3, shape, dtype=torch.int8, device=DEVICE).to(dtype)


def normal(rows: int, out: int, width: int, dtype: torch.dtype = BFLOAT16) -> dict[str, Tensor]:
    """dy and x."""
    shapes = {"dy": (rows, out), "x": (rows, width)}
    return {name: torch.randn(shape, device=DEVICE, dtype=dtype) for name, shape in shapes.items()}


def expected(dy: Tensor, x: Tensor, bias: bool = True) -> dict[str, Tensor | None]:
    dw, db = reference.weight_gradient(dy.double(), x.double(), bias=bias)
    assert float(dw.abs().max()) < 2**24
    return {"dw": dw.to(dy.dtype), "db": None if db is None else db.to(dy.dtype)}


def named(results: tuple[Tensor, Tensor | None]) -> dict[str, Tensor | None]:
    return dict(zip(("dw", "db"), results, strict=True))


@on_hopper
@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT16], ids=str)
@pytest.mark.parametrize("size", [*RAGGED, (3000, 1024, 768)], ids=str)
@pytest.mark.parametrize("pipeline", PIPELINES, ids=lambda pipeline: "×".join(map(str, pipeline.tile)))
def test_every_pipeline_with_any_number_of_splits(
    pipeline: WeightGradientPipeline, size: tuple[int, int, int], dtype: torch.dtype, launched: list[str]
) -> None:
    """Exact integers, empty splits, programs with many tiles and with one, with db and without."""
    rows, out, width = size
    dy, x = integers(rows, out, dtype=dtype), integers(rows, width, dtype=dtype)
    tiles = product_tiles("sm_90", 16)
    for bias in (True, False):
        truth = expected(dy, x, bias)
        for splits in (1, 2, 3, 5, 8):
            for programs in (132, 5):
                config = replace(pipeline, programs=programs)
                assert_equal(named(kernels.weight_gradient(dy, x, bias, splits, "ieee", tiles, config)), truth)
    assert set(launched) == {"sm90"}


@on_hopper
@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("size", [*PUBLISHED, *RAGGED], ids=str)
def test_exact_integers_again_and_again(size: tuple[int, int, int], bias: bool, launched: list[str]) -> None:
    rows, out, width = size
    dy, x = integers(rows, out), integers(rows, width)
    truth = expected(dy, x, bias)
    with on_path("kernels"):
        for _ in range(20):
            assert_equal(named(functional.weight_gradient(dy, x, bias=bias)), truth)
    assert set(launched) == {"sm90"}


@pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT16, FLOAT32], ids=str)
@pytest.mark.parametrize("facts", [{}, {"backend": "generic"}, {"sms": 16}], ids=str)
@pytest.mark.parametrize("size", [*RAGGED, (70, 33, 65), (5000, 767, 431), (4096, 1024, 512)], ids=str)
def test_close_to_torch(size: tuple[int, int, int], facts: dict[str, Any], dtype: torch.dtype) -> None:
    dy, x = normal(*size, dtype).values()
    with on_path("kernels", **facts):
        ours = named(functional.weight_gradient(dy, x))
    theirs = named(reference.weight_gradient(dy, x))
    assert_all_close(ours, theirs, named(reference.weight_gradient(dy.double(), x.double())))


@pytest.mark.parametrize("size", PUBLISHED, ids=str)
def test_published_sizes_are_close_to_torch(size: tuple[int, int, int]) -> None:
    dy, x = normal(*size).values()
    with on_path("kernels"):
        ours = named(functional.weight_gradient(dy, x))
    theirs = named(reference.weight_gradient(dy, x))
    assert_all_close(ours, theirs, named(reference.weight_gradient(dy.double(), x.double())))


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("size", [(65536, 1024, 256), (131072, 256, 256), (5000, 767, 431)], ids=str)
def test_the_same_bits_every_time(size: tuple[int, int, int]) -> None:
    dy, x = normal(*size).values()
    with on_path("kernels"):
        runs = [named(functional.weight_gradient(dy, x)) for _ in range(10)]
    for run in runs:
        assert all(tensor is not None and bool(tensor.isfinite().all()) for tensor in run.values())
        assert_equal(run, runs[0])


# Whether TMA takes them; the generic kernel takes the rest.
LAYOUTS: dict[str, tuple[Callable[[Tensor], Tensor], bool]] = {
    "contiguous": (lambda t: t, True),
    "columns of a wider matrix": (lambda t: torch.cat((t, torch.full_like(t, NAN)), -1)[:, : t.shape[1]], True),
    "columns from the middle on": (lambda t: torch.cat((torch.full_like(t[:, :8], NAN), t), -1)[:, 8:], True),
    "one column further": (lambda t: torch.cat((torch.full_like(t[:, :1], NAN), t), -1)[:, 1:], False),
    "every other row": (lambda t: torch.stack((t, torch.full_like(t, NAN)), 1).flatten(0, 1)[::2], True),
    "transposed": (lambda t: t.T.contiguous().T, False),
    "odd rows": (lambda t: torch.nn.functional.pad(t, (0, 1), value=NAN)[:, :-1], False),
}


@on_hopper
@pytest.mark.parametrize("role", ["dy", "x"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout: str, role: str, launched: list[str]) -> None:
    lay, taken = LAYOUTS[layout]
    tensors = {"dy": integers(1000, 136), "x": integers(1000, 264)}
    truth = expected(**tensors)
    with on_path("kernels"):
        assert_equal(named(functional.weight_gradient(**{**tensors, role: lay(tensors[role])})), truth)
    assert launched == ["sm90" if taken else "generic"]


def test_expanded_gradients() -> None:
    x = integers(1000, 264)
    for dy in (integers(1, 1), integers(1, 136), integers(1000, 1)):
        dy = dy.expand(1000, 136)
        with on_path("kernels"):
            assert_equal(named(functional.weight_gradient(dy, x)), expected(dy, x))


@pytest.mark.parametrize("where", ["dy", "x"])
@pytest.mark.parametrize("value", [NAN, float("inf"), -float("inf")])
def test_nan_and_infinity_come_out_where_torch_has_them(value: float, where: str) -> None:
    tensors = normal(500, 72, 40)
    tensors[where][-1, -2] = value
    with on_path("kernels"):
        ours = named(functional.weight_gradient(**tensors))
    for name, tensor in named(reference.weight_gradient(**tensors)).items():
        for what in (torch.isnan, torch.isposinf, torch.isneginf):
            assert torch.equal(what(ours[name]), what(tensor)), f"{name}: {what.__name__}"


@pytest.mark.xdist_group("large")
@on_hopper
@pytest.mark.parametrize("role", ["dy", "x"])
def test_more_than_two_to_the_31_elements(role: str, launched: list[str]) -> None:
    rows = 2**22 + 5
    tensors = {"dy": (rows, 8), "x": (rows, 8)} | {role: (rows, 520)}
    assert rows * 520 > 2**31
    drawn = {name: integers(*shape) for name, shape in tensors.items()}
    truth: Tensors = {}
    dw, db = torch.zeros((), device=DEVICE), torch.zeros((), device=DEVICE)
    for first in range(0, rows, 2**18):
        part = {name: tensor[first : first + 2**18].double() for name, tensor in drawn.items()}
        more = reference.weight_gradient(**part)
        dw, db = dw + more[0], db + more[1]
    truth = {"dw": dw.to(BFLOAT16), "db": db.to(BFLOAT16)}
    assert float(dw.abs().max()) < 2**24
    for facts in ({}, {"backend": "generic"}):
        with on_path("kernels", **facts):
            assert_equal(named(functional.weight_gradient(**drawn)), truth)
    assert launched == ["sm90", "generic"]


@pytest.mark.xdist_group("large")
@on_hopper
def test_a_gradient_of_more_than_two_to_the_31_elements() -> None:
    rows, out, width = 64, 2**16 + 8, 2**15 + 8
    dy, x = integers(rows, out), integers(rows, width)
    with on_path("kernels"):
        dw, _ = functional.weight_gradient(dy, x)
    assert dw.numel() > 2**31
    for first in range(0, out, 2**12):
        part = dy[:, first : first + 2**12]
        assert torch.equal(dw[first : first + 2**12], (part.T.float() @ x.float()).to(BFLOAT16)), first


def test_a_cuda_graph_replays() -> None:
    tensors = leaves(normal(5000, 264, 136))

    def step() -> tuple[Tensor, ...]:
        dw, db = functional.weight_gradient(**tensors)
        assert db is not None
        return dw.detach(), db.detach()

    with on_path("kernels"):
        assert_replays_like_launched(step, list(tensors.values()), 20)
