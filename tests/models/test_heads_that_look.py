"""Causal models whose forward tells a stand-in from the model, or uncomputed logits from a tensor, keep their class."""

from __future__ import annotations

import collections
import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

import fusedlayers as fl
from fusedlayers.replacing.loss.lazy_logits import LazyLogits
from tests.models.loss_heads import build, in_kernels, losses, replaced, text
from tests.support.written import written

pytest.importorskip("transformers", reason="transformers is not installed: pip install 'fusedlayers[models]'")

Results = collections.namedtuple("Results", "loss logits")
TABLE: dict[Any, float] = collections.defaultdict(lambda: 3.0)


@dataclasses.dataclass(frozen=True)
class Held:
    loss: Tensor
    logits: Any


def doubled_if_tensor(logits: Any) -> Any:
    return logits * 2 if isinstance(logits, Tensor) else logits


def capped(logits: Any, cap: float) -> Any:
    return cap * torch.tanh(logits / cap)


class Methods:
    """What forwards of the models here may use."""

    factor, loss_type = 2.0, "ForCausalLM"

    def doubled(self, logits: Any) -> Any:
        return doubled_if_tensor(logits)

    def halved(self, logits: Any) -> Any:
        return logits / 2


LOGITS = "logits = self.lm_head(self.model(input_ids=words).last_hidden_state)"
LOSS = "loss = self.loss_function(logits, labels, self.config.vocab_size)"
# Statements between the logits and the loss that look at what stands in for the model, its last layer or its logits.
LOOKING = {
    "layer": "if isinstance(self.lm_head, torch.nn.Linear):\n    logits = logits * 2",
    "layer by another name": "head = self.lm_head\nif type(head) is torch.nn.Linear:\n    logits = logits * 2",
    "logits": "logits = logits.float()\nif isinstance(logits, Tensor):\n    logits = logits * 2",
    "logits by torch": "scaled = logits\nif torch.is_tensor(scaled / 2):\n    logits = scaled * 2",
    "logits in a function": "logits = doubled_if_tensor(logits)",
    "logits in a method": "logits = self.doubled(logits)",
    "logits matched": "self.kept = logits\nmatch logits:\n    case Tensor():\n        logits = logits * 2",
    "itself": "assert isinstance(self, torch.nn.Module)",
    "its class": "logits = logits * self.__class__.factor",
    "its type": "logits = logits * type(self).factor",
    "its attributes": "logits = logits * 2 if '_modules' in vars(self) else logits",
    "a key": "logits = logits * TABLE[self]",
    "another loss": "self.loss_function = lambda *args: args[0].sum()",
}
# Statements that look at nothing, and what is returned.
USING = {
    "deleted": ("self.kept = 1\ndel self.kept", "loss, logits"),
    "by a function": ("logits = capped(logits, cap=3.0)", "loss, logits"),
    "by a method": ("logits = self.halved(logits)", "loss, logits"),
    "named": ("pass", "Results(loss=loss, logits=logits)"),
    "held": ("pass", "Held(loss, logits)"),
    "nested": ("pass", "Held(loss, {'all': [(logits,)]})"),
}


def model_with(methods: type[Any]) -> Any:
    """A model with these methods, its forward among them."""
    model = build("Llama")
    model.__class__ = type("Own", (methods, type(model)), {"__module__": __name__})
    return model.eval()


def made(statement: str, result: str = "loss, logits") -> Any:
    """A model with this statement in its forward."""
    return model_with(written(Methods, f"{LOGITS}\n{statement}\n{LOSS}\nreturn {result}", "self, words, labels"))


def loss_and_logits(outputs: Any) -> tuple[Tensor, Any]:
    if not isinstance(outputs, Held):
        return outputs[0], outputs[1]
    return outputs.loss, outputs.logits["all"][0][0] if isinstance(outputs.logits, dict) else outputs.logits


@pytest.mark.filterwarnings("ignore:nothing was replaced:UserWarning")
@pytest.mark.parametrize("name", LOOKING)
def test_a_forward_that_looks_stays(name: str) -> None:
    model, (words, labels) = made(LOOKING[name]), text().values()
    expected = model(words, labels)
    own = type(model)
    [reason] = (entry.reason for entry in fl.replace(model).skipped if entry.path == "")
    assert reason.startswith("its loss makes logits: its forward ")
    assert type(model) is own
    torch.testing.assert_close(model(words, labels)[0], expected[0])


@pytest.mark.interpreter
@pytest.mark.parametrize("name", USING)
def test_any_other_forward_is_fused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, (words, labels) = made(*USING[name]), text().values()
    loss, logits = loss_and_logits(model(words, labels))
    replaced(model)
    with in_kernels(monkeypatch):
        ours, waiting = loss_and_logits(model(words, labels))
    torch.testing.assert_close(ours, loss)
    assert type(waiting) is LazyLogits
    torch.testing.assert_close(waiting + 0, logits)


@pytest.mark.interpreter
def test_a_forward_may_call_what_its_enclosing_function_has(monkeypatch: pytest.MonkeyPatch) -> None:
    def halved(logits: Any) -> Any:
        return logits / 2

    class Enclosed(Methods):
        def forward(self: Any, words: Tensor, labels: Tensor) -> Any:
            logits = halved(self.lm_head(self.model(input_ids=words).last_hidden_state))
            return self.loss_function(logits, labels, self.config.vocab_size), logits

    model, (words, labels) = model_with(Enclosed), text().values()
    expected = model(words, labels)[0]
    replaced(model)
    with in_kernels(monkeypatch) as paths:
        torch.testing.assert_close(model(words, labels)[0], expected)
    assert losses(paths) == 1


@pytest.mark.filterwarnings("ignore:nothing was replaced:UserWarning")
def test_a_forward_whose_source_is_gone_stays() -> None:
    found: dict[str, Any] = {}
    exec(f"def forward(self, words, labels):\n    {LOGITS}\n    {LOSS}\n    return loss, logits", found)
    model = model_with(type("Nameless", (Methods,), {"forward": found["forward"]}))
    [reason] = (entry.reason for entry in fl.replace(model).skipped if entry.path == "")
    assert "source" in reason
