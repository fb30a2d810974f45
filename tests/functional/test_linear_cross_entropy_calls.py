"""The loss head as a function of torch: bad input, special values, derivatives, autocast, compilation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from fusedlayers import explain, functional, reference
from fusedlayers.closeness import assert_all_close
from fusedlayers.functional.dispatch import decisions
from tests.support.compiled_cases import nothing_compiled  # noqa: F401
from tests.support.loss_operands import (
    EVERY_KERNEL,
    EVERY_PATH,
    IGNORED,
    KERNELS,
    PATHS,
    frozen_on,
    in_float64,
    loss_inputs,
    on_path,
    results,
)
from tests.support.operands import DEVICE, ON_GPU, infinities, needs_kernels

pytestmark = [
    infinities,
    # The interpreter's maximum of a row of NaN.
    pytest.mark.filterwarnings("ignore:All-NaN (slice|axis) encountered:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:`isinstance\\(treespec, LeafSpec\\)` is deprecated:FutureWarning"),
]
X, W, T = torch.zeros(2, 5, 3), torch.zeros(4, 3), torch.zeros(2, 5, dtype=torch.int64)
BOTH = [
    ({"recompute": "auto"}, TypeError, "recompute must be True or False, got 'auto' (str)"),
    ({"target": T.int()}, TypeError, "target of shape [2, 5] and dtype torch.int32 on cpu: expected torch.int64"),
    ({"target": T.to_sparse()}, TypeError, "has the layout torch.sparse_coo: expected torch.strided"),
    ({"ignore_index": 1.0}, TypeError, "ignore_index must be an int or None, got 1.0 (float)"),
    ({"ignore_index": 2**63}, ValueError, "ignore_index must be an int of 64 bits, got 9223372036854775808"),
    ({"softcap": 0.0}, ValueError, "softcap must be a positive number or None, got 0.0"),
    ({"softcap": -1}, ValueError, "softcap must be a positive number or None, got -1"),
    ({"softcap": "30"}, TypeError, "softcap must be a positive number or None, got '30' (str)"),
    ({"logit_scale": float("nan")}, ValueError, "logit_scale must be a finite number, got nan"),
    ({"logit_scale": True}, TypeError, "logit_scale must be a finite number, got True (bool)"),
]
LOSSES = [
    (
        {"target": T.float()},
        ValueError,
        "expected [*B, V] = [2, 5, 4], as input is [*B, K] = [2, 5, 3] and linear",
    ),
    ({"reduction": "average"}, ValueError, "reduction must be one of none, mean, sum, got 'average'"),
    ({"reduction": None}, ValueError, "reduction must be one of none, mean, sum, got None"),
    ({"label_smoothing": 1.5}, ValueError, "label_smoothing must be a number from 0 to 1, got 1.5"),
    ({"label_smoothing": None}, TypeError, "label_smoothing must be a number from 0 to 1, got None"),
    ({"z_loss": -1e-4}, ValueError, "z_loss must be a number from 0 on, got -0.0001"),
    ({"weight": [1.0]}, TypeError, "weight must be a torch.Tensor or None, got list"),
    ({"weight": torch.ones(3)}, ValueError, "weight of shape [3] and dtype torch.float32 on cpu: expected [V] = [4]"),
    ({"weight": torch.ones(4).int()}, TypeError, "weight of shape [4] and dtype torch.int32 on cpu: expected a real"),
    ({"weight": torch.ones(4, device="meta")}, ValueError, "expected the device of input, cpu"),
    ({"weight": torch.ones(4, requires_grad=True)}, ValueError, "requires a gradient, and class weights have none"),
]
LOG_PROBS = [
    ({"target": T.float()}, TypeError, "target of shape [2, 5] and dtype torch.float32 on cpu: expected torch.int64"),
    ({"return_entropy": 1}, TypeError, "return_entropy must be True or False, got 1"),
]
CALLS: list[tuple[Callable[..., Any], dict[str, Any], type[Exception], str]] = [
    *((functional.linear_cross_entropy, *row) for row in (*BOTH, *LOSSES)),
    *((functional.linear_log_probs, *row) for row in (*BOTH, *LOG_PROBS)),
]


@pytest.mark.parametrize(("function", "change", "error", "words"), CALLS)
def test_bad_input(function: Callable[..., Any], change: dict[str, Any], error: type[Exception], words: str) -> None:
    for call in (function, lambda **given: explain(function, **given)):
        with pytest.raises(error) as raised:
            call(**({"input": X, "linear_weight": W, "target": T} | change))
        assert words in str(raised.value)


# Rows of logits by what is special in them, and one that is not.
ROWS = {
    "a column of -inf": [-torch.inf, 0.0, 1.0, 2.0],
    "one column alone": [-torch.inf, -torch.inf, 3.0, -torch.inf],
    "nothing but -inf": [-torch.inf] * 4,
    "inf": [1.0, torch.inf, 0.0, -1.0],
    "two of inf": [torch.inf, torch.inf, 0.0, -torch.inf],
    "NaN": [torch.nan, 0.0, 1.0, 2.0],
    "large": [3e38, -3e38, 1.0, 3e38],
    "plain": [0.5, 1.5, -1.0, 2.0],
}


@pytest.mark.sampled(together=2)
@pytest.mark.parametrize("path", KERNELS)
@pytest.mark.parametrize(
    "options", [{}, {"label_smoothing": 0.25}, {"weight": 1}, {"softcap": 2.0}, {"z_loss": 0.5}], ids=str
)
@pytest.mark.parametrize("reduction", ["none", "sum"])
@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)
def test_special_values(row: list[float], reduction: str, options: dict[str, Any], path: str) -> None:
    """Losses and gradients of logits are infinite or NaN where torch's are, for every target and an ignored one."""
    if "z_loss" in options and max(row) > 1e38:
        pytest.skip(
            "twice the logsumexp is infinite in torch's gradient of the square, before the z-loss makes it small"
        )
    V = len(row)
    target = torch.tensor([*range(V), IGNORED], device=DEVICE)
    # Logits are the bias; the gradient of the input sees each token's own.
    bias, upstream = torch.tensor(row, device=DEVICE), torch.tensor([1.0, 0.5, -1.0, 2.0, 1.0], device=DEVICE)
    inputs = {"input": torch.zeros(V + 1, V), "linear_weight": torch.eye(V), "linear_bias": bias, "target": target}
    inputs |= {name: inputs[name].to(DEVICE) for name in ("input", "linear_weight")}
    if "weight" in options:
        options = {"weight": torch.tensor([1.0, 0.0, 2.0, 0.5], device=DEVICE)}
    given = {"reduction": reduction, "upstream": [upstream if reduction == "none" else upstream[0]], **options}
    with on_path(path):
        ours = results(functional.linear_cross_entropy, inputs, **given)
    theirs = results(reference.linear_cross_entropy, inputs, **given)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6, equal_nan=True)


