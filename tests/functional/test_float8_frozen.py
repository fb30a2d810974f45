"""FFNs in 8 bits with frozen or unusual operands, by the float32 model on a CPU."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.nn import Parameter

from fusedlayers import reference
from fusedlayers.closeness.noise import OF_LAYER, OF_WEIGHT_GRADIENT, sqnr
from fusedlayers.functional import float8
from tests.functional.test_float8 import RECIPES, M, O, ffn, gradients, in_float64, made, operands
from tests.support.float8_twins import optimizer_step

__all__ = ["made"]


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
def test_whatever_is_frozen(gated: bool, recipe: str, made: Any) -> None:
    """Every operand alone: the same gradient as with all of them, and nothing quantised for what nobody wants."""
    given, dy = operands(gated), torch.randn(M, O)
    everything = gradients(ffn(given, precision=recipe), given, dy)
    for name, expected in everything.items():
        alone = {other: each.detach().requires_grad_(other == name) for other, each in given.items()}
        made.clear()
        y = ffn(alone, precision=recipe)
        forward = made["rows"]
        found = gradients(y, alone, dy)[name]
        # w_down alone has a gradient in 16 bits.
        assert sqnr(found, expected) > 20 if name == "w_down" else torch.equal(found, expected), name
        # The transposed w_down for what goes through the hidden, the other weights for dx alone.
        through = name not in ("w_down", "b_down")
        assert made["transposed"] == through + (name == "x")
        # dy for what goes through the hidden, and dz for dx, if it does not come in 8 bits.
        in_8_bits = recipe == "rowwise"
        assert made["pairs"] == (in_8_bits and name in ("w_up", "w_gate"))
        assert made["rows"] - forward == through + (name == "x" and not in_8_bits)


def test_biases_that_change_beside_frozen_weights() -> None:
    """The numbers of units depend on them."""
    given, dy = operands(), torch.randn(M, O)
    given = {name: each.detach().requires_grad_(not name.startswith("w_")) for name, each in given.items()}
    for step in range(3):
        found = gradients(ffn(given), given, dy)
        fresh = {name: each.detach().clone().requires_grad_(each.requires_grad) for name, each in given.items()}
        expected = gradients(ffn(fresh), fresh, dy)
        assert [name for name, each in expected.items() if not torch.equal(found[name], each)] == []
        with torch.no_grad():
            given["b_up"] += 2 + step


@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
def test_channels_that_weights_hardly_read(gated: bool) -> None:
    """Large ones, as massive activations are: they take no bits from the hidden."""
    given, dy = operands(gated), torch.randn(M, O)
    with torch.no_grad():
        for place, size in ((3, 100), (17, 300)):
            given["x"][:, place] *= size
            for name in given.keys() & {"w_up", "w_gate"}:
                given[name][:, place] /= size
        # One token has nothing else.
        given["x"][5] *= 0.001
        given["x"][5, 3] = 400
    exact = in_float64(given)
    y, truth = ffn(given, activation="silu"), reference.ffn(**exact, activation="silu")
    assert sqnr(y, truth) >= OF_LAYER
    assert sqnr(y[5], truth[5]) >= OF_LAYER
    found, expected = gradients(y, given, dy), gradients(truth, exact, dy)
    for name in given.keys() - {"x"}:
        assert sqnr(found[name], expected[name]) >= OF_WEIGHT_GRADIENT, name


@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
def test_powers_of_two_are_exact(gated: bool, made: Any) -> None:
    """No scale, norm or number of a channel rounds them."""
    names = ("w_up", "w_down", "w_gate")[: 2 + gated]
    permutations = {name: torch.eye(O)[torch.randperm(O)] * torch.randint(1, 3, (O,)) for name in names}
    given = {name: each.bfloat16().requires_grad_() for name, each in permutations.items()}
    x, dy = (torch.randint(-1, 2, (M, O)) * torch.randint(1, 3, (M, O)).bfloat16() for _ in range(2))
    given["x"] = x.requires_grad_()
    exact = in_float64(given)
    y, truth = ffn(given, activation="identity"), reference.ffn(**exact, activation="identity")
    assert made["products"]
    assert torch.equal(y.double(), truth)
    found, expected = gradients(y, given, dy), gradients(truth, exact, dy)
    assert [name for name, each in expected.items() if not torch.equal(found[name].double(), each)] == []


@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
def test_gated_layers_with_biases_quantise_the_hidden_by_maxima(bias: bool, made: Any) -> None:
    """Rows are those of three weights and x, and then of the hidden."""
    ffn(operands(True, bias=bias))
    assert made["rows"] == 4 + bias


def test_copies_of_two_parts_of_one_weight_are_freed_at_a_step() -> None:
    """Without waiting for the collector of cycles."""
    given, dy = operands(True), torch.randn(M, O)
    merged = torch.cat((given["w_gate"], given["w_up"])).detach().requires_grad_()
    gate, up = merged.unflatten(0, (2, -1)).unbind(0)
    torch.autograd.grad(ffn(given | {"w_up": up, "w_gate": gate}), [given["x"], merged], dy.to(torch.bfloat16))
    copies = [weakref.ref(made.down.values) for made, _ in float8._kept[id(merged)].made.values()]
    assert [each() is None for each in copies] == [False] * 2
    gc.disable()
    optimizer_step()
    freed = [each() is None for each in copies]
    gc.enable()
    assert all(freed)


@pytest.fixture
def keeping() -> Iterator[None]:
    float8.keep_frozen_weights()
    yield
    float8.keep_frozen_weights(False)


def frozen_weights(given: dict[str, Any]) -> dict[str, Any]:
    frozen: dict[str, Any] = {name: Parameter(each.detach(), requires_grad=False) for name, each in given.items()}
    return frozen | {"x": given["x"]}


def test_frozen_weights_are_kept_on_request(keeping: None, made: Any) -> None:
    """Over steps and without gradients, until they change or are to be forgotten."""
    given, dy = operands(True), torch.randn(M, O)
    frozen = frozen_weights(given)
    y = ffn(frozen)
    dx = gradients(y, frozen, dy)["x"]
    made.clear()
    optimizer_step()
    with torch.no_grad():
        assert torch.equal(ffn(frozen), y)
    assert made["rows"] == 1
    assert torch.equal(gradients(ffn(frozen), frozen, dy)["x"], dx)
    assert (made["rows"], made["transposed"]) == (3, 0)
    for change in (lambda: frozen["w_up"].mul_(2), float8.forget_weights):
        made.clear()
        change()
        with torch.no_grad():
            changed = ffn(frozen)
        assert made["rows"] == 4
        assert torch.equal(changed, ffn({name: each.clone() for name, each in frozen.items()}))
    assert not torch.equal(changed, y)


def test_what_inference_made_serves_training(keeping: None, made: Any) -> None:
    given, dy = operands(), torch.randn(M, O)
    frozen = frozen_weights(given)
    with torch.inference_mode():
        y = ffn(frozen)
    made.clear()
    found = ffn(frozen)
    assert made["rows"] == 1
    assert torch.equal(found, y)
    expected = gradients(ffn(given), given, dy)["x"]
    assert torch.equal(gradients(found, frozen, dy)["x"], expected)


@pytest.mark.parametrize(("frozen_one", "trained"), [("w_up", "w_down"), ("w_down", "w_up")])
def test_what_is_trained_is_never_kept_longer(frozen_one: str, trained: str, keeping: None, made: Any) -> None:
    given, dy = operands(), torch.randn(M, O)
    mixed = given | {frozen_one: frozen_weights(given)[frozen_one]}
    for _ in range(2):
        made.clear()
        gradients(ffn(mixed), mixed, dy)
        # x, dy and two weights in rows; both weights transposed.
        assert (made["rows"], made["transposed"]) == (4, 2)
        optimizer_step()
        assert not any(kept.made for kept in float8._kept.values())
        with torch.no_grad():
            mixed[trained].data.mul_(2)
    expected = ffn({name: each.detach().clone() for name, each in mixed.items()})
    assert torch.equal(ffn(mixed), expected)
    float8.keep_frozen_weights(False)
    assert not float8._kept
    frozen = frozen_weights(given) | {"x": given["x"].detach()}
    for _ in range(2):
        made.clear()
        ffn(frozen)
        assert made["rows"] == 3


def test_a_promise_is_a_bool() -> None:
    with pytest.raises(TypeError, match="keep must be True or False, got 1"):
        float8.keep_frozen_weights(1)  # type: ignore[arg-type]
