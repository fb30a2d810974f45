"""Causal models whose forward tells a stand-in from the model, or uncomputed logits from a tensor, keep their class."""

from __future__ import annotations

import collections
import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fusedlayers as fl
from fusedlayers.replacing.loss.lazy_logits import LazyLogits
from tests.models.loss_heads import build, in_kernels, replaced, text

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


class Looking:
    """Forwards that look at what stands in for the model, its last layer or its logits."""

    factor = 2.0

    def layer(self: Any, words: Tensor, labels: Tensor) -> Any:
        logits = self.lm_head(self.model(input_ids=words).last_hidden_state)
        if isinstance(self.lm_head, nn.Linear):
            logits = logits * 2
        return self.loss_function(logits, labels, self.config.vocab_size), logits

    def layer_by_another_name(self: Any, words: Tensor, labels: Tensor) -> Any:
        head = self.lm_head
        logits = head(self.model(input_ids=words).last_hidden_state)
        if type(head) is nn.Linear:
            logits = logits * 2
        return self.loss_function(logits, labels, self.config.vocab_size), logits

    def logits(self: Any, words: Tensor, labels: Tensor) -> Any:
        logits = self.lm_head(self.model(input_ids=words).last_hidden_state).float()
        if isinstance(logits, Tensor):
            logits = logits * 2
        return self.loss_function(logits, labels, self.config.vocab_size), logits

    def logits_by_torch(self: Any, words: Tensor, labels: Tensor) -> Any:
        logits = scaled = self.lm_head(self.model(input_ids=words).last_hidden_state)
        if torch.is_tensor(scaled / 2):
            logits = scaled * 2
        return self.loss_function(logits, labels, self.config.vocab_size), logits

    def logits_in_a_function(self: Any, words: Tensor, labels: Tensor) -> Any:
        logits = doubled_if_tensor(self.lm_head(self.model(input_ids=words).last_hidden_state))
        return self.loss_function(logits, labels, self.config.vocab_size), logits

    def logits_in_a_method(self: Any, words: Tensor, labels: Tensor) -> Any:
        logits = self.doubled(self.lm_head(self.model(input_ids=words).last_hidden_state))
        return self.loss_function(logits, labels, self.config.vocab_size), logits

    def logits_matched(self: Any, words: Tensor, labels: Tensor) -> Any:
        logits = self.lm_head(self.model(input_ids=words).last_hidden_state)
        self.kept = logits
        match logits:
            case Tensor():
                logits = logits * 2
        return self.loss_function(logits, labels, self.config.vocab_size), logits

    def itself(self: Any, words: Tensor, labels: Tensor) -> Any:
        assert isinstance(self, nn.Module)
        logits = self.lm_head(self.model(input_ids=words).last_hidden_state)
        return self.loss_function(logits, labels, self.config.vocab_size), logits

    def its_class(self: Any, words: Tensor, labels: Tensor) -> Any:
        logits = self.lm_head(self.model(input_ids=words).last_hidden_state) * self.__class__.factor
        return self.loss_function(logits, labels, self.config.vocab_size), logits

    def its_type(self: Any, words: Tensor, labels: Tensor) -> Any:
        logits = self.lm_head(self.model(input_ids=words).last_hidden_state) * type(self).factor
        return self.loss_function(logits, labels, self.config.vocab_size), logits

    def its_attributes(self: Any, words: Tensor, labels: Tensor) -> Any:
        logits = self.lm_head(self.model(input_ids=words).last_hidden_state)
        logits = logits * 2 if "_modules" in vars(self) else logits
        return self.loss_function(logits, labels, self.config.vocab_size), logits

    def a_key(self: Any, words: Tensor, labels: Tensor) -> Any:
        logits = self.lm_head(self.model(input_ids=words).last_hidden_state) * TABLE[self]
        return self.loss_function(logits, labels, self.config.vocab_size), logits

    def another_loss(self: Any, words: Tensor, labels: Tensor) -> Any:
        logits = self.lm_head(self.model(input_ids=words).last_hidden_state)
        own, self.loss_function = self.loss_function, lambda *args: args[0].sum()
        loss = self.loss_function(logits, labels, self.config.vocab_size)
        self.loss_function = own
        return loss, logits

    def doubled(self, logits: Any) -> Any:
        return logits * 2 if isinstance(logits, Tensor) else logits


