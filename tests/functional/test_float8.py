"""FFNs and linear layers in 8 bits, by the float32 model on a CPU: numbers, gradients, what is quantised how often."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import fusedlayers as fl
from fusedlayers import reference
from fusedlayers.closeness.noise import OF_LAYER, OF_PRODUCT, OF_WEIGHT_GRADIENT, sqnr
from fusedlayers.functional import float8
from fusedlayers.functional.dispatch import decisions
from tests.functional.test_compiled import Recorded
from tests.support.float8_twins import in_8_bits, optimizer_step

BFLOAT16 = torch.bfloat16
NAMES = ("x", "w_up", "w_down", "b_up", "b_down", "w_gate", "b_gate")
M, K, N, O = 40, 64, 96, 48
RECIPES = ("rowwise", "rowwise_with_gw_hp")


@pytest.fixture(autouse=True)
def made() -> Iterator[Any]:
    with in_8_bits() as found:
        yield found


def operands(
    gated: bool = False, dtype: torch.dtype = BFLOAT16, bias: bool | None = None
) -> dict[str, Tensor]:  # fmt: skip
    """With biases of the hidden unless it is gated; with both it is not bounded."""
    bias = not gated if bias is None else bias
    shapes = {
        "x": (M, K), "w_up": (N, K), "w_down": (O, N), "b_up": (N,), "b_down": (O,), "w_gate": (N, K), "b_gate": (N,),
    }  # fmt: skip
    found = {}
    for name, shape in shapes.items():
        if (gated or "gate" not in name) and (bias or name not in ("b_up", "b_gate")):
            values = torch.randn(shape) / (shape[1] ** 0.5 if name.startswith("w") else 1)
            found[name] = values.to(dtype).requires_grad_()
    return found


def in_float64(given: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: each.detach().double().requires_grad_(each.requires_grad) for name, each in given.items()}


def gradients(y: Tensor, given: dict[str, Tensor], dy: Tensor) -> dict[str, Tensor]:
    wanted = {name: each for name, each in given.items() if each.requires_grad}
    return dict(zip(wanted, torch.autograd.grad(y, list(wanted.values()), dy.to(y.dtype)), strict=True))


def ffn(given: dict[str, Tensor], precision: str = "fp8", **options: Any) -> Tensor:
    return fl.functional.ffn(**given, precision=precision, **options)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("activation", ["gelu", "silu", "relu2", "identity"])
@pytest.mark.parametrize(
    ("gated", "bias"), [(False, True), (True, False), (True, True)], ids=["plain", "gated", "both"]
)
def test_ffn_close_to_float64(gated: bool, bias: bool, activation: str, recipe: str) -> None:
    given, dy = operands(gated, bias=bias), torch.randn(M, O)
    with decisions() as taken:
        y = ffn(given, activation=activation, precision=recipe)
    assert taken == {"ffn float8": 1}
    exact = in_float64(given)
    truth = reference.ffn(**exact, activation=activation)
    assert sqnr(y, truth) >= OF_LAYER
    found, expected = gradients(y, given, dy), gradients(truth, exact, dy)
    for name, value in found.items():
        assert value.dtype == BFLOAT16
        assert sqnr(value, expected[name]) >= (OF_LAYER if name == "x" else OF_WEIGHT_GRADIENT), name
    in_16_bits = fl.functional.ffn(**given, activation=activation)
    assert sqnr(y, truth) < sqnr(in_16_bits, truth)


@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("activation", [None, "gelu"])
def test_linear_close_to_float64(activation: str | None, bias: bool) -> None:
    given = {"x": operands()["x"], "weight": operands()["w_up"], "bias": operands()["b_up"]}
    given = given if bias else {name: given[name] for name in ("x", "weight")}
    dy = torch.randn(M, N)
    with decisions() as taken:
        y = fl.functional.linear(**given, activation=activation, precision="fp8")
    assert taken == {"linear float8": 1}
    exact = in_float64(given)
    truth = reference.linear(**exact, activation=activation)
    assert sqnr(y, truth) >= OF_PRODUCT
    found, expected = gradients(y, given, dy), gradients(truth, exact, dy)
    for name, value in found.items():
        assert sqnr(value, expected[name]) >= OF_PRODUCT, name


def test_what_is_not_wanted_is_not_saved() -> None:
    given = operands()
    frozen = {name: each.detach().requires_grad_(name == "b_down") for name, each in given.items()}
    assert not any(each is not None for each in ffn(frozen).grad_fn.saved_tensors)
    with torch.no_grad():
        assert ffn(given).grad_fn is None


@pytest.mark.parametrize("options", [{}, {"dropout_p": 0.25}, {"activation": "silu"}], ids=str)
def test_the_same_value_with_and_without_gradients(options: dict[str, Any]) -> None:
    given = operands(True) | {"dropout_seed": torch.tensor([7]), "residual": torch.randn(M, O).to(BFLOAT16)}
    y = ffn(given, **options)
    with torch.no_grad():
        assert torch.equal(ffn(given, **options), y)
    with torch.inference_mode():
        assert torch.equal(ffn(given, **options), y)


def test_dropout_draws_the_mask_of_the_layer_in_16_bits() -> None:
    given, dy = operands() | {"dropout_seed": torch.tensor([11])}, torch.randn(M, O)
    y = ffn(given, dropout_p=0.5)
    exact = in_float64({name: each for name, each in given.items() if name != "dropout_seed"})
    truth = reference.ffn(**exact, dropout_p=0.5, activation="gelu", seed=given["dropout_seed"])
    assert sqnr(y, truth) >= OF_LAYER
    found, expected = gradients(y, given, dy), gradients(truth, exact, dy)
    assert all(sqnr(found[name], expected[name]) >= OF_WEIGHT_GRADIENT for name in found)


def test_leading_dims_and_strides() -> None:
    given, dy = operands(), torch.randn(M, O).to(BFLOAT16)
    y = ffn(given)
    expected = gradients(y, given, dy)
    for shape in ((2, M // 2, K), (M // 4, 2, 2, K)):
        again = given | {"x": given["x"].detach().view(shape).requires_grad_()}
        other = ffn(again)
        assert torch.equal(other, y.view(*shape[:-1], O))
        found = gradients(other, again, dy.view(other.shape))
        assert all(torch.equal(found[name].view(value.shape), value) for name, value in expected.items())
    wide = torch.randn(M, 2 * K).to(BFLOAT16)
    wide[:, ::2] = given["x"].detach()
    laid_out = given | {
        "x": wide[:, ::2],
        "w_up": given["w_up"].detach().T.contiguous().T.requires_grad_(),
        "b_up": torch.stack((given["b_up"], given["b_up"]), 1)[:, 0].detach().requires_grad_(),
    }
    other = ffn(laid_out)
    assert torch.equal(other, y)
    found = gradients(other, laid_out, dy.T.contiguous().T)
    assert all(torch.equal(value, expected[name]) for name, value in found.items())
    # An expanded upstream gradient.
    summed = gradients(ffn(given).sum(), given, torch.tensor(1.0))
    ones = gradients(ffn(given), given, torch.ones(M, O))
    assert all(torch.equal(summed[name], value) for name, value in ones.items())


def test_weights_are_quantised_once_until_they_change(made: Any) -> None:
    given, dy = operands(True), torch.randn(M, O)
    counts = []
    for step in range(4):
        made.clear()
        gradients(ffn(given), given, dy)
        counts.append((made["rows"], made["transposed"]))
        if step == 1:
            with torch.no_grad():
                given["w_gate"].mul_(2)
    # x and dy, and the weights: up, gate and down in rows, down and (up, gate) transposed.
    assert counts == [(5, 2), (2, 0), (5, 2), (2, 0)]
    assert len(float8._kept) == 3
    one = weakref.ref(float8._kept[id(given["w_up"])].made.popitem()[1][0].down.values)
    assert one() is None
    gc.disable()
    del given
    assert not float8._kept
    gc.enable()


def test_the_numbers_are_those_of_the_changed_weight() -> None:
    given = operands()
    before = ffn(given)
    for change in (
        lambda weight: weight.copy_(torch.randn(weight.shape)),
        lambda weight: weight.data.copy_(torch.randn(weight.shape)),
        lambda weight: setattr(weight, "data", torch.randn(weight.shape).to(BFLOAT16)),
    ):
        with torch.no_grad():
            change(given["w_up"])
        # A step of any optimizer drops what an assignment past the version counter leaves unnoticed.
        optimizer_step()
        after = ffn(given)
        assert not torch.equal(after, before)
        assert torch.equal(after, ffn({name: each.detach().clone() for name, each in given.items()}))
        before = after


def test_parts_of_one_weight_are_told_apart(made: Any) -> None:
    given = operands(True)
    merged = torch.cat((given["w_gate"], given["w_up"])).detach().requires_grad_()
    for _ in range(2):
        gate, up = merged.unflatten(0, (2, -1)).unbind(0)
        parts = given | {"w_up": up, "w_gate": gate}
        y = ffn(parts)
        [found] = torch.autograd.grad(y.sum(), [merged])
        assert torch.equal(y, ffn(given))
    assert made["transposed"] == 2
    expected = gradients(ffn(given).sum(), given, torch.tensor(1.0))
    assert torch.equal(found, torch.cat((expected["w_gate"], expected["w_up"])))
    exchanged = {"w_up": given["w_gate"], "w_gate": given["w_up"]}
    assert torch.equal(ffn(given | {"w_up": gate, "w_gate": up}), ffn(given | exchanged))


def test_nothing_is_kept_of_a_weight_that_was_just_computed(made: Any) -> None:
    given = operands()
    for _ in range(2):
        ffn(given | {"w_up": given["w_up"] * 2})
    assert made["rows"] == 2 * 3
    assert not float8._kept


def test_nothing_is_kept_of_what_a_graph_used(made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    given = {name: torch.nn.Parameter(each.detach(), name == "w_up") for name, each in operands().items()}
    call: Any = SimpleNamespace(problem=SimpleNamespace(captured=False, training=True), ready={})
    graph: Any = SimpleNamespace(problem=SimpleNamespace(captured=True, training=True), ready={})
    for each in (graph, call, call):
        float8.quantised_weight(given["w_up"], each)
    assert made["rows"] == 3
    # A frozen weight cannot change in a replay.
    for each in (graph, call, call):
        float8.quantised_weight(given["w_down"], each)
    assert made["rows"] == 5
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    float8.quantised_weight(given["w_down"], call)
    assert made["rows"] == 6


def test_calls_without_gradients_see_every_change(made: Any) -> None:
    """Averages of weights and merged adapters are written past the version counter, and back, between two steps."""
    given = operands()
    trained = ffn(given)
    with torch.no_grad():
        kept = given["w_up"].data.clone()
        given["w_up"].data.mul_(-1)
        averaged = ffn(given)
        given["w_up"].data.copy_(kept)
        assert torch.equal(ffn(given), trained)
    assert not torch.equal(averaged, trained)
    made.clear()
    assert torch.equal(ffn(given), trained)
    assert made["rows"] == 1


def test_checkpoint_gives_the_same_bits() -> None:
    given, dy = operands(True), torch.randn(M, O)
    y = ffn(given, dropout_p=0.1, dropout_seed=torch.tensor([3]))
    expected = gradients(y, given, dy)
    again = checkpoint(
        lambda *each: ffn(dict(zip(given, each, strict=True)), dropout_p=0.1, dropout_seed=torch.tensor([3])),
        *given.values(), use_reentrant=False,
    )  # fmt: skip
    assert torch.equal(again, y)
    found = gradients(again, given, dy)
    assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_second_derivatives_are_those_of_16_bits() -> None:
    given = operands(True)
    found = []
    for options in ({"precision": "fp8"}, {}):
        y = fl.functional.ffn(**given, activation="silu", **options)
        [dx] = torch.autograd.grad(y.float().square().sum(), [given["x"]], create_graph=True)
        found.append(torch.autograd.grad(dx.float().square().sum(), [given["w_up"]])[0])
    assert sqnr(found[0], found[1].double()) >= OF_WEIGHT_GRADIENT


def test_under_autocast() -> None:
    given = operands(True, torch.float32)
    with decisions() as taken, torch.autocast("cpu", BFLOAT16):
        y = ffn(given)
    assert taken == {"ffn float8": 1}
    assert y.dtype == BFLOAT16
    found = gradients(y, given, torch.randn(M, O))
    assert {each.dtype for each in found.values()} == {torch.float32}
    low = {name: each.detach().to(BFLOAT16) for name, each in given.items()}
    assert torch.equal(y, ffn(low))


def test_weights_under_autocast_are_quantised_once_until_they_change(made: Any) -> None:
    """Those that autocast casts anew at every call are known by what they were cast from."""
    given, dy = operands(True, torch.float32), torch.randn(M, O)
    merged = torch.cat((given["w_gate"], given["w_up"])).detach().requires_grad_()
    counts = []
    for step in range(4):
        gate, up = merged.unflatten(0, (2, -1)).unbind(0)
        made.clear()
        with torch.autocast("cpu", BFLOAT16):
            y = ffn(given | {"w_up": up, "w_gate": gate})
        torch.autograd.grad(y, [given["x"], merged], dy.to(BFLOAT16))
        counts.append((made["rows"], made["transposed"]))
        if step == 1:
            with torch.no_grad():
                merged.mul_(2)
    assert counts == [(5, 2), (2, 0), (5, 2), (2, 0)]
    with torch.autocast("cpu", BFLOAT16), torch.no_grad():
        expected = ffn(given | {"w_up": up.clone(), "w_gate": gate.clone()})
    assert torch.equal(y, expected)


@pytest.mark.parametrize("activation", ["gelu", "relu2"])
def test_a_weight_that_changes_between_both_passes_under_autocast(activation: str) -> None:
    """The backward pass reads what was cast before."""
    given, dy = operands(False, torch.float32), torch.randn(M, O).to(BFLOAT16)
    found = []
    for change in (False, True):
        with torch.autocast("cpu", BFLOAT16):
            y = ffn(given, activation=activation)
        before = given["w_up"].detach().clone()
        with torch.no_grad():
            given["w_up"].mul_(1 + change)
        with torch.autocast("cpu", BFLOAT16):
            newer = ffn(given, activation=activation)
        torch.autograd.grad(newer, [given["x"]], dy)
        found.append(torch.autograd.grad(y, [given["x"]], dy)[0])
        given["w_up"].data = before
    assert torch.equal(*found)


def test_observed_calls_run_as_one_operation() -> None:
    """As selective checkpointing and compilers see them; with the same bits."""
    given, dy = operands(True), torch.randn(M, O)
    expected = gradients(ffn(given), given, dy)
    with FlopCounterMode(display=False) as counter:
        y = ffn(given)
        found = gradients(y, given, dy)
    assert counter.get_total_flops() == 3 * 2 * M * N * (2 * K + O)
    assert all(torch.equal(found[name], value) for name, value in expected.items())


@pytest.mark.parametrize("name", ["ffn", "linear"])
def test_opcheck(name: str) -> None:
    given = operands(True)
    with FlopCounterMode(display=False), Recorded() as recorded:
        if name == "ffn":
            y = ffn(given)
        else:
            y = fl.functional.linear(given["x"], given["w_up"], precision="fp8")
        y.float().square().sum().backward()
    assert set(recorded.calls) == {f"float8_{name}_forward", f"float8_{name}_backward"}
    for called, arguments in recorded.calls.values():
        leaves = [t.detach().requires_grad_(t.requires_grad) if isinstance(t, Tensor) else t for t in arguments]
        if called._opname.endswith("_backward"):
            leaves[:3] = ([None if t is None else t.detach() for t in each] for each in leaves[:3])
        torch.library.opcheck(called, tuple(leaves))


def test_compiled() -> None:
    given, dy = operands(True), torch.randn(M, O)
    expected = ffn(given)
    compiled = torch.compile(lambda **each: ffn(each), fullgraph=True, backend="aot_eager")
    y = compiled(**given)
    assert torch.equal(y, expected)
    found = gradients(expected, given, dy)
    assert all(torch.equal(value, found[name]) for name, value in gradients(y, given, dy).items())


@pytest.mark.parametrize("kind", [fl.FusedFFN, fl.SplitKLinear])
def test_a_recipe_that_was_assigned_to_a_compiled_module(kind: Any) -> None:
    module, x = kind(K, N, dtype=BFLOAT16), operands()["x"]
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    for recipe in (None, fl.Float8(weight_gradient="bf16"), "rowwise"):
        module.precision = recipe
        with decisions() as taken:
            expected = module(x)
        assert any(name.endswith("float8") for name in taken) is (recipe is not None)
        assert torch.equal(compiled(x), expected)


def test_copies_and_state_dicts_know_nothing_of_it() -> None:
    block = fl.FusedFFN(K, N, precision="fp8", dtype=BFLOAT16)
    x = torch.randn(M, K).to(BFLOAT16)
    y = block(x)
    assert set(block.state_dict()) == set(fl.FusedFFN(K, N).state_dict())
    other = copy.deepcopy(block)
    with torch.no_grad():
        other.up_proj.weight.mul_(2)
    assert torch.equal(block(x), y)
    assert not torch.equal(other(x), y)
