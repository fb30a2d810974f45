"""The warp-specialised kernels for experts on Hopper: exact integers for every layout of weights and any routing."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fusedlayers.devices import describe
from fusedlayers.kernels.grouped_gemm import Arithmetic, SortedRows, longest_first, sm90, sort
from fusedlayers.kernels.grouped_gemm import rows_of as sorted_rows
from fusedlayers.kernels.tuning.grouped_gemm_pipelines import BLOCK, GROUPED_PIPELINES
from tests.support.operands import DEVICE

pytestmark = pytest.mark.skipif(describe(DEVICE).backend != "sm90", reason="no Hopper GPU with Gluon")

DTYPE = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
ROUTING = pytest.mark.parametrize("routing", ["even", "skewed", "one", "few"])
LAYOUT = pytest.mark.parametrize("layout", ["separate", "concatenated", "interleaved", "transposed"])
IDENTITY = Arithmetic("identity", "coarse")
NAN = float("nan")
E = 12


def routed(routing: str, slots: int = 20_000) -> SortedRows:
    """Rows sorted by twelve experts, some without rows where they are skewed."""
    shares = {
        "even": torch.ones(E),
        "skewed": torch.tensor([0.0, 5, 1, 0, 0.3, 0.1, 0.01, 2, 0, 0.2, 0.1, 0]),
        "one": (torch.arange(E) == 7).float(),
        "few": torch.ones(E),
    }[routing]
    index = torch.multinomial(shares, 30 if routing == "few" else slots, replacement=True).to(DEVICE)
    packed, _ = sort(index, E, 1, BLOCK)
    return sorted_rows(packed, index.shape[0], E, BLOCK, 1)


def integers(dtype: torch.dtype, most: int, *shape: int) -> Tensor:
    return torch.randint(-most, most + 1, shape, device=DEVICE).to(dtype)


def rows_like(rows: SortedRows, columns: int, dtype: torch.dtype, most: int) -> Tensor:
    """Integers, zeros in padding, and NaN behind the rows in use, which nobody reads."""
    found = integers(dtype, most, rows.capacity, columns) * (rows.slots[:, None] >= 0)
    found[int(rows.starts[-1]) :] = NAN
    return found


def by_expert(a: Tensor, w: Tensor, rows: SortedRows) -> Tensor:
    """``a wᵀ`` in float64 with each row's expert, zeros behind the rows in use."""
    found = a.new_zeros(a.shape[0], w.shape[1], dtype=torch.float64)
    for expert, (first, end) in enumerate(zip(rows.starts[:-1].tolist(), rows.starts[1:].tolist(), strict=True)):
        found[first:end] = a[first:end].double() @ w[expert].double().T
    return found


def laid_out(layout: str, up: Tensor, gate: Tensor) -> tuple[Tensor, Tensor]:
    """The same values ``[E, N, K]`` as they lie in checkpoints."""
    if layout == "concatenated":
        merged = torch.cat((gate, up), 1)
        return merged[:, up.shape[1] :], merged[:, : up.shape[1]]
    if layout == "interleaved":
        merged = torch.stack((gate, up), 2).flatten(1, 2)
        return merged[:, 1::2], merged[:, ::2]
    if layout == "transposed":
        return up.mT.contiguous().mT, gate.mT.contiguous().mT
    return up, gate


def assert_rows(found: Tensor, expected: Tensor, rows: SortedRows, padding: bool = False) -> None:
    """Of all rows that are somebody's, with ``padding`` of all in use, every element is right."""
    in_use = torch.arange(rows.capacity, device=DEVICE) < rows.starts[-1]
    if not padding:
        in_use &= rows.slots >= 0
    assert torch.equal(found[in_use], expected[in_use].to(found.dtype))


@DTYPE
@ROUTING
@LAYOUT
@pytest.mark.parametrize(("K", "N"), [(512, 768), (192, 136)])
def test_products(K: int, N: int, layout: str, routing: str, dtype: torch.dtype) -> None:
    """Both kernels of the forward pass, and the gradient of x, again and again."""
    rows = routed(routing)
    x = rows_like(rows, K, dtype, 2)
    up, gate = integers(dtype, 1, E, N, K), integers(dtype, 1, E, N, K)
    w_up, w_gate = laid_out(layout, up, gate)
    b_up, b_gate, b_down = integers(dtype, 8, E, N), integers(dtype, 8, E, N), integers(dtype, 8, E, K)
    expert = torch.repeat_interleave(torch.arange(E, device=DEVICE), rows.starts.diff())
    z, g = by_expert(x, up, rows), by_expert(x, gate, rows)
    z[: len(expert)] += b_up.double()[expert]
    g[: len(expert)] += b_gate.double()[expert]
    h, w_down = rows_like(rows, N, dtype, 2), integers(dtype, 1, E, K, N)
    y = by_expert(h, w_down, rows)
    y[: len(expert)] += b_down.double()[expert]
    d_gate = rows_like(rows, N, dtype, 1)
    dx = by_expert(h, up.mT, rows) + by_expert(d_gate, gate.mT, rows)
    for _ in range(3):
        for gated in (False, True):
            found = sm90.hidden(
                x, w_up, w_gate if gated else None, b_up, b_gate if gated else None, rows, True, IDENTITY,
                config=GROUPED_PIPELINES["hidden", gated],
            )  # fmt: skip
            assert found is not None
            assert_rows(found[0], z * g if gated else z, rows)
            assert_rows(found[1], z, rows)
            if gated:
                assert_rows(found[2], g, rows)
        product = sm90.product([(h, w_down)], b_down, rows, config=GROUPED_PIPELINES["product", False])
        assert_rows(product, y, rows)
        pairs = [(h, w_up.mT), (d_gate, w_gate.mT)]
        product = sm90.product(pairs, None, rows, config=GROUPED_PIPELINES["product", True])
        if N % 64 and layout != "transposed":
            assert product is None, "the inner axis ends within a step"
        else:
            assert_rows(product, dx, rows)


