"""The numbers of every operation on every path: of any size, dtype, layout and activation, with NaN, and autocast."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import strategies
from torch import Tensor

from fusedlayers.closeness import assert_all_close
from tests.support.compiled_cases import given as tensors_of
from tests.support.number_cases import (
    NUMBERS,
    Numbers,
    Results,
    assert_numbers_close,
    cases,
    in_kernels,
    outcome,
    upstream,
)
from tests.support.operands import (
    DEVICE,
    DTYPES,
    INTEGERS,
    ON_GPU,
    SIZES,
    assert_equal,
    in_float64,
    infinities,
    on_path,
    seed_after,
)
from tests.support.selection import draws

# Their numbers at many sizes, and with every option, are in files of their own.
REDUCTIONS = ("max", "sumsq", "maxsim")
# What becomes of a value on its way depends on the activation, of which these are enough for most operands.
FEW = (None, "relu", "gelu")


def run(numbers: Numbers, path: str, *arguments: Any, **options: Any) -> Results:
    """What our operation gives on this path."""
    with on_path(path) as own:
        return outcome(numbers, numbers.ours, *arguments, **options, **(own if numbers.function == "ffn" else {}))


@pytest.mark.sampled(together=2)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("name", "path", "activation"),
    [
        pytest.param(*case.values, activation, marks=case.marks)
        for case in in_kernels(cases())
        for activation in NUMBERS[case.values[0]].activations
    ],
)
def test_activations(name: str, path: str, activation: str | None, dtype: torch.dtype) -> None:
    """Two row tiles and two column tiles, both ragged."""
    numbers = NUMBERS[name]
    sizes = dict(zip(numbers.sizes, (2, 70) if "Z" in numbers.sizes else (70,), strict=False)) | {"K": 24, "N": 50}
    assert_numbers_close(name, path, numbers.inputs(dtype, **sizes), activation=activation)


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("name", "path"), cases("maxsim", "sumsq"))
def test_exact_integers(name: str, path: str, dtype: torch.dtype) -> None:
    numbers, draw = NUMBERS[name], INTEGERS[dtype]
    for activation in (None, "relu") if numbers.activations else (None,):
        options = {"activation": activation or "identity"} if numbers.activations else {}
        tensors = numbers.inputs(dtype, draw, M=49, N=37, K=5, O=6)
        truth = outcome(numbers, numbers.theirs, in_float64(tensors), draw=draw, **options)
        assert_equal(in_float64(run(numbers, path, tensors, draw=draw, **options)), truth)


@pytest.mark.sampled(together=2)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(
    ("name", "path", "letter"),
    [
        pytest.param(*case.values, letter, marks=case.marks)
        for case in cases(*REDUCTIONS)
        for letter in NUMBERS[case.values[0]].sizes
    ],
)
def test_sizes_one_at_a_time(name: str, path: str, letter: str, size: int) -> None:
    numbers = NUMBERS[name]
    if path == "kernels" and letter in "KO" and size > 256 and numbers.between:
        pytest.skip("wider than the chip: no kernel takes it")
    options = {"activation": "silu"} if numbers.activations else {}
    tensors = numbers.inputs(torch.float32 if size <= 65 else DTYPES[-1], **{letter: size})
    assert_numbers_close(name, path, tensors, **options)


@hypothesis.settings(max_examples=60 if ON_GPU else draws(6, 15))
@pytest.mark.parametrize(("name", "path"), in_kernels(cases(*REDUCTIONS)))
@hypothesis.given(data=strategies.data())
def test_sizes_in_random_combinations(name: str, path: str, data: strategies.DataObject) -> None:
    """With any leading dims, activation and dtype, and without some of the biases."""
    numbers = NUMBERS[name]
    sizes = {letter: data.draw(strategies.integers(0, 40), letter) for letter in numbers.sizes}
    leading = tuple(data.draw(strategies.lists(strategies.integers(0, 6), max_size=4), "leading"))
    dtype = data.draw(strategies.sampled_from(DTYPES[:2]), "dtype")
    options: dict[str, Any] = {}
    if numbers.activations:
        options["activation"] = data.draw(strategies.sampled_from(numbers.activations), "activation")
    optional = [each for each in numbers.operands if each.startswith("b_") or each in ("bias", "residual")]
    absent = data.draw(strategies.sets(strategies.sampled_from(optional)), "absent") if optional else set()
    drawn = [numbers.inputs(dtype, leading=leading, **sizes) for _ in range(3)]
    given = [{key: tensor for key, tensor in tensors.items() if key not in absent} for tensors in drawn]
    seed = None
    if path == "kernels" and numbers.function == "ffn" and all(tensor.numel() for tensor in given[0].values()):
        options["dropout_p"] = data.draw(strategies.sampled_from([0.0, 0.25]), "dropout_p")
        seed = _seed
    assert_numbers_close(name, path, *given, seed=seed, **options)


def _seed() -> Tensor:
    return seed_after(3)


@pytest.mark.parametrize("leading", [(), (3,), (2, 5), (2, 1, 5), (2, 3, 1, 5), (0,), (2, 0), (0, 3)], ids=str)
@pytest.mark.parametrize(("name", "path"), [case for case in cases(*REDUCTIONS) if NUMBERS[case.values[0]].has_rows])
def test_leading_dims_are_rows(name: str, path: str, leading: tuple[int, ...]) -> None:
    """Results have those of the operands, and gradients theirs; of no rows there is nothing but zeros."""
    numbers = NUMBERS[name]
    tensors = numbers.inputs(leading=leading, N=18)
    assert_numbers_close(name, path, tensors)
    ours, theirs = run(numbers, path, tensors), outcome(numbers, numbers.theirs, tensors)
    assert {key: each.shape for key, each in ours.items() if each is not None} == {
        key: each.shape for key, each in theirs.items() if each is not None
    }
    if 0 in leading:
        assert not any(each.any() for key, each in ours.items() if each is not None and key != "dresidual")


def strided_vector(tensor: Tensor) -> Tensor:
    return torch.stack((tensor, torch.full_like(tensor, math.nan)), -1)[..., 0]


# The same values in another layout; what lies between them is NaN. Expanded ones repeat their first values.
LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "sliced, odd row stride": lambda t: torch.cat((t, torch.full_like(t[..., :1], math.nan)), -1)[..., : t.shape[-1]],
    "middle of three chunks": lambda t: torch.cat((t * math.nan, t, t * math.nan), -1).chunk(3, -1)[1],
    "every other column": strided_vector,
    "every other row": lambda t: torch.stack((t, torch.full_like(t, math.nan)), 1)[:, 0],
    "transposed": lambda t: t.mT.contiguous().mT if t.dim() > 1 else strided_vector(t),
    "first axis last": lambda t: t.movedim(0, -1).contiguous().movedim(-1, 0),
    "one element off": lambda t: torch.cat((t.new_full((1,), math.nan), t.flatten()))[1:].view(t.shape),
    "one row": lambda t: t[:1].expand_as(t),
    "one column": lambda t: t[..., :1].expand_as(t),
    "one number": lambda t: t.flatten()[0].expand_as(t),
}


def copied(tensor: Tensor) -> Tensor:
    return tensor.clone(memory_format=torch.contiguous_format)


@pytest.mark.sampled(together=2)
@pytest.mark.parametrize(
    ("rows", "whole", "dtype"),
    [(1, False, torch.float32), (19, False, torch.float16), (19, True, DTYPES[-1]), (19, True, torch.float32)],
    ids=["one row", "no whole vectors", "whole vectors of 16 bits", "whole vectors"],
)
@pytest.mark.parametrize("together", [False, True], ids=["one by one", "all at once"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("name", "path"), in_kernels(cases()))
def test_layouts_change_nothing(
    name: str, path: str, layout: str, together: bool, rows: int, whole: bool, dtype: torch.dtype
) -> None:
    """In exact integers: the layout of operands and of upstream gradients."""
    numbers, lay, draw = NUMBERS[name], LAYOUTS[layout], INTEGERS[dtype]
    sizes = {"N": 24, "K": 8, "O": 12} if whole else {"N": 21, "K": 9, "O": 7}
    tensors = numbers.inputs(dtype, draw, (2, rows) if rows > 1 else (1,), M=rows, **sizes)
    options = {"activation": "relu"} if numbers.activations else {}
    given = upstream(tensors_of(numbers.theirs(**tensors, **{**numbers.options, **options})), draw)
    for group in [[*tensors, "upstream"]] if together else [[name] for name in (*tensors, "upstream")]:
        strided = {key: lay(tensor) if key in group else tensor for key, tensor in tensors.items()}
        plain = {key: copied(tensor) for key, tensor in strided.items()}
        others = [lay(each) for each in given] if "upstream" in group else given
        ours = run(numbers, path, strided, others, **options)
        assert_equal(ours, run(numbers, path, plain, [copied(each) for each in others], **options))


@pytest.mark.sampled(together=2)
@infinities
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("single", [False, True], ids=["many rows", "one row"])
@pytest.mark.parametrize(
    ("name", "path", "role", "activation"),
    [
        pytest.param(*case.values, role, activation, marks=case.marks)
        for case in in_kernels(cases("max", "sumsq"))
        if case.values[1] != "chunked"
        for role in (*NUMBERS[case.values[0]].operands, *["upstream"] * NUMBERS[case.values[0]].differentiates)
        for activation in (NUMBERS[case.values[0]].activations or (None,))
        if role in ("x", "a", "z", "upstream") or activation in FEW
    ],
)
def test_special_values_spread_as_in_torch(
    name: str, path: str, role: str, activation: str | None, single: bool, value: float
) -> None:
    """One NaN or infinity somewhere makes exactly those results NaN or infinite that it makes in torch.

    torch computes the expectation in float64, because the float32 gelu of its CPU has no value at +inf; pre-activations
    are small, so that nothing saturates in one dtype alone. A single row cannot hide behind the others' infinities that
    padding makes a NaN.
    """
    numbers = NUMBERS[name]
    tensors = {key: each.clamp(-1, 1) for key, each in numbers.inputs(M=1 if single else 50, N=21, K=5).items()}
    options = {"activation": activation or "identity"} if numbers.activations else {}
    given = upstream(tensors_of(numbers.theirs(**tensors, **{**numbers.options, **options})))
    planted = given[0] if role == "upstream" else tensors[role]
    planted.view(-1)[planted.numel() // 2] = value
    ours = run(numbers, path, tensors, given, **options)
    truth = outcome(numbers, numbers.theirs, in_float64(tensors), [each.double() for each in given], **options)
    with on_path(path) as own, torch.no_grad():
        alone = numbers.ours(**tensors, **{**numbers.options, **options}, **(own if numbers.function == "ffn" else {}))
    for place, result in enumerate(tensors_of(alone)):
        ours[f"{place} without gradients"], truth[f"{place} without gradients"] = result, truth[f"result {place}"]
    for key, tensor in ours.items():
        other = truth[key]
        if tensor is None or other is None:
            continue
        if name == "maxsim" and (role, key) == ("documents", "dqueries"):
            # torch multiplies by the zeros of its dense gradient: a token that no one chose leaves no NaN in ours.
            assert not (tensor.isnan() & ~other.isnan()).any()
            continue
        assert torch.equal(tensor.isfinite(), other.isfinite()), key
        # Behind its slope torch adds up two terms, whose infinities may cancel to NaN where kernels multiply once.
        if activation != "quick_gelu":
            assert torch.equal(tensor.isnan(), other.isnan()), key
            infinite = tensor.isinf()
            assert torch.equal(tensor[infinite].double(), other[infinite]), key
    if math.isnan(value) and numbers.differentiates:
        assert any(each.isnan().any() for each in ours.values() if each is not None)


@pytest.mark.parametrize("half", ["", "first", "others"])
@pytest.mark.parametrize(("name", "path"), cases())
def test_autocast(name: str, path: str, half: str) -> None:
    """Forward inside of it, backward outside: results in its dtype, every gradient in that of its operand."""
    numbers = NUMBERS[name]
    tensors = {key: each for key, each in numbers.inputs(N=48).items() if key != "residual"}
    first = next(iter(tensors))
    tensors = {
        key: each.half() if (half == "first" and key == first) or (half == "others" and key != first) else each
        for key, each in tensors.items()
    }
    options = {"activation": "relu"} if numbers.activations else {}

    def inside(**arguments: Any) -> Any:
        with torch.autocast(DEVICE.type, torch.float16):
            return numbers.ours(**arguments)

    def cast(**arguments: Any) -> Any:
        return numbers.theirs(**{key: v.half() if isinstance(v, Tensor) else v for key, v in arguments.items()})

    with on_path(path) as own:
        ours = outcome(numbers, inside, tensors, **options, **(own if numbers.function == "ffn" else {}))
    dtypes = {f"d{key}": each.dtype for key, each in tensors.items()}
    assert {key: each.dtype for key, each in ours.items() if each is not None} == {
        key: dtypes.get(key, torch.float16) for key, each in ours.items() if each is not None
    }
    truth = outcome(numbers, numbers.theirs, in_float64(tensors), **options)
    theirs = outcome(numbers, cast, tensors, **options)
    assert_all_close(ours, theirs, truth, computed_in=torch.float16, independent=numbers.independent(tensors))
