"""The scores of the recipe for pylate are those of pylate's own functions, and its loss trains with them."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fusedlayers.functional.dispatch import decisions
from tests.support.seeds import generator

with warnings.catch_warnings():
    # pylate 1.6 imports sentence-transformers by names that these have moved.
    warnings.simplefilter("ignore", DeprecationWarning)
    scores = pytest.importorskip("pylate.scores", reason="the recipe is for pylate")

pytestmark = pytest.mark.filterwarnings("ignore:Importing from 'sentence_transformers:DeprecationWarning")


def embeddings(*shape: int) -> Tensor:
    drawn = torch.randn(*shape, generator=generator(3))
    # Similarities above 0, below which pylate's masks, which multiply by 0, would win a maximum.
    return torch.nn.functional.normalize(drawn.abs(), dim=-1).requires_grad_()


def masks(*shape: int) -> Tensor:
    """Integers, as tokenizers make them; no text is empty."""
    drawn = torch.randint(2, shape, generator=generator(4))
    drawn[..., 0] = 1
    return drawn


@pytest.mark.parametrize("masked", [False, True], ids=["all tokens", "masked"])
@pytest.mark.parametrize("kind", ["contrastive", "distillation"])
def test_scores_are_those_of_pylate(kind: str, masked: bool) -> None:
    from train_examples.recipes import pylate_scores as recipe

    ours, theirs = {
        "contrastive": (recipe.contrastive_scores, scores.ColBERTScores()),
        "distillation": (recipe.distillation_scores, scores.colbert_kd_scores),
    }[kind]
    queries, documents = embeddings(4, 6, 16), embeddings(4, 3, 9, 16)
    given: dict[str, Any] = {"queries_mask": masks(4, 6), "documents_mask": masks(4, 3, 9)} if masked else {}
    found = []
    for score in (ours, theirs):
        result = score(queries, documents, **given)
        found.append((result, *torch.autograd.grad(result.square().sum(), (queries, documents))))
    assert found[0][0].shape == ((4, 12) if kind == "contrastive" else (4, 3))
    for mine, expected in zip(*found, strict=True):
        torch.testing.assert_close(mine, expected)


def test_the_recipe_trains(tmp_path: Path) -> None:
    from train_examples.recipes.pylate_scores import main

    with decisions() as paths:
        losses = main(160, str(tmp_path))
    assert sum(count for path, count in paths.items() if path.startswith("maxsim")) == 160
    assert sum(losses[-10:]) < 0.5 * sum(losses[:10])
    assert (tmp_path / "last.pt").is_file()
