"""Logits of models whose losses do without: whoever reads them gets them, as they were, or an error that says why."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fusedlayers.closeness import assert_all_close
from fusedlayers.replacing.loss.lazy_logits import LazyLogits
from tests.models.loss_heads import (
    FAMILIES,
    IGNORED,
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
from tests.models.small import InFloat64
from tests.support.ffn_blocks import assert_same
from tests.support.written import written

pytest.importorskip("transformers", reason="transformers is not installed: pip install 'fusedlayers[models]'")
pytestmark = pytest.mark.interpreter


def outputs_of(model: nn.Module, monkeypatch: pytest.MonkeyPatch, **options: Any) -> Any:
    with in_kernels(monkeypatch) as paths:
        outputs = model(**text(), **options)
    assert losses(paths) == 1
    return outputs


@pytest.mark.sampled
@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("grad", [True, False], ids=["with a gradient", "without"])
def test_who_reads_them_gets_them(name: str, grad: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build(name)
    with torch.set_grad_enabled(grad):
        expected = model(**text()).logits
        replaced(model)
        outputs = outputs_of(model, monkeypatch)
    assert type(outputs.logits) is LazyLogits
    for fact in ("shape", "dtype", "device", "requires_grad", "is_leaf", "ndim"):
        assert getattr(outputs.logits, fact) == getattr(expected, fact), fact
    assert outputs.logits.stride() == expected.stride()
    assert waits(outputs.logits)
    # The hidden states went through torch's own layers: their product is the same one.
    found = torch.clone(outputs.logits)
    assert type(found) is Tensor
    assert torch.equal(found, expected)
    assert found.requires_grad is grad
    assert not waits(outputs.logits)


def waits(logits: Any) -> bool:
    """Whether nobody has computed them."""
    return logits._logits is not None and logits._logits._values is None


READERS: dict[str, Callable[[Any], Any]] = {
    "a method": lambda logits: logits.argmax(-1),
    "an attribute": lambda logits: logits.mT,
    "an operator": lambda logits: logits + 1,
    "an operator from the right": lambda logits: 2 / logits,
    "with a tensor": lambda logits: torch.ones(WORDS) * logits,
    "an item": lambda logits: logits[:, -1],
    "comparison": lambda logits: logits > 0,
    "a function": lambda logits: F.log_softmax(logits, -1),
    "functions of lists": lambda logits: torch.cat([logits, logits]),
    "a loss": lambda logits: F.cross_entropy(logits.flatten(0, 1), torch.zeros(18, dtype=torch.int64)),
    "its length": len,
    "iteration": lambda logits: torch.stack(list(logits)),
    "a scaled copy": lambda logits: (logits * 2.0).sum(),
    "a cast": lambda logits: logits.to(torch.float64),
    "a step that is none": lambda logits: logits.float().tanh().exp(),
    "numbers": lambda logits: torch.from_numpy(logits.detach().numpy()),
}


@pytest.mark.sampled
@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("grad", [True, False], ids=["with a gradient", "without"])
def test_every_way_to_read_them(reader: str, grad: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("Cohere")
    with torch.set_grad_enabled(grad):
        expected = READERS[reader](model(**text()).logits)
        replaced(model)
        outputs = outputs_of(model, monkeypatch)
    with torch.no_grad():
        found = READERS[reader](outputs.logits)
    assert found == expected if isinstance(expected, int) else torch.equal(found, expected)


def test_a_copy_is_a_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("Llama")
    expected = model(**text()).logits
    replaced(model)
    logits = outputs_of(model, monkeypatch).logits
    twin = pickle.loads(pickle.dumps(logits))
    assert type(twin) is Tensor
    assert twin.requires_grad
    assert torch.equal(twin, expected)
    # As of any tensor with a past.
    with pytest.raises(RuntimeError, match="graph leaves"):
        copy.deepcopy(logits)


def test_a_tuple_holds_them_at_their_place(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("Llama")
    expected = model(**text(), return_dict=False)
    replaced(model)
    outputs = outputs_of(model, monkeypatch, return_dict=False)
    assert type(outputs) is tuple
    assert len(outputs) == len(expected) == 2
    assert torch.equal(outputs[1] * 1, expected[1])


def _aside(model: nn.Module, inputs: Inputs) -> dict[str, Tensor | None]:
    """The gradients of the loss and of a function of the logits together."""
    outputs = model(**inputs)
    loss = outputs.loss + outputs.logits.float().logsumexp(-1).square().mean()
    model.zero_grad()
    loss.backward()
    return {"loss": loss.detach()} | {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("name", ["Llama, tied", "Gemma 2"])
def test_they_have_gradients(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs = build(name), text()
    with InFloat64():
        exact = _aside(copy.deepcopy(model).double(), inputs)
    expected = _aside(model, inputs)
    replaced(model)
    with in_kernels(monkeypatch) as paths:
        found = _aside(model, inputs)
    assert losses(paths) == 1
    assert_all_close(found, expected, exact)


def test_after_a_step_it_is_too_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the new weights they would be others."""
    model = build("Llama")
    replaced(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    early, late = outputs_of(model, monkeypatch), outputs_of(model, monkeypatch)
    first = early.logits[0, 0].detach().clone()
    late.loss.backward()
    # The backward pass changes nothing.
    assert torch.equal(outputs_of(model, monkeypatch).logits[0, 0], first)
    optimizer.step()
    assert torch.equal(early.logits[0, 0], first)
    with pytest.raises(RuntimeError, match=r"now it is too late .*as an optimizer's step does.*loss=False"):
        late.logits.argmax(-1)


def test_evaluation_hands_on_a_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    """What gathers, casts, moves, copies and stores results takes it for one."""
    model = build("Llama")
    with torch.no_grad():
        expected = model(**text()).logits
        replaced(model)
        logits = outputs_of(model, monkeypatch).logits
        cast = outputs_of(model.bfloat16(), monkeypatch).logits.float()
    assert isinstance(logits, Tensor)
    assert type(cast) is LazyLogits
    assert cast.dtype is torch.float32
    assert waits(cast)
    assert torch.equal(copy.deepcopy(outputs_of(build_replaced(), monkeypatch).logits.detach()), expected)
    buffer = io.BytesIO()
    with torch.no_grad():
        torch.save(outputs_of(build_replaced(), monkeypatch).logits, buffer)
        buffer.seek(0)
        assert torch.equal(torch.load(buffer), expected)
        # Where Python's protocol does not reach.
        with torch._C.DisableTorchFunctionSubclass():
            assert torch.equal(outputs_of(build_replaced(), monkeypatch).logits + 0, expected)
        printed = repr(outputs_of(build_replaced(), monkeypatch).logits)
        assert printed.split() == repr(expected).replace("tensor(", "LazyLogits(").split()
        assert torch.equal(copy.deepcopy(outputs_of(build_replaced(), monkeypatch).logits), expected)
        assert outputs_of(build_replaced(), monkeypatch).logits.tolist() == expected.tolist()
        assert (outputs_of(build_replaced(), monkeypatch).logits.numpy() == expected.numpy()).all()
        changed = outputs_of(build_replaced(), monkeypatch).logits
        changed[:, 0] = 7
        assert (changed[:, 0] == 7).all()


def build_replaced() -> nn.Module:
    model = build("Llama")
    replaced(model)
    return model


def test_inference_mode_makes_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("Llama")
    replaced(model)
    with in_kernels(monkeypatch) as paths, torch.inference_mode():
        outputs = model(**text())
    assert type(outputs.logits) is Tensor
    assert not paths


def test_without_labels_nothing_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    model: Any = build("Llama")
    words = text()["input_ids"]
    expected, written = model(words).logits, model.generate(words, max_new_tokens=3, do_sample=False)
    replaced(model)
    with in_kernels(monkeypatch) as paths:
        assert torch.equal(model(words).logits, expected)
        assert torch.equal(model.generate(words, max_new_tokens=3, do_sample=False), written)
    assert not paths


class Model:
    """A causal model whose forward is one of those below."""

    loss_type = "ForCausalLM"


# What a forward does with the logits before the loss; the loss takes over the first four.
STATEMENTS = {
    "cut": "logits = logits[..., :-1, :] if logits.shape[-2] > 100 else logits",
    "branched": "halved = logits / 2\nlogits.mul_(3)\nlogits = halved",
    "capped": "logits = 3 * (logits.float().contiguous() * 0.25).tanh()",
    "capped by a function": "logits = torch.mul(torch.div(logits, 2.0).tanh(), 5)",
    "masked": "logits[..., 7] = torch.finfo(logits.dtype).min",
    "capped twice": "logits = torch.tanh(torch.tanh(logits / 3) * 3 / 2) * 2",
    "shifted": "logits = logits + torch.linspace(-1, 1, WORDS)",
    "scaled in place": "logits /= 2",
    "turned": "logits = torch.tanh(logits) * -2",
}
TAKEN_OVER = list(STATEMENTS)[:4]
FORWARD = """
logits = self.lm_head(self.model(input_ids=input_ids).last_hidden_state)
{}
return self.loss_function(logits, labels, self.config.vocab_size, **options), logits
"""


@pytest.mark.parametrize("name", STATEMENTS)
def test_any_forward_computes_what_it_computed(
    name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    forward = written(Model, FORWARD.format(STATEMENTS[name]), "self, input_ids, labels, **options")
    model: Any = build("Llama")
    kind = type("Changed", (forward, type(model)), {"__module__": __name__})
    model.__class__ = kind
    inputs = text()
    exact = truth(copy.deepcopy(model), inputs)
    expected = results(model, inputs)
    logits = model(**inputs)[1]
    replaced(model)
    monkeypatch.setattr("fusedlayers.modules.children._said", set())
    with in_kernels(monkeypatch) as paths, caplog.at_level("INFO", "fusedlayers"):
        found = results(model, inputs)
        outputs = model(**inputs)
    said = [line for line in caplog.messages if "computes its logits: its forward does more with them" in line]
    assert len(said) == (name not in TAKEN_OVER)
    assert losses(paths) == (2 if name in TAKEN_OVER else 0)
    if name in TAKEN_OVER:
        assert_all_close(found, expected, exact)
        assert torch.equal(torch.clone(outputs[1]), logits)
    else:
        assert_same(found, expected)
        assert torch.equal(outputs[1], logits)


def test_what_the_loss_function_refuses_it_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs = build("Llama"), text()
    replaced(model)
    with in_kernels(monkeypatch):
        with pytest.raises(ValueError, match="batch_size"):
            model(**inputs, logits_to_keep=3)
        with pytest.raises(RuntimeError, match="Int"):
            model(inputs["input_ids"], labels=inputs["labels"].int())
        kept = {**inputs, "labels": inputs["labels"][:, -3:]}
        assert torch.isfinite(model(**kept, logits_to_keep=3).loss)


def test_no_label_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs = build("Llama"), text()
    inputs["labels"].fill_(IGNORED)
    replaced(model)
    with in_kernels(monkeypatch):
        found = results(model, inputs)
    loss = found.pop("loss")
    assert loss.isnan()
    assert all(gradient is None or not gradient.any() for gradient in found.values())
