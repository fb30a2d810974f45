"""The gradient of the pre-activations on a GPU: exact integers, closeness, the same bits, past 2^31 elements."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from fusedlayers import functional, reference
from fusedlayers.closeness import assert_all_close
from fusedlayers.kernels.activations import ACTIVATIONS
from tests.gpu.graphs import assert_replays_like_launched
from tests.support.operands import DEVICE, Tensors, assert_equal, in_float64, on_path

BFLOAT16, FLOAT16, FLOAT32 = torch.bfloat16, torch.float16, torch.float32
# Rows, hidden columns, columns of dy. Without a gate, programs stay in a column in the first two alone.
SIZES = [(4096, 2048, 512), (5001, 1032, 576), (4001, 3080, 512), (1000, 767, 431), (129, 65, 33), (1, 3, 2)]
NAMES = ("dz", "dz_gate", "db_up", "db_gate")


def drawn(size: tuple[int, int, int], dtype: torch.dtype, gated: bool) -> dict[str, Tensor | None]:
    rows, columns, out = size
    shapes = {"dy": (rows, out), "w_down": (out, columns), "z": (rows, columns), "z_gate": (rows, columns)}
    tensors = {name: torch.randn(shape, device=DEVICE) for name, shape in shapes.items()}
    tensors["w_down"] /= out**0.5
    return {name: None if name == "z_gate" and not gated else t.to(dtype) for name, t in tensors.items()}


def integers(size: tuple[int, int, int], dtype: torch.dtype, gated: bool, density: float) -> dict[str, Tensor | None]:
    """From -2 to 2, so sparse that every result stays exact in ``dtype`` before it is summed."""
    chance = {"dy": density, "w_down": density, "z": 1.0, "z_gate": 1.0}
    return {
        name: None
        if tensor is None
        else (torch.randint_like(tensor, -2, 3) * (torch.rand_like(tensor, dtype=FLOAT32) < chance[name])).to(dtype)
        for name, tensor in drawn(size, dtype, gated).items()
    }


def named(results: tuple[Tensor | None, ...]) -> dict[str, Tensor | None]:
    return dict(zip(NAMES, results, strict=True))


def found(call: Callable[..., tuple[Tensor | None, ...]], tensors: Tensors, activation: str | None) -> Tensors:
    return named(call(**tensors, activation=activation))


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT16, FLOAT32], ids=str)
@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
@pytest.mark.parametrize("activation", [None, "relu"])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_exact_integers_again_and_again(
    size: tuple[int, int, int], activation: str | None, gated: bool, dtype: torch.dtype
) -> None:
    """Sums are exact in float32, whatever the dtype, and rounded once."""
    tensors = integers(size, dtype, gated, density=0.05)
    truth = found(reference.hidden_gradient, in_float64(tensors), activation)
    for name, tensor in truth.items():
        if tensor is not None:
            limit = 2 / torch.finfo(dtype).eps if name.startswith("dz") else 2**24
            assert float(tensor.abs().max()) <= limit, name
    expected = {name: None if tensor is None else tensor.to(dtype) for name, tensor in truth.items()}
    for facts in ({}, {"backend": "generic"}):
        with on_path("kernels", **facts):
            for _ in range(20):
                assert_equal(found(functional.hidden_gradient, tensors, activation), expected)


@pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT16, FLOAT32], ids=str)
@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
@pytest.mark.parametrize("activation", [None, *ACTIVATIONS])
def test_close_to_torch(activation: str | None, gated: bool, dtype: torch.dtype) -> None:
    for size in SIZES:
        tensors = drawn(size, dtype, gated)
        theirs = found(reference.hidden_gradient, tensors, activation)
        truth = found(reference.hidden_gradient, in_float64(tensors), activation)
        for facts in ({}, {"backend": "generic"}):
            with on_path("kernels", **facts):
                assert_all_close(found(functional.hidden_gradient, tensors, activation), theirs, truth)


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
def test_the_same_bits_every_time(gated: bool) -> None:
    """With one tile of rows for each program, and with several."""
    for size in ((5000, 520, 264), (70_000, 136, 72)):
        tensors = drawn(size, BFLOAT16, gated)
        for facts in ({}, {"backend": "generic"}):
            with on_path("kernels", **facts):
                runs = [found(functional.hidden_gradient, tensors, "gelu") for _ in range(10)]
            for run in runs:
                assert all(tensor is None or bool(tensor.isfinite().all()) for tensor in run.values())
                assert_equal(run, runs[0])


NAN = float("nan")
LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "transposed": lambda t: t.T.contiguous().T,
    "sliced": lambda t: torch.nn.functional.pad(t, (8, 8), value=NAN)[:, 8:-8],
    "odd rows": lambda t: torch.nn.functional.pad(t, (0, 1), value=NAN)[:, :-1],
    "every other row": lambda t: torch.stack((t, torch.full_like(t, NAN)), 1).flatten(0, 1)[::2],
}


@pytest.mark.parametrize("role", ["dy", "w_down", "z", "z_gate"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout: str, role: str) -> None:
    tensors = integers((300, 136, 72), BFLOAT16, True, density=0.2)
    original = tensors[role]
    with on_path("kernels"):
        expected = found(functional.hidden_gradient, tensors, "relu")
        strided = {**tensors, role: LAYOUTS[layout](original)}
        assert_equal(found(functional.hidden_gradient, strided, "relu"), expected)


@pytest.mark.parametrize("role", ["dy", "w_down", "z"])
@pytest.mark.parametrize("value", [NAN, float("inf"), -float("inf")])
def test_nan_and_infinity_come_out_where_torch_has_them(value: float, role: str) -> None:
    tensors = drawn((300, 136, 72), BFLOAT16, False)
    planted = tensors[role]
    planted[-1, -2] = value
    with on_path("kernels"):
        ours = found(functional.hidden_gradient, tensors, "relu")
    for name, tensor in found(reference.hidden_gradient, tensors, "relu").items():
        if tensor is not None:
            for what in (torch.isnan, torch.isposinf, torch.isneginf):
                assert torch.equal(what(ours[name]), what(tensor)), f"{name}: {what.__name__}"


@pytest.mark.xdist_group("large")
def test_more_than_two_to_the_31_elements() -> None:
    rows, columns, out = 2**20 + 7, 2064, 32
    assert rows * columns > 2**31
    tensors = integers((64, columns, out), BFLOAT16, False, density=0.2)
    w_down = tensors["w_down"]
    dy = torch.randint(-2, 3, (rows, out), dtype=torch.int8, device=DEVICE).to(BFLOAT16)
    z = torch.randint(-2, 3, (rows, columns), dtype=torch.int8, device=DEVICE).to(BFLOAT16)
    with on_path("kernels"):
        dz, _, db, _ = functional.hidden_gradient(dy, w_down, z, activation="relu")
    total = torch.zeros(columns, dtype=torch.float64, device=DEVICE)
    for first in range(0, rows, 2**17):
        part = slice(first, first + 2**17)
        expected, *_ = reference.hidden_gradient(dy[part].float(), w_down.float(), z[part].float(), activation="relu")
        assert torch.equal(dz[part], expected.to(BFLOAT16)), f"rows from {first} on"
        total += expected.double().sum(0)
    assert float(total.abs().max()) < 2**24
    assert torch.equal(db, total.to(BFLOAT16))


def test_a_cuda_graph_replays() -> None:
    tensors = drawn((5000, 264, 136), BFLOAT16, True)

    def step() -> tuple[Tensor, ...]:
        return tuple(t for t in functional.hidden_gradient(**tensors, activation="silu") if t is not None)

    with on_path("kernels"):
        assert_replays_like_launched(step, [tensor for tensor in tensors.values() if tensor is not None], 20)
