"""`FusedFFN` keeps the contract of an ``nn.Module``, and calls every child that is more than a plain ``nn.Linear``."""

from __future__ import annotations

import copy
import logging
import warnings
from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, prune

from fusedlayers import FusedFFN, explain
from fusedlayers.closeness import assert_all_close
from fusedlayers.kernels.activations import ACTIVATIONS
from fusedlayers.modules import children, why_not_plain
from tests.support.ffn_blocks import (
    Doubled,
    LowRank,
    Scale,
    TaggedTensor,
    assert_same,
    count_fused_calls,
    pickled,
    results,
    saved,
)

GATED = [pytest.param(False, id="plain"), pytest.param(True, id="gated")]


def composed(ffn: FusedFFN, x: Tensor, residual: Tensor | None = None) -> Tensor:
    """The block as torch writes it, with the children of ``ffn``; the same torch operations in the same order."""
    activate = ACTIVATIONS[ffn.activation].torch
    hidden = ffn.up_proj(x)
    hidden = activate(hidden) if ffn.gate_proj is None else activate(ffn.gate_proj(x)) * hidden
    y = ffn.down_proj(F.dropout(hidden, ffn.dropout, ffn.training))
    return y if residual is None else y + residual


@pytest.fixture
def fused_calls(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    return count_fused_calls(monkeypatch)


@pytest.mark.parametrize("gated", GATED)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_it_computes_what_torch_computes(activation: str, gated: bool, fused_calls: list[float]) -> None:
    """On the CPU the same torch operations run in the same order, so everything is equal bit for bit."""
    ffn = FusedFFN(6, 10, activation, gated=gated)
    x, residual = torch.randn(2, 3, 6), torch.randn(2, 3, 6)
    ours = results(ffn, x, residual)
    assert len(fused_calls) == 1
    assert_same(ours, results(ffn, x, residual, call=partial(composed, ffn)))


@pytest.mark.parametrize("shape", [(6,), (1, 6), (0, 6), (2, 3, 4, 6)])
@pytest.mark.parametrize("bias", [True, False])
def test_leading_dimensions_and_missing_biases(shape: tuple[int, ...], bias: bool) -> None:
    ffn = FusedFFN(6, 10, "silu", gated=True, bias=bias)
    assert [name for name, _ in ffn.named_parameters() if name.endswith("bias")] == (
        ["up_proj.bias", "gate_proj.bias", "down_proj.bias"] if bias else []
    )
    x = torch.randn(shape)
    assert_same(results(ffn, x), results(ffn, x, call=partial(composed, ffn)))


def test_children_may_differ_in_bias(fused_calls: list[float]) -> None:
    ffn = FusedFFN(6, 10, gated=True)
    ffn.up_proj.bias = None
    assert_same(results(ffn, torch.ones(2, 6)), results(ffn, torch.ones(2, 6), call=partial(composed, ffn)))
    assert fused_calls


@pytest.mark.parametrize("gated", GATED)
@pytest.mark.parametrize("backend", ["torch", pytest.param("triton", marks=pytest.mark.interpreter)])
def test_without_the_hidden_it_is_as_close_as_torch(backend: str, gated: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """``recompute=True`` takes the chunked path on torch and the fused one on Triton; both sum in another order."""
    monkeypatch.setenv("FUSEDLAYERS_BACKEND", backend)
    ffn = FusedFFN(32, 48, gated=gated, recompute=True)
    x = torch.randn(40, 32)
    exact = copy.deepcopy(ffn).double()
    ours = results(ffn, x)
    theirs = results(ffn, x, call=partial(composed, ffn))
    assert_all_close(ours, theirs, results(exact, x.double(), call=partial(composed, exact)))


@pytest.mark.parametrize("gated", GATED)
def test_parameters_are_drawn_as_those_of_linear_modules(gated: bool) -> None:
    torch.manual_seed(3)
    ffn = FusedFFN(6, 10, gated=gated)
    again = copy.deepcopy(ffn)
    torch.manual_seed(3)
    plain = [nn.Linear(6, 10), *([nn.Linear(6, 10)] if gated else []), nn.Linear(10, 6)]
    expected = [parameter for linear in plain for parameter in linear.parameters()]
    torch.manual_seed(3)
    again.reset_parameters()
    for module in (ffn, again):
        assert [type(child) for child in module.children()] == [nn.Linear] * len(plain)
        for ours, theirs in zip(module.parameters(), expected, strict=True):
            assert type(ours) is nn.Parameter
            assert torch.equal(ours, theirs)


@pytest.mark.parametrize("gated", GATED)
def test_checkpoints_are_ordinary(gated: bool) -> None:
    names = ["up_proj", *(["gate_proj"] if gated else []), "down_proj"]
    ffn = FusedFFN(6, 10, gated=gated)
    plain = nn.ModuleDict({name: nn.Linear(*((10, 6) if name == "down_proj" else (6, 10))) for name in names})
    assert list(ffn.state_dict()) == list(plain.state_dict())
    plain.load_state_dict(ffn.state_dict(), strict=True)
    other = FusedFFN(6, 10, gated=gated)
    other.load_state_dict(plain.state_dict(), strict=True)
    assert torch.equal(other(torch.ones(6)), ffn(torch.ones(6)))
    with pytest.raises(RuntimeError, match="gate_proj"):
        other.load_state_dict(FusedFFN(6, 10, gated=not gated).state_dict(), strict=True)


def test_dropout_is_for_training() -> None:
    ffn = FusedFFN(6, 40, dropout=0.5)
    x = torch.randn(3, 6)
    ours = results(ffn, x)
    assert_same(ours, results(ffn, x, call=partial(composed, ffn)))
    ffn.eval()
    still = ffn(x)
    assert torch.equal(still, FusedFFN.forward(ffn, x))
    assert not torch.equal(still, ours["y"])
    ffn.train()
    ffn.dropout = 0.0
    assert torch.equal(ffn(x), still)


def test_device_and_dtype() -> None:
    ffn = FusedFFN(6, 10, device="meta", dtype=torch.float64)
    assert {(p.device.type, p.dtype) for p in ffn.parameters()} == {("meta", torch.float64)}
    assert ffn(torch.empty(2, 6, device="meta", dtype=torch.float64)).shape == (2, 6)
    ffn = ffn.to_empty(device="cpu")
    torch.manual_seed(5)
    ffn.reset_parameters()
    torch.manual_seed(5)
    built = FusedFFN(6, 10, dtype=torch.float64)
    x = torch.randn(2, 6, dtype=torch.float64)
    assert torch.equal(ffn(x), built(x))
    for cast, dtype in ((ffn.half, torch.float16), (lambda: ffn.to(torch.bfloat16), torch.bfloat16)):
        cast()
        y = ffn(x.to(dtype))
        assert y.dtype == dtype
        assert torch.equal(y, composed(ffn, x.to(dtype)))


def test_autocast(fused_calls: list[float]) -> None:
    ffn = FusedFFN(6, 10, gated=True)
    x = torch.randn(2, 6)
    with torch.autocast("cpu", torch.bfloat16):
        ours, theirs = ffn(x), composed(ffn, x)
    assert fused_calls
    assert ours.dtype == torch.bfloat16
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize("copied", [copy.deepcopy, pickled, saved])
def test_copies(copied: Callable[[nn.Module], nn.Module]) -> None:
    ffn = FusedFFN(6, 10, "silu", gated=True, dropout=0.25, recompute=True).eval()
    twin = copied(ffn)
    assert type(twin) is FusedFFN
    assert repr(twin) == repr(ffn)
    assert twin.training is False
    assert not {id(p) for p in twin.parameters()} & {id(p) for p in ffn.parameters()}
    assert torch.equal(twin(torch.ones(6)), ffn(torch.ones(6)))


def test_repr_names_every_option() -> None:
    ffn = FusedFFN(6, 10, "swish", gated=True, dropout=0.1, recompute=True)
    assert ffn.extra_repr() == "d_model=6, d_ff=10, activation='silu', gated=True, dropout=0.1, recompute=True"
    assert repr(ffn).splitlines()[2] == "  (up_proj): Linear(in_features=6, out_features=10, bias=True)"


def test_hooks_on_the_block_itself(fused_calls: list[float]) -> None:
    ffn = FusedFFN(6, 10)
    fired: list[str] = []
    ffn.register_forward_pre_hook(lambda *_: fired.append("before"))
    ffn.register_forward_hook(lambda *_: fired.append("after"))
    ffn.register_full_backward_hook(lambda *_: fired.append("backward"))
    ffn(torch.ones(2, 6, requires_grad=True)).sum().backward()
    assert fired == ["before", "after", "backward"]
    assert fused_calls


def test_functional_call_reads_the_given_parameters() -> None:
    ffn, other = FusedFFN(6, 10), FusedFFN(6, 10)
    x = torch.randn(2, 6)
    assert torch.equal(torch.func.functional_call(ffn, dict(other.named_parameters()), (x,)), other(x))


def _wrap(ffn: FusedFFN) -> None:
    ffn.up_proj = LowRank(ffn.up_proj)


def _subclass(ffn: FusedFFN) -> None:
    ffn.up_proj = Doubled(6, 10)


def _set_forward(ffn: FusedFFN) -> None:
    ffn.up_proj.forward = lambda x: F.linear(x, 2 * ffn.up_proj.weight)


def _tag_weight(ffn: FusedFFN) -> None:
    ffn.up_proj.weight = nn.Parameter(ffn.up_proj.weight.detach().as_subclass(TaggedTensor))


def _tag_bias(ffn: FusedFFN) -> None:
    ffn.up_proj.bias = nn.Parameter(ffn.up_proj.bias.detach().as_subclass(TaggedTensor))


# What can happen to a child, and what the reason must say.
CHANGES: dict[str, tuple[Callable[[FusedFFN], object], str]] = {
    "forward hook": (lambda ffn: ffn.up_proj.register_forward_hook(lambda _, __, y: 2 * y), "a forward hook"),
    "pre-hook": (lambda ffn: ffn.up_proj.register_forward_pre_hook(lambda _, x: (2 * x[0],)), "a forward pre-hook"),
    "backward hook": (
        lambda ffn: ffn.up_proj.register_full_backward_hook(lambda _, dx, __: (2 * dx[0],)),
        "a backward hook",
    ),
    "backward pre-hook": (
        lambda ffn: ffn.up_proj.register_full_backward_pre_hook(lambda _, dy: (2 * dy[0],)),
        "a backward pre-hook",
    ),
    "parametrize": (lambda ffn: parametrize.register_parametrization(ffn.up_proj, "weight", Scale()), "parametrized"),
    "weight_norm": (lambda ffn: parametrizations.weight_norm(ffn.up_proj), "parametrized"),
    "spectral_norm": (lambda ffn: nn.utils.spectral_norm(ffn.up_proj), "a forward pre-hook"),
    "pruning": (lambda ffn: prune.random_unstructured(ffn.up_proj, "weight", 0.5), "a forward pre-hook"),
    "low rank": (_wrap, "LowRank, not exactly nn.Linear"),
    "subclass": (_subclass, "Doubled, not exactly nn.Linear"),
    "instance forward": (_set_forward, "set on the instance"),
    "weight subclass": (_tag_weight, "TaggedTensor, not a plain tensor"),
    "bias subclass": (_tag_bias, "TaggedTensor, not a plain tensor"),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("gated", GATED)
def test_a_child_that_is_not_plain_is_called(change: str, gated: bool, fused_calls: list[float]) -> None:
    ffn = FusedFFN(6, 10, gated=gated)
    apply, reason = CHANGES[change]
    apply(ffn)
    x = torch.randn(3, 6)
    # Spectral norm moves its estimate at every call in training.
    ffn.train(change != "spectral_norm")
    assert_same(results(ffn, x), results(ffn, x, call=partial(composed, ffn)))
    assert not fused_calls
    assert reason in why_not_plain(ffn.up_proj)
    assert ffn.why_called() == f"the up linear {why_not_plain(ffn.up_proj)}"
    assert ffn.why_called() in explain(ffn, x, details=True)


@pytest.mark.parametrize("role", ["up_proj", "gate_proj", "down_proj"])
def test_every_child_is_asked(role: str, fused_calls: list[float]) -> None:
    ffn = FusedFFN(6, 10, gated=True)
    handle = getattr(ffn, role).register_forward_hook(lambda *_: None)
    ffn(torch.ones(6))
    assert not fused_calls
    handle.remove()
    assert ffn.why_called() is None
    ffn(torch.ones(6))
    assert fused_calls


def test_a_child_compiled_by_itself_is_called() -> None:
    ffn = FusedFFN(6, 10)
    ffn.down_proj.compile(backend="eager")
    assert ffn.why_called() == "the down linear is compiled by itself"


def test_an_old_weight_norm_is_called(fused_calls: list[float]) -> None:
    ffn = FusedFFN(6, 10)
    with pytest.warns(FutureWarning, match="weight_norm"):
        nn.utils.weight_norm(ffn.up_proj)
    x = torch.randn(3, 6)
    assert_same(results(ffn, x), results(ffn, x, call=partial(composed, ffn)))
    assert not fused_calls


def test_a_hook_for_all_modules_sees_the_children(fused_calls: list[float]) -> None:
    ffn = FusedFFN(6, 10)
    seen: list[nn.Module] = []
    handle = nn.modules.module.register_module_forward_hook(lambda module, *_: seen.append(module))
    try:
        assert ffn.why_called() == "a hook is registered for all modules"
        ffn(torch.ones(6))
    finally:
        handle.remove()
    assert seen == [ffn.up_proj, ffn.down_proj, ffn]
    assert not fused_calls


def test_an_input_that_is_not_a_plain_tensor_goes_to_the_children(fused_calls: list[float]) -> None:
    ffn = FusedFFN(6, 10)
    x = torch.randn(3, 6).as_subclass(TaggedTensor)
    assert type(ffn(x)) is TaggedTensor
    # torch says once per process that nested tensors may still change.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        rows = torch.nested.nested_tensor([torch.ones(2, 6), torch.ones(3, 6)])
    assert ffn(rows).is_nested
    assert not fused_calls


def test_tracing_records_torch_operations_only() -> None:
    ffn = FusedFFN(6, 10).eval()
    x = torch.randn(3, 6)
    with pytest.warns((DeprecationWarning, FutureWarning), match="trace"):
        traced = torch.jit.trace(ffn, (x,))
    assert torch.equal(traced(x), ffn(x))
    assert "PythonOp" not in str(traced.inlined_graph)


def test_low_rank_adapters_train(fused_calls: list[float]) -> None:
    ffn = FusedFFN(6, 10)
    _wrap(ffn)
    ffn(torch.randn(3, 6)).square().sum().backward()
    assert ffn.up_proj.base.weight.grad is None
    assert ffn.up_proj.b.weight.grad.abs().sum() > 0


def test_calling_the_children_is_said_once(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(children, "_said", set())
    ffn = FusedFFN(6, 10)
    ffn.up_proj.register_forward_hook(lambda *_: None)
    with caplog.at_level(logging.INFO, logger="fusedlayers"):
        for _ in range(3):
            ffn(torch.ones(6))
    lines = [record.getMessage() for record in caplog.records if "children" in record.getMessage()]
    assert lines == ["fusedlayers.modules.ffn.FusedFFN calls its children: the up linear has a forward hook"]


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"d_model": 0}, ValueError, "d_model must be a positive int, got 0"),
        ({"d_ff": -3}, ValueError, "d_ff must be a positive int, got -3"),
        ({"d_ff": 10.0}, TypeError, r"d_ff must be a positive int, got 10.0 \(float\)"),
        ({"d_model": True}, TypeError, "d_model must be a positive int, got True"),
        ({"activation": "swoosh"}, ValueError, "activation 'swoosh' .*known.*gelu_tanh"),
        ({"activation": nn.GELU()}, TypeError, "activation must be a name"),
        ({"gated": "no"}, TypeError, "gated must be True or False, got 'no'"),
        ({"bias": None}, TypeError, "bias must be True or False, got None"),
        ({"dropout": 1.0}, ValueError, r"dropout must be a number in \[0, 1\), got 1.0"),
        ({"dropout": -0.1}, ValueError, r"dropout must be a number in \[0, 1\), got -0.1"),
        ({"dropout": float("nan")}, ValueError, r"dropout must be a number in \[0, 1\), got nan"),
        ({"dropout": "0.1"}, TypeError, r"dropout must be .* got '0.1'"),
        (
            {"recompute": "always"},
            ValueError,
            "recompute must be \"auto\", True, False or an int of bytes above 1, got 'always'",
        ),
        ({"recompute": 1}, ValueError, 'recompute must be "auto", True, False or an int of bytes above 1, got 1'),
        ({"dtype": torch.int64}, TypeError, "dtype must be a floating point dtype, got torch.int64"),
        ({"dtype": torch.complex64}, TypeError, "dtype must be a floating point dtype, got torch.complex64"),
    ],
)
def test_bad_options(arguments: dict[str, object], error: type[Exception], words: str) -> None:
    before = torch.get_rng_state()
    with pytest.raises(error, match=words):
        FusedFFN(**{"d_model": 6, "d_ff": 10} | arguments)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    ("inputs", "error", "words"),
    [
        (("text",), TypeError, "x must be a torch.Tensor, got str"),
        ((torch.ones(2, 7),), ValueError, r"^x of shape \[2, 7\].* K = 6, .*\[10, 6\]"),
        ((torch.ones(2, 6, dtype=torch.int64),), TypeError, r"x of shape \[2, 6\] and dtype torch.int64"),
        ((torch.ones(2, 6, dtype=torch.float64),), TypeError, "w_up .* torch.float32.*torch.float64"),
        ((torch.ones(2, 6), torch.ones(3, 6)), ValueError, r"residual of shape \[3, 6\]"),
    ],
)
def test_bad_inputs(inputs: tuple[Tensor, ...], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        FusedFFN(6, 10)(*inputs)
