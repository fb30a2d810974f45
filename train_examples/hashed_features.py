"""Source text as very wide, sparse vectors of hashed n-grams, and the predictions of a linear classifier on them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from train_examples.code_pairs import WORD

# The parts of names, as in the code search, and every sign: punctuation shows style.
TOKEN = rf"{WORD.pattern}|[^\w\s]"
# Regularisation strengths, from which the validation part chooses one for the baseline.
PENALTIES = (1e-7, 1e-6, 1e-5)


@dataclass(frozen=True)
class SparseRows:
    """``[N, K]`` in compressed rows: the nonzero entries of row n are ``starts[n]`` to ``starts[n + 1]``."""

    starts: Tensor  # [N + 1], int64
    columns: Tensor  # int64
    values: Tensor  # float32

    def take(self, samples: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(row in ``0..len(samples) - 1``, column, value) of every nonzero entry of these samples."""
        lengths = self.starts[samples + 1] - self.starts[samples]
        rows = torch.arange(len(samples)).repeat_interleave(lengths)
        # The entry's offset within its row, plus where its row starts in this matrix.
        entries = torch.arange(len(rows)) - (lengths.cumsum(0) - lengths)[rows] + self.starts[samples][rows]
        return rows, self.columns[entries], self.values[entries]


def dense_rows(
    rows: Tensor, columns: Tensor, values: Tensor, shape: tuple[int, int], dtype: torch.dtype | None = None
) -> Tensor:
    """The matrix of this shape with these entries, on their device, in ``dtype`` or the dtype of the values."""
    dense = torch.zeros(shape, dtype=dtype or values.dtype, device=values.device)
    dense[rows, columns] = values.to(dense.dtype)
    return dense


class HashedFeatures:
    """Maps texts to rows of ``width`` features: n-grams of up to ``n_gram`` tokens, hashed, weighted by 1 + log(count)
    and inverse document frequency in ``training``, each row of length ``scale``."""

    def __init__(self, training: Sequence[str], width: int, n_gram: int, scale: float) -> None:
        # Imported here because it takes a second, and the other examples do not need it.
        from sklearn.feature_extraction.text import HashingVectorizer, TfidfTransformer

        self.vectorizer = HashingVectorizer(
            n_features=width,
            token_pattern=TOKEN,
            ngram_range=(1, n_gram),
            lowercase=False,
            alternate_sign=False,
            norm=None,
        )
        self.weighting = TfidfTransformer(sublinear_tf=True)
        self.scale = scale
        self.weighting.fit(self.vectorizer.transform(training))

    def matrix(self, texts: Sequence[str]) -> Any:
        """``[len(texts), width]`` as a SciPy CSR matrix, float64, every row of length 1."""
        return self.weighting.transform(self.vectorizer.transform(texts))

    def rows(self, matrix: Any) -> SparseRows:
        """The rows of ``matrix`` for the model, of length ``scale``."""
        values = torch.from_numpy(matrix.data * self.scale).float()
        return SparseRows(torch.from_numpy(matrix.indptr).long(), torch.from_numpy(matrix.indices).long(), values)

    def tokens(self, texts: Sequence[str]) -> int:
        """The total number of words and signs in the texts."""
        tokenize = self.vectorizer.build_tokenizer()
        return sum(len(tokenize(text)) for text in texts)


def linear_predictions(
    training: Any, labels: Tensor, validation: Any, validation_labels: Tensor, others: Sequence[Any]
) -> list[Tensor]:
    """The baseline: the classes that logistic regression predicts for ``validation`` and each of ``others``.

    scikit-learn's, one class against the rest, fitted by stochastic gradient descent on the same features, with the
    penalty that predicts most validation rows correctly.
    """
    from sklearn.linear_model import SGDClassifier

    fitted = [
        SGDClassifier(loss="log_loss", alpha=penalty, random_state=0).fit(training, labels.numpy())
        for penalty in PENALTIES
    ]
    best = max(fitted, key=lambda classifier: classifier.score(validation, validation_labels.numpy()))
    return [torch.from_numpy(best.predict(matrix)) for matrix in (validation, *others)]
