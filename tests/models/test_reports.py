"""The reports in docs/reports.md are what `replace` prints."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fusedlayers as fl

transformers = pytest.importorskip("transformers", reason="transformers is not installed: pip install '.[models]'")

PAGE = Path(__file__).parents[2] / "docs" / "reports.md"
MODELS: dict[str, Callable[[], nn.Module]] = {
    "Llama": lambda: transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            hidden_size=2048,
            intermediate_size=8192,
            num_hidden_layers=16,
            num_attention_heads=32,
            num_key_value_heads=8,
            vocab_size=128256,
        )
    ),
    "Qwen2": lambda: transformers.Qwen2ForCausalLM(
        transformers.Qwen2Config(
            hidden_size=896,
            intermediate_size=4864,
            num_hidden_layers=24,
            num_attention_heads=14,
            num_key_value_heads=2,
            vocab_size=151936,
            tie_word_embeddings=True,
        )
    ),
    "GPT-2": lambda: transformers.GPT2LMHeadModel(transformers.GPT2Config()),
    "BERT": lambda: transformers.BertForMaskedLM(transformers.BertConfig()),
    "T5": lambda: transformers.T5ForConditionalGeneration(transformers.T5Config()),
}


def test_the_page_has_these_models() -> None:
    assert re.findall(r"^## (.*)$", PAGE.read_text(), flags=re.M) == list(MODELS)


@pytest.mark.parametrize("name", MODELS)
def test_a_report_is_the_one_of_the_page(name: str) -> None:
    with torch.device("meta"):
        model: Any = MODELS[name]().to(torch.bfloat16)
    [printed] = re.findall(rf"^## {re.escape(name)}\n\n```text\n(.*?)\n```", PAGE.read_text(), flags=re.M | re.S)
    assert str(fl.replace(model, dry_run=True, on="H200")) == printed
