"""`replace` reads which modules are norms, and lets these run torch's fused one."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fusedlayers as fl
from fusedlayers.closeness import assert_all_close
from fusedlayers.replacing import norms
from fusedlayers.replacing.norms import FusedNorm, kept_by_norm
from tests.support.ffn_blocks import assert_same, pickled, results, saved
from tests.support.norm_modules import NORMS, WIDTH, Cohere, Gemma, Llama, in_float64

each_norm = pytest.mark.parametrize("name", NORMS)
each_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)


def replaced(norm: nn.Module) -> nn.Module:
    report = fl.replace(norm)
    assert len(report.replaced) == 1
    assert isinstance(norm, FusedNorm)
    return norm


@pytest.fixture
def fused(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The fused norms that run from here on."""
    calls: list[str] = []

    def counted(run: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def counting(*args: Any, **kwargs: Any) -> Tensor:
            calls.append(run.__name__)
            return run(*args, **kwargs)

        return counting

    # Not in torch itself: a norm whose forward calls what somebody put there is not read.
    functions = SimpleNamespace(rms_norm=counted(F.rms_norm), layer_norm=counted(F.layer_norm))
    monkeypatch.setattr(norms, "F", functions)
    return calls


@pytest.mark.sampled
@each_norm
@each_dtype
@pytest.mark.parametrize("training", [True, False])
def test_a_norm_is_recognised_and_close(name: str, dtype: torch.dtype, training: bool, fused: list[str]) -> None:
    build, text = NORMS[name]
    norm = build().to(dtype).train(training)
    x = torch.randn(5, 40, WIDTH).mul(torch.rand(5, 40, 1) * 4).to(dtype)
    truth = results(in_float64(norm), x.double())
    theirs = results(norm, x)
    state, before = norm.state_dict(), dict(norm.named_parameters())
    [entry] = fl.replace(norm).replaced
    assert entry.reason == f"{text}, {WIDTH} columns"
    assert type(norm).__name__ == f"Fused{type(build()).__name__}"
    fused.clear()
    assert_all_close(results(norm, x), theirs, truth)
    assert fused == [text.partition(",")[0]]
    assert norm.state_dict().keys() == state.keys()
    assert all(parameter is before[key] for key, parameter in norm.named_parameters())
    for twin in (copy.deepcopy(norm), pickled(norm), saved(norm)):
        assert type(twin) is type(norm)
        assert_same(results(twin, x), results(norm, x))
    fl.restore(norm)
    assert type(norm) is type(build())
    assert_same(results(norm, x), theirs)


@each_norm
def test_compiled_in_one_graph_it_is_the_original(name: str) -> None:
    norm, x = NORMS[name][0](), torch.randn(3, 7, WIDTH)
    before = results(norm, x)
    replaced(norm)
    torch._dynamo.reset()
    compiled = torch.compile(norm, fullgraph=True, backend="aot_eager")
    assert_same(results(norm, x, call=lambda x: compiled(x)), before)


def test_in_a_model_with_checkpoints_hooks_and_autocast(fused: list[str]) -> None:
    model = nn.Sequential(Llama(), nn.Linear(WIDTH, WIDTH), Gemma())
    x = torch.randn(2, 9, WIDTH)
    truth = results(
        nn.Sequential(in_float64(model[0]), copy.deepcopy(model[1]).double(), in_float64(model[2])), x.double()
    )
    theirs = [results(model, x), results(model, x, call=lambda x: checkpoint(model, x, use_reentrant=False))]
    with torch.autocast("cpu", torch.bfloat16):
        theirs.append(results(model, x))
    hooked: list[Tensor] = []
    model[0].register_forward_hook(lambda module, args, y: hooked.append(y.detach()))
    report = fl.replace(model)
    assert [(entry.path, entry.became) for entry in report.replaced] == [("0", "FusedLlama"), ("2", "FusedGemma")]
    fused.clear()
    ours = [results(model, x), results(model, x, call=lambda x: checkpoint(model, x, use_reentrant=False))]
    assert fused == ["rms_norm"] * 6
    with torch.autocast("cpu", torch.bfloat16):
        ours.append(results(model, x))
    # The linear gives bfloat16, and Gemma's weight is of float32: that norm runs its own forward.
    assert fused == ["rms_norm"] * 7
    for one, other in zip(ours, theirs, strict=True):
        assert one["y"].dtype is other["y"].dtype  # type: ignore[union-attr]
        assert_all_close(one, other, truth, computed_in=torch.bfloat16 if one is ours[2] else None)
    assert len(hooked) == 5 - 1
    again = fl.replace(model)
    assert [entry.reason for entry in again.skipped] == ["already fused"] * 2


@pytest.mark.filterwarnings("ignore:nothing was replaced")
def test_norms_are_left_where_that_is_asked_for() -> None:
    norm = Llama()
    assert not fl.replace(norm, norm=False).skipped
    assert type(norm) is Llama
    assert fl.replace(norm, dry_run=True).replaced
    assert type(norm) is Llama
    with pytest.raises(TypeError, match="norm must be True or False, got 1"):
        fl.replace(norm, norm=1)  # type: ignore[arg-type]


def _double_weight(norm: Any) -> None:
    norm.weight.data = norm.weight.data.double()


def _other_eps(norm: Any) -> None:
    norm.variance_epsilon = 0.5


def _no_parameter(norm: Any) -> None:
    weight = norm._parameters.pop("weight")
    norm.weight = weight.detach() + 0


def _patched(norm: Any) -> None:
    """Undone by the caller."""
    Llama.forward = lambda self, x: 3 * x  # type: ignore[method-assign, assignment]


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (_double_weight, "its weight is of torch.float64"),
        (_other_eps, "its variance_epsilon was 1e-06 when it was replaced"),
        (_no_parameter, "its weight is no plain parameter"),
        (_patched, "the forward of Llama was changed after replace"),
    ],
    ids=["dtype", "eps", "parameter", "forward"],
)
def test_what_changes_later_is_seen(
    change: Callable[[Any], None], why: str, fused: list[str], caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr("fusedlayers.modules.children._said", set())
    monkeypatch.setattr(Llama, "forward", Llama.forward)
    norm, other, x = Llama(), Llama(), torch.randn(4, WIDTH)
    other.load_state_dict(norm.state_dict())
    replaced(norm)
    assert norm.why_called(x) is None
    change(norm)
    change(other)
    fused.clear()
    with caplog.at_level(logging.INFO, "fusedlayers"):
        assert torch.equal(norm(x), other(x))
    assert not fused
    assert why in norm.why_called(x)
    assert why in caplog.text


@pytest.mark.parametrize(
    ("x", "why"),
    [
        (torch.randn(3, WIDTH, dtype=torch.float64), "its result in torch.float64 may differ"),
        (torch.randn(3, WIDTH).bfloat16(), "its weight is of torch.float32"),
        (torch.randn(3, 1), "another width"),
    ],
    ids=["float64", "mixed", "width"],
)
def test_calls_with_other_inputs_run_the_original(x: Tensor, why: str, fused: list[str]) -> None:
    norm = Llama()
    expected = norm(x)
    assert torch.equal(replaced(norm)(x), expected)
    assert torch.equal(norm(hidden_states=x), expected)
    assert why in norm.why_called(x)
    x = torch.randn(3, WIDTH)
    fused.clear()
    assert torch.equal(norm(hidden_states=x), norm(x))
    assert fused == ["rms_norm"] * 2


def test_sixteen_bits_under_autocast_run_the_original(fused: list[str]) -> None:
    """Autocast would make float32 of a layer norm."""
    norm, x = Cohere().bfloat16(), torch.randn(3, WIDTH).bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        expected = norm(x)
        assert torch.equal(replaced(norm)(x), expected)
        assert "autocast" in norm.why_called(x)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script")
def test_second_derivatives_batches_and_dual_numbers() -> None:
    norm, x = Llama(), torch.randn(3, 4, WIDTH)

    def facts(norm: nn.Module) -> list[Tensor]:
        leaf = x.clone().requires_grad_()
        [slope] = torch.autograd.grad(norm(leaf).square().sum(), leaf, create_graph=True)
        [second] = torch.autograd.grad(slope.square().sum(), leaf)
        directional = torch.func.jvp(norm, (x,), (torch.ones_like(x),))[1]
        return [second, directional, torch.func.vmap(norm)(x), torch.func.vmap(torch.func.jacrev(norm))(x[:, 0])]

    before = facts(norm)
    for one, other in zip(facts(replaced(norm)), before, strict=True):
        torch.testing.assert_close(one, other)


def test_frozen_weights_get_no_gradient() -> None:
    norm = replaced(Llama())
    norm.weight.requires_grad_(False)
    x = torch.randn(3, WIDTH, requires_grad=True)
    norm(x).sum().backward()
    assert norm.weight.grad is None
    assert x.grad is not None


class Wide(Llama):
    """Gives float32, whatever comes."""

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return self.weight.float() * wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)


