"""Gradient of the pre-activations with its sums: the kernel against torch in the same dtype and in float64."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import strategies
from torch import Tensor

from fusedlayers import functional, reference
from fusedlayers.closeness import assert_all_close
from fusedlayers.kernels import gemm_epilogue as kernels
from fusedlayers.kernels.activations import ACTIVATIONS
from fusedlayers.kernels.matmul.arithmetic import Arithmetic
from fusedlayers.kernels.tuning import ColumnSumTiles, EpilogueTiles
from tests.support.operands import (
    DEVICE,
    DTYPES,
    INTEGERS,
    ON_GPU,
    PATHS,
    SIZES,
    Tensors,
    assert_equal,
    in_float64,
    infinities,
    leaves,
    needs_kernels,
    on_path,
)
from tests.support.selection import draws

KERNELS_AND_TORCH = [PATHS[0], PATHS[2]]
NAMES = ("dz", "dz_gate", "db_up", "db_gate")
Call = Callable[..., "tuple[Tensor | None, ...]"]


def inputs(
    leading: tuple[int, ...] | int,
    N: int,
    O: int,
    dtype: torch.dtype = torch.float32,
    *,
    gated: bool = False,
    draw: Callable[..., Tensor] = torch.randn,
) -> dict[str, Tensor | None]:
    """dy, z and z_gate ~ N(0, 1), w_down / √O, or integers."""
    leading = (leading,) if isinstance(leading, int) else leading
    shapes = {"dy": (*leading, O), "w_down": (O, N), "z": (*leading, N), "z_gate": (*leading, N)}
    scale = max(O, 1) ** 0.5 if draw is torch.randn else 1
    return {
        name: None
        if name == "z_gate" and not gated
        else (draw(*shape, dtype=torch.float64) / (scale if name == "w_down" else 1)).to(DEVICE, dtype)
        for name, shape in shapes.items()
    }


def found(call: Call, tensors: Tensors, **options: Any) -> dict[str, Tensor | None]:
    results = call(**tensors, **options)
    return {name: t if t is None else t.detach() for name, t in zip(NAMES, results, strict=True)}


def assert_close_to_torch(tensors: Tensors, **options: Any) -> None:
    with on_path("kernels"):
        ours = found(functional.hidden_gradient, tensors, **options)
    theirs = found(reference.hidden_gradient, tensors, **options)
    assert_all_close(ours, theirs, found(reference.hidden_gradient, in_float64(tensors), **options))


@pytest.mark.sampled(together=2)
@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
@pytest.mark.parametrize("activation", [None, *ACTIVATIONS])
def test_activations(activation: str | None, gated: bool, dtype: torch.dtype) -> None:
    assert_close_to_torch(inputs(70, 50, 24, dtype, gated=gated), activation=activation)


@needs_kernels
@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("leading", [(), (30,), (2, 15), (2, 1, 5, 3)], ids=str)
def test_leading_dimensions_are_rows(leading: tuple[int, ...], bias: bool, gated: bool) -> None:
    tensors = inputs(leading, 37, 20, gated=gated)
    assert_close_to_torch(tensors, activation="silu", bias=bias)
    with on_path("kernels"):
        shapes = [None if t is None else tuple(t.shape) for t in functional.hidden_gradient(
            **tensors, activation="silu", bias=bias)]  # fmt: skip
    assert shapes == [(*leading, 37), (*leading, 37) if gated else None, (37,) if bias else None,
                      (37,) if bias and gated else None]  # fmt: skip


@needs_kernels
def test_the_results_may_be_changed_in_place() -> None:
    tensors = leaves(inputs((2, 15), 37, 20, gated=True))
    with on_path("kernels"):
        dz, dz_gate, *_ = functional.hidden_gradient(**tensors, activation="silu")
    for result in (dz, dz_gate):
        result.mul_(2).sum().backward(retain_graph=True)


@pytest.mark.parametrize("path", KERNELS_AND_TORCH)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
@pytest.mark.parametrize("activation", [None, "relu"])
def test_exact_integers(activation: str | None, gated: bool, dtype: torch.dtype, path: str) -> None:
    tensors = inputs(49, 37, 6, dtype, gated=gated, draw=INTEGERS[dtype])
    with on_path(path):
        ours = found(functional.hidden_gradient, tensors, activation=activation)
    truth = found(reference.hidden_gradient, in_float64(tensors), activation=activation)
    assert_equal(in_float64(ours), truth)


@pytest.mark.sampled(together=2)
@needs_kernels
@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("row_tiles", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
@pytest.mark.parametrize("inner", [16, 0], ids=["one kernel", "torch multiplies"])
def test_exact_integers_for_any_number_of_row_tiles(
    inner: int, gated: bool, dtype: torch.dtype, row_tiles: int
) -> None:
    """Ragged last tiles on all axes, and a last program with fewer tiles than the others."""
    tensors = inputs(70, 37, 21, dtype, gated=gated, draw=INTEGERS[dtype])
    dy, w_down, z, z_gate = tensors.values()
    assert dy is not None
    assert w_down is not None
    assert z is not None
    truth = in_float64(tensors)
    expected = found(reference.hidden_gradient, truth, activation="relu")
    expected["hidden"] = reference.hidden(truth["z"], truth["z_gate"], activation="relu")
    tiles = EpilogueTiles(16, 32, inner, 4, 1)
    summed: dict[str, Any] = {"column_sums": ColumnSumTiles(16, 16, 5)}
    for more in ({}, {"for_products": True}, {"keep_hidden": True}, summed):
        ours = kernels.hidden_gradient(
            dy, w_down, z, z_gate, True, row_tiles, Arithmetic("relu", "exact", "ieee"), tiles, **more
        )._asdict()
        kept = None if "keep_hidden" not in more else expected["hidden"]
        db_down = truth["dy"].sum(0) if more is summed else None
        assert_equal(in_float64(ours), expected | {"hidden": kept, "db_down": db_down})


@needs_kernels
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("letter", ["M", "N", "O"])
def test_sizes_one_at_a_time(letter: str, size: int) -> None:
    sizes = {"leading": 40, "N": 20, "O": 24} | {letter.replace("M", "leading"): size}
    assert_close_to_torch(inputs(**sizes), activation="gelu")


@needs_kernels
@hypothesis.settings(max_examples=60 if ON_GPU else draws(6, 20))
@hypothesis.given(
    leading=strategies.lists(strategies.integers(0, 9), max_size=4),
    N=strategies.integers(0, 70),
    O=strategies.integers(0, 70),
    gated=strategies.booleans(),
    bias=strategies.booleans(),
    activation=strategies.sampled_from([None, *ACTIVATIONS]),
    dtype=strategies.sampled_from(DTYPES[:2]),
)
def test_sizes_in_random_combinations(
    leading: list[int], N: int, O: int, gated: bool, bias: bool, activation: str | None, dtype: torch.dtype
) -> None:
    assert_close_to_torch(inputs(tuple(leading), N, O, dtype, gated=gated), activation=activation, bias=bias)


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "sliced columns": lambda t: torch.cat((t, torch.full_like(t[..., :3], math.nan)), -1)[..., : t.shape[-1]],
    "every other row": lambda t: torch.stack((t, torch.full_like(t, math.nan)), -2).flatten(-3, -2)[..., ::2, :],
    "transposed": lambda t: t.mT.contiguous().mT,
    "first axis last": lambda t: t.movedim(0, -1).contiguous().movedim(-1, 0),
    "one element off": lambda t: torch.cat((t.new_full((1,), math.nan), t.flatten()))[1:].view(t.shape),
}


@pytest.mark.sampled(together=2)
@needs_kernels
@pytest.mark.parametrize("leading", [(45,), (3, 15)], ids=str)
@pytest.mark.parametrize("role", ["dy", "w_down", "z", "z_gate"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_change_nothing(layout: str, role: str, leading: tuple[int, ...]) -> None:
    tensors = inputs(leading, 21, 18, gated=True, draw=INTEGERS[torch.float32])
    original = tensors[role]
    assert original is not None
    strided = {**tensors, role: LAYOUTS[layout](original)}
    assert torch.equal(strided[role], original)
    with on_path("kernels"):
        expected = found(functional.hidden_gradient, tensors, activation="relu")
        assert_equal(found(functional.hidden_gradient, strided, activation="relu"), expected)


@needs_kernels
def test_an_expanded_gradient() -> None:
    tensors = inputs(45, 21, 18, draw=INTEGERS[torch.float32])
    dy = tensors["dy"]
    assert dy is not None
    for expanded in (dy[:1, :1].expand(45, 18), dy[:1].expand(45, 18), dy[:, :1].expand(45, 18)):
        with on_path("kernels"):
            ours = found(functional.hidden_gradient, {**tensors, "dy": expanded}, activation=None)
        truth = found(reference.hidden_gradient, in_float64({**tensors, "dy": expanded}), activation=None)
        assert_equal(in_float64(ours), truth)


@pytest.mark.sampled(together=2)
@needs_kernels
@infinities
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("role", ["dy", "w_down", "z", "z_gate"])
@pytest.mark.parametrize("activation", [None, "relu", "relu2", "silu"])
def test_special_values_spread_as_in_torch(activation: str | None, role: str, value: float) -> None:
    for gated in (True,) if role == "z_gate" else (False, True):
        # No whole tile of rows: what lies past the end must not spread.
        tensors = inputs(50, 21, 18, gated=gated)
        planted = tensors[role]
        assert planted is not None
        planted[-1, -2] = value
        with on_path("kernels"):
            ours = found(functional.hidden_gradient, tensors, activation=activation)
        for name, truth in found(reference.hidden_gradient, in_float64(tensors), activation=activation).items():
            tensor = ours[name]
            assert (tensor is None) == (truth is None)
            if tensor is not None and truth is not None:
                assert torch.equal(tensor.isnan(), truth.isnan()), name
                infinite = tensor.isinf() | truth.isinf()
                assert torch.equal(tensor[infinite].double(), truth[infinite]), name


def gradients(
    call: Call, tensors: Tensors, upstream: Tensors, frozen: tuple[str, ...] = ()
) -> dict[str, Tensor | None]:
    """Of all operands that are not frozen, for the given gradients of the results; some depend on frozen ones alone."""
    wanted = leaves(tensors, frozen)
    results = dict(zip(NAMES, call(**wanted, activation="gelu"), strict=True))
    chosen = {name: tensor for name, tensor in wanted.items() if tensor is not None and name not in frozen}
    moving = {name: out for name, out in results.items() if out is not None and out.requires_grad}
    grads = torch.autograd.grad(
        list(moving.values()), list(chosen.values()), [upstream[name] for name in moving], materialize_grads=True
    )
    return dict(zip(chosen, grads, strict=True))


@pytest.mark.parametrize("path", KERNELS_AND_TORCH)
@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
@pytest.mark.parametrize("frozen", [(), ("dy",), ("w_down", "z"), ("dy", "w_down", "z_gate")], ids=" ".join)
def test_gradients(frozen: tuple[str, ...], gated: bool, path: str) -> None:
    tensors = inputs((2, 15), 21, 18, gated=gated)
    shapes = {"dz": (2, 15, 21), "dz_gate": (2, 15, 21), "db_up": (21,), "db_gate": (21,)}
    upstream: dict[str, Tensor | None] = {
        name: torch.randn(shape, device=DEVICE) for name, shape in shapes.items() if gated or "gate" not in name
    }
    with on_path(path):
        ours = gradients(functional.hidden_gradient, tensors, upstream, frozen)
    theirs = gradients(reference.hidden_gradient, tensors, upstream, frozen)
    truth = gradients(reference.hidden_gradient, in_float64(tensors), in_float64(upstream), frozen)
    assert_all_close(ours, theirs, truth)


@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
@pytest.mark.parametrize("activation", list(ACTIVATIONS))
def test_it_is_the_gradient_of_the_hidden(activation: str, gated: bool) -> None:
    """What autograd gives for the feed-forward block itself."""
    tensors = in_float64(inputs(9, 7, 5, gated=gated))
    dy, w_down, z, z_gate = leaves(tensors).values()
    act = ACTIVATIONS[activation].torch
    hidden = act(z) if z_gate is None else act(z_gate) * z
    wanted = [tensor for tensor in (z, z_gate) if tensor is not None]
    expected = torch.autograd.grad(hidden @ w_down.T, wanted, dy.detach())
    ours = functional.hidden_gradient(**tensors, activation=activation)
    assert all(torch.allclose(one, two) for one, two in zip(ours, expected, strict=False))
    assert torch.allclose(ours[2], expected[0].sum(0))


@pytest.mark.parametrize("path", KERNELS_AND_TORCH)
def test_autocast(path: str) -> None:
    tensors = inputs(50, 21, 34, gated=True)
    with on_path(path), torch.autocast(DEVICE.type, torch.float16):
        ours = found(functional.hidden_gradient, tensors, activation="silu")
    half = {name: None if tensor is None else tensor.half() for name, tensor in tensors.items()}
    theirs = found(reference.hidden_gradient, half, activation="silu")
    truth = found(reference.hidden_gradient, in_float64(tensors), activation="silu")
    assert_all_close(ours, theirs, truth, computed_in=torch.float16)


BAD: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"dy": None}, TypeError, "dy must be a torch.Tensor, got None"),
    ({"w_down": None}, TypeError, "w_down must be a torch.Tensor, got None"),
    ({"z": 3.0}, TypeError, "z must be a torch.Tensor, got float"),
    ({"z": torch.ones(4, 5, dtype=torch.int32)}, TypeError, "z of .*int32.*floating-point"),
    ({"z_gate": torch.ones(4, 5, dtype=torch.float64)}, TypeError, "z_gate of .*float64.*: expected the dtype of dy"),
    ({"w_down": torch.ones(3, 5, device="meta")}, ValueError, "w_down of .*meta: expected the device of dy"),
    ({"dy": torch.ones(())}, ValueError, r"dy of shape \[\].*: expected \[\*B, M, O\], at least one dimension"),
    ({"w_down": torch.ones(5, 3)}, ValueError, r"dy of shape \[4, 3\].*O = 5, as w_down is .*, unless w_down is"),
    ({"w_down": torch.ones(2, 5)}, ValueError, r"dy of shape \[4, 3\].*: expected \[\*B, M, O\] with O = 2"),
    ({"z": torch.ones(4, 6)}, ValueError, r"z of shape \[4, 6\].*: expected \[\*B, M, N\] = \[4, 5\]"),
    ({"z_gate": torch.ones(5)}, ValueError, r"z_gate of shape \[5\].*: expected \[\*B, M, N\] = \[4, 5\]"),
    ({"bias": torch.ones(5)}, TypeError, "bias must be True or False, got Tensor"),
    ({"activation": "swoosh"}, ValueError, "activation 'swoosh' is not known"),
    ({"activation": 3}, TypeError, "activation must be a name"),
]


@pytest.mark.parametrize(("change", "error", "words"), BAD, ids=lambda value: str(value)[:30])
def test_bad_input(change: dict[str, Any], error: type[Exception], words: str) -> None:
    good = {"dy": torch.ones(4, 3), "w_down": torch.ones(3, 5), "z": torch.ones(4, 5), "activation": "relu"}
    with pytest.raises(error, match=words):
        functional.hidden_gradient(**(good | change))
