"""The warp-specialised kernels on Hopper: pairs of widths, ragged sizes, layouts they take and layouts they leave."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from fusedlayers import functional, reference
from fusedlayers.closeness import assert_all_close
from fusedlayers.devices import describe
from fusedlayers.kernels import gemm_gemm as kernels
from fusedlayers.kernels.gemm_gemm import sm90
from tests.gpu.exact import exact_ffn
from tests.gpu.launches import note_launches
from tests.support.operands import (
    DEVICE,
    Tensors,
    assert_equal,
    assert_ffn_close,
    ffn_inputs,
    in_float64,
    like_result,
    on_path,
    results,
)

BFLOAT16, FLOAT16 = torch.bfloat16, torch.float16
# The kernels of the two backward passes.
RECOMPUTING = ("sm90_forward", "sm90_data_gradient", "sm90_weight_gradient")
STORING = ("sm90_forward", "sm90_hidden_gradient", "stored_weight_gradient")
STORES_GATED = describe(DEVICE).triton_release < (3, 9)
PAIRS = [(64, 64), (64, 128), (128, 64), (128, 128), (256, 256)]
PADDED = [(8, 8), (40, 40), (96, 96), (120, 24), (16, 104)]

pytestmark = pytest.mark.skipif(describe(DEVICE).backend != "sm90", reason="no Hopper GPU with Gluon")


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the sm90 kernels that run."""
    return note_launches(monkeypatch, {name: name for name in (*RECOMPUTING, *STORING)})


@pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT16], ids=str)
@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
@pytest.mark.parametrize(("K", "O"), [*PAIRS, *PADDED])
def test_ragged_sizes(K: int, O: int, gated: bool, dtype: torch.dtype, launched: list[str]) -> None:
    activation = "silu" if gated else "gelu"
    for M, N in ((1, 8), (63, 64), (65, 136), (1000, 512), (4099, 328)):
        inputs = ffn_inputs(M, K, N, O, dtype, gated=gated, residual=True)
        with on_path("kernels", sms=16) as options:
            assert_ffn_close(functional.ffn, inputs, options=options, activation=activation)
    assert set(launched) == set(STORING if K == 256 and (STORES_GATED or not gated) else RECOMPUTING)


@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
def test_recompute_forbids_storing(gated: bool, launched: list[str]) -> None:
    inputs = ffn_inputs(1000, 256, 520, 256, BFLOAT16, gated=gated)
    with on_path("kernels", recompute=True) as options:
        assert_ffn_close(functional.ffn, inputs, options=options, activation="silu")
    assert set(launched) == set(RECOMPUTING)


@pytest.mark.parametrize("frozen", [("x",), ("w_up", "w_gate"), ("w_down",), ("b_up",), ("b_down", "b_gate")])
def test_frozen_inputs_of_a_stored_backward_pass(frozen: tuple[str, ...], launched: list[str]) -> None:
    """Biases may be left out of it; without x or a weight the kernels that recompute have less to do."""
    inputs, dy, expected = exact_ffn(300, 256, 136, 256, BFLOAT16, gated=True, activation="relu")
    with on_path("kernels") as options:
        found = results(functional.ffn, inputs, dy, frozen, activation="relu", **options)
    assert_equal(found, {name: None if name[1:] in frozen else value for name, value in expected.items()})
    assert ("sm90_hidden_gradient" in launched) == (STORES_GATED and all(name.startswith("b_") for name in frozen))


@pytest.mark.parametrize("role", ["w_up", "w_down", "dy"])
def test_layouts_that_a_stored_backward_pass_leaves(role: str, launched: list[str]) -> None:
    """Those of weights; an upstream gradient is copied once, where it does not lie as the kernels take it."""
    inputs, dy, expected = exact_ffn(200, 256, 192, 256, BFLOAT16, activation="relu")
    if role == "dy":
        dy = torch.cat((dy[:, :1], dy), -1)[:, 1:]
    else:
        inputs = {**inputs, role: inputs[role].T.contiguous().T}
    with on_path("kernels") as options:
        assert_equal(results(functional.ffn, inputs, dy, activation="relu", **options), expected)
    assert ("sm90_hidden_gradient" in launched) == (role == "dy")


@pytest.mark.parametrize(("K", "O"), PAIRS)
def test_batches(K: int, O: int, launched: list[str]) -> None:
    for batch, M, N in ((3, 128, 64), (40, 256, 128), (5, 384, 192)):
        inputs = {
            "a": torch.randn(batch, M, K, device=DEVICE, dtype=BFLOAT16),
            "b": torch.randn(batch, K, N, device=DEVICE, dtype=BFLOAT16) / K**0.5,
            "c": torch.randn(batch, N, O, device=DEVICE, dtype=BFLOAT16) / N**0.5,
        }
        de = torch.randn(batch, M, O, device=DEVICE, dtype=BFLOAT16)
        truth = results(reference.gemm_gemm, in_float64(inputs), de.double(), activation="gelu_tanh")
        theirs = results(reference.gemm_gemm, inputs, de, activation="gelu_tanh")
        with on_path("kernels"):
            ours = results(functional.gemm_gemm, inputs, de, activation="gelu_tanh")
        assert_all_close(ours, theirs, truth)
    assert {"sm90_forward", "sm90_data_gradient"} <= set(launched)