# Products of a large logit with an upstream gradient overflow in torch's gradient of the entropy.
@pytest.mark.parametrize("path", KERNELS)
@pytest.mark.parametrize("row", [row for name, row in ROWS.items() if name != "large"], ids=str)
def test_special_values_of_log_probabilities(row: list[float], path: str) -> None:
    V = len(row)
    target = torch.tensor([*range(V), IGNORED], device=DEVICE)
    inputs = {
        "input": torch.zeros(V + 1, V, device=DEVICE), "linear_weight": torch.eye(V, device=DEVICE),
        "linear_bias": torch.tensor(row, device=DEVICE), "target": target,
    }  # fmt: skip
    with on_path(path):
        ours = results(functional.linear_log_probs, inputs, return_entropy=True)
    theirs = results(reference.linear_log_probs, inputs, return_entropy=True)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6, equal_nan=True)


@pytest.mark.parametrize("path", KERNELS)
@pytest.mark.parametrize("recompute", [False, True])
def test_class_weights_that_add_up_to_zero(recompute: bool, path: str) -> None:
    """A mean over no weight is NaN with gradients that are NaN, but for tokens that do not count, as torch's."""
    inputs = loss_inputs((9,), 24, 70, ignored=2)
    inputs["weight"] = torch.zeros(70, device=DEVICE)
    with on_path(path):
        ours = results(functional.linear_cross_entropy, inputs, recompute=recompute)
    theirs = results(reference.linear_cross_entropy, inputs)
    torch.testing.assert_close(ours, theirs, equal_nan=True)


@pytest.mark.sampled(together=2)
@pytest.mark.bits
@pytest.mark.parametrize("path", EVERY_KERNEL)
@pytest.mark.parametrize("target", [-1, 70, 127, 128, 2**32 + 3, 2**40, -(2**40)])
@pytest.mark.parametrize("reduction", ["none", "mean"])
@pytest.mark.parametrize("weight", [False, True])
def test_a_target_that_is_no_class_shows(target: int, reduction: str, weight: bool, path: str) -> None:
    """Without a copy to the host nobody can raise; other tokens keep their losses."""
    inputs = loss_inputs((9,), 24, 70, weight=weight, ignored=0)
    given = {name: tensor for name, tensor in inputs.items() if tensor is not None}
    with on_path(path):
        frozen = frozen_on(path)
        right = results(functional.linear_cross_entropy, given, frozen, reduction=reduction)["result 0"]
        wrong = given["target"].clone()
        wrong[4] = target
        found = results(functional.linear_cross_entropy, given | {"target": wrong}, frozen, reduction=reduction)
    loss, gradient = found["result 0"], found["dinput"]
    assert (gradient is None) == (path == "fused")
    if reduction == "mean":
        assert loss.isnan()
    else:
        assert loss.isnan().nonzero().tolist() == [[4]]
        others = torch.arange(9, device=DEVICE) != 4
        assert torch.equal(loss[others], right[others])
        assert gradient is None or not gradient[others].isnan().any()
    assert gradient is None or gradient[4].isnan().all()


