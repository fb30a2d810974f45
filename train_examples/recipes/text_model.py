"""What the recipes train: a small Llama or GPT with random weights, on the bytes of the Python standard library."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from tokenizers import Regex, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import WordLevel
from torch import Tensor, nn
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from train_examples.data import load_text, random_windows
from train_examples.settings import DataSettings

CONTEXT = 64  # bytes that the model sees at once: a token is a byte, so nothing is downloaded
WINDOWS = 4096


def small_llama(seed: int = 0) -> LlamaForCausalLM:
    """Two layers of width 64 with gated feed-forward blocks, as in every Llama; about 130,000 parameters."""
    torch.manual_seed(seed)
    sizes = {"hidden_size": 64, "intermediate_size": 172, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=256, max_position_embeddings=CONTEXT, use_cache=False, **sizes))


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer whose tokens are the bytes of a text in latin-1; 0 pads, and 1 ends a text."""
    letters = Tokenizer(WordLevel({chr(byte): byte for byte in range(256)}, unk_token="\0"))
    letters.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    letters.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=letters, pad_token="\0", eos_token="\1")


class Block(nn.Module):
    """Attention and a feed-forward block, each after a norm and beside a residual, as in GPT-2."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.c_attn, self.attn_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.c_fc, self.gelu, self.c_proj = nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.c_attn(self.norm_1(x)).unflatten(-1, (3, self.heads, -1)).transpose(1, 3)
        mixed = F.scaled_dot_product_attention(*parts.unbind(2), is_causal=True)
        x = x + self.attn_proj(mixed.transpose(1, 2).flatten(-2))
        return x + self.c_proj(self.gelu(self.c_fc(self.norm_2(x))))


class GPT(nn.Module):
    """Tokens ``[B, T]`` to the input ``[B, T, width]`` of the head, whose weight is that of the embedding ``wte``."""

    def __init__(self, width: int = 64, heads: int = 4, layers: int = 2) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(256, width), nn.Embedding(CONTEXT, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        for embedding in (self.wte, self.wpe):
            nn.init.normal_(embedding.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        x: Tensor = self.norm(self.blocks(self.wte(tokens) + self.wpe.weight[: tokens.shape[1]]))
        return x


class TextWindows(Dataset[dict[str, Tensor]]):
    """Random windows of the text as Hugging Face's models take them; the model shifts the labels itself."""

    def __init__(self, seed: int = 0) -> None:
        text = load_text(DataSettings(kind="stdlib"), CONTEXT)
        self.windows = random_windows(text.training, WINDOWS, CONTEXT, torch.Generator().manual_seed(seed))

    def __len__(self) -> int:
        return len(self.windows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.windows[index], "labels": self.windows[index]}
