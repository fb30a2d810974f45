"""Experts in 8 bits, by the float32 model on a CPU: numbers, gradients, layouts, what is quantised how often."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import fusedlayers as fl
from fusedlayers import reference
from fusedlayers.closeness.noise import sqnr
from fusedlayers.functional.dispatch import decisions
from fusedlayers.functional.moe_ffn import moe_ffn
from tests.functional.test_compiled import CHECKS, Recorded
from tests.support.float8_twins import in_8_bits, optimizer_step
from tests.support.moe_operands import CLAMPED, LAYOUTS, assert_same, how, in_8, like_x, moe_inputs, results, wide
from tests.support.operands import needs_kernels, on_path

pytestmark = needs_kernels

BFLOAT16 = torch.bfloat16
TOKENS, K, N, E, TOP_K = 48, 64, 128, 5, 2
# In dB, of experts.
OF_RESULT, OF_DX, OF_PARAMETER = 23.0, 18.0, 17.0


@pytest.fixture(autouse=True)
def made() -> Iterator[Any]:
    with in_8_bits() as found:
        yield found


def inputs(dtype: torch.dtype = BFLOAT16, **options: Any) -> dict[str, Tensor | None]:
    return moe_inputs(TOKENS, K, N, E, TOP_K, dtype, **options)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("transposed", [False, True], ids=["", "transposed"])
@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
def test_close_to_float64_in_every_layout(gated: bool, transposed: bool, layout: str) -> None:
    options = {"gated": gated, "layout": layout, "transposed": transposed}
    tensors = inputs(**options)
    dy = like_x(tensors)
    found = in_8(tensors, dy, **how(**options))
    truth = results(reference.moe_ffn, wide(tensors), dy.double(), **how(**options))
    assert found.keys() == truth.keys()
    for name, value in found.items():
        least = {"y": OF_RESULT, "dx": OF_DX}.get(name, OF_PARAMETER)
        if value is not None:
            assert value.dtype == BFLOAT16
            assert sqnr(value, truth[name]) >= least, name
    with on_path("torch"):
        in_16_bits = moe_ffn(**tensors, **how(**options))
    assert sqnr(found["y"], truth["y"]) < sqnr(in_16_bits, truth["y"])


@pytest.mark.parametrize("routing", ["repeated", "one takes all", "sentinels", "nobody"])
def test_any_routing(routing: str) -> None:
    """Experts without rows, too: their gradients are zeros."""
    tensors = inputs(routing=routing)
    dy = like_x(tensors)
    found, truth = in_8(tensors, dy), results(reference.moe_ffn, wide(tensors), dy.double())
    for name, value in found.items():
        if value is not None and truth[name].count_nonzero():
            assert sqnr(value, truth[name]) >= OF_PARAMETER, name
        elif value is not None:
            assert not value.any(), name


@pytest.mark.parametrize("layout", ["separate", "interleaved"])
def test_a_limit_and_an_offset(layout: str) -> None:
    tensors = inputs(layout=layout)
    dy = like_x(tensors)
    # Slopes jump at the limit: no gradient comes close.
    found = in_8(tensors, dy, **how(layout=layout, **CLAMPED))
    truth = results(reference.moe_ffn, wide(tensors), dy.double(), **how(layout=layout, **CLAMPED))
    assert sqnr(found["y"], truth["y"]) >= OF_RESULT


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_stays_with_its_experts(value: float) -> None:
    tensors = inputs(bias=False)
    dy = like_x(tensors)
    clean = in_8(tensors, dy)
    tensors["x"][3, 5] = value
    found = in_8(tensors, dy)
    touched = torch.zeros(E, dtype=torch.bool)
    touched[tensors["top_k_index"][3]] = True
    for name in ("dw_up", "dw_gate", "dw_down"):
        assert found[name][touched].isnan().all(), name
        assert torch.equal(found[name][~touched], clean[name][~touched]), name
    others = torch.arange(TOKENS) != 3
    for name in ("y", "dx"):
        assert torch.equal(found[name][others], clean[name][others]), name


def test_frozen_operands_change_no_other_gradient(made: Any) -> None:
    tensors = inputs()
    dy = like_x(tensors)
    everything = in_8(tensors, dy)
    names = [name for name, each in tensors.items() if each is not None and each.is_floating_point()]
    for name in names:
        frozen = tuple(other for other in names if other != name)
        made.clear()
        alone = in_8(tensors, dy, frozen)
        assert_same(alone, everything)
        # x, h and dy, and the weights; dz for dx, with the transposes of both weights; what weight gradients need.
        assert made["rows"] == 3 + 3 + {"x": 1, "w_down": 1, "w_up": 2, "w_gate": 2}.get(name, 0)
        assert made["transposed"] == (name != "b_down") + (name == "x")
        assert made["pairs"] == (name in ("w_down", "w_up", "w_gate"))


def test_the_same_value_with_and_without_gradients() -> None:
    tensors = inputs()
    dy = like_x(tensors)
    expected = in_8(tensors, dy)
    assert_same(in_8(tensors, dy, recompute=True), expected)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            assert torch.equal(moe_ffn(**tensors, precision="fp8"), expected["y"])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_weights_are_quantised_once_until_they_change(layout: str, made: Any) -> None:
    tensors, merged = inputs(layout=layout, bias=False), layout != "separate"
    leaves = {name: t if t is None or name == "top_k_index" else t.requires_grad_() for name, t in tensors.items()}
    weights, counts = [leaves[name] for name in ("w_up", "w_down")], []
    for step in range(4):
        made.clear()
        torch.autograd.grad(moe_ffn(**leaves, **how(layout=layout), precision="fp8").sum(), weights)
        counts.append((made["rows"], made["transposed"]))
        if step == 1:
            with torch.no_grad():
                leaves["w_up"].mul_(2)
    # x, h, dy, dz, h and x, and the weights: up and gate, in one tensor if merged, and down; and both transposed.
    assert counts == [(9 - merged, 2), (6, 0), (8 - merged, 1), (6, 0)]
    optimizer_step()
    made.clear()
    moe_ffn(**leaves, **how(layout=layout), precision="fp8")
    assert made["rows"] == 5 - merged


@pytest.mark.parametrize(
    ("width", "precision", "pairs", "text"),
    [
        (N, "fp8", 2, "weight gradients in 8 bits"),
        (N, "rowwise", 2, "weight gradients in 8 bits"),
        (N, "rowwise_with_gw_hp", 0, "weight gradients in 16 bits"),
        # The next expert's gradient would begin within a tile.
        (N + 32, "rowwise", 0, "weight gradients in 16 bits"),
    ],
)
def test_weight_gradients_by_recipe(width: int, precision: str, pairs: int, text: str, made: Any) -> None:
    tensors = moe_inputs(TOKENS, K, width, E, TOP_K, BFLOAT16)
    dy = like_x(tensors)
    found, truth = in_8(tensors, dy, precision=precision), results(reference.moe_ffn, wide(tensors), dy.double())
    assert made["pairs"] == pairs
    for name in ("dw_up", "dw_gate", "dw_down"):
        assert sqnr(found[name], truth[name]) >= OF_PARAMETER, name
    assert text in str(fl.explain(moe_ffn, **tensors, precision=precision))


def test_layouts_are_told_apart() -> None:
    """The same tensor as weights of two layouts."""
    tensors = inputs(layout="concatenated", bias=False)
    tensors = {name: t if t is None or name == "top_k_index" else t.requires_grad_() for name, t in tensors.items()}
    found = [moe_ffn(**tensors, **how(layout=layout), precision="fp8") for layout in LAYOUTS[1:]]
    for layout, y in zip(LAYOUTS[1:], found, strict=True):
        assert sqnr(y, reference.moe_ffn(**wide(tensors), **how(layout=layout))) >= OF_RESULT


def test_checkpoint_gives_the_same_bits() -> None:
    tensors = inputs()
    dy = like_x(tensors)

    def checkpointed(**given: Any) -> Tensor:
        return checkpoint(moe_ffn, **given, use_reentrant=False)

    assert_same(results(checkpointed, tensors, dy, precision="fp8"), in_8(tensors, dy))


def test_second_derivatives_are_those_of_16_bits() -> None:
    tensors = inputs(bias=False)
    tensors["x"].requires_grad_()
    tensors["w_up"].requires_grad_()
    found = []
    for precision in ("fp8", None):
        with nullcontext() if precision else on_path("torch"):
            y = moe_ffn(**tensors, precision=precision)
            [dx] = torch.autograd.grad(y.float().square().sum(), [tensors["x"]], create_graph=True)
            found.append(torch.autograd.grad(dx.float().square().sum(), [tensors["w_up"]])[0])
    assert sqnr(found[0], found[1].double()) >= OF_PARAMETER


def test_under_autocast(made: Any) -> None:
    tensors = inputs(torch.float32)
    dy = like_x(tensors).to(BFLOAT16)
    with torch.autocast("cpu", BFLOAT16):
        found = in_8(tensors, dy)
    low = {name: t if t is None or t.dtype is not torch.float32 else t.to(BFLOAT16) for name, t in tensors.items()}
    low["top_k_weights"] = tensors["top_k_weights"]
    expected = in_8(low, dy)
    assert torch.equal(found["y"], expected["y"])
    assert found["dw_up"].dtype == torch.float32
    # Those that autocast casts anew at every call are known by what they were cast from.
    leaves = {name: t if t is None or name == "top_k_index" else t.requires_grad_() for name, t in tensors.items()}
    counts = []
    for _ in range(2):
        made.clear()
        with torch.autocast("cpu", BFLOAT16):
            y = moe_ffn(**leaves, precision="fp8")
        torch.autograd.grad(y.float().sum(), [leaves["x"]])
        counts.append((made["rows"], made["transposed"]))
    assert counts == [(9, 2), (6, 0)]


def test_compiled_and_observed() -> None:
    tensors = inputs()
    dy = like_x(tensors)
    expected = in_8(tensors, dy)
    compiled = torch.compile(moe_ffn, fullgraph=True, backend="aot_eager")
    assert_same(results(compiled, tensors, dy, precision="fp8"), expected)
    with FlopCounterMode(display=False), Recorded() as recorded:
        results(moe_ffn, tensors, dy, precision="fp8")
    assert set(recorded.calls) == {"float8_moe_ffn_forward", "float8_moe_ffn_backward"}
    for called, arguments in recorded.calls.values():
        leaves = [t.detach().requires_grad_(t.requires_grad) if isinstance(t, Tensor) else t for t in arguments]
        if called._opname.endswith("_backward"):
            leaves[:3] = ([None if t is None else t.detach() for t in each] for each in leaves[:3])
        torch.library.opcheck(called, tuple(leaves), test_utils=CHECKS[:3])


@pytest.mark.parametrize(
    ("shape", "dtype", "reason"),
    [
        ((TOKENS, 72, N, E, TOP_K), BFLOAT16, "a width of 72 is no multiple of 16"),
        ((TOKENS, K, N, E, TOP_K), torch.float32, "operands of float32 are not quantised"),
        (
            (1, K, N, E, TOP_K),
            BFLOAT16,
            "the experts are narrow or have few rows for their weights: 1 FLOPs",
        ),
        ((0, K, N, E, TOP_K), BFLOAT16, "there is nothing to compute"),
    ],
)
def test_what_stays_in_16_bits(shape: tuple[int, ...], dtype: torch.dtype, reason: str) -> None:
    tensors = moe_inputs(*shape, dtype)
    assert reason in str(fl.explain(moe_ffn, **tensors, precision="fp8"))


def test_a_module() -> None:
    plain = fl.FusedMoE(K, N, E, TOP_K, shared_d_ff=N, dtype=BFLOAT16)
    mixture = fl.FusedMoE(K, N, E, TOP_K, shared_d_ff=N, precision="fp8", dtype=BFLOAT16)
    mixture.load_state_dict(plain.state_dict())
    assert "precision='fp8'" in repr(mixture)
    assert "precision" not in repr(fl.FusedMoE(K, N, E, TOP_K))
    x = torch.randn(4, 12, K).to(BFLOAT16)
    with decisions() as taken:
        y = mixture(x)
    assert taken == {"moe_ffn float8": 1, "ffn float8": 1}
    with on_path("torch"):
        truth = plain.double()(x.double())
    assert sqnr(y, truth) >= OF_PARAMETER
    assert "float8" in str(fl.explain(mixture, x))
    with pytest.raises(ValueError, match="precision must be None"):
        fl.FusedMoE(K, N, E, TOP_K, precision="fp4")
