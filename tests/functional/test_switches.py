"""The user's switches: wrong values are named, and kernels that are a must fail where they cannot run."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from fusedlayers import functional
from fusedlayers.functional import switches
from tests.functional.test_arguments import CALLS, N, O, refused, valid_gemm_gemm

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
