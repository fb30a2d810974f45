"""What is particular to the epilogue path of the FFN: its kernels, what they are asked for, and what is kept."""

from __future__ import annotations

import itertools
import math
import weakref
from collections.abc import Callable
from importlib import import_module
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fusedlayers import functional, planning, reference
from fusedlayers.devices import describe
from fusedlayers.functional import dispatch
from fusedlayers.functional.ffn.arguments import ffn_problem
from fusedlayers.kernels import gemm_epilogue as kernels
from fusedlayers.kernels.activations import ACTIVATIONS
from fusedlayers.kernels.dropout import draw_seed
from fusedlayers.kernels.matmul.arithmetic import Arithmetic
from fusedlayers.kernels.tuning import EpilogueTiles
from tests.functional.test_ffn import GATED, exact_case
from tests.support.operands import (
    DEVICE,
    DTYPES,
    INTEGERS,
    ON_GPU,
    assert_equal,
    assert_ffn_close,
    ffn_inputs,
    in_float64,
    leaves,
    like_result,
    needs_kernels,
    on_path,
    results,
    saved,
)
from tests.support.selection import FULL
from tests.support.uninitialised import allocate_by

path = import_module("fusedlayers.functional.ffn.epilogue")
passes = import_module("fusedlayers.functional.ffn.passes")
# Of subsets that are neither one input nor all but one, every third must do: on a GPU each compiles the kernels anew.
STEP = 1 if FULL and not ON_GPU else 3
# The last ones are those of what follows a product of torch.
TILES = [EpilogueTiles(16, 32, 16, 4, 1), EpilogueTiles(32, 16, 32, 4, 1), EpilogueTiles(16, 32, 0, 4, 1)]
TORCH_MULTIPLIES = pytest.mark.parametrize("torch_multiplies", [False, True], ids=["one kernel", "torch multiplies"])
# Too wide for the fused kernels in float32, and wide enough for no padding to be of use.
WIDE = (20, 144, 40, 144)

