"""Bad input: each error names the argument, its shape and dtype, and what was expected, before anything happens."""

from __future__ import annotations

import functools
import inspect
import math
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fusedlayers import functional
from fusedlayers.functional.operation import OPERATIONS
from tests.support.contract_cases import made
from tests.support.operands import PATHS, Allocations, ffn_inputs, on_path

CPU = torch.device("cpu")
M, K, N, O = 5, 6, 18, 4


def valid_ffn() -> dict[str, Any]:
    return ffn_inputs((2, M), K, N, O, gated=True, residual=True, device=CPU)


def valid_gemm_gemm() -> dict[str, Any]:
    return {"a": torch.randn(3, M, K), "b": torch.randn(3, K, N), "c": torch.randn(3, N, O)}


def valid_maxsim() -> dict[str, Any]:
    return {"queries": torch.randn(3, M, K), "documents": torch.randn(O, N, K)}


def valid_call(operation: str) -> dict[str, Any]:
    """The arguments of a call of the contract tests, in the order of the function."""
    arguments = made({"gemm_reduce": "sum"}.get(operation, operation), adapter_dropout_p=0.0).arguments
    names = [name for name in inspect.signature(getattr(functional, operation)).parameters if name in arguments]
    given = {name: arguments[name] for name in names}
    return {name: each.detach() if isinstance(each, Tensor) else each for name, each in given.items()}


CALLS: dict[str, tuple[Callable[..., Tensor], Callable[[], dict[str, Any]]]] = {
    "ffn": (functional.ffn, valid_ffn),
    "gemm_gemm": (functional.gemm_gemm, valid_gemm_gemm),
    "maxsim": (functional.maxsim, valid_maxsim),
}
EVERY_CALL = CALLS | {
    operation: (getattr(functional, operation), functools.partial(valid_call, operation))
    for operation in OPERATIONS
    if operation not in CALLS
}
TENSORS = [
    (operation, name)
    for operation, (_, valid) in EVERY_CALL.items()
    for name, value in valid().items()
    if isinstance(value, Tensor)
]
FLOATING = [(operation, name) for operation, name in TENSORS if name not in ("top_k_index", "target")]
# The weights of experts may have a dtype of their own.
OF_ONE_DTYPE = [(operation, name) for operation, name in FLOATING if name != "top_k_weights"]


def is_optional(operation: str, name: str) -> bool:
    return inspect.signature(getattr(functional, operation)).parameters[name].default is None


def first_and_second(operation: str, arguments: dict[str, Any], chosen: list[tuple[str, str]]) -> list[str]:
    """The tensor that sets what others must have, and the one that is named where the first one is the odd one."""
    return [name for name in arguments if (operation, name) in chosen][:2]


def refused(operation: str, error: type[Exception], words: str, **changes: Any) -> None:
    """The call with ``changes`` raises, says the words (a regular expression), computes and changes nothing."""
    call, valid = EVERY_CALL[operation]
    arguments = valid() | changes
    before = {name: value.clone() for name, value in arguments.items() if isinstance(value, Tensor)}
    generator = torch.get_rng_state()
    with Allocations() as allocations, pytest.raises(error) as caught:
        call(**arguments)
    message = str(caught.value)
    assert re.search(words, message), message
    assert not allocations.elements, "something was computed"
    assert torch.equal(torch.get_rng_state(), generator), "something was drawn"
    for name, tensor in before.items():
        assert tensor.is_meta or torch.equal(tensor, arguments[name]), name


def said(name: str, tensor: Tensor) -> str:
    return re.escape(f"{name} of shape {list(tensor.shape)} and dtype {tensor.dtype} on {tensor.device}")


@pytest.mark.sampled
@pytest.mark.parametrize("value", [None, "text", 3.0, [[1.0]], np.ones((2, 2), dtype=np.float32)], ids=str)
@pytest.mark.parametrize(("operation", "name"), TENSORS)
def test_an_argument_that_is_no_tensor(operation: str, name: str, value: object) -> None:
    got = "None" if value is None else type(value).__name__
    if value is not None or not is_optional(operation, name):
        expected = "a torch.Tensor or None" if is_optional(operation, name) else "a torch.Tensor"
        refused(operation, TypeError, f"^{name} must be {expected}, got {got}$", **{name: value})
    elif name == "w_gate":
        refused(operation, ValueError, "^b_gate must be None, because w_gate is None$", w_gate=None)
    elif operation == "ffn":
        assert functional.ffn(**valid_ffn() | {name: None}).shape == (2, M, O)


