"""dx that is summed over groups of hidden units, on a GPU: exact, the same bits, any layout."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from fusedlayers import functional
from fusedlayers.devices import describe
from fusedlayers.kernels import gemm_epilogue as kernels
from fusedlayers.kernels.tuning import EPILOGUE_PIPELINES
from fusedlayers.planning.ffn_chunked import LEAST_WORKSPACE, WORKSPACE_COPIES
from tests.functional.test_ffn_chunked import GATED, cut, force_kernels
from tests.gpu.graphs import assert_replays_like_launched
from tests.support.operands import DEVICE, Tensors, assert_ffn_close, ffn_inputs, leaves, like_result

NAN = float("nan")
BFLOAT16 = torch.bfloat16
FACTS = describe(DEVICE)
PARTS = pytest.mark.parametrize("parts", [1, 2], ids=["plain", "gated"])
DTYPE = pytest.mark.parametrize("dtype", [torch.float16, BFLOAT16], ids=str)
# Tokens, hidden units and width, and hidden units of a group: whole tiles, and tails of everything.
SIZES = [((4096, 2048, 1024), 512), ((1001, 1000, 544), 328), ((65, 72, 64), 8), ((3001, 640, 1064), 72)]
Terms = list[tuple[Tensor, Tensor]]

on_hopper = pytest.mark.skipif(FACTS.backend != "sm90", reason="no Hopper GPU with Gluon")


def integers(size: tuple[int, int, int], dtype: torch.dtype, parts: int) -> Terms:
    """Sums of their products need more bits than the dtype has, and not more than float32 has.

    Gradients of pre-activations ``[M, N]`` and weights ``[N, K]``, by part.
    """
    M, N, K = size
    most = {torch.float16: 2**15, BFLOAT16: 2**12}[dtype]
    # Products are up to 6 times a value, and their sums a random walk of N steps.
    value = int(most / (4 * 4 * (parts * N) ** 0.5))
    return [
        (
            torch.randint(-value, value + 1, (M, N), device=DEVICE).to(dtype),
            torch.randint(-6, 7, (N, K), device=DEVICE).to(dtype),
        )
        for _ in range(parts)
    ]


def rounded(terms: Terms) -> Tensor:
    exact = sum((d_pre.double() @ weight.double() for d_pre, weight in terms), torch.tensor(0.0).double())
    return exact.to(terms[0][0].dtype)


def in_groups(terms: Terms, units: int) -> Tensor | None:
    """dx of groups of so many hidden units, or None where TMA does not take them; nothing beside it is written."""
    (M, N), K, dtype = terms[0][0].shape, terms[0][1].shape[1], terms[0][0].dtype
    around = torch.full((M + 2, K + 8), NAN, dtype=dtype, device=DEVICE)
    total = torch.full((M + 2, K), NAN, device=DEVICE)
    dx, pipeline = around[1:-1, :K], EPILOGUE_PIPELINES["data_gradient", len(terms) > 1]
    for first in range(0, N, units):
        group = slice(first, min(first + units, N))
        part = [(d_pre[:, group], weight[group]) for d_pre, weight in terms]
        if not kernels.data_gradient(part, dx, total[1:-1], first == 0, group.stop == N, pipeline):
            return None
    assert bool(around[0].isnan().all() & around[-1].isnan().all() & around[:, K:].isnan().all())
    assert bool(total[0].isnan().all() & total[-1].isnan().all())
    return dx


@on_hopper
@PARTS
@DTYPE
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(("size", "units"), SIZES, ids=str)
def test_sums_are_exact_and_rounded_once(
    size: tuple[int, int, int], units: int, transposed: bool, dtype: torch.dtype, parts: int
) -> None:
    """Again and again, with weights as they are, and transposed."""
    for _ in range(3):
        terms = integers(size, dtype, parts)
        expected = rounded(terms)
        if transposed:
            terms = [(d_pre, weight.T.contiguous().T) for d_pre, weight in terms]
        for _ in range(5):
            found = in_groups(terms, units)
            assert found is not None, "TMA takes these"
            assert torch.equal(found, expected)


@on_hopper
@DTYPE
def test_what_is_no_number_stays(dtype: torch.dtype) -> None:
    """From the group on that it comes with, whatever the groups behind it add."""
    values = (float("inf"), -float("inf"), NAN, -NAN, torch.finfo(dtype).max, 0.0)
    d_pre = torch.zeros(len(values), 32, device=DEVICE, dtype=dtype)
    for row, value in enumerate(values):
        d_pre[row, 5 * row] = value
    dx = in_groups([(d_pre, torch.ones(32, 64, device=DEVICE, dtype=dtype))], 8)
    for row, value in enumerate(values):
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
def test_layouts(layout: str, role: int) -> None:
    """What TMA cannot take is refused, and left to torch's product."""
    change, taken = LAYOUTS[layout]
    [term] = integers((300, 320, 96), BFLOAT16, 1)
    strided = tuple(change(each) if place == role else each for place, each in enumerate(term))
    found = in_groups([(strided[0], strided[1])], 64)
    if taken or (layout, role) == ("transposed", 1):
        assert found is not None
        assert torch.equal(found, rounded([term]))
    else:
        assert found is None