pytestmark = needs_kernels


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is computed, in order: the two kernels with what they are asked for, and the products around them."""
    names: list[str] = []

    def spy(module: Any, name: str, words: Callable[..., str]) -> None:
        function = getattr(module, name)

        def call(*arguments: Any, **options: Any) -> Any:
            names.append(words(*arguments, **options))
            return function(*arguments, **options)

        monkeypatch.setattr(module, name, call)

    def hidden(x: Any, w_up: Any, b_up: Any, w_gate: Any, b_gate: Any, keep: bool, *rest: Any, **options: Any) -> str:
        return "hidden and pre-activations" if keep else "hidden"

    def gradient(
        dy: Any, w_down: Any, z: Any, z_gate: Any, bias: bool, *rest: Any, keep_hidden: bool = False, **options: Any
    ) -> str:
        summed = options.get("column_sums") is not None
        return "gradient" + " and sums" * bias + " and hidden" * keep_hidden + " and db" * summed

    spy(kernels, "hidden", hidden)
    spy(kernels, "hidden_gradient", gradient)
    spy(path, "_data_gradient", lambda *arguments: "dx")
    spy(path, "weight_gradient", lambda dy, x: "dw")
    spy(passes, "column_sums", lambda dy, tiles, ready: "db")
    return names


# Numbers.


@pytest.mark.sampled(together=2)
@pytest.mark.parametrize("gated", GATED)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@TORCH_MULTIPLIES
def test_activations_without_biases(torch_multiplies: bool, activation: str, dtype: torch.dtype, gated: bool) -> None:
    """With all of them: in test_ffn.py."""
    inputs = ffn_inputs(70, 24, 50, 40, dtype, gated=gated, biases=())
    with on_path("epilogue", torch_multiplies=torch_multiplies) as options:
        assert_ffn_close(functional.ffn, inputs, options=options, activation=activation)


@pytest.mark.sampled(together=2)
@pytest.mark.parametrize("gated", GATED)
@pytest.mark.parametrize("dropout_p", [0.1, 0.99])
@pytest.mark.parametrize("activation", ACTIVATIONS)
@TORCH_MULTIPLIES
def test_activations_with_dropout(torch_multiplies: bool, activation: str, dropout_p: float, gated: bool) -> None:
    """The mask is that of torch's path with the same seed, and replayed for all gradients."""
    inputs = ffn_inputs(70, 24, 50, 40, DTYPES[-1], gated=gated, residual=True)
    with on_path("epilogue", torch_multiplies=torch_multiplies) as options:
        assert_ffn_close(
            functional.ffn, inputs, options=options, manual_seed=4, activation=activation, dropout_p=dropout_p
        )


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("dropout_p", [0.0, 0.2])
@pytest.mark.parametrize("gated", GATED)
def test_widths_that_no_fused_kernel_holds(
    gated: bool, dropout_p: float, launched: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the planner as it is."""
    monkeypatch.setenv("FUSEDLAYERS_BACKEND", "triton")
    inputs = ffn_inputs(*WIDE, gated=gated, residual=True)
    assert_ffn_close(functional.ffn, inputs, options={}, manual_seed=8, activation="silu", dropout_p=dropout_p)
    products = ["dw", "dx", "dw", *["dw"] * gated]
    assert launched == ["hidden and pre-activations", "gradient and sums and hidden and db", *products]


def test_a_width_on_either_side_is_enough(launched: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSEDLAYERS_BACKEND", "triton")
    for K, O in ((144, 5), (5, 144)):
        with torch.no_grad():
            functional.ffn(**ffn_inputs(20, K, 24, O))
    assert launched == ["hidden"] * 2


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("gated", GATED)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tiles", TILES, ids=str)
def test_the_hidden_in_exact_integers(tiles: EpilogueTiles, dtype: torch.dtype, gated: bool) -> None:
    """More tiles below one another than a group has, ragged last ones on all axes; kept or not, the same hidden."""
    inputs = ffn_inputs(170, 37, 70, 6, dtype, gated=gated, draw=INTEGERS[dtype])
    x, w_up, b_up, w_gate, b_gate = (inputs[name] for name in ("x", "w_up", "b_up", "w_gate", "b_gate"))
    truth = in_float64(inputs)
    z = truth["x"] @ truth["w_up"].T + truth["b_up"]
    z_gate = truth["x"] @ truth["w_gate"].T + truth["b_gate"] if gated else None
    hidden = reference.hidden(z, z_gate, activation="relu")
    for keep in (True, False):
        found = kernels.hidden(x, w_up, b_up, w_gate, b_gate, keep, Arithmetic("relu", "exact", "ieee"), tiles)
        expected = {"hidden": hidden, "z": z if keep else None, "z_gate": z_gate if keep else None}
        # The hidden of a gate may be larger than what float16 counts to: it is rounded once.
        expected["hidden"] = hidden.to(dtype).double()
        assert_equal(in_float64(dict(zip(expected, found, strict=True))), expected)


@pytest.mark.parametrize(("rows", "units", "way"), [(33, 16, "cat"), (32, 16, "addmm_"), (33, 10, "addmm_")])
def test_both_ways_to_the_data_gradient(rows: int, units: int, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of more rows than both weights together have, the gated gradient is one product; else a sum of two.

    So it is where rows of hidden units would end within a sector of memory.
    """
    ways: list[str] = []
    for owner, name in ((torch, "cat"), (Tensor, "addmm_")):
        function = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *args, n=name, f=function: (ways.append(n), f(*args))[1])
    draw = INTEGERS[torch.float32]
    inputs = ffn_inputs(rows, 6, units, 5, gated=True, draw=draw)
    dy = like_result(inputs, draw)
    with on_path("epilogue") as options:
        ours = results(functional.ffn, inputs, dy, activation="relu", **options)
    assert_equal(in_float64(ours), results(reference.ffn, in_float64(inputs), dy.double(), activation="relu"))
    assert ways == [way]