class Halved(Llama):
    """Squares in the dtype of the input: in float16 large numbers overflow, which they do not in torch's fused norm."""

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon))


def test_the_dtype_decides_not_the_class() -> None:
    model = nn.Sequential(Wide(), Wide().bfloat16(), Halved().half(), Halved())
    report = fl.replace(model)
    assert [entry.path for entry in report.replaced] == ["0", "2", "3"]
    [left] = report.skipped
    assert (left.path, left.reason) == ("1", "it is a norm, but its own forward gives float32 for bfloat16")
    assert torch.isfinite(model[2](torch.full((2, WIDTH), 1000.0).half())).all()


def test_a_forward_on_the_instance_stays() -> None:
    model = nn.Sequential(Llama(), Llama())
    model[0].forward = lambda x: 2 * x
    report = fl.replace(model)
    assert [entry.path for entry in report.replaced] == ["1"]
    assert "set on the instance" in report.skipped[0].reason


class Subclass(nn.LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps)


class Twice(Llama):
    def forward(self, x: Tensor, gate: Tensor | None = None) -> Tensor:
        return super().forward(x) if gate is None else super().forward(x) * gate


class Scale(Llama):
    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x


@pytest.mark.filterwarnings("ignore:nothing was replaced")
def test_fused_norms_and_other_modules_stay_without_a_word() -> None:
    kinds: list[nn.Module] = [nn.LayerNorm(WIDTH), nn.RMSNorm(WIDTH), Subclass(WIDTH), Twice(), Scale()]
    model = nn.ModuleList([*kinds, nn.Identity(), nn.ReLU(), nn.BatchNorm1d(WIDTH)])
    classes = [type(module) for module in model]
    report = fl.replace(model)
    assert [type(module) for module in model] == classes
    assert not report.skipped


