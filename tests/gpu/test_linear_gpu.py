"""The split linear layer on a GPU: exact integers for every shipped tile, equal bits, graphs, strides past 2^31."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fusedlayers import SplitKLinear, functional, planning, reference
from fusedlayers.closeness import assert_all_close
from fusedlayers.devices import describe
from fusedlayers.functional import dispatch
from fusedlayers.kernels.split_k import product
from fusedlayers.kernels.tuning import SplitTiles, split_k
from tests.functional.test_linear import inputs, upstream
from tests.gpu.graphs import assert_replays_like_launched
from tests.support.operands import DEVICE, Tensors, assert_equal, forget_calls, in_float64, leaves, on_path, results
from tests.support.records import where

BFLOAT16, FLOAT16 = torch.bfloat16, torch.float16
SHIPPED = sorted({tiles for _, _, tiles in split_k.TABLE["sm_90", 16]}, key=str)
# Rows, columns, inner axis.
PUBLISHED = [
    (64, 64, 65536), (16, 16, 1048576), (128, 128, 262144), (256, 256, 65536), (1, 4096, 4096), (1, 4096, 14336),
    (16, 1024, 4096), (16, 4096, 14336), (64, 4096, 4096), (64, 1024, 8192),
]  # fmt: skip
RAGGED = [(1, 17, 4095), (3, 100, 5000), (15, 16, 70001), (65, 129, 3333), (300, 7, 20000), (431, 767, 1001)]


def integers(*shape: int, dtype: torch.dtype = BFLOAT16) -> Tensor:
    """From -2 to 2, a tenth of them not 0: their products add up exactly in float32, and one rounding is ours."""
    values = torch.randint(-2, 3, shape, dtype=torch.int8, device=DEVICE)
    return (values * (torch.rand(shape, device=DEVICE) < 0.1)).to(dtype)


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("atomic", [False, True], ids=["workspace", "atomic"])
@pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT16], ids=str)
@pytest.mark.parametrize("tiles", SHIPPED, ids=str)
def test_every_tile_with_any_number_of_splits(tiles: SplitTiles, dtype: torch.dtype, atomic: bool) -> None:
    """Exact integers, ragged on every axis, both layouts of the right operand, twenty times each."""
    for rows, columns, inner in ((tiles.block_m, 200, 9000), (1 if tiles.block_m == 1 else 37, 131, 4100)):
        left, right = integers(rows, inner, dtype=dtype), integers(columns, inner, dtype=dtype)
        bias = integers(columns, dtype=dtype)
        truth = torch.relu(left.double() @ right.double().T + bias.double())
        assert float(truth.max()) < 2**11
        for weight in (right, right.T.contiguous().T):
            for splits in (1, 2, 3, 5, 8, 10**6):
                for _ in range(20):
                    y = product(
                        left, weight, bias, splits, tiles,
                        activation="relu", accuracy="half", atomic=atomic, dependent=True,
                    )  # fmt: skip
                    assert torch.equal(y, truth.to(dtype)), splits


@pytest.mark.parametrize("size", [*PUBLISHED, *RAGGED], ids=str)
def test_published_and_ragged_sizes_are_close_to_torch(size: tuple[int, int, int]) -> None:
    rows, columns, inner = size
    tensors = inputs(rows, columns, inner, BFLOAT16)
    dy = upstream(tensors)
    with on_path("kernels"):
        ours = results(functional.linear, tensors, dy)
    theirs = results(reference.linear, tensors, dy)
    assert_all_close(ours, theirs, results(reference.linear, in_float64(tensors), dy.double()))


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("size", [*PUBLISHED[:3], *PUBLISHED[4:7], *RAGGED], ids=str)
def test_the_same_bits_every_time(size: tuple[int, int, int]) -> None:
    rows, columns, inner = size
    tensors = inputs(rows, columns, inner, BFLOAT16)
    dy = upstream(tensors)
    with on_path("kernels"):
        first = results(functional.linear, tensors, dy, activation="gelu")
        for _ in range(9):
            assert_equal(results(functional.linear, tensors, dy, activation="gelu"), first)


@pytest.mark.parametrize("split_k", [1, 2, 3, 5, 8, 64, "auto"])
@pytest.mark.parametrize("reduction", ["workspace", "atomic"])
def test_error_does_not_grow_with_the_splits(reduction: str, split_k: int | str) -> None:
    tensors = inputs(16, 64, 65536, BFLOAT16)
    ours = functional.linear(**tensors, split_k=split_k, reduction=reduction)
    theirs, truth = reference.linear(**tensors), reference.linear(**in_float64(tensors))
    assert_all_close({"y": ours}, {"y": theirs}, {"y": truth})


# Inputs that were used on another stream before the capture: torch says that it may wait there, and does no harm.
@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream does not match:UserWarning")
@pytest.mark.parametrize("size", [(64, 64, 65536), (1, 4096, 4096), (16, 1024, 4096)], ids=str)
def test_replays_of_a_graph(size: tuple[int, int, int]) -> None:
    """Forward and backward, every kernel started while the one before still runs, with new data in each replay."""
    rows, columns, inner = size
    tensors = leaves(inputs(rows, columns, inner, BFLOAT16))
    dy = upstream(tensors)

    def step() -> tuple[Tensor, ...]:
        y = functional.linear(**tensors, activation="silu")
        return (y, *torch.autograd.grad(y, list(tensors.values()), dy))

    with on_path("kernels"):
        assert_replays_like_launched(step, [t for t in (*tensors.values(), dy) if t is not None], 100)


def test_a_chain_of_layers_waits_for_each_other() -> None:
    """What one kernel writes the next one reads, however early it starts: a wait that is missing shows here."""
    torch.manual_seed(0)
    layers = [SplitKLinear(2048, 2048, device=DEVICE, dtype=BFLOAT16) for _ in range(8)]
    x = torch.randn(16, 2048, device=DEVICE, dtype=BFLOAT16)

    def chain() -> tuple[Tensor]:
        y = x
        for layer in layers:
            y = functional.linear(y, layer.weight, layer.bias, activation="relu", split_k=8)
        return (y,)

    with torch.no_grad():
        (expected,) = chain()
        apart = x
        for layer in layers:
            torch.cuda.synchronize()
            apart = functional.linear(apart, layer.weight, layer.bias, activation="relu", split_k=8)
        assert torch.equal(expected, apart)
        assert_replays_like_launched(chain, [x], 20)


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
@pytest.mark.parametrize("size", [(64, 64, 4096), (1, 512, 4096)], ids=str)
def test_torch_compile(size: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSEDLAYERS_BACKEND", "triton")
    tensors = inputs(*size, BFLOAT16)
    dy = upstream(tensors)
    options: dict[str, Any] = {"activation": "relu", "split_k": 4}
    compiled = torch.compile(functional.linear, fullgraph=True)
    ours = results(compiled, tensors, dy, **options)
    theirs = results(reference.linear, tensors, dy, activation="relu")
    truth = results(reference.linear, in_float64(tensors), dy.double(), activation="relu")
    assert_all_close(ours, theirs, truth)


@pytest.mark.xdist_group("large")
def test_rows_more_than_two_to_the_31_elements_apart() -> None:
    """Offsets of the operands and of the result have 64 bits."""
    stride = 2**31 + 8
    memory = torch.zeros(stride + 4096, dtype=BFLOAT16, device=DEVICE)
    right = memory.as_strided((2, 4096), (stride, 1))
    right.copy_(integers(2, 4096))
    left = integers(3, 4096)
    truth = left.double() @ right.double().T
    for tiles in SHIPPED:
        if tiles.block_m > 1:
            assert torch.equal(product(left, right, None, 4, tiles).double(), truth)
        else:
            assert torch.equal(product(left[:1], right, None, 4, tiles).double(), truth[:1])


def expected_dtypes(tensors: Tensors) -> set[torch.dtype]:
    return {tensor.dtype for tensor in tensors.values() if tensor is not None}


@pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT16, torch.float32], ids=str)
def test_dtypes(dtype: torch.dtype) -> None:
    tensors = inputs(20, 48, 4000, dtype)
    dy = upstream(tensors)
    with on_path("kernels"):
        ours = results(functional.linear, tensors, dy, activation="gelu")
    assert expected_dtypes(ours) == {dtype}
    theirs = results(reference.linear, tensors, dy, activation="gelu")
    assert_all_close(ours, theirs, results(reference.linear, in_float64(tensors), dy.double(), activation="gelu"))


def test_torchs_gradients_of_odd_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    """They come from padded copies, as sizes like these are far faster so, where a kernel has the forward pass."""
    x, weight, dy = integers(64, 2**21), integers(19, 2**21), integers(64, 19)
    x.requires_grad_()
    weight.requires_grad_()
    facts = {"needs_data_gradient": True, "needs_weight_gradient": True}
    problem = planning.LinearProblem(M=64, N=19, K=2**21, dtype="bfloat16", **facts)
    known = where(describe(DEVICE), problem, {"fused": 0.5})
    monkeypatch.setattr(dispatch, "describe", lambda device: known)
    forget_calls()
    assert planning.plan(problem, known).padded_columns == 24
    dx, dw = torch.autograd.grad(functional.linear(x, weight), [x, weight], dy)
    with torch.no_grad():
        assert torch.equal(dx.float(), dy.float() @ weight.float())
        assert torch.equal(dw.float(), dy.float().T @ x.float())
    forget_calls()
