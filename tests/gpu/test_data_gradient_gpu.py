"""dx that is carried from one group of hidden units to the next, on a GPU: exact, the same bits, any layout."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from fusedlayers import functional, planning
from fusedlayers.devices import describe
from fusedlayers.kernels.gemm_epilogue import pipelined
from fusedlayers.kernels.tuning import EPILOGUE_PIPELINES, data_gradient_tiles
from tests.gpu.graphs import assert_replays_like_launched
from tests.operands import DEVICE, Tensors, assert_ffn_close, ffn_inputs, leaves, like_result
from tests.test_data_gradient import (
    NAN,
    PARTS,
    SIXTEEN_BITS,
    Terms,
    assert_rounded_once,
    drawn,
    in_groups,
    integers,
    planted,
    total,
)
from tests.test_ffn_chunked import GATED, cut, force_kernels

BFLOAT16 = torch.bfloat16
FACTS = describe(DEVICE)
DTYPE = pytest.mark.parametrize("dtype", SIXTEEN_BITS, ids=str)
KIND = pytest.mark.parametrize("kind", ["pipelined", "portable"])
# Tokens, hidden units and width, and hidden units of a group: whole tiles, and tails of everything.
SIZES = [((4096, 2048, 1024), 512), ((1001, 1000, 544), 328), ((65, 72, 64), 8), ((3001, 640, 1056), 72)]

on_hopper = pytest.mark.skipif(not FACTS.pipelined, reason="no Hopper GPU with Gluon")


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many hidden units each launch of the pipelined kernel adds."""
    sizes: list[int] = []
    launch = pipelined.launch_data_gradient

    def noting(operands: Any, *rest: Any) -> None:
        sizes.append(operands[0].columns)
        launch(operands, *rest)

    monkeypatch.setattr(pipelined, "launch_data_gradient", noting)
    return sizes


def summed(terms: Terms, units: int, kind: str) -> Tensor:
    if kind == "pipelined" and not FACTS.pipelined:
        pytest.skip("no Hopper GPU with Gluon")
    pipeline = EPILOGUE_PIPELINES["data_gradient", len(terms) > 1] if kind == "pipelined" else None
    return in_groups(terms, units, pipeline, data_gradient_tiles(FACTS.architecture))


@KIND
@PARTS
@DTYPE
@pytest.mark.parametrize(("size", "units"), SIZES, ids=str)
def test_sums_beyond_the_dtype_are_exact_again_and_again(
    size: tuple[int, int, int], units: int, dtype: torch.dtype, parts: int, kind: str, launched: list[int]
) -> None:
    for _ in range(3):
        terms = integers(size, dtype, parts)
        truth = total(terms)
        assert not torch.equal(truth.to(dtype).double(), truth), "every sum fits the dtype"
        launched.clear()
        for _ in range(5):
            assert torch.equal(summed(terms, units, kind), truth.to(dtype))
        assert bool(launched) == (kind == "pipelined"), "TMA takes these"


@on_hopper
@PARTS
@DTYPE
@pytest.mark.parametrize(("size", "units"), SIZES, ids=str)
def test_transposed_weights(
    size: tuple[int, int, int], units: int, dtype: torch.dtype, parts: int, launched: list[int]
) -> None:
    terms = integers(size, dtype, parts)
    transposed = [(d_pre, weight.T.contiguous().T) for d_pre, weight in terms]
    for _ in range(5):
        assert torch.equal(summed(transposed, units, "pipelined"), total(terms).to(dtype))
    assert launched, "TMA takes these"


@KIND
@PARTS
@DTYPE
def test_many_groups_are_as_exact_as_one(dtype: torch.dtype, parts: int, kind: str) -> None:
    terms = drawn((2048, 2048, 512), dtype, parts)
    assert_rounded_once(summed(terms, 128, kind), terms, 16)


@KIND
@DTYPE
def test_what_is_no_number_stays(dtype: torch.dtype, kind: str) -> None:
    values = (float("inf"), -float("inf"), NAN, -NAN, torch.finfo(dtype).max, 0.0)
    [(d_pre, weight)] = planted(values, dtype)
    dx = summed([(d_pre, weight[:, :1].expand(-1, 64).contiguous())], 8, kind)
    for row, value in enumerate((*values, 0.0)):
        expected = torch.full((64,), value, dtype=dtype, device=DEVICE)
        assert torch.equal(dx[row].nan_to_num(7.0, 8.0, 9.0), expected.nan_to_num(7.0, 8.0, 9.0)), value