def test_no_module_is_run() -> None:
    ran: list[Tensor] = []

    class Sends(Llama):
        def forward(self, x: Tensor) -> Tensor:
            ran.append(x)
            return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)

    fl.replace(nn.Sequential(Sends(), Llama()))
    assert not ran


def test_alike_norms_are_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[nn.Module] = []
    recognise = norms.recognise_norm
    monkeypatch.setattr("fusedlayers.replacing.norms.recognise_norm", lambda norm: read.append(norm) or recognise(norm))
    model = nn.Sequential(Llama(), Llama(), Llama(1e-5))
    assert len(fl.replace(model).replaced) == 3
    assert len(read) == 2


@pytest.mark.parametrize(
    ("build", "kept"),
    [
        # The input in float32, and normed in bfloat16.
        (lambda: Llama().bfloat16(), (6 * WIDTH + 4, 2 * WIDTH + 4)),
        (lambda: Llama(), (8 * WIDTH + 4, 4 * WIDTH + 4)),
        (lambda: Gemma().bfloat16(), (8 * WIDTH + 4, 4 * WIDTH + 4)),
        (lambda: Cohere().bfloat16(), (12 * WIDTH + 4, 2 * WIDTH + 8)),
    ],
)
def test_what_is_kept(build: Callable[[], nn.Module], kept: tuple[int, int]) -> None:
    norm = build()
    found = norms.recognise_norm(norm)
    assert isinstance(found, norms.Norm)
    assert kept_by_norm(norm, found) == kept
    report = fl.replace(norm)
    assert report.replaced[0].saved_bytes is None
    assert "no kernel does: torch has no fused norms on cpu." in str(report)
