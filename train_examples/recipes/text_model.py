"""What the recipes train: a small Llama with random weights, on the bytes of the Python standard library."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM

from train_examples.data import load_text, random_windows
from train_examples.settings import DataSettings

CONTEXT = 64  # bytes that the model sees at once: a token is a byte, so nothing is downloaded
WINDOWS = 4096


def small_llama(seed: int = 0) -> LlamaForCausalLM:
    """Two layers of width 64 with gated feed-forward blocks, as in every Llama; about 130,000 parameters."""
    torch.manual_seed(seed)
    sizes = {"hidden_size": 64, "intermediate_size": 172, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=256, max_position_embeddings=CONTEXT, use_cache=False, **sizes))


class TextWindows(Dataset[dict[str, Tensor]]):
    """Random windows of the text as Hugging Face's models take them; the model shifts the labels itself."""

    def __init__(self, seed: int = 0) -> None:
        text = load_text(DataSettings(kind="stdlib"), CONTEXT)
        self.windows = random_windows(text.training, WINDOWS, CONTEXT, torch.Generator().manual_seed(seed))

    def __len__(self) -> int:
        return len(self.windows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.windows[index], "labels": self.windows[index]}
