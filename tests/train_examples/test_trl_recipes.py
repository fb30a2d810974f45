"""The recipe of a loss head for TRL's trainers returns what TRL's own one does, and trains with it."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

import fusedlayers as fl
from fusedlayers.functional.dispatch import decisions
from tests.support.seeds import generator

utils = pytest.importorskip("trl.trainer.utils", reason="the recipes are for TRL")

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*pin_memory.*:UserWarning"),
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:`gradient_checkpointing(_enable|_disable)?` is deprecated:FutureWarning"),
]


class Trained:
    """What ``use_loss_head`` reads of a trainer."""

    def __init__(self, model: Any, temperature: float = 1.0, **arguments: Any) -> None:
        self.model, self.ref_model, self.temperature = model, None, temperature
        self.args = type("Arguments", (), arguments)()


def batch() -> dict[str, Any]:
    ids = torch.randint(256, (3, 20), generator=generator(5))
    labels = ids.clone()
    labels[:, :6], labels[1] = -100, -100  # prompts, and a sequence without a label
    return {"input_ids": ids, "labels": labels}


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("softcap", [None, 3.0], ids=["", "softcap"])
@pytest.mark.parametrize("shifted", [False, True], ids=["labels", "shifted labels"])
def test_outputs_and_gradients_are_those_of_trl(
    backend: str, softcap: float | None, shifted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from train_examples.recipes.text_model import small_llama
    from train_examples.recipes.trl_loss_head import use_loss_head

    wanted = ("log_probs", "entropy", "is_top1", *(() if softcap else ("mean_logits",)))
    found = []
    for ours in (False, True):
        model, given = small_llama(), batch()
        model.config.final_logit_softcapping = softcap
        with torch.no_grad():
            model.lm_head.weight.mul_(5)
        if shifted:
            given["shift_labels"] = given["labels"]
        utils.add_fused_lm_head(model, temperature=0.7, outputs=wanted)
        if ours:
            monkeypatch.setenv("FUSEDLAYERS_BACKEND", backend)
            fl.replace(model)
            use_loss_head(Trained(model, temperature=0.7))
        with decisions() as paths:
            outputs = model(**given, fused_lm_head=True, num_items_in_batch=17)
        assert not ours or paths[f"linear_log_probs {'torch' if backend == 'torch' else 'fused'}"] == 1
        (outputs.loss + outputs.entropy.sum()).backward()
        found.append({name: getattr(outputs, name) for name in (*wanted, "loss", "label_mask")})
        found[-1] |= {name: each.grad for name, each in model.named_parameters()}
        logits = model(input_ids=given["input_ids"]).logits
        assert logits.shape == (3, 20, 256), "without the word TRL's forward runs"
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-5)


def test_what_only_trl_computes_is_refused() -> None:
    from train_examples.recipes.text_model import small_llama
    from train_examples.recipes.trl_loss_head import use_loss_head

    model = small_llama()
    with pytest.raises(ValueError, match=r"takes use_weighting$"):
        use_loss_head(Trained(model, use_weighting=True))
    model.config.logits_scaling = 8.0
    with pytest.raises(ValueError, match=r"takes logits_scaling$"):
        use_loss_head(Trained(model))


def test_grpo_trains(tmp_path: Path) -> None:
    from train_examples.recipes import trl_grpo

    with decisions() as paths:
        rewards = trl_grpo.main(2, str(tmp_path))
    assert paths["linear_log_probs torch"] == 2, "one of every step"
    assert all(map(math.isfinite, rewards))
    assert (tmp_path / "model.safetensors").is_file()
