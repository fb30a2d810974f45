"""The warp-specialised kernels for experts on Hopper: exact integers for every layout of weights and any routing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fusedlayers.devices import describe
from fusedlayers.kernels import grouped_gemm as kernels
from fusedlayers.kernels.grouped_gemm import Arithmetic, SortedRows, longest_first, sort
from fusedlayers.kernels.grouped_gemm import rows_of as sorted_rows
from fusedlayers.kernels.tuning.grouped_gemm import grouped_tiles
from fusedlayers.kernels.tuning.grouped_gemm_pipelines import BLOCK, GROUPED_PIPELINES
from tests.gpu.launches import note_launches
from tests.support.operands import DEVICE

pytestmark = pytest.mark.skipif(describe(DEVICE).backend != "sm90", reason="no Hopper GPU with Gluon")

DTYPE = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
ROUTING = pytest.mark.parametrize("routing", ["even", "skewed", "one", "few"])
LAYOUT = pytest.mark.parametrize("layout", ["separate", "concatenated", "interleaved", "transposed"])
IDENTITY = Arithmetic("identity", "coarse")
NAN = float("nan")
E = 12
SM90 = {
    "sm90_hidden": "hidden", "sm90_grouped_product": "product", "sm90_epilogue_gradient": "hidden gradient",
    "sm90_grouped_weight_gradient": "weight gradient",
}  # fmt: skip


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Which of the sm90 kernels run; where they do not, the generic ones do."""
    return note_launches(monkeypatch, SM90)


def options(step: str, gated: bool, block: int = BLOCK) -> dict[str, Any]:
    """What the plan chooses for one step; in other blocks than of 128 rows it chooses the generic kernels itself."""
    generic = step if step == "weight_gradient" else "wide" if gated else "product"
    return {"tiles": grouped_tiles("sm_90", 16, generic, block), "pipeline": GROUPED_PIPELINES[step, gated]}


def routed(routing: str, slots: int = 20_000, block: int = BLOCK) -> SortedRows:
    """Rows sorted by twelve experts, some without rows where they are skewed."""
    shares = {
        "even": torch.ones(E),
        "skewed": torch.tensor([0.0, 5, 1, 0, 0.3, 0.1, 0.01, 2, 0, 0.2, 0.1, 0]),
        "one": (torch.arange(E) == 7).float(),
        "few": torch.ones(E),
    }[routing]
    index = torch.multinomial(shares, 30 if routing == "few" else slots, replacement=True).to(DEVICE)
    packed, _ = sort(index, E, 1, block)
    return sorted_rows(packed, index.shape[0], E, block, 1)


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
def test_products(K: int, N: int, layout: str, routing: str, dtype: torch.dtype, launched: list[str]) -> None:
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
            found = kernels.hidden(
                x, w_up, w_gate if gated else None, b_up, b_gate if gated else None, rows, True, IDENTITY,
                gathered=True, **options("hidden", gated),
            )  # fmt: skip
            assert_rows(found[0], z * g if gated else z, rows)
            assert_rows(found[1], z, rows)
            if gated:
                assert_rows(found[2], g, rows)
        product = kernels.product([(h, w_down)], b_down, rows, "ieee", **options("product", False))
        assert_rows(product, y, rows)
        pairs = [(h, w_up.mT), (d_gate, w_gate.mT)]
        product = kernels.product(pairs, None, rows, "ieee", **options("product", True))
        assert_rows(product, dx, rows)
    # Otherwise the inner axis of the last product ends within a step.
    taken = N % 64 == 0 or layout == "transposed"
    assert launched == ["hidden", "hidden", "product", *["product"] * taken] * 3