@pytest.mark.sampled
@pytest.mark.parametrize("dtype", [torch.int64, torch.int8, torch.bool, torch.complex64], ids=str)
@pytest.mark.parametrize(("operation", "name"), FLOATING)
def test_a_dtype_that_is_not_real_floating(operation: str, name: str, dtype: torch.dtype) -> None:
    tensor = EVERY_CALL[operation][1]()[name].to(dtype)
    refused(operation, TypeError, said(name, tensor) + ": expected a real floating-point dtype", **{name: tensor})


@pytest.mark.sampled
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize(("operation", "name"), OF_ONE_DTYPE)
def test_a_mix_of_dtypes(operation: str, name: str, dtype: torch.dtype) -> None:
    """As nn.Linear does, and in every position: the first tensor sets the dtype, so that another is named."""
    arguments = EVERY_CALL[operation][1]()
    first, second = first_and_second(operation, arguments, OF_ONE_DTYPE)
    tensor = arguments[name].to(dtype)
    if name == first:
        words = said(second, arguments[second]) + f": expected the dtype of {first}, {dtype}"
    else:
        words = said(name, tensor) + f": expected the dtype of {first}, torch.float32"
    refused(operation, TypeError, words, **{name: tensor})


@pytest.mark.parametrize(("operation", "name"), OF_ONE_DTYPE)
def test_float64_is_not_mixed_under_autocast(operation: str, name: str) -> None:
    """Autocast casts the other dtypes to one, but never float64; torch refuses the product too."""
    arguments = EVERY_CALL[operation][1]()
    first, second = first_and_second(operation, arguments, OF_ONE_DTYPE)
    culprit = name if name != first else second
    words = rf"^{culprit} of shape .* expected the dtype of {first}"
    with torch.autocast("cpu", torch.bfloat16):
        refused(operation, TypeError, words, **{name: arguments[name].double()})


@pytest.mark.parametrize(("operation", "name"), TENSORS)
def test_different_devices(operation: str, name: str) -> None:
    arguments = EVERY_CALL[operation][1]()
    first, second = first_and_second(operation, arguments, TENSORS)
    tensor = arguments[name].to("meta")
    if name == first:
        words = said(second, arguments[second]) + f": expected the device of {first}, meta"
    else:
        words = said(name, tensor) + f": expected the device of {first}, cpu"
    refused(operation, ValueError, words, **{name: tensor})


# Dims of one tensor alone, and leading dims that broadcast or are rows: another size there is another call.
FREE = {
    ("gemm_gemm", "a"): ("dim 1", "more", "fewer"), ("gemm_gemm", "b"): ("more", "fewer"),
    ("gemm_gemm", "c"): ("dim 2", "more", "fewer"), ("gemm_reduce", "a"): ("dim 1", "more", "fewer"),
    ("gemm_reduce", "b"): ("dim 2", "more", "fewer"), ("maxsim", "queries"): ("dim 0", "dim 1"),
    ("maxsim", "documents"): ("dim 0", "dim 1"), ("weight_gradient", "dy"): ("dim 2",),
    ("weight_gradient", "x"): ("dim 2",), ("linear", "x"): ("dim 0", "dim 1", "more", "fewer"),
    ("lora_ffn", "x"): ("dim 0", "dim 1", "more", "fewer"),
}  # fmt: skip


def reshaped(tensor: Tensor) -> dict[str, Tensor]:
    """A tensor with one dim larger, with more and with fewer dims, and with none."""
    found = {"more": torch.stack([tensor, tensor]), "fewer": tensor[0], "none": tensor.flatten()[0]}
    for dim in range(tensor.dim()):
        found[f"dim {dim}"] = torch.cat((tensor, tensor.narrow(dim, 0, 1)), dim)
    return found


@pytest.mark.parametrize(("operation", "name"), TENSORS)
def test_a_tensor_of_another_shape(operation: str, name: str) -> None:
    """The error names a tensor, its shape and what was expected, and the changed one; see also test_shapes.py."""
    call, valid = EVERY_CALL[operation]
    for change, tensor in reshaped(valid()[name]).items():
        if change in FREE.get((operation, name), ()):
            call(**valid() | {name: tensor})
        else:
            words = rf"^(?=.*\b{name} (of shape|is) )\w+ of shape .*: expected "
            refused(operation, ValueError, words, **{name: tensor})


W_UP = rf"as w_up is \[N, K\] = \[{N}, {K}\]"


def test_an_input_of_another_width_than_the_weights() -> None:
    """Weights of a layer are what its author asked for, unless they lie otherwise."""
    expected = r"expected \[\*B, M, K\] with K = "
    found = rf"^x of shape \[3, 7\] .*: {expected}{K}, {W_UP}$"
    refused("ffn", ValueError, found, x=torch.ones(3, 7))
    found = (
        rf"^x of shape .*: {expected}{N}, as w_up is \[N, K\] = \[{K}, {N}\], unless w_up is meant to be transposed$"
    )
    refused("ffn", ValueError, found, w_up=torch.ones(K, N))


