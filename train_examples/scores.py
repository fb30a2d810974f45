"""Scores of a classifier, and a table of scores."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

Scores = dict[str, float]


def accuracy_scores(predicted: Tensor, labels: Tensor) -> Scores:
    """The share of samples whose class, int64 ``[N]``, was predicted, and the mean of that share over the classes,
    which weighs small classes like large ones."""
    right = (predicted == labels).double()
    by_class = torch.stack([right[labels == label].mean() for label in labels.unique()])
    return {"accuracy": right.mean().item(), "balanced_accuracy": by_class.mean().item()}


def majority_scores(training_labels: Tensor, labels: Tensor) -> Scores:
    """The scores of always predicting the class that is most frequent in training."""
    return accuracy_scores(training_labels.mode().values.expand_as(labels), labels)


def score_table(reached: Mapping[str, Scores]) -> list[str]:
    """One aligned line per name, below one with the names of the scores."""
    width = max(map(len, reached)) + 1
    first = next(iter(reached.values()))
    lines = ["".join([" " * width, *(f"{name:>{column_width(name)}}" for name in first)])]
    for name, row in reached.items():
        cells = (f"{value:{column_width(score)}.3f}" for score, value in row.items())
        lines.append("".join([f"{name:<{width}}", *cells]))
    return lines


def column_width(score: str) -> int:
    """The width for the name of a score, and for its value."""
    return max(14, len(score) + 2)