@pytest.mark.parametrize("gated", GATED)
def test_the_hidden_is_gone_before_the_other_products(gated: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    hidden: list[weakref.ref[Tensor]] = []
    alive: list[bool] = []
    gradient, product = kernels.hidden_gradient, path._data_gradient

    def watched(*arguments: Any, **options: Any) -> Any:
        found = gradient(*arguments, **options)
        hidden.append(weakref.ref(found.hidden))
        return found

    monkeypatch.setattr(kernels, "hidden_gradient", watched)
    monkeypatch.setattr(
        path, "_data_gradient", lambda *tensors: (alive.append(hidden[0]() is not None), product(*tensors))[1]
    )
    inputs = leaves(ffn_inputs(33, 17, 40, 9, torch.float32, gated=gated))
    with on_path("epilogue") as options:
        functional.ffn(**inputs, **options).sum().backward()
    assert alive == [False]
    assert all(tensor is None or tensor.grad is not None for tensor in inputs.values())


@pytest.mark.parametrize("gated", GATED)
@pytest.mark.parametrize("inner", [16, 0], ids=["one kernel", "torch multiplies"])
def test_nothing_outside_of_the_outputs_is_touched(inner: int, gated: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Outputs and workspace lie between bands of a known value, and every element of theirs is written."""
    buffers: list[Tensor] = []
    band = 4096

    def guarded(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
        buffer = torch.full((shape.numel() + 2 * band,), -7.0, dtype=dtype, device=device)
        buffer[band:-band] = math.nan
        buffers.append(buffer)
        return buffer[band:-band].view(shape)

    inputs, dy = exact_case(gated, torch.float32, 49)
    x, w_up, b_up, w_gate, b_gate = (inputs[name] for name in ("x", "w_up", "b_up", "w_gate", "b_gate"))
    rest = (Arithmetic("gelu", "exact", "ieee"), EpilogueTiles(32, 16, inner, 4, 1))
    allocate_by(monkeypatch, guarded)
    _, *kept = kernels.hidden(x, w_up, b_up, w_gate, b_gate, True, *rest, for_products=True)
    z, z_gate = (each if each is None else each[:, :37] for each in kept)
    kernels.hidden_gradient(dy, inputs["w_down"], z, z_gate, True, 1, *rest, keep_hidden=True)
    # The hidden twice, pre-activations, their gradients, sums with their partials. Torch allocates the pre-activations
    # that it computes.
    assert len(buffers) == (9 if gated else 6) - (0 if inner else 1 + gated)
    for buffer in buffers:
        assert (buffer[:band] == -7).all()
        assert (buffer[-band:] == -7).all()
        assert buffer[band:-band].isfinite().all()


@pytest.mark.parametrize("gated", GATED)
@pytest.mark.parametrize("inner", [16, 0], ids=["one kernel", "torch multiplies"])
@pytest.mark.parametrize(("units", "row"), [(37, 40), (40, 40), (24, 24)])
def test_rows_for_products_begin_with_a_sector(units: int, row: int, inner: int, gated: bool) -> None:
    """Of 32 bytes; where such rows of few hidden units end with one, a gate's gradients are halves of one matrix."""
    inputs = ffn_inputs(49, 5, units, 6, gated=gated, draw=INTEGERS[torch.float32])
    dy = like_result(inputs, INTEGERS[torch.float32])
    x, w_up, b_up, w_gate, b_gate = (inputs[name] for name in ("x", "w_up", "b_up", "w_gate", "b_gate"))
    rest = (Arithmetic("relu", "exact", "ieee"), EpilogueTiles(32, 16, inner, 4, 1))
    plain = kernels.hidden(x, w_up, b_up, w_gate, b_gate, True, *rest)
    hidden, z, z_gate = kernels.hidden(x, w_up, b_up, w_gate, b_gate, True, *rest, for_products=True)
    kept = [z] if z_gate is None else [z, z_gate]
    # Torch's products lie as torch lays them.
    assert {(tuple(each.shape), each.is_contiguous()) for each in kept} == {((49, row if inner else units), True)}
    assert_equal({"z": z[:, :units]}, {"z": F.linear(x, w_up, b_up)})
    alone, *nothing = kernels.hidden(x, w_up, b_up, w_gate, b_gate, False, *rest, for_products=True)
    assert nothing == [None, None]
    assert_equal({"hidden": alone}, {"hidden": hidden})
    assert {(tuple(each.shape), each.stride()) for each in (hidden, alone)} == {((49, units), (row, 1))}
    pre_activations = [each if each is None else each[:, :units] for each in (z, z_gate)]
    assert_equal(dict(enumerate((hidden, *pre_activations))), dict(enumerate(plain)))
    gradient = (dy, inputs["w_down"], *pre_activations, True, 1, *rest)
    expected = kernels.hidden_gradient(*gradient, keep_hidden=True)
    found = kernels.hidden_gradient(*gradient, keep_hidden=True, for_products=True)
    assert_equal(found._asdict(), expected._asdict())
    assert found.hidden.stride() == (row, 1)
    together = gated and units == row and 2 * units < len(dy)
    assert found.dz.stride() == (2 * row if together else row, 1)
    if gated:
        assert (found.dz_gate.storage_offset() == found.dz.storage_offset() + units) == together


# What is computed and kept.


@pytest.mark.parametrize(("gated", "dropout_p"), [(False, 0.5), (True, 0.0)])
def test_every_subset_of_frozen_inputs(gated: bool, dropout_p: float, launched: list[str]) -> None:
    """The same gradients as with nothing frozen, None for the frozen ones, nothing computed that nobody wants."""
    draw = INTEGERS[torch.float32]
    inputs = ffn_inputs(5, 4, 6, 4, gated=gated, residual=True, draw=draw)
    dy = like_result(inputs, draw)
    present = [name for name, tensor in inputs.items() if tensor is not None]
    arithmetic = {"activation": "relu", "dropout_p": dropout_p, "dropout_seed": draw_seed(DEVICE)}
    with on_path("epilogue") as options:
        everything = results(functional.ffn, inputs, dy, **arithmetic, **options)
        subsets = [list(itertools.combinations(present, count)) for count in range(len(present))]
        steps = [STEP if 1 < count < len(present) - 1 else 1 for count in range(len(present))]
        for frozen in (frozen for some, step in zip(subsets, steps, strict=True) for frozen in some[::step]):
            launched.clear()
            ours = results(functional.ffn, inputs, dy, frozen, **arithmetic, **options)
            assert_equal(ours, everything | {f"d{name}": None for name in frozen})
            assert launched == wanted_launches(set(present) - set(frozen)), frozen
        launched.clear()
        y = functional.ffn(**leaves(inputs, tuple(present)), **arithmetic, **options)
        assert not y.requires_grad
        assert torch.equal(y, everything["y"])
        assert launched == ["hidden"]


def wanted_launches(wanted: set[str]) -> list[str]:
    through = wanted & {"x", "w_up", "b_up", "w_gate", "b_gate"}
    if not through | (wanted & {"w_down"}):
        return ["hidden"]
    found = ["hidden and pre-activations"]
    if through:
        sums = " and sums" if wanted & {"b_up", "b_gate"} else ""
        hidden, summed = "w_down" in wanted, "b_down" in wanted
        found.append("gradient" + sums + " and hidden" * hidden + " and db" * summed)
    if "w_down" in wanted:
        found.append("dw")
    weights = len(wanted & {"w_up", "w_gate"})
    found += ["dx"] * ("x" in wanted) + (["dw", "dw"] if weights == 2 else ["dw"] * weights)
    return found + ["db"] * ("b_down" in wanted and not through)


@pytest.mark.parametrize("gated", GATED)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("units", [64, 59])
@TORCH_MULTIPLIES
def test_saved_bytes_are_those_of_the_plan(torch_multiplies: bool, units: int, dtype: torch.dtype, gated: bool) -> None:
    """Beside parameters: x, and the pre-activations. At most half of what torch keeps for a smooth activation.

    Each row of pre-activations begins with a sector of memory, where a kernel writes it.
    """
    inputs = leaves(ffn_inputs((3, 5), 16, units, 8, dtype, gated=gated))
    parameters = {tensor.data_ptr() for name, tensor in inputs.items() if tensor is not None and name != "x"}

    def kept_bytes(call: Callable[..., Tensor], **options: Any) -> int:
        tensors = saved(lambda: call(**inputs, activation="gelu_tanh", **options))
        return sum({t.data_ptr(): t.nbytes for t in tensors if t.data_ptr() not in parameters}.values())

    with on_path("epilogue", torch_multiplies=torch_multiplies) as options:
        problem = ffn_problem(**inputs, activation="gelu_tanh", dropout_p=0.0, recompute="auto")
        made = planning.plan(problem, describe(DEVICE), "triton")
        assert made.path == "epilogue"
        ours = kept_bytes(functional.ffn, **options)
    x_bytes = 15 * 16 * dtype.itemsize
    row_bytes = units * dtype.itemsize if torch_multiplies else 64 * dtype.itemsize
    assert ours == made.saved_bytes == x_bytes + (2 if gated else 1) * 15 * row_bytes
    if units == 64:
        assert ours - x_bytes <= (kept_bytes(reference.ffn) - x_bytes) / 2


@pytest.mark.bits
@TORCH_MULTIPLIES
def test_results_of_a_call_without_gradients_are_the_same(torch_multiplies: bool, launched: list[str]) -> None:
    inputs = ffn_inputs(20, 9, 21, 7, gated=True, residual=True)
    with on_path("epilogue", torch_multiplies=torch_multiplies) as options:
        y = functional.ffn(**leaves(inputs), **options).detach()
        with torch.no_grad():
            assert torch.equal(functional.ffn(**leaves(inputs), **options), y)
        assert torch.equal(functional.ffn(**inputs, **options), y)
    assert launched == ["hidden and pre-activations", "hidden", "hidden"]


# Who comes here.


@pytest.mark.parametrize("dropout_p", [0.0, 0.5])
def test_what_the_path_cannot_do_it_is_not_asked_for(
    dropout_p: float, launched: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The promise that no hidden is kept: where kernels are a must, they compute chunks of it."""
    inputs = leaves(ffn_inputs(*WIDE))
    for backend, launches in (("auto", 0), ("triton", 2 + 2 + 1)):
        monkeypatch.setenv("FUSEDLAYERS_BACKEND", backend)
        with dispatch.decisions() as counted:
            functional.ffn(**inputs, recompute=True, dropout_p=dropout_p).sum().backward()
        assert counted == {"ffn chunked": 1}
        assert len(launched) == launches, "forward and backward, of two chunks each; db_down"