@pytest.mark.parametrize(
    ("seed", "error", "words"),
    [
        (5, TypeError, "dropout_seed must be a torch.Tensor or None, got int"),
        (torch.zeros(1), TypeError, r"dropout_seed .*float32.*: expected torch.int64"),
        (torch.zeros(2, dtype=torch.int64), ValueError, r"dropout_seed of shape \[2\].*: expected \[1\]"),
        (
            torch.zeros(1, dtype=torch.int64, device="meta"),
            ValueError,
            "dropout_seed .*expected the device of x, cpu",
        ),
    ],
    ids=str,
)
def test_the_seed_of_the_ffn(seed: object, error: type[Exception], words: str) -> None:
    refused("ffn", error, words, dropout_seed=seed, dropout_p=0.5)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"a": (K,)}, r"^a of shape \[6\] .*: expected \[\*B, M, K\], at least two dimensions"),
        ({"a": (2, M, K)}, r"leading dimensions \*B that broadcast, got \[2\], \[3\], \[3\]"),
        (
            {"c": (2, 2, N, O)},
            r"c of shape \[2, 2, 18, 4\] .*leading dimensions \*B that broadcast, got \[3\], \[3\], \[2, 2\]",
        ),
    ],
)
def test_shapes_of_gemm_gemm(changes: dict[str, tuple[int, ...]], words: str) -> None:
    refused("gemm_gemm", ValueError, words, **{name: torch.randn(shape) for name, shape in changes.items()})


@pytest.mark.parametrize("operation", [name for name in CALLS if name != "maxsim"])
def test_activations(operation: str) -> None:
    known = r"known are: identity, relu, relu2, gelu, gelu_tanh, silu, quick_gelu, tanh, sigmoid, leaky_relu"
    for name in ("swoosh", "GELU", "gelu ", ""):
        refused(operation, ValueError, f"^activation {name!r} is not known; {known}", activation=name)
    for thing in (torch.relu, torch.nn.GELU(), 3, ["gelu"]):
        refused(operation, TypeError, r"^activation must be a name \(str\) or None, got", activation=thing)


@pytest.mark.parametrize("p", [1.0, 1, -0.1, 2, math.nan, math.inf, -math.inf])
def test_a_probability_outside_of_its_range(p: float) -> None:
    refused("ffn", ValueError, re.escape(f"dropout_p must be a number in [0, 1), got {p!r}"), dropout_p=p)


@pytest.mark.parametrize("p", [True, False, "0.1", None, torch.tensor(0.1), 0.1j], ids=str)
def test_a_probability_that_is_no_number(p: object) -> None:
    refused("ffn", TypeError, re.escape("dropout_p must be a number in [0, 1), got"), dropout_p=p)


@pytest.mark.parametrize("recompute", [None, 0, 1, -5, 1e9, "always", "True", ""], ids=repr)
def test_recompute(recompute: object) -> None:
    words = re.escape(f'recompute must be "auto", True, False or an int of bytes above 1, got {recompute!r}')
    refused("ffn", ValueError, words, recompute=recompute)


@pytest.mark.parametrize("path", PATHS)
def test_what_is_unusual_but_right(path: str) -> None:
    """Parameters, aliases of names, one-dimensional x, an integer as probability: accepted on every path."""
    t = {name: tensor.to(CPU) for name, tensor in valid_ffn().items()}
    if path == "kernels":
        t = {name: tensor.to(ffn_inputs(1, 1, 1, 1)["x"].device) for name, tensor in t.items()}
    t |= {name: torch.nn.Parameter(t[name]) for name in ("w_up", "b_up", "w_down")}
    with on_path(path) as options:
        y = functional.ffn(**t, activation="swish", dropout_p=0, **options)
        one = t | {"x": t["x"][0, 0], "residual": t["residual"][0, 0]}
        alone = functional.ffn(**one, activation="silu", **options)
    assert y.shape == (2, M, O)
    torch.testing.assert_close(alone, y[0, 0])


def test_positions_are_those_of_the_documentation() -> None:
    t = valid_ffn()
    residual = t.pop("residual")
    assert torch.equal(functional.ffn(*t.values(), residual=residual), functional.ffn(**t, residual=residual))
    with pytest.raises(TypeError, match="positional"):
        functional.ffn(*t.values(), "gelu")
    with pytest.raises(TypeError, match="positional"):
        functional.gemm_gemm(*valid_gemm_gemm().values(), "gelu")
