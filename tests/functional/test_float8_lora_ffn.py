"""FFNs with adapters whose products with the weights run in 8 bits, by the float32 model on a CPU."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import fusedlayers as fl
from fusedlayers import reference
from fusedlayers.closeness.noise import OF_LAYER, OF_WEIGHT_GRADIENT, sqnr
from fusedlayers.functional.dispatch import decisions
from fusedlayers.kernels.gemm_epilogue import LowRank
from fusedlayers.kernels.matmul.low_rank import low_rank_copies
from tests.functional.test_compiled import Recorded
from tests.functional.test_lora_ffn import ADAPTERS, SCALES, inputs
from tests.support.float8_twins import in_8_bits

BFLOAT16 = torch.bfloat16
SIZES = (64, 96, 48)
M = 40
SEED = torch.tensor([2**40 + 7])
TRAINED = ("x", *ADAPTERS)


@pytest.fixture(autouse=True)
def made() -> Iterator[Any]:
    with in_8_bits() as found:
        yield found


def operands(
    ranks: tuple[int, int, int] = (4, 6, 3),
    gated: bool = True,
    wanted: Sequence[str] | None = None,
    dtype: torch.dtype = BFLOAT16,
) -> dict[str, Tensor]:
    """On the CPU whatever there is: the model is torch's."""
    found = inputs(ranks, gated=gated, dtype=dtype, leading=(M,), sizes=SIZES, wanted=wanted)
    return {name: Parameter(each.detach().cpu(), each.requires_grad) for name, each in found.items()}


def lora_ffn(given: dict[str, Tensor], precision: str | None = "fp8", **options: Any) -> Tensor:
    return fl.functional.lora_ffn(**given, activation="silu", precision=precision, **SCALES, **options)


def gradients(y: Tensor, given: dict[str, Tensor], dy: Tensor) -> dict[str, Tensor]:
    wanted = {name: each for name, each in given.items() if each.requires_grad}
    return dict(zip(wanted, torch.autograd.grad(y, list(wanted.values()), dy.to(y.dtype)), strict=True))


def same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    return all(torch.equal(found[name], value) for name, value in expected.items())


@pytest.mark.parametrize("options", [{}, {"adapter_dropout_p": 0.25, "dropout_seed": SEED}], ids=["", "dropout"])
@pytest.mark.parametrize("ranks", [(4, 6, 3), (16, 16, 16), (8, 0, 0), (0, 5, 0), (0, 0, 7), (0, 0, 0)], ids=str)
@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
def test_close_to_float64(gated: bool, ranks: tuple[int, int, int], options: dict[str, Any]) -> None:
    given, dy = operands(ranks, gated), torch.randn(M, SIZES[2])
    with decisions() as taken:
        y = lora_ffn(given, **options)
    assert taken == {"lora_ffn float8": 1}
    exact = {name: each.detach().double().requires_grad_() for name, each in given.items()}
    of_torch = {"seed" if name == "dropout_seed" else name: value for name, value in options.items()}
    truth = reference.lora_ffn(**exact, activation="silu", **SCALES, **of_torch)
    assert sqnr(y, truth) >= OF_LAYER
    expected = gradients(truth, exact, dy)
    for name, value in gradients(y, given, dy).items():
        assert value.dtype == BFLOAT16
        assert sqnr(value, expected[name]) >= (OF_LAYER if name == "x" else OF_WEIGHT_GRADIENT), name


def test_what_adapters_add_has_16_bits() -> None:
    """With weights of zeros nothing else is left, which has 16 bits at each step."""
    given, dy = operands(), torch.randn(M, SIZES[2])
    for name, each in given.items():
        if name.startswith("w_"):
            each.detach().zero_()
    exact = {name: each.detach().double().requires_grad_() for name, each in given.items()}
    y, truth = lora_ffn(given), reference.lora_ffn(**exact, activation="silu", **SCALES)
    assert sqnr(y, truth) > 40
    expected = gradients(truth, exact, dy)
    assert all(sqnr(value, expected[name]) > 40 for name, value in gradients(y, given, dy).items() if name[0] != "w")


@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
def test_whatever_is_frozen(gated: bool, made: Any) -> None:
    """Every operand alone: the same gradient as with all of them, and nothing quantised for what nobody wants."""
    given, dy = operands(gated=gated), torch.randn(M, SIZES[2])
    everything = gradients(lora_ffn(given), given, dy)
    for name, expected in everything.items():
        alone = {other: each.detach().requires_grad_(other == name) for other, each in given.items()}
        made.clear()
        y = lora_ffn(alone)
        forward = made["rows"]
        found = gradients(y, alone, dy)[name]
        # The hidden alone is torch's, from pre-activations that were rounded.
        of_hidden = name in ("w_down", "down_a")
        assert sqnr(found, expected) > 40 if of_hidden else torch.equal(found, expected), name
        through = not of_hidden and name not in ("b_down", "down_b")
        assert made["transposed"] == through + (name == "x")
        assert made["rows"] - forward == through + (name == "x")
        assert not made["pairs"]


def test_frozen_weights_are_quantised_once_a_step(made: Any) -> None:
    """Merged adapters change them past their version counters, so no copy outlives a step."""
    given, dy = operands(wanted=TRAINED), torch.randn(M, SIZES[2])
    optimizer = torch.optim.AdamW([given[name] for name in ADAPTERS], lr=1e-2)
    counts = []
    for _ in range(2):
        for _ in range(2):
            made.clear()
            for name, each in gradients(lora_ffn(given), given, dy).items():
                given[name].grad = each
            counts.append((made["rows"], made["transposed"]))
        given["w_gate"].data += 1.0
        optimizer.step()
    # x, h, dy and dz, and the weights: up, gate and down in rows, down and (up, gate) transposed.
    assert counts == [(7, 2), (4, 0)] * 2
    assert torch.equal(lora_ffn(given), lora_ffn({name: each.detach() for name, each in given.items()}))


