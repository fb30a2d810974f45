"""Losses of causal models without logits: the same loss and gradients, what the report says, and the way back."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fusedlayers as fl
from fusedlayers.closeness import assert_all_close
from fusedlayers.replacing.loss import FusedLossHead
from fusedlayers.replacing.loss.lazy_logits import LazyLogits
from tests.models.loss_heads import (
    FAMILIES,
    WIDTH,
    WORDS,
    Inputs,
    build,
    in_kernels,
    losses,
    replaced,
    results,
    text,
    truth,
)
from tests.support.ffn_blocks import assert_same
from tests.support.operands import Tensors, assert_close_or_again, needs_kernels

pytest.importorskip("transformers", reason="transformers is not installed: pip install 'fusedlayers[models]'")

each_family = pytest.mark.parametrize("name", FAMILIES)
# What a forward takes beyond words and labels, as the Trainer gives it, or as users do.
OPTIONS: dict[str, dict[str, Any]] = {
    "mean": {},
    "items as a tensor": {"num_items_in_batch": torch.tensor(31)},
    "items as a number": {"num_items_in_batch": 31},
    "tuple": {"return_dict": False},
    "ignoring another": {"ignore_index": 5},
    "shifted already": {"shift_labels": torch.randint(WORDS, (2, 9))},
}


def assert_kernels_compute_the_same(model: Any, inputs: Inputs, patch: pytest.MonkeyPatch, **options: Any) -> Tensors:
    """As torch does, in one loss without logits; what the kernels gave."""
    exact = truth(copy.deepcopy(model), inputs, **options)
    expected = results(model, inputs, **options)
    replaced(model)
    with in_kernels(patch) as paths:
        found = results(model, inputs, **options)
    assert losses(paths) == 1
    assert_all_close(found, expected, exact)
    return found


@pytest.mark.interpreter
@each_family
def test_the_kernels_compute_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_kernels_compute_the_same(build(name), text(), monkeypatch)


@pytest.mark.interpreter
@pytest.mark.parametrize("case", OPTIONS)
@pytest.mark.parametrize("name", ["Llama", "Gemma 2"])
def test_the_kernels_take_what_the_loss_function_takes(case: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs = build(name), text()
    if "ignore_index" in OPTIONS[case]:
        inputs["labels"][inputs["labels"] < 0] = 5
    usual = results(model, inputs)["loss"]
    found = assert_kernels_compute_the_same(model, inputs, monkeypatch, **OPTIONS[case])
    assert found["loss"] != usual or case in ("mean", "tuple", "ignoring another")


@pytest.mark.interpreter
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("mixed", [False, True], ids=["cast", "autocast"])
def test_the_kernels_compute_the_same_in_16_bits(
    dtype: torch.dtype, mixed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:

    def compared(draw: int) -> tuple[Tensors, Tensors, Tensors]:
        model, inputs = build("Gemma 2"), text(draw)
        model = model if mixed else model.to(dtype)
        exact = truth(copy.deepcopy(model), inputs)
        with torch.autocast("cpu", dtype, enabled=mixed):
            expected = results(model, inputs)
            replaced(model)
            with in_kernels(monkeypatch) as paths:
                found = results(model, inputs)
        assert losses(paths) == 1
        loss = found["loss"]
        assert loss.dtype is torch.float32
        return found, expected, exact

    assert_close_or_again(compared, computed_in=dtype)


@each_family
def test_torch_computes_what_it_computed(name: str) -> None:
    """Bit for bit, in as many operations, with logits that are a tensor: where torch computes the loss anyway."""
    model, inputs = build(name), text()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as before:
        expected = results(model, inputs)
    logits = model(**inputs).logits
    replaced(model)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as after:
        found = results(model, inputs)
    assert_same(found, expected)
    outputs = model(**inputs)
    assert type(outputs.logits) is Tensor
    assert torch.equal(outputs.logits, logits)
    assert _products(after) == _products(before)


def _products(profile: Any) -> int:
    return sum(event.count for event in profile.key_averages() if event.key in ("aten::mm", "aten::addmm", "aten::bmm"))


@each_family
def test_the_way_back(name: str) -> None:
    model, inputs = build(name), text()
    kind, expected = type(model), results(model, inputs)
    keys, tensors = list(model.state_dict()), [id(parameter) for parameter in model.parameters()]
    replaced(model)
    assert isinstance(model, FusedLossHead)
    assert isinstance(model, kind)
    assert (list(model.state_dict()), [id(parameter) for parameter in model.parameters()]) == (keys, tensors)
    fl.restore(model)
    assert type(model) is kind
    assert_same(results(model, inputs), expected)


def test_the_report() -> None:
    entry = replaced(build("Llama"))
    assert (entry.path, entry.module, entry.became) == ("", "LlamaForCausalLM", "FusedLossHead")
    assert str(entry).startswith(f"lm_head, loss_function: {WIDTH} -> {WORDS} classes, without logits")
    # The kernels may run nowhere on a CPU, and keep what torch keeps there.
    assert entry.why_no_kernels is not None
    assert entry.saved_bytes[0] == entry.saved_bytes[1] == 4 * (WIDTH + WORDS) + 8


@needs_kernels
def test_the_report_of_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    with in_kernels(monkeypatch):
        entry = replaced(build("Llama"))
    assert (entry.plan, entry.why_no_kernels) == ("chunked", None)
    # Of the logits nothing; the gradients of the input and, shared by many tokens, of the weight. And the targets.
    assert entry.saved_bytes == (4 * (WIDTH + WORDS) + 8, 4 * 2 * WIDTH + 8)


def test_it_is_found_once() -> None:
    model = build("Llama")
    replaced(model)
    report = fl.replace(model)
    assert not [entry for entry in report.replaced if entry.became == "FusedLossHead"]
    assert "already fused" in [entry.reason for entry in report.skipped if not entry.path]


def test_a_dry_run_changes_nothing() -> None:
    model = build("Llama")
    report = fl.replace(model, dry_run=True)
    assert [entry.became for entry in report.replaced if not entry.path] == ["FusedLossHead"]
    assert not isinstance(model, FusedLossHead)


def test_losses_are_left_on_request() -> None:
    model = build("Llama")
    kind = type(model)
    report = fl.replace(model, loss=False, norm=False)
    assert type(model) is kind
    assert {entry.path for entry in report.replaced} == {"model.layers.0.mlp"}
    with pytest.raises(TypeError, match="loss must be True or False, got 'no'"):
        fl.replace(model, loss="no")  # type: ignore[arg-type]


def _hook(model: Any) -> None:
    model.lm_head.register_forward_hook(lambda module, args, output: output * 2)


def _own_loss(model: Any) -> None:
    def half(logits: Tensor, labels: Tensor, **_: Any) -> Tensor:
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()) / 2

    model.loss_function = half


def _other_loss(model: Any) -> None:
    model.loss_type = "ForMaskedLM"


def _own_forward(model: Any) -> None:
    model.forward = model.forward


def _other_head(model: Any) -> None:
    model.lm_head = nn.Sequential(nn.Linear(WIDTH, WORDS, bias=False))
    model.get_output_embeddings = lambda: model.lm_head


def _parametrized(model: Any) -> None:
    nn.utils.parametrizations.weight_norm(model.lm_head)


def _adapter(model: Any) -> None:
    peft = pytest.importorskip("peft", exc_type=ImportError)
    peft.inject_adapter_in_model(peft.LoraConfig(r=2, target_modules=["lm_head"], init_lora_weights=False), model)


LEFT: dict[str, tuple[Callable[[Any], None], str]] = {
    "a hook": (_hook, "lm_head has a forward hook"),
    "its own loss function": (_own_loss, "its loss function is _own_loss.<locals>.half"),
    "another loss function": (_other_loss, "its loss function is ForMaskedLMLoss, not transformers' ForCausalLMLoss"),
    "its own forward": (_own_forward, "has a forward of its own"),
    "another head": (_other_head, "lm_head is a Sequential, not exactly nn.Linear"),
    "parametrized": (_parametrized, "not exactly nn.Linear"),
    "an adapter": (_adapter, "lm_head is a peft"),
}


@pytest.mark.interpreter
@pytest.mark.parametrize("case", LEFT)
@pytest.mark.parametrize("first", ["change", "replace"])
def test_what_is_left(case: str, first: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """So before `replace`, or only after it: what was computed is computed, and a reason is said."""
    change, reason = LEFT[case]
    if first == "replace" and case == "its own forward":
        pytest.skip("that forward is the one without logits")
    model, inputs = build("Llama"), text()
    torch.manual_seed(2)
    if first == "replace":
        replaced(model)
    change(model)
    expected = results(copy.deepcopy(model), inputs)
    monkeypatch.setattr("fusedlayers.modules.children._said", set())
    if first == "change":
        report = fl.replace(model)
        [said] = [entry.reason for entry in report.skipped if not entry.path]
        fl.restore(model)
    with in_kernels(monkeypatch) as paths, caplog.at_level("INFO", "fusedlayers"):
        found = results(model, inputs)
    if first == "replace":
        [said] = [line for line in caplog.messages if "runs the forward of its own class" in line]
    assert reason in said
    assert not paths
    assert_same(found, expected)


def test_a_rule_for_the_head_goes_first() -> None:
    model = build("Llama")
    report = fl.replace(model, rules=[fl.LinearRule(names="lm_head")])
    assert [entry.reason for entry in report.skipped if not entry.path] == [
        "its loss makes logits: a rule takes lm_head"
    ]
    assert not isinstance(model, FusedLossHead)


def test_a_replica_of_data_parallel_makes_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("Llama")
    replaced(model)
    replica: Any = model._replicate_for_data_parallel()
    assert replica.why_called() == "it is a replica of nn.DataParallel, which gathers logits"


@pytest.mark.interpreter
def test_a_patched_forward_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs = build("Llama"), text()
    kind = type(model)
    replaced(model)
    original = kind.forward
    monkeypatch.setattr(kind, "forward", lambda self, **options: (original(self, **options)[0] * 2,))
    with in_kernels(monkeypatch) as paths:
        found = results(model, inputs)
    monkeypatch.undo()
    fl.restore(model)
    expected = results(model, inputs)
    assert not paths
    assert found["loss"] == 2 * expected["loss"]  # type: ignore[operator]


@pytest.mark.interpreter
@pytest.mark.parametrize("way", ["copied", "pickled", "saved"])
def test_copies_compute_the_same(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs = build("Llama"), text()
    replaced(model)
    if way == "copied":
        twin = copy.deepcopy(model)
    elif way == "pickled":
        twin = pickle.loads(pickle.dumps(model))
    else:
        buffer = io.BytesIO()
        torch.save(model, buffer)
        buffer.seek(0)
        twin = torch.load(buffer, weights_only=False)
    assert type(twin) is type(model)
    with in_kernels(monkeypatch) as paths:
        assert_same(results(twin, inputs), results(model, inputs))
    assert losses(paths) == 2


def test_its_checkpoints_name_the_original_class(tmp_path: Any) -> None:
    model: Any = build("Llama")
    kind = type(model)
    replaced(model)
    model.save_pretrained(tmp_path)
    loaded = kind.from_pretrained(tmp_path, attn_implementation="eager")
    assert loaded.config.architectures == ["LlamaForCausalLM"]
    assert model._get_name() == "LlamaForCausalLM"
    assert_same(results(loaded, text()), results(model, text()))


@pytest.mark.interpreter
def test_verify(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("Gemma 2").eval()
    replaced(model)
    with in_kernels(monkeypatch):
        found = fl.verify(model, **text())
    assert found.ok, found
    assert "y['logits']" in {verdict.name for verdict in found.verdicts}
    assert losses(found.paths) == 1


@pytest.mark.interpreter
def test_checkpointed_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    model: Any = build("Llama").train()
    inputs = text()
    expected = results(model, inputs)
    exact = truth(copy.deepcopy(model), inputs)
    enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)
    enable({"use_reentrant": False})
    replaced(model)
    with in_kernels(monkeypatch) as paths:
        found = results(model, inputs)
    assert losses(paths) == 1
    assert_all_close(found, expected, exact)


@pytest.mark.interpreter
@pytest.mark.parametrize("name", ["Llama", "Llama, tied"])
def test_a_frozen_head(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model: Any = build(name)
    model.lm_head.weight.requires_grad_(False)
    found = assert_kernels_compute_the_same(model, text(), monkeypatch)
    assert found["d model.embed_tokens.weight" if "tied" in name else "d lm_head.weight"] is None


@pytest.mark.interpreter
def test_nothing_is_made_of_hidden_states_that_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """The logits of a call wait beside its loss."""
    model, inputs = build("Llama"), text()
    replaced(model)
    with in_kernels(monkeypatch):
        outputs = model(**inputs, output_hidden_states=True)
    assert isinstance(outputs.logits, LazyLogits)
    assert outputs.logits._logits._values is None
    assert len(outputs.hidden_states) == 2