class Using:
    """Forwards that look at nothing."""

    def deleted(self: Any, words: Tensor, labels: Tensor) -> Any:
        logits = self.lm_head(self.model(input_ids=words).last_hidden_state)
        self.kept = 1
        del self.kept
        return self.loss_function(logits, labels, self.config.vocab_size), logits

    def by_a_function(self: Any, words: Tensor, labels: Tensor) -> Any:
        head = self.lm_head
        logits = capped(head(self.model(input_ids=words).last_hidden_state), cap=3.0)
        return self.loss_function(logits, labels, self.config.vocab_size), logits

    def by_a_method(self: Any, words: Tensor, labels: Tensor) -> Any:
        logits = self.halved(self.lm_head(self.model(input_ids=words).last_hidden_state))
        return self.loss_function(logits, labels, self.config.vocab_size), logits

    def halved(self, logits: Any) -> Any:
        return logits / 2

    def named(self: Any, words: Tensor, labels: Tensor) -> Any:
        logits = self.lm_head(self.model(input_ids=words).last_hidden_state)
        return Results(loss=self.loss_function(logits, labels, self.config.vocab_size), logits=logits)

    def held(self: Any, words: Tensor, labels: Tensor) -> Any:
        logits = self.lm_head(self.model(input_ids=words).last_hidden_state)
        return Held(self.loss_function(logits, labels, self.config.vocab_size), logits)

    def nested(self: Any, words: Tensor, labels: Tensor) -> Any:
        logits = self.lm_head(self.model(input_ids=words).last_hidden_state)
        return Held(self.loss_function(logits, labels, self.config.vocab_size), {"all": [(logits,)]})


HELPERS = {"doubled": Looking.doubled, "halved": Using.halved}


def cases(kind: type) -> list[str]:
    return [name for name in vars(kind) if not name.startswith("_") and name not in (*HELPERS, "factor")]


def made(method: Any) -> Any:
    """A model with this forward."""
    model = build("Llama")
    own = {"forward": method, "factor": 2.0, "loss_type": "ForCausalLM", "__module__": __name__} | HELPERS
    model.__class__ = type("Own", (type(model),), own)
    return model.eval()


def loss_and_logits(outputs: Any) -> tuple[Tensor, Any]:
    if not isinstance(outputs, Held):
        return outputs[0], outputs[1]
    return outputs.loss, outputs.logits["all"][0][0] if isinstance(outputs.logits, dict) else outputs.logits


@pytest.mark.filterwarnings("ignore:nothing was replaced:UserWarning")
@pytest.mark.parametrize("name", cases(Looking))
def test_a_forward_that_looks_stays(name: str) -> None:
    model, (words, labels) = made(getattr(Looking, name)), text().values()
    expected = model(words, labels)
    own = type(model)
    [reason] = (entry.reason for entry in fl.replace(model).skipped if entry.path == "")
    assert reason.startswith("its loss makes logits: its forward ")
    assert type(model) is own
    torch.testing.assert_close(model(words, labels)[0], expected[0])


@pytest.mark.interpreter
@pytest.mark.parametrize("name", cases(Using))
def test_any_other_forward_is_fused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, (words, labels) = made(getattr(Using, name)), text().values()
    loss, logits = loss_and_logits(model(words, labels))
    replaced(model)
    with in_kernels(monkeypatch):
        ours, waiting = loss_and_logits(model(words, labels))
    torch.testing.assert_close(ours, loss)
    assert type(waiting) is LazyLogits
    torch.testing.assert_close(waiting + 0, logits)
