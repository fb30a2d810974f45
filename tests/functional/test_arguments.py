"""Bad input: each error names the argument, its shape and dtype, and what was expected, before anything happens."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fusedlayers import functional
from fusedlayers.functional import switches
from tests.support.operands import PATHS, Allocations, ffn_inputs, on_path

CPU = torch.device("cpu")
M, K, N, O = 5, 6, 18, 4


def valid_ffn() -> dict[str, Any]:
    return ffn_inputs((2, M), K, N, O, gated=True, residual=True, device=CPU)


def valid_gemm_gemm() -> dict[str, Any]:
    return {"a": torch.randn(3, M, K), "b": torch.randn(3, K, N), "c": torch.randn(3, N, O)}


def valid_maxsim() -> dict[str, Any]:
    return {"queries": torch.randn(3, M, K), "documents": torch.randn(O, N, K)}


CALLS: dict[str, tuple[Callable[..., Tensor], Callable[[], dict[str, Any]]]] = {
    "ffn": (functional.ffn, valid_ffn),
    "gemm_gemm": (functional.gemm_gemm, valid_gemm_gemm),
    "maxsim": (functional.maxsim, valid_maxsim),
}
OPTIONAL = ("b_up", "b_down", "w_gate", "b_gate", "residual")
TENSORS = [(operation, name) for operation, (_, valid) in CALLS.items() for name in valid()]


def refused(operation: str, error: type[Exception], words: str, **changes: Any) -> None:
    """The call with ``changes`` raises, says the words (a regular expression), computes and changes nothing."""
    call, valid = CALLS[operation]
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


@pytest.mark.parametrize("value", [None, "text", 3.0, [[1.0]], np.ones((2, 2), dtype=np.float32)], ids=str)
@pytest.mark.parametrize(("operation", "name"), TENSORS)
def test_an_argument_that_is_no_tensor(operation: str, name: str, value: object) -> None:
    got = "None" if value is None else type(value).__name__
    if value is not None or name not in OPTIONAL:
        expected = "a torch.Tensor or None" if name in OPTIONAL else "a torch.Tensor"
        refused(operation, TypeError, f"^{name} must be {expected}, got {got}$", **{name: value})
    elif name == "w_gate":
        refused(operation, ValueError, "^b_gate must be None, because w_gate is None$", w_gate=None)
    else:
        assert functional.ffn(**valid_ffn() | {name: None}).shape == (2, M, O)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int8, torch.bool, torch.complex64], ids=str)
@pytest.mark.parametrize(("operation", "name"), TENSORS)
def test_a_dtype_that_is_not_real_floating(operation: str, name: str, dtype: torch.dtype) -> None:
    tensor = CALLS[operation][1]()[name].to(dtype)
    refused(operation, TypeError, said(name, tensor) + ": expected a real floating-point dtype", **{name: tensor})


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize(("operation", "name"), TENSORS)
def test_a_mix_of_dtypes(operation: str, name: str, dtype: torch.dtype) -> None:
    """As nn.Linear does, and in every position: the first tensor sets the dtype, so that another is named."""
    arguments = CALLS[operation][1]()
    first, second = list(arguments)[:2]
    tensor = arguments[name].to(dtype)
    if name == first:
        words = said(second, arguments[second]) + f": expected the dtype of {first}, {dtype}"
    else:
        words = said(name, tensor) + f": expected the dtype of {first}, torch.float32"
    refused(operation, TypeError, words, **{name: tensor})


@pytest.mark.parametrize(("operation", "name"), TENSORS)
def test_float64_is_not_mixed_under_autocast(operation: str, name: str) -> None:
    """Autocast casts the other dtypes to one, but never float64; torch refuses the product too."""
    arguments = CALLS[operation][1]()
    first = next(iter(arguments))
    culprit = name if name != first else list(arguments)[1]
    words = rf"^{culprit} of shape .* expected the dtype of {first}"
    with torch.autocast("cpu", torch.bfloat16):
        refused(operation, TypeError, words, **{name: arguments[name].double()})


@pytest.mark.parametrize(("operation", "name"), TENSORS)
def test_different_devices(operation: str, name: str) -> None:
    arguments = CALLS[operation][1]()
    first, second = list(arguments)[:2]
    tensor = arguments[name].to("meta")
    if name == first:
        words = said(second, arguments[second]) + f": expected the device of {first}, meta"
    else:
        words = said(name, tensor) + f": expected the device of {first}, cpu"
    refused(operation, ValueError, words, **{name: tensor})


LAYOUT = "it looks transposed"
W_UP = rf"as w_up is \[N, K\] = \[{N}, {K}\]"
W_DOWN = rf"as w_down is \[O, N\] = \[{O}, {N}\]"
X = rf"as x is \[\*B, M, K\] = \[2, {M}, {K}\]"


@pytest.mark.parametrize(
    ("name", "shape", "words"),
    [
        ("x", (), r"expected \[\*B, M, K\], at least one dimension"),
        ("w_up", (N,), rf"expected \[N, K\], two dimensions, with K = {K}, {X}$"),
        ("w_up", (1, N, K), rf"expected \[N, K\], two dimensions, with K = {K}, {X}$"),
        ("w_down", (N, O), rf"expected \[O, N\] with N = {N}, {W_UP} \({LAYOUT}\)$"),
        ("w_down", (O, N + 1), rf"expected \[O, N\] with N = {N}, {W_UP}$"),
        ("w_down", (N,), rf"expected \[O, N\], two dimensions, with N = {N}, {W_UP}$"),
        ("w_down", (1, O, N), rf"expected \[O, N\], two dimensions, with N = {N}, {W_UP}$"),
        ("b_up", (N + 1,), rf"expected \[N\] = \[{N}\], {W_UP}$"),
        ("b_up", (1,), rf"expected \[N\] = \[{N}\]"),
        ("b_up", (1, N), rf"expected \[N\] = \[{N}\]"),
        ("b_up", (), rf"expected \[N\] = \[{N}\]"),
        ("b_down", (N,), rf"expected \[O\] = \[{O}\], {W_DOWN}$"),
        ("b_down", (M, O), rf"expected \[O\] = \[{O}\]"),
        ("w_gate", (K, N), rf"expected \[N, K\] = \[{N}, {K}\], {W_UP} \({LAYOUT}\)$"),
        ("w_gate", (N + 1, K), rf"expected \[N, K\] = \[{N}, {K}\], {W_UP}$"),
        ("b_gate", (O,), rf"expected \[N\] = \[{N}\], {W_UP}$"),
        ("residual", (2, M, K), rf"expected \[\*B, M, O\] = \[2, {M}, {O}\], {X} and {W_DOWN.removeprefix('as ')}$"),
        ("residual", (O,), rf"expected \[\*B, M, O\] = \[2, {M}, {O}\]"),
        ("residual", (2 * M, O), rf"expected \[\*B, M, O\] = \[2, {M}, {O}\]"),
    ],
)
def test_shapes_of_the_ffn(name: str, shape: tuple[int, ...], words: str) -> None:
    tensor = torch.randn(shape)
    refused("ffn", ValueError, f"^{said(name, tensor)}: {words}", **{name: tensor})


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
        ({"b": (K,)}, r"^b of shape \[6\] .*: expected \[\*B, K, N\], at least two dimensions"),
        ({"c": ()}, r"^c of shape \[\] .*: expected \[\*B, N, O\], at least two dimensions"),
        (
            {"b": (3, N, K)},
            rf"^b of shape \[3, {N}, {K}\] .*: expected .* K = {K}, as a is .* = \[3, {M}, {K}\] \({LAYOUT}\)$",
        ),
        (
            {"c": (3, O, N)},
            rf"^c of shape \[3, {O}, {N}\] .*: expected .* N = {N}, as b is .* = \[3, {K}, {N}\] \({LAYOUT}\)$",
        ),
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


SWITCHES = [
    ("FUSEDLAYERS_BACKEND", "cuda", "FUSEDLAYERS_BACKEND is 'cuda'; expected one of auto, triton, torch"),
    ("FUSEDLAYERS_BACKEND", "Triton", "FUSEDLAYERS_BACKEND is 'Triton'; expected one of auto, triton, torch"),
    ("FUSEDLAYERS_STRICT", "yes", "FUSEDLAYERS_STRICT is 'yes'; expected 0 or 1"),
]


@pytest.mark.parametrize(("switch", "value", "words"), SWITCHES)
@pytest.mark.parametrize("operation", CALLS)
def test_switches(operation: str, switch: str, value: str, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(switch, value)
    refused(operation, ValueError, f"^{re.escape(words)}$")


@pytest.mark.parametrize("operation", CALLS)
def test_an_empty_switch_is_none(operation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    function, valid = CALLS[operation]
    arguments = valid()
    expected = function(**arguments)
    for switch in switches.SWITCHES:
        monkeypatch.setenv(switch, "")
    assert (switches.backend(), switches.strict(), switches.workspace_limit()) == ("auto", False, 0)
    assert torch.equal(function(**arguments), expected)


@pytest.mark.parametrize("value", ["64 MiB", "0", "-1", "inf", "nan"])
def test_the_workspace(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a loss head alone."""
    monkeypatch.setenv("FUSEDLAYERS_WORKSPACE_MIB", value)
    words = f"FUSEDLAYERS_WORKSPACE_MIB is {value!r}; expected a positive number of MiB"
    with pytest.raises(ValueError, match=f"^{re.escape(words)}$"):
        functional.linear_cross_entropy(torch.randn(2, 3), torch.randn(5, 3), torch.tensor([1, 2]))