@pytest.mark.parametrize("path", EVERY_PATH)
@pytest.mark.parametrize("name", ["input", "linear_weight", "linear_bias"])
def test_special_values_of_operands(name: str, path: str) -> None:
    """NaN and infinities planted in an operand spread as in torch."""
    for value in (torch.nan, torch.inf, -torch.inf):
        inputs = loss_inputs((2, 9), 24, 70, bias=True)
        planted = inputs[name]
        planted.view(-1)[7] = value
        with on_path(path):
            ours = results(functional.linear_cross_entropy, inputs, frozen_on(path), reduction="none")
        theirs = results(reference.linear_cross_entropy, inputs, frozen_on(path), reduction="none")
        for key, mine in ours.items():
            other = theirs[key]
            assert (mine is None) == (other is None)
            if mine is None or other is None:
                continue
            assert torch.equal(mine.isnan(), other.isnan()), key
            assert torch.equal(mine.isinf(), other.isinf()), key


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("tokens", [(0,), (2, 0, 3)])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_no_tokens(tokens: tuple[int, ...], reduction: str, path: str) -> None:
    inputs = loss_inputs(tokens, 24, 70, ignored=0)
    with on_path(path):
        found = results(functional.linear_cross_entropy, inputs, reduction=reduction)
    expected = {"mean": torch.tensor(torch.nan), "sum": torch.tensor(0.0), "none": torch.zeros(tokens)}[reduction]
    loss, gradient = found["result 0"], found["dlinear_weight"]
    assert not gradient.any()
    torch.testing.assert_close(loss, expected.to(DEVICE), equal_nan=True)


@pytest.mark.parametrize("path", EVERY_PATH)
@pytest.mark.parametrize("dtype", [torch.float16, *([torch.bfloat16] if ON_GPU else [])], ids=str)
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_autocast(dtype: torch.dtype, reduction: str, path: str) -> None:
    """Products in the dtype of autocast, class weights and losses in float32, gradients in that of the parameters."""
    inputs = loss_inputs((2, 9), 24, 70, bias=True, weight=True)

    def inside(call: Callable[..., Any]) -> Callable[..., Any]:
        def cast(**given: Any) -> Any:
            with torch.autocast(DEVICE.type, dtype):
                return call(**given)

        return cast

    def by_torch(*, input: Tensor, linear_weight: Tensor, linear_bias: Tensor, target: Tensor, **options: Any) -> Any:
        logits = torch.nn.functional.linear(input, linear_weight, linear_bias)
        return torch.nn.functional.cross_entropy(logits.movedim(-1, 1), target, **options)

    options = {
        "reduction": reduction,
        "frozen": frozen_on(path),
        "upstream": [torch.ones(2, 9, device=DEVICE)] if reduction == "none" else None,
    }
    with on_path(path):
        ours = results(inside(functional.linear_cross_entropy), inputs, **options)
    theirs = results(inside(by_torch), inputs, **options)
    truth = results(reference.linear_cross_entropy, in_float64(inputs), **options)
    assert {key: t.dtype for key, t in ours.items() if t is not None} == {
        key: torch.float32 for key, t in ours.items() if t is not None
    }
    assert_all_close(ours, theirs, truth, computed_in=dtype, independent=18)


def test_autocast_leaves_probabilities_as_they_are() -> None:
    inputs = loss_inputs((2, 9), 24, 70)
    inputs["target"] = torch.rand(2, 9, 70).softmax(-1).to(DEVICE)
    low = {name: inputs[name].to(torch.bfloat16) for name in ("input", "linear_weight")}  # type: ignore[union-attr]
    with torch.autocast(DEVICE.type, torch.bfloat16):
        ours = functional.linear_cross_entropy(**inputs)
    assert torch.equal(ours, reference.linear_cross_entropy(**low, target=inputs["target"]))


@needs_kernels
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("linear_cross_entropy", {"softcap": 30, "logit_scale": 2, "recompute": True}),
        ("linear_log_probs", {"return_entropy": True, "recompute": True}),
        ("linear_log_probs", {"return_entropy": True, "softcap": 30, "logit_scale": 2}),
    ],
    ids=str,
)
def test_compiled(name: str, options: dict[str, Any]) -> None:
    """Options that a graph holds, and several lengths; test_compiled.py compiles the paths without options."""
    function = getattr(functional, name)
    with on_path("recomputed" if "recompute" in options else "chunked"):
        compiled = torch.compile(
            lambda **given: function(**given, **options), backend="aot_eager", fullgraph=True, dynamic=True
        )
        for tokens in (9, 17, 33):
            inputs = loss_inputs((tokens,), 24, 70, bias=True)
            with decisions() as paths:
                ours = results(compiled, inputs)
            assert set(paths) <= {f"{name} fused"}
            torch.testing.assert_close(ours, results(function, inputs, **options))