@pytest.mark.parametrize("options", [{}, {"adapter_dropout_p": 0.25, "dropout_seed": SEED}], ids=["", "dropout"])
def test_the_same_bits_without_gradients_and_in_checkpoints(options: dict[str, Any]) -> None:
    given, dy = operands(wanted=TRAINED), torch.randn(M, SIZES[2])
    y = lora_ffn(given, **options)
    expected = gradients(y, given, dy)
    with torch.no_grad():
        assert torch.equal(lora_ffn(given, **options), y)
    again = checkpoint(
        lambda *each: lora_ffn(dict(zip(given, each, strict=True)), **options), *given.values(), use_reentrant=False
    )
    assert torch.equal(again, y)
    assert same(gradients(again, given, dy), expected)


def test_leading_dims_and_strides() -> None:
    given, dy = operands(), torch.randn(M, SIZES[2]).to(BFLOAT16)
    y = lora_ffn(given)
    expected = gradients(y, given, dy)
    again = given | {"x": given["x"].detach().view(2, M // 2, -1).requires_grad_()}
    for name in ("up_a", "gate_b", "down_a", "down_b", "w_up"):
        again[name] = given[name].detach().T.contiguous().T.requires_grad_()
    other = lora_ffn(again)
    assert torch.equal(other.view(y.shape), y)
    found = gradients(other, again, dy.view(other.shape))
    assert all(torch.equal(found[name].view(value.shape), value) for name, value in expected.items())


def test_second_derivatives_are_those_of_16_bits() -> None:
    found = []
    given = operands()
    for precision in ("fp8", None):
        y = lora_ffn(given, precision)
        [dx] = torch.autograd.grad(y.float().square().sum(), [given["x"]], create_graph=True)
        found.append(torch.autograd.grad(dx.float().square().sum(), [given["up_a"]])[0])
    assert sqnr(found[0], found[1].double()) >= OF_WEIGHT_GRADIENT


def test_weights_under_autocast_stay_quantised(made: Any) -> None:
    given, dy = operands(wanted=TRAINED, dtype=torch.float32), torch.randn(M, SIZES[2])
    counts = []
    for _ in range(2):
        made.clear()
        with torch.autocast("cpu", BFLOAT16), decisions() as taken:
            y = lora_ffn(given)
        found = gradients(y, given, dy)
        counts.append((made["rows"], made["transposed"]))
    assert taken == {"lora_ffn float8": 1}
    assert {each.dtype for each in found.values()} == {torch.float32}
    assert counts == [(7, 2), (4, 0)]
    assert torch.equal(y, lora_ffn({name: each.detach().to(BFLOAT16) for name, each in given.items()}))


def test_opcheck() -> None:
    given = operands()
    expected = lora_ffn(given)
    with FlopCounterMode(display=False), Recorded() as recorded:
        y = lora_ffn(given)
        y.float().square().sum().backward()
    assert torch.equal(y, expected)
    assert set(recorded.calls) == {"float8_lora_ffn_forward", "float8_lora_ffn_backward"}
    for called, arguments in recorded.calls.values():
        leaves = [t.detach().requires_grad_(t.requires_grad) if isinstance(t, Tensor) else t for t in arguments]
        if called._opname.endswith("_backward"):
            leaves[:3] = ([None if t is None else t.detach() for t in each] for each in leaves[:3])
        torch.library.opcheck(called, tuple(leaves))


def test_compiled() -> None:
    given, dy = operands(wanted=TRAINED), torch.randn(M, SIZES[2])
    expected = lora_ffn(given)
    compiled = torch.compile(lambda **each: lora_ffn(each), fullgraph=True, backend="aot_eager")
    y = compiled(**given)
    assert torch.equal(y, expected)
    assert same(gradients(y, given, dy), gradients(expected, given, dy))


@pytest.mark.parametrize("dtype", [BFLOAT16, torch.float16], ids=str)
def test_factors_that_are_divided_by_scales(dtype: torch.dtype) -> None:
    """Exactly, also by the least scale, that of a row of zeros; TMA can read what comes out."""
    u, b = torch.randn(M, 16, dtype=dtype), torch.randn(96, 5, dtype=dtype)
    rows, columns = torch.full((M,), 2.0**-108), torch.randint(-20, 20, (96,)).float().exp2()
    for axis, right in ((0, b), (1, b.T), (1, b.T.contiguous())):
        made = LowRank(u, right, right if axis == 0 else None, 8).divided(rows, columns, columns, axis)
        scale = columns[:, None] if axis == 0 else columns
        assert torch.equal(made.left.double() * 2.0**-108, u.to(BFLOAT16).double())
        assert torch.equal(made.right.double() * scale, right.to(BFLOAT16).double())
        assert made.other is None or torch.equal(made.other, made.right)
        blocks = ((64, 64), (64, 64))
        assert low_rank_copies(made.copied(axis == 1), axis == 1, *blocks) is not None


def test_an_unknown_precision() -> None:
    with pytest.raises(ValueError, match="precision must be None"):
        lora_ffn(operands(), "fp4")