class Tagged(Tensor):
    """A subclass, as sharded and quantised tensors are."""


def float64(tensor: Tensor) -> Tensor:
    return tensor.double()


def on_meta(tensor: Tensor) -> Tensor:
    return tensor.to("meta")


CANNOT_RUN = [
    pytest.param(float64, "the kernels take float16, bfloat16, float32, not float64", id="float64"),
    pytest.param(on_meta, "the kernels need a CUDA or ROCm GPU, and the tensors are on device type meta", id="meta"),
]
FORCED = [
    pytest.param({"FUSEDLAYERS_BACKEND": "triton"}, "FUSEDLAYERS_BACKEND=triton is set", id="forced"),
    pytest.param({"FUSEDLAYERS_STRICT": "1"}, "FUSEDLAYERS_STRICT=1 is set", id="strict"),
]


@pytest.mark.interpreter
@pytest.mark.parametrize(("switches", "switch"), FORCED)
@pytest.mark.parametrize(("change", "reason"), CANNOT_RUN)
@pytest.mark.parametrize("operation", CALLS)
def test_triton_forced_where_it_cannot_run(
    operation: str,
    change: Callable[[Tensor], Tensor],
    reason: str,
    switches: dict[str, str],
    switch: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in switches.items():
        monkeypatch.setenv(name, value)
    arguments = {name: change(tensor) for name, tensor in CALLS[operation][1]().items()}
    words = re.escape(f"{switch}, but {operation} cannot run in Triton: {reason}")
    refused(operation, RuntimeError, f"^{words}", **arguments)
    monkeypatch.setenv("FUSEDLAYERS_BACKEND", "torch")
    assert CALLS[operation][0](**arguments).shape[-1] == O


@pytest.mark.interpreter
@pytest.mark.parametrize(("switches", "switch"), FORCED)
def test_triton_forced_on_what_does_not_fit(
    switches: dict[str, str], switch: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in switches.items():
        monkeypatch.setenv(name, value)
    wide = {"a": torch.ones(1, 2, 2000), "b": torch.ones(1, 2000, N), "c": torch.ones(1, N, O)}
    words = rf"^{switch}, but gemm_gemm .*: width 2000 \(padded 2048\) of float32 does not fit on chip"
    refused("gemm_gemm", RuntimeError, words, **wide)
    wide = {"x": torch.ones(2, 2000), "w_up": torch.ones(N, 2000), "w_down": torch.ones(O, N)}
    # The epilogue path runs at any width, and its kernels compute the chunks, too.
    for recompute, dropout_p in itertools.product((False, True), (0.0, 0.5)):
        assert functional.ffn(**wide, recompute=recompute, dropout_p=dropout_p).shape == (2, O)
    tagged = {name: tensor.as_subclass(Tagged) for name, tensor in valid_gemm_gemm().items()}
    refused("gemm_gemm", RuntimeError, rf"^{switch}, but .*: an operand is a Tagged", **tagged)


def test_no_triton_without_a_device_or_the_interpreter(run_python: Callable[..., object]) -> None:
    """A user's CPU process: forced, the call fails; not forced, it runs through torch, as recompute=True does."""
    run_python(
        """
import os, torch
from fusedlayers.functional import ffn
x, up, down = torch.ones(2, 3), torch.ones(4, 3), torch.ones(3, 4)
assert ffn(x, up, down).shape == ffn(x, up, down, recompute=True).shape == (2, 3)
for switch, value in (("FUSEDLAYERS_BACKEND", "triton"), ("FUSEDLAYERS_STRICT", "1")):
    os.environ[switch] = value
    for recompute in ("auto", True):
        try:
            ffn(x, up, down, recompute=recompute)
        except RuntimeError as error:
            assert str(error).startswith(f"{switch}={value} is set, but ffn cannot run in Triton: the kernels"), error
        else:
            raise AssertionError("a silent fallback")
    assert ffn(x[:0], up, down).shape == (0, 3), "nothing to compute is no reason to fail"
    del os.environ[switch]
""",
        TRITON_INTERPRET="0",
        CUDA_VISIBLE_DEVICES="",
    )


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