@DTYPE
@ROUTING
@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
@pytest.mark.parametrize("in_place", [False, True])
def test_hidden_gradient(in_place: bool, gated: bool, routing: str, dtype: torch.dtype) -> None:
    K, N = 192, 200
    rows = routed(routing)
    dy, w_down = rows_like(rows, K, dtype, 1), integers(dtype, 1, E, K, N)
    weights = torch.where(rows.slots >= 0, 2.0 ** torch.randint(-1, 2, (rows.capacity,), device=DEVICE), 0.0)
    d_hidden, by_row = by_expert(dy, w_down.mT, rows), weights[:, None].double()
    for _ in range(3):
        z, g = integers(dtype, 2, rows.capacity, N), integers(dtype, 2, rows.capacity, N) if gated else None
        wide = z.double(), torch.ones_like(z).double() if g is None else g.double()
        found = sm90.hidden_gradient(
            dy, w_down, z, g, weights, rows, True, True, IDENTITY, in_place=in_place,
            config=GROUPED_PIPELINES["hidden_gradient", gated],
        )  # fmt: skip
        assert found is not None
        assert (found.dz is z) == in_place
        assert_rows(found.dz, d_hidden * by_row * wide[1], rows, padding=True)
        if gated:
            assert_rows(found.dg, d_hidden * by_row * wide[0], rows, padding=True)
        assert_rows(found.weighted_hidden, wide[0] * wide[1] * by_row, rows, padding=True)
        sums = (d_hidden * wide[0] * wide[1]).sum(1)
        assert_rows(found.partials.double().sum(0)[:, None], sums[:, None], rows)


def test_padding_stays_zero_beside_infinite_weights() -> None:
    rows = routed("skewed")
    dy, w_down = rows_like(rows, 64, torch.bfloat16, 1), integers(torch.bfloat16, 1, E, 64, 128)
    w_down[:, 3, 5] = float("inf")
    z, g = (torch.full((rows.capacity, 128), value, device=DEVICE, dtype=torch.bfloat16) for value in (1.0, NAN))
    found = sm90.hidden_gradient(
        dy, w_down, z, g, (rows.slots >= 0).float(), rows, True, False, Arithmetic("silu", "coarse"), in_place=False,
        config=GROUPED_PIPELINES["hidden_gradient", True],
    )  # fmt: skip
    assert found is not None
    assert found.partials is None
    padding = (rows.slots < 0) & (torch.arange(rows.capacity, device=DEVICE) < rows.starts[-1])
    for gradient in (found.dz, found.dg, found.weighted_hidden):
        assert not gradient[padding].any()


@DTYPE
@ROUTING
@LAYOUT
@pytest.mark.parametrize("ordered", [False, True])
def test_weight_gradient(ordered: bool, layout: str, routing: str, dtype: torch.dtype) -> None:
    """Into every layout, and nothing beside it; experts without rows get zeros."""
    rows, units, columns = routed(routing), 192, 320
    a, b = rows_like(rows, units, dtype, 1), rows_like(rows, columns, dtype, 1)
    bounds = zip(rows.starts[:-1].tolist(), rows.starts[1:].tolist(), strict=True)
    expected = torch.stack([a[first:end].double().T @ b[first:end].double() for first, end in bounds])
    order = longest_first(rows.starts) if ordered else None
    for _ in range(3):
        blank = torch.full((E, units, columns), 7.0, dtype=dtype, device=DEVICE)
        out, beside = laid_out(layout, blank, blank.clone())
        config = GROUPED_PIPELINES["weight_gradient", True]
        assert sm90.weight_gradient(a, b, rows, out, config=config, order=order)
        assert torch.equal(out, expected.to(dtype))
        assert bool((beside == 7.0).all())


def test_what_is_refused() -> None:
    """What TMA does not take, and rows in other blocks: the generic kernels run then."""
    rows = routed("few")
    x, up = rows_like(rows, 72, torch.bfloat16, 1), integers(torch.bfloat16, 1, E, 64, 72)
    config = GROUPED_PIPELINES["hidden", False]
    options = (None, None, None)
    assert sm90.hidden(x, up, *options, rows, False, IDENTITY, config=config) is not None
    odd = rows_like(rows, 71, torch.bfloat16, 1), integers(torch.bfloat16, 1, E, 64, 71)
    assert sm90.hidden(*odd, *options, rows, False, IDENTITY, config=config) is None
    assert sm90.hidden(x, up.mT.contiguous().mT, *options, rows, False, IDENTITY, config=config) is None
    assert sm90.hidden(x, up, *options, rows._replace(block=64), False, IDENTITY, config=config) is None
    out = torch.empty(E, 72, 64, device=DEVICE, dtype=torch.bfloat16)
    assert not sm90.weight_gradient(
        x, rows_like(rows, 64, torch.bfloat16, 1), rows, out, config=GROUPED_PIPELINES["weight_gradient", True]
    )