@DTYPE
@ROUTING
@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
@pytest.mark.parametrize("in_place", [False, True])
def test_hidden_gradient(in_place: bool, gated: bool, routing: str, dtype: torch.dtype, launched: list[str]) -> None:
    K, N = 192, 200
    rows = routed(routing)
    dy, w_down = rows_like(rows, K, dtype, 1), integers(dtype, 1, E, K, N)
    weights = torch.where(rows.slots >= 0, 2.0 ** torch.randint(-1, 2, (rows.capacity,), device=DEVICE), 0.0)
    d_hidden, by_row = by_expert(dy, w_down.mT, rows), weights[:, None].double()
    for _ in range(3):
        z, g = integers(dtype, 2, rows.capacity, N), integers(dtype, 2, rows.capacity, N) if gated else None
        wide = z.double(), torch.ones_like(z).double() if g is None else g.double()
        found = kernels.hidden_gradient(
            dy, w_down, z, g, weights, rows, True, True, IDENTITY, in_place=in_place,
            **options("hidden_gradient", gated),
        )  # fmt: skip
        assert (found.dz is z) == in_place
        assert_rows(found.dz, d_hidden * by_row * wide[1], rows, padding=True)
        if gated:
            assert_rows(found.dg, d_hidden * by_row * wide[0], rows, padding=True)
        assert_rows(found.weighted_hidden, wide[0] * wide[1] * by_row, rows, padding=True)
        sums = (d_hidden * wide[0] * wide[1]).sum(1)
        assert_rows(found.partials.double().sum(0)[:, None], sums[:, None], rows)
    assert launched == ["hidden gradient"] * 3


def test_padding_stays_zero_beside_infinite_weights(launched: list[str]) -> None:
    rows = routed("skewed")
    dy, w_down = rows_like(rows, 64, torch.bfloat16, 1), integers(torch.bfloat16, 1, E, 64, 128)
    w_down[:, 3, 5] = float("inf")
    z, g = (torch.full((rows.capacity, 128), value, device=DEVICE, dtype=torch.bfloat16) for value in (1.0, NAN))
    found = kernels.hidden_gradient(
        dy, w_down, z, g, (rows.slots >= 0).float(), rows, True, False, Arithmetic("silu", "coarse"), in_place=False,
        **options("hidden_gradient", True),
    )  # fmt: skip
    assert launched == ["hidden gradient"]
    assert found.partials is None
    padding = (rows.slots < 0) & (torch.arange(rows.capacity, device=DEVICE) < rows.starts[-1])
    for gradient in (found.dz, found.dg, found.weighted_hidden):
        assert not gradient[padding].any()


@DTYPE
@ROUTING
@LAYOUT
@pytest.mark.parametrize("ordered", [False, True])
def test_weight_gradient(ordered: bool, layout: str, routing: str, dtype: torch.dtype, launched: list[str]) -> None:
    """Into every layout, and nothing beside it; experts without rows get zeros."""
    rows, units, columns = routed(routing), 192, 320
    a, b = rows_like(rows, units, dtype, 1), rows_like(rows, columns, dtype, 1)
    bounds = zip(rows.starts[:-1].tolist(), rows.starts[1:].tolist(), strict=True)
    expected = torch.stack([a[first:end].double().T @ b[first:end].double() for first, end in bounds])
    order = longest_first(rows.starts) if ordered else None
    for _ in range(3):
        blank = torch.full((E, units, columns), 7.0, dtype=dtype, device=DEVICE)
        out, beside = laid_out(layout, blank, blank.clone())
        kernels.weight_gradient(a, b, rows, out, "ieee", order=order, **options("weight_gradient", True))
        assert torch.equal(out, expected.to(dtype))
        assert bool((beside == 7.0).all())
    assert launched == ["weight gradient"] * 3


def test_what_is_refused(launched: list[str]) -> None:
    """What TMA does not take, and rows in other blocks: the generic kernels run then."""
    rows = routed("few")
    x, up = rows_like(rows, 72, torch.bfloat16, 1), integers(torch.bfloat16, 1, E, 64, 72)

    def hidden(x: Tensor, up: Tensor, rows: SortedRows) -> None:
        kernels.hidden(
            x, up, None, None, None, rows, False, IDENTITY, gathered=True, **options("hidden", False, rows.block)
        )  # fmt: skip

    hidden(x, up, rows)
    assert launched == ["hidden"]
    hidden(rows_like(rows, 71, torch.bfloat16, 1), integers(torch.bfloat16, 1, E, 64, 71), rows)
    hidden(x, up.mT.contiguous().mT, rows)
    in_blocks_of_64 = routed("few", block=64)
    hidden(rows_like(in_blocks_of_64, 72, torch.bfloat16, 1), up, in_blocks_of_64)
    out = torch.empty(E, 72, 64, device=DEVICE, dtype=torch.bfloat16)
    right = rows_like(rows, 64, torch.bfloat16, 1)
    kernels.weight_gradient(x, right, rows, out, "ieee", **options("weight_gradient", True))
    assert launched == ["hidden"]
