"""Search for code by its docstring: ``python -m train_examples.code_search layers=fused model=tiny``.

Late interaction (Khattab and Zaharia 2020, "ColBERT"): one encoder maps every word of a query and of a function to a
vector; each word of the query looks for its best match in the code, and the score is the weighted sum of these matches.
Training makes every docstring find its own function among all functions of the batch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from zlib import crc32

import hydra
import torch
import torch.nn.functional as F
from omegaconf import DictConfig, OmegaConf
from torch import Tensor, nn

import fusedlayers
from train_examples import loop
from train_examples.code_pairs import Pair, load_pairs
from train_examples.command import CONFIGS, in_one_line, start
from train_examples.retrieval import chance_scores, ranking, ranks, retrieval_scores, tfidf_scores
from train_examples.rules import SettingsError
from train_examples.scores import Scores, score_table
from train_examples.settings import CodeSearchSettings, LayerSettings, ModelSettings, SearchSettings, register_settings
from train_examples.transformer import Transformer, replace_if_asked
from train_examples.vocabulary import PADDING, Vocabulary

# Functions that are scored at once: limits the memory for similarities if torch computes them.
SCORED_AT_ONCE = 64


class LateInteraction(Transformer):
    """Maps queries ``[Q, Lq]`` and codes ``[D, Ld]`` (int64, padded) to the scores ``[Q, D]`` of all pairs, as logits.

    The learned weights of query words start from ``rarity [vocabulary]``.
    """

    def __init__(self, settings: ModelSettings, layers: LayerSettings, search: SearchSettings, rarity: Tensor) -> None:
        # Embeddings of length sqrt(d_model) outweigh what the first blocks add, so that at first a word is most similar
        # to itself: the model starts as a search for equal words, and learns the rest.
        super().__init__(settings, layers, len(rarity), causal=False, embedding_scale=1.0)
        self.side = nn.Embedding(2, settings.d_model)
        nn.init.zeros_(self.side.weight)
        self.projection = nn.Linear(settings.d_model, search.vector_size, bias=False)
        nn.init.orthogonal_(self.projection.weight)
        self.word_weight = nn.Embedding(len(rarity), 1)
        with torch.no_grad():
            self.word_weight.weight.copy_(rarity.log()[:, None])
        self.weight_in_context = nn.Linear(settings.d_model, 1, bias=False)
        nn.init.zeros_(self.weight_in_context.weight)
        self.log_sharpness = nn.Parameter(torch.tensor(math.log(search.sharpness)))
        # Longer code has more chances of an accidental match.
        self.length_penalty = nn.Parameter(torch.tensor(search.length_penalty))
        self.word_dropout = search.word_dropout
        self.max_sim = fusedlayers.MaxSim()

    def encode(self, tokens: Tensor, side: int) -> tuple[Tensor, Tensor]:
        """The encoder's vectors ``[B, M, d_model]``, and which of them are words ``[B, M]``; ``side`` is 0 for queries
        and 1 for code."""
        present = tokens != PADDING
        if self.training and self.word_dropout:
            kept = torch.rand(tokens.shape, device=tokens.device) >= self.word_dropout
            kept[:, 0] = True  # a text must keep at least one word
            present = present & kept
        return self.features(tokens, present, self.side.weight[side]), present

    def forward(self, queries: Tensor, codes: Tensor) -> Tensor:
        query_features, query_words = self.encode(queries, 0)
        code_features, code_words = self.encode(codes, 1)
        # A word's weight depends on its rarity and its context; the weights of a query sum to 1.
        weights = (self.word_weight(queries) + self.weight_in_context(query_features)).float()
        weights = weights.masked_fill(~query_words[..., None], -math.inf).softmax(dim=1)
        query_vectors = F.normalize(self.projection(query_features), dim=-1) * weights
        code_vectors = F.normalize(self.projection(code_features), dim=-1)
        if self.training:
            matches = self.max_sim(query_vectors, code_vectors, query_words, code_words)
        else:
            # 16-bit scores have too few digits to rank by.
            with torch.autocast(queries.device.type, enabled=False):
                matches = self.max_sim(query_vectors.float(), code_vectors.float(), query_words, code_words)
        penalty = self.length_penalty * code_words.sum(dim=-1).log()
        return self.log_sharpness.exp() * (matches.float() - penalty)


def build_model(settings: CodeSearchSettings, rarity: Tensor) -> LateInteraction:
    """The model, with feed-forward blocks of the kind ``layers.kind``."""
    built = LateInteraction(settings.model, settings.layers, settings.search, rarity)
    replace_if_asked(built, settings.layers)
    return built


@dataclass(frozen=True)
class Part:
    """Pairs and their tokens: ``queries [N, search.query_words]`` and ``codes [N, model.context]``."""

    pairs: Sequence[Pair]
    queries: Tensor
    codes: Tensor

    def batch(self, rows: Tensor) -> loop.Batch:
        """These pairs as a batch for the loop."""
        return self.queries[rows], self.codes[rows]


def encode_part(pairs: Sequence[Pair], vocabulary: Vocabulary, settings: CodeSearchSettings) -> Part:
    """The pairs with their first words as tokens."""
    return Part(
        pairs,
        vocabulary.encode([pair.query_words for pair in pairs], settings.search.query_words),
        vocabulary.encode([pair.code_words for pair in pairs], settings.model.context),
    )


def rarity(codes: Tensor, vocabulary: int) -> Tensor:
    """1 + log((1 + codes) / (1 + codes with the token)) of every token, ``[vocabulary]``: the smoothed inverse document
    frequency that scikit-learn uses, too."""
    holds = torch.zeros(vocabulary)
    for code in codes:
        holds[code.unique()] += 1
    return 1 + torch.log((1 + len(codes)) / (1 + holds))


def in_batch_loss(model: nn.Module, batch: loop.Batch) -> Tensor:
    """The mean of two cross-entropies in nats: of the right code for each query, and of the right query for each
    code."""
    queries, codes = batch
    scores = model(queries, codes)
    right = torch.arange(len(scores), device=scores.device)
    return (F.cross_entropy(scores, right) + F.cross_entropy(scores.T, right)) / 2


@torch.no_grad()
def all_scores(model: nn.Module, part: Part) -> Tensor:
    """The scores of every query with every code of a part, ``[N, N]`` on the CPU."""
    device = next(model.parameters()).device
    queries = part.queries.to(device)
    return torch.cat([model(queries, codes.to(device)).cpu() for codes in part.codes.split(SCORED_AT_ONCE)], dim=1)


def references(untrained: nn.Module, part: Part) -> dict[str, Scores]:
    """Baselines on these pairs: TF-IDF; the untrained model, which knows equal words and their rarity; and chance."""
    untrained.eval()
    scores = all_scores(untrained, part)
    untrained.train()
    return {
        "TF-IDF": retrieval_scores(ranks(tfidf_scores(part.pairs))),
        "untrained": retrieval_scores(ranks(scores)),
        "chance": chance_scores(len(part.pairs)),
    }


def report(model: nn.Module, test: Part, others: dict[str, Scores], shown: int) -> tuple[str, loop.Row]:
    """The test scores beside the baselines, and the rankings of some queries, as text; and the numbers for the
    summary."""
    scores, baseline = all_scores(model, test), tfidf_scores(test.pairs)
    reached = {"trained": retrieval_scores(ranks(scores)), **others}
    lines = [f"{len(test.pairs)} functions of held-out test modules, found by their docstrings:"]
    lines += score_table(reached)
    for query in torch.linspace(0, len(test.pairs) - 1, min(shown, len(test.pairs))).long().tolist():
        lines += ["", *ranking(test.pairs, scores, baseline, query)]
    return "\n".join(lines), {"test_scores": reached["trained"], "test_references": others}


def run(settings: CodeSearchSettings) -> loop.Row:
    """Read the pairs, build the model, train it; returns the summary that is also in ``summary.json``."""
    model, search, batch_size = settings.model, settings.search, settings.run.batch_size
    pairs = load_pairs(settings.data)
    print(pairs.description)
    if batch_size > len(pairs.training):
        raise SettingsError(
            f"run.batch_size is {batch_size}; expected at most the {len(pairs.training)} training pairs"
        )
    texts = [words for pair in pairs.training for words in (pair.query_words, pair.code_words)]
    vocabulary = Vocabulary(texts, search.vocabulary, search.hash_buckets)
    training, validation, test = (
        encode_part(part, vocabulary, settings) for part in (pairs.training, pairs.validation, pairs.test)
    )
    torch.manual_seed(settings.run.seed)
    built = build_model(settings, rarity(training.codes, len(vocabulary)))
    parameters = sum(parameter.numel() for parameter in built.parameters())
    print(f"{parameters:,} parameters, {len(vocabulary.tokens):,} words, layers={settings.layers.kind}")

    # Neighbours come from one module and are harder to tell apart: validation batches are shuffled, as training batches
    # are.
    mixed = torch.randperm(len(validation.pairs), generator=torch.Generator().manual_seed(0))
    # All batches have the same size, because the loss depends on it.
    whole = [rows for rows in mixed.split(batch_size) if len(rows) == min(batch_size, len(mixed))]
    words = sum(int((part != PADDING).sum()) for part in (training.queries, training.codes))
    architecture = ("d_model", "d_ff", "layers", "heads", "activation", "gated", "bias")
    # Before training, which changes the model in place.
    test_references = references(built, test)
    example = loop.Example(
        name="code_search",
        model=built,
        fingerprint={
            **{f"model.{name}": getattr(model, name) for name in architecture},
            "search.hash_buckets": search.hash_buckets,
            "vocabulary": crc32(" ".join(vocabulary.tokens).encode()),
        },
        training_batch=lambda generator: training.batch(
            torch.randperm(len(training.pairs), generator=generator)[:batch_size]
        ),
        validation_batches=[validation.batch(rows) for rows in whole[: settings.run.evaluation_batches]],
        loss=in_batch_loss,
        loss_unit=f"nats, {batch_size} to choose from",
        # On average, without padding.
        tokens_per_batch=round(words / len(training.pairs) * batch_size),
        sample=lambda trained: report(trained, test, test_references, search.shown),
        scores=lambda trained: retrieval_scores(ranks(all_scores(trained, validation))),
        references=references(built, validation),
    )
    config = OmegaConf.to_yaml(OmegaConf.structured(settings))
    return loop.train(example, settings.layers.kind, settings.run, settings.optim, config)


register_settings()


@in_one_line
@hydra.main(version_base="1.3", config_path=CONFIGS, config_name="code_search")
def main(config: DictConfig) -> None:
    """Entry point."""
    start(config, CodeSearchSettings, run)


if __name__ == "__main__":
    main()