LAYOUTS: dict[str, tuple[Callable[[Tensor], Tensor], bool]] = {
    "contiguous": (lambda t: t, True),
    "columns of a wider matrix": (lambda t: torch.cat((t, t), -1)[..., : t.shape[-1]], True),
    "columns from the middle on": (lambda t: torch.cat((t[..., :8], t), -1)[..., 8:], True),
    "one column further": (lambda t: torch.cat((t[..., :1], t), -1)[..., 1:], False),
    "every other row": (lambda t: t.repeat_interleave(2, 0)[::2], True),
}


@pytest.mark.parametrize("width", [64, 104])
@pytest.mark.parametrize("role", ["x", "w_up", "w_down", "w_gate", "residual", "dy"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout: str, role: str, width: int, launched: list[str]) -> None:
    """TMA takes rows at multiples of 16 bytes; the generic kernels take the rest, with the same result.

    An upstream gradient decides nothing: it is copied once.
    """
    lay, taken = LAYOUTS[layout]
    inputs, dy, expected = exact_ffn(200, width, 192, width, BFLOAT16, gated=True, residual=True, activation="relu")
    if role == "dy":
        dy = lay(dy)
    else:
        inputs = {**inputs, role: lay(inputs[role])}
    with on_path("kernels") as options:
        assert_equal(results(functional.ffn, inputs, dy, activation="relu", **options), expected)
    everything = set(RECOMPUTING)
    left = {"residual": {"sm90_forward"}, "dy": set()}.get(role, everything)
    assert set(launched) == (everything if taken else everything - left)


@pytest.mark.parametrize("width", [64, 24, 104])
def test_transposed_weights(width: int, launched: list[str]) -> None:
    inputs, dy, expected = exact_ffn(200, width, 192, width, BFLOAT16, activation="relu")
    for role in ("w_up", "w_down"):
        weight = inputs[role]
        turned = {**inputs, role: weight.T.contiguous().T}
        with on_path("kernels") as options:
            assert_equal(results(functional.ffn, turned, dy, activation="relu", **options), expected)
    assert launched == [*RECOMPUTING] * 2


@pytest.mark.parametrize("width", [64, 72])
@pytest.mark.parametrize("frozen", [("x",), ("w_up", "b_up"), ("w_down",), ("w_up", "b_up", "w_gate", "b_gate")])
def test_frozen_inputs(frozen: tuple[str, ...], width: int, launched: list[str]) -> None:
    inputs, dy, expected = exact_ffn(300, width, 136, width, BFLOAT16, gated=True, activation="relu")
    with on_path("kernels") as options:
        found = results(functional.ffn, inputs, dy, frozen, activation="relu", **options)
    assert_equal(found, {name: None if name[1:] in frozen else value for name, value in expected.items()})
    assert ("sm90_data_gradient" in launched) == ("x" not in frozen)


def test_dropout_takes_the_generic_kernels(launched: list[str]) -> None:
    inputs = ffn_inputs(300, 64, 256, 64, BFLOAT16)
    with on_path("kernels") as options:
        assert_ffn_close(functional.ffn, inputs, options=options, activation="silu", dropout_p=0.1, manual_seed=3)
    assert not launched


def test_what_lies_beside_the_columns_of_x_does_not_count() -> None:
    """Tiles are wider than the layer: what they would read from a wider tensor is not a number."""
    inputs, dy, expected = exact_ffn(200, 40, 192, 40, BFLOAT16, gated=True, residual=True, activation="relu")

    def surrounded(tensor: Tensor) -> Tensor:
        wide = tensor.new_full((tensor.shape[0] + 64, tensor.shape[1] + 96), float("nan"))
        wide[: tensor.shape[0], : tensor.shape[1]] = tensor
        return wide[: tensor.shape[0], : tensor.shape[1]]

    around = {
        name: surrounded(tensor) if tensor is not None and tensor.dim() == 2 else tensor
        for name, tensor in inputs.items()
    }
    with on_path("kernels") as options:
        found = results(functional.ffn, around, surrounded(dy), activation="relu", **options)
    assert_equal(found, expected)


@pytest.mark.parametrize("width", [64, 96, 128, 256])
def test_the_same_numbers_as_the_generic_kernels(width: int) -> None:
    """Both round where the other does, but add up in another order."""
    inputs = ffn_inputs(5000, width, 4 * width, width, BFLOAT16)
    dy = like_result(inputs)
    found: list[Tensors] = []
    for facts in ({}, {"backend": "generic"}):
        # What a backward pass stores is rounded more often.
        with on_path("kernels", recompute=True, **facts) as options:
            found.append(results(functional.ffn, inputs, dy, activation="gelu_tanh", **options))
    for name, tensor in found[0].items():
        other = found[1][name]
        if tensor is not None and other is not None:
            difference = float((tensor.double() - other.double()).norm() / other.double().norm())
            assert difference < 2e-3, f"{name}: {difference}"


def test_the_module_is_what_the_operations_call() -> None:
    assert kernels.forward.__globals__["sm90"] is sm90
