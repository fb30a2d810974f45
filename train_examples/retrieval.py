"""Quality of a search: ranks, recall and MRR, the baselines (chance and TF-IDF), and a ranking to look at."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from train_examples.code_pairs import Pair
from train_examples.scores import Scores


def ranks(scores: Tensor) -> Tensor:
    """The rank, from 1, of each query's own document: ``scores [Q, Q]``, where query q belongs to document q.

    Documents with the same score as the right one count as ranked before it, so ties never flatter; NaN counts as a
    tie.
    """
    own = scores.diagonal()[:, None]
    return scores.shape[1] - (scores < own).sum(dim=1)


def retrieval_scores(ranks: Tensor) -> Scores:
    """Recall at 10 and at 1 (the share of queries whose document is among the first 10 or 1), and the mean of 1 /
    rank."""
    return {
        "recall_at_10": (ranks <= 10).double().mean().item(),
        "recall_at_1": (ranks <= 1).double().mean().item(),
        "mrr": ranks.double().reciprocal().mean().item(),
    }


def chance_scores(candidates: int) -> Scores:
    """The average scores of a random order of this many candidates."""
    return retrieval_scores(torch.arange(1, candidates + 1))


def tfidf_scores(pairs: Sequence[Pair]) -> Tensor:
    """Cosine of TF-IDF vectors of queries and code, ``[Q, Q]``: the baseline, on the same words as the model's.

    scikit-learn's, with 1 + log(tf), which suits code, where names are repeated often. It uses the document frequencies
    of the very code that is searched, and sees every word of it, not only the first ``model.context``.
    """
    # Imported here because it takes a second, and only this example needs it.
    from sklearn.feature_extraction.text import TfidfVectorizer

    vectorizer = TfidfVectorizer(analyzer=tuple, sublinear_tf=True)
    code = vectorizer.fit_transform([pair.code_words for pair in pairs])
    queries = vectorizer.transform([pair.query_words for pair in pairs])
    return torch.from_numpy((queries @ code.T).toarray())


def ranking(pairs: Sequence[Pair], scores: Tensor, baseline: Tensor, query: int, length: int = 3) -> list[str]:
    """The lines of one ranking: the query, the rank of its function, and the first results."""
    place, baseline_place = (int(ranks(found)[query]) for found in (scores, baseline))
    lines = [
        f"query: {shortened(pairs[query].query)}",
        f"  its function is number {place}, with TF-IDF {baseline_place}",
    ]
    for number, found in enumerate(scores[query].argsort(descending=True, stable=True)[:length].tolist(), start=1):
        mark = "→" if found == query else " "
        code = shortened(" ".join(pairs[found].code.split()), 70)
        lines.append(f"  {mark} {number}. {scores[query, found].item():7.2f}  {pairs[found].name}: {code}")
    return lines


def shortened(text: str, length: int = 100) -> str:
    """At most the first ``length`` characters; an ellipsis marks a cut."""
    return text if len(text) <= length else text[: length - 1] + "…"