@pytest.mark.xdist_group("large")
@on_hopper
def test_more_than_two_to_the_31_elements() -> None:
    rows, units, width = 2**20 + 7, 64, 2080
    assert rows * width > 2**31
    [(few, weight)] = integers((64, units, width), BFLOAT16, 1)
    d_pre = few.repeat(-(-rows // 64), 1)[:rows]
    dx = in_groups([(d_pre, weight)], 24)
    expected = rounded([(few, weight)])
    for first in range(0, rows, 2**18):
        part = dx[first : first + 2**18]
        assert torch.equal(part, expected.repeat(-(-len(part) // 64), 1)[: len(part)]), f"rows from {first} on"


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many hidden units each launch of the kernel adds."""
    sizes: list[int] = []
    launch = kernels.data_gradient

    def noting(terms: Terms, *rest: Any) -> bool:
        sizes.append(terms[0][0].shape[1])
        return launch(terms, *rest)

    monkeypatch.setattr(kernels, "data_gradient", noting)
    return sizes


def grouped_inputs(gated: bool, monkeypatch: pytest.MonkeyPatch) -> tuple[Tensors, dict[str, Any]]:
    """An FFN whose dx is summed over four groups, and a ragged one, of hidden units; half a group has its hidden."""
    force_kernels(monkeypatch)
    cut(monkeypatch, 1000, 256, 128)
    return ffn_inputs(1000, 544, 1160, 544, BFLOAT16, gated=gated, residual=True), {"recompute": True}


@on_hopper
@GATED
@pytest.mark.parametrize("dropout_p", [0.0, 0.1])
def test_an_ffn_in_groups_is_close_to_torch(
    dropout_p: float, gated: bool, monkeypatch: pytest.MonkeyPatch, launched: list[int]
) -> None:
    tensors, options = grouped_inputs(gated, monkeypatch)
    seed = {"manual_seed": 5} if dropout_p else {}
    assert_ffn_close(functional.ffn, tensors, options=options, dropout_p=dropout_p, activation="silu", **seed)
    assert launched == [256] * 4 + [136]


@GATED
def test_an_ffn_in_groups_replays_in_a_graph(gated: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors, options = grouped_inputs(gated, monkeypatch)
    named = leaves(tensors)
    wanted = [tensor for tensor in named.values() if tensor is not None]
    dy = like_result(tensors)

    def step() -> tuple[Tensor, ...]:
        return torch.autograd.grad(functional.ffn(**named, activation="silu", **options), wanted, dy)

    assert_replays_like_launched(step, [tensor.detach() for tensor in wanted], 20)


@on_hopper
@GATED
@pytest.mark.parametrize("frozen", [(), ("w_up",)], ids=["trained", "frozen"])
@pytest.mark.parametrize("size", [(8192, 2048, 8192), (8192, 1536, 6144)], ids=str)
def test_what_is_planned_is_close_to_torch_within_the_limit(
    size: tuple[int, int, int], frozen: tuple[str, ...], gated: bool, launched: list[int]
) -> None:
    """Also where w_up is frozen, and no gradient of it has room for the sums of its bias."""
    tokens, d_model, d_ff = size
    tensors = ffn_inputs(tokens, d_model, d_ff, d_model, BFLOAT16, gated=gated)
    assert_ffn_close(functional.ffn, tensors, options={"recompute": True}, activation="gelu_tanh")
    assert len(launched) > 1
    named, dy = leaves(tensors, frozen=frozen), like_result(tensors)
    y = functional.ffn(**named, activation="gelu_tanh", recompute=True)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    y.backward(dy)
    gradients = sum(tensor.grad.nbytes for tensor in named.values() if tensor is not None and tensor.grad is not None)
    extra = torch.cuda.max_memory_allocated() - before - gradients
    x = named["x"]
    # The allocator rounds every tensor up to 512 bytes.
    assert 0 < extra <= max(LEAST_WORKSPACE, WORKSPACE_COPIES * x.nbytes) + 2**14
