"""This library's loss head in the trainers of TRL 1.16 or newer: ``use_loss_head(trainer)`` before they train.

TRL calls the model with ``fused_lm_head=True`` for log-probabilities, entropies and token accuracy. Here one kernel
computes all of them from the input of the last linear layer, and no logits are in memory.
"""

from __future__ import annotations

import functools
from types import MethodType
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from trl.trainer.utils import FusedCausalLMOutput

import fusedlayers as fl

IGNORED = -100
# What a configuration calls a factor of the logits, or a divisor; this recipe has no use for them.
FACTORS = ("logit_scale", "logits_scaling", "output_multiplier", "lm_head_multiplier")


def use_loss_head(trainer: Any) -> None:
    """Let an ``SFTTrainer``, a ``DPOTrainer`` or a ``GRPOTrainer`` compute with ``fl.functional.linear_log_probs``.

    Raises:
        ValueError: the model or the arguments ask for something that only TRL's own loss head computes.
    """
    arguments, temperature = trainer.args, getattr(trainer, "temperature", 1.0)
    for model in (trainer.model, getattr(trainer, "ref_model", None)):
        if model is None:
            continue
        base = model.get_base_model() if hasattr(model, "get_base_model") else model
        config = base.config.get_text_config()
        asked = [name for name in ("use_weighting", "cast_lm_head_to_fp32") if getattr(arguments, name, False)]
        asked += [name for name in FACTORS if getattr(config, name, None) not in (None, 1.0)]
        asked += ["output_router_logits"] if getattr(config, "output_router_logits", False) else []
        if asked:
            raise ValueError(f"use_loss_head: only TRL's own loss head takes {', '.join(asked)}")
        base.forward = MethodType(_forward(base, temperature), base)


def _forward(model: PreTrainedModel, temperature: float) -> Any:
    theirs, softcap = model.forward, getattr(model.config.get_text_config(), "final_logit_softcapping", None)

    # ``generate`` compares its arguments with the signature.
    @functools.wraps(type(model).forward)
    def forward(self: PreTrainedModel, *args: Any, fused_lm_head: bool = False, **given: Any) -> Any:
        if not fused_lm_head:
            return theirs(*args, **given)
        labels, shifted, items = (given.pop(name, None) for name in ("labels", "shift_labels", "num_items_in_batch"))
        hidden = self.base_model(*args, **given | {"use_cache": False}).last_hidden_state
        hidden, target = (hidden[:, :-1], labels[:, 1:]) if shifted is None else (hidden, shifted)
        return scores(hidden, self.get_output_embeddings(), target, softcap, temperature, items)

    return forward


def scores(
    hidden: Tensor, head: torch.nn.Linear, target: Tensor, softcap: float | None, temperature: float, items: Any
) -> FusedCausalLMOutput:
    """What TRL reads for each token ``[B, T]``, 0 where the target is ignored; hidden ``[B, T, K]``."""
    mask = target != IGNORED
    x, classes = hidden[mask], target[mask]
    # The temperature divides the logits after the softcap: c / t · tanh(logits / c).
    cap = None if softcap is None else softcap / temperature
    log_probs, entropy, best = fl.functional.linear_log_probs(
        x, head.weight, classes, linear_bias=head.bias, softcap=cap, logit_scale=1 / temperature,
        return_entropy=True, return_argmax=True,
    )  # fmt: skip
    found: dict[str, Tensor] = {"log_probs": log_probs, "entropy": entropy, "is_top1": best == classes}
    if softcap is None:
        # The mean of the logits is the product with the mean of the weight's rows; autocast would round a matmul.
        with torch.no_grad():
            mean = (x.float() * head.weight.mean(0, dtype=torch.float32)).sum(-1) / temperature
            found["mean_logits"] = mean if head.bias is None else mean + head.bias.float().mean() / temperature
    each = {name: value.new_zeros(mask.shape).masked_scatter(mask, value) for name, value in found.items()}
    loss = -log_probs.sum() / (mask.sum().clamp(min=1) if items is None else items)
    return FusedCausalLMOutput(loss=loss, label_mask=mask, **each)
