"""The tokens of the language model: bytes, or byte pairs (Sennrich et al. 2016) learned from the training text.

Byte pairs start from the 256 bytes, so that every text can be encoded. They are learned and applied by the library
``tokenizers``; the same text gives the same tokens in every process.
"""

from __future__ import annotations

import os
import re
from codecs import getincrementaldecoder
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor

from fusedlayers.folders import check_folder
from train_examples.data import Text
from train_examples.rules import SettingsError
from train_examples.settings import VocabularySettings

# A token always ends before the last of some line breaks, if no white space follows it: cutting the text there does not
# change its tokens.
CUTS = re.compile(r"(?=\n\S)")


@dataclass(frozen=True)
class Tokens:
    """The number of tokens, the word for one, and the functions from text to tokens and back.

    ``digest`` distinguishes vocabularies of one size that were learned from different texts.
    """

    size: int
    token: str
    encode: Callable[[str], list[int]]
    decode: Callable[[list[int]], str]
    digest: str | None = None


BYTES = Tokens(256, "byte", lambda text: list(text.encode()), lambda tokens: bytes(tokens).decode(errors="replace"))


def tokenized(text: Text, settings: VocabularySettings, sequence: int) -> tuple[Text, Tokens]:
    """``text`` in the tokens of ``settings``, at least ``sequence`` of them in each part, and the vocabulary.

    Raises:
        SettingsError: there are fewer, the text is not UTF-8, or the cache cannot be written.
    """
    if settings.kind == "bytes":
        return text, BYTES
    tokenizer, parts = _cached(text, settings)
    for name, part in parts.items():
        if len(part) < sequence:
            raise SettingsError(
                f"vocabulary=bpe makes {len(part)} tokens of the text for {name}; "
                f"expected at least {sequence}: one sequence of model.context tokens and the token that follows it"
            )
    size = tokenizer.get_vocab_size()
    fewer = "" if size == settings.size else f" of {settings.size:,} asked for, as the training text has no more pairs"
    length = len(text.training) / len(parts["training"])
    description = f"{text.description}\n{size:,} tokens{fewer}, {length:.2f} bytes each: " + ", ".join(
        f"{len(part):,} for {name}" for name, part in parts.items()
    )
    tokens = Tokens(
        size,
        "token",
        lambda prompt: tokenizer.encode(prompt).ids,
        tokenizer.decode,
        sha256(tokenizer.to_str().encode()).hexdigest()[:16],
    )
    return Text(parts["training"], parts["validation"], description), tokens


def learn(pieces: list[str], size: int) -> Tokenizer:
    """A tokenizer with the most frequent byte pairs in the pieces of a text, up to ``size`` tokens including the
    bytes."""
    tokenizer = Tokenizer(models.BPE())
    # As in GPT-2: a token is part of a word with a leading space, of a number, of signs, or of white space.
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    # A pair that occurs only once is useless.
    trainer = trainers.BpeTrainer(vocab_size=size, min_frequency=2, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(pieces, trainer)
    return tokenizer


def _cached(text: Text, settings: VocabularySettings) -> tuple[Tokenizer, dict[str, Tensor]]:
    """The tokenizer of a text and both parts of it as tokens (int32), cached in a file."""
    parts = {"training": text.training, "validation": text.validation}
    contents = {name: bytes(part.numpy()) for name, part in parts.items()}
    digest = sha256(b"".join(sha256(content).digest() for content in contents.values())).hexdigest()[:16]
    file = Path(settings.cache).expanduser() / f"bpe-{settings.size}-{digest}.pt"
    if file.exists():
        found = torch.load(file, weights_only=True)
        return Tokenizer.from_str(found["tokenizer"]), {name: found[name] for name in parts}
    try:
        check_folder(file.parent)
    except ValueError as error:
        raise SettingsError(f"vocabulary.cache is {error}") from error
    print(f"learning {settings.size:,} tokens from the training text, once: {file}", flush=True)
    pieces = {name: CUTS.split(_decoded(content)) for name, content in contents.items()}
    tokenizer = learn(pieces["training"], settings.size)
    parts = {
        name: torch.tensor([token for each in tokenizer.encode_batch_fast(part) for token in each.ids]).int()
        for name, part in pieces.items()
    }
    file.parent.mkdir(parents=True, exist_ok=True)
    # Several processes may write the same file; none may read half of it.
    unfinished = file.with_suffix(f".{os.getpid()}")
    torch.save({"tokenizer": tokenizer.to_str(), **parts}, unfinished)
    unfinished.replace(file)
    return tokenizer, parts


def _decoded(content: bytes) -> str:
    """The UTF-8 text, without a character at either end that was cut when a file was split by size."""
    whole = content.lstrip(bytes(range(0x80, 0xC0)))
    try:
        return getincrementaldecoder("utf-8")().decode(whole)
    except UnicodeDecodeError as error:
        raise SettingsError(f"vocabulary.kind is bpe, but the text is not UTF-8 ({error}); expected bytes") from error
