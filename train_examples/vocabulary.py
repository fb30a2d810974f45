"""Words as token ids: frequent words of the training texts have their own, all others share hashed ones."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from zlib import crc32

import torch
from torch import Tensor

PADDING = 0


class Vocabulary:
    """Token 0 is padding, the next ``buckets`` are hashes, and then come the words, the most frequent first.

    A word that training never saw still has the same token in a query and in code, so that it can be found. ``texts``
    are the training texts; a word must be in two of them, or its token would be learned from one.
    """

    def __init__(self, texts: Iterable[Sequence[str]], size: int, buckets: int) -> None:
        document_frequency = Counter(word for text in texts for word in set(text))
        # By frequency, then alphabetically: a Counter's order depends on the process's hash seed.
        ordered = sorted(document_frequency.items(), key=lambda item: (-item[1], item[0]))
        kept = [word for word, frequency in ordered if frequency >= 2][:size]
        self.buckets = buckets
        self.tokens = {word: 1 + buckets + number for number, word in enumerate(kept)}

    def __len__(self) -> int:
        return 1 + self.buckets + len(self.tokens)

    def token(self, word: str) -> int:
        """The token of a word, by its hash if it is not in the vocabulary; the same in every process."""
        return self.tokens.get(word, 1 + crc32(word.encode()) % self.buckets)

    def encode(self, texts: Sequence[Sequence[str]], length: int) -> Tensor:
        """The first ``length`` words of every text, padded: int64 ``[len(texts), length]``."""
        encoded = torch.full((len(texts), length), PADDING, dtype=torch.int64)
        for row, text in zip(encoded, texts, strict=True):
            tokens = [self.token(word) for word in text[:length]]
            row[: len(tokens)] = torch.tensor(tokens)
        return encoded