LAYOUTS: dict[str, tuple[Callable[[Tensor], Tensor], bool]] = {
    "columns from the middle on": (lambda t: torch.nn.functional.pad(t, (8, 8), value=NAN)[:, 8:-8], True),
    "one column further": (lambda t: torch.nn.functional.pad(t, (1, 7), value=NAN)[:, 1:-7], False),
    "odd rows": (lambda t: torch.nn.functional.pad(t, (0, 1), value=NAN)[:, :-1], False),
    "transposed": (lambda t: t.T.contiguous().T, False),
}


@on_hopper
@pytest.mark.parametrize("role", [0, 1], ids=["gradient", "weight"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout: str, role: int, launched: list[int]) -> None:
    """What TMA cannot take runs in the portable kernel, group by group, with the same sums."""
    change, copied = LAYOUTS[layout]
    copied = copied or (layout, role) == ("transposed", 1)
    [term] = integers((300, 320, 96), BFLOAT16, 1)
    strided = tuple(change(each) if place == role else each for place, each in enumerate(term))
    found = summed([(strided[0], strided[1])], 64, "pipelined")
    assert torch.equal(found, total([term]).to(BFLOAT16))
    assert launched == ([64] * 5 if copied else [])


@KIND
def test_more_than_two_to_the_31_elements(kind: str) -> None:
    rows, units, width = 2**20 + 7, 64, 2080
    assert rows * width > 2**31
    [(few, weight)] = integers((64, units, width), BFLOAT16, 1)
    d_pre = few.repeat(-(-rows // 64), 1)[:rows]
    dx = summed([(d_pre, weight)], 24, kind)
    expected = total([(few, weight)]).to(BFLOAT16)
    for first in range(0, rows, 2**18):
        part = dx[first : first + 2**18]
        assert torch.equal(part, expected.repeat(-(-len(part) // 64), 1)[: len(part)]), f"rows from {first} on"


def carried_inputs(gated: bool, monkeypatch: pytest.MonkeyPatch) -> tuple[Tensors, dict[str, Any]]:
    """An FFN whose dx is carried over four groups, and a ragged one, of hidden units in two slices."""
    force_kernels(monkeypatch)
    cut(monkeypatch, 1000, 256, 128, carried=True)
    return ffn_inputs(1000, 544, 1160, 544, BFLOAT16, gated=gated, residual=True), {"recompute": True}


@on_hopper
@GATED
@pytest.mark.parametrize("dropout_p", [0.0, 0.1])
def test_an_ffn_in_groups_is_close_to_torch(
    dropout_p: float, gated: bool, monkeypatch: pytest.MonkeyPatch, launched: list[int]
) -> None:
    tensors, options = carried_inputs(gated, monkeypatch)
    seed = {"manual_seed": 5} if dropout_p else {}
    assert_ffn_close(functional.ffn, tensors, options=options, dropout_p=dropout_p, activation="silu", **seed)
    assert launched == [256] * 4 + [136]


@GATED
def test_an_ffn_in_groups_replays_in_a_graph(gated: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors, options = carried_inputs(gated, monkeypatch)
    named = leaves(tensors)
    wanted = [tensor for tensor in named.values() if tensor is not None]
    dy = like_result(tensors)

    def step() -> tuple[Tensor, ...]:
        return torch.autograd.grad(functional.ffn(**named, activation="silu", **options), wanted, dy)

    assert_replays_like_launched(step, [tensor.detach() for tensor in wanted], 20)


@on_hopper
@GATED
@pytest.mark.parametrize("size", [(8192, 2048, 8192), (8192, 1536, 6144)], ids=str)
def test_what_is_planned_is_close_to_torch_within_the_limit(
    size: tuple[int, int, int], gated: bool, launched: list[int]
) -> None:
    tokens, d_model, d_ff = size
    tensors = ffn_inputs(tokens, d_model, d_ff, d_model, BFLOAT16, gated=gated)
    assert_ffn_close(functional.ffn, tensors, options={"recompute": True}, activation="gelu_tanh")
    assert len(launched) > 1
    named, dy = leaves(tensors), like_result(tensors)
    y = functional.ffn(**named, activation="gelu_tanh", recompute=True)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    y.backward(dy)
    gradients = sum(tensor.grad.nbytes for tensor in named.values() if tensor is not None and tensor.grad is not None)
    extra = torch.cuda.max_memory_allocated() - before - gradients
    # The allocator rounds every tensor up to 512 bytes.
    assert 0 < extra <= planning.WORKSPACE_LIMIT + 2**14
