"""Scores for pylate's losses: ``python -m train_examples.recipes.pylate_scores``, with pylate 1.6 or newer.

``pylate.losses.Contrastive`` and ``Distillation`` take ``contrastive_scores`` and ``distillation_scores`` as their
``score_metric``. A masked token takes no part in a maximum, as with pylate's kernels; on a CPU pylate counts it as 0.
"""

from __future__ import annotations

from pathlib import Path

import torch
from pylate.losses import Contrastive
from torch import Tensor, nn

import fusedlayers as fl
from train_examples.recipes.text_model import GPT, TextWindows


def contrastive_scores(
    queries_embeddings: Tensor,
    documents_embeddings: Tensor,
    queries_mask: Tensor | None = None,
    documents_mask: Tensor | None = None,
) -> Tensor:
    """Scores ``[Q, D N]`` of queries ``[Q, Lq, d]`` and of N documents for each of D queries, ``[D, N, Ld, d]``."""
    documents_mask = None if documents_mask is None else documents_mask.flatten(0, 1).bool()
    queries_mask = None if queries_mask is None else queries_mask.bool()
    documents = documents_embeddings.flatten(0, 1)
    return fl.functional.maxsim(queries_embeddings, documents, queries_mask, documents_mask)


def distillation_scores(
    queries_embeddings: Tensor,
    documents_embeddings: Tensor,
    queries_mask: Tensor | None = None,
    documents_mask: Tensor | None = None,
) -> Tensor:
    """Scores ``[Q, N]`` of queries ``[Q, Lq, d]``, each with N documents of its own, ``[Q, N, Ld, d]``."""
    masks = [[None] * len(queries_embeddings) if mask is None else mask for mask in (queries_mask, documents_mask)]
    scores = [
        contrastive_scores(query[None], documents[None], *(None if mask is None else mask[None] for mask in each))
        for query, documents, *each in zip(queries_embeddings, documents_embeddings, *masks, strict=True)
    ]
    return torch.cat(scores)


class Encoder(nn.Module):
    """Embeddings of tokens, with what pylate's losses read from a ``pylate.models.ColBERT``."""

    skiplist = ()
    do_query_expansion = False

    def __init__(self) -> None:
        super().__init__()
        self.transformer = GPT()

    def forward(self, features: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"token_embeddings": self.transformer(features["input_ids"])}


def main(steps: int = 200, folder: str = "runs/pylate_scores") -> list[float]:
    """Train beginnings and ends of windows, which overlap, to find each other; return the loss of each step (nats)."""
    torch.manual_seed(0)
    model = Encoder()
    print(fl.replace(model))  # the one line for blocks
    loss_of = Contrastive(model, score_metric=contrastive_scores)  # and the one for scores
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    windows, losses = TextWindows().windows, list[float]()
    for step in range(steps):
        batch = windows[torch.randint(len(windows), (16,))]
        parts = (batch[:, :40], batch[:, 24:])
        loss = loss_of([{"input_ids": part, "attention_mask": torch.ones_like(part)} for part in parts])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if step % 10 == 0:
            print(f"step {step}: loss {losses[-1]:.3f}")
    Path(folder).mkdir(parents=True, exist_ok=True)
    torch.save(model.state_dict(), f"{folder}/last.pt")
    return losses


if __name__ == "__main__":
    main()
