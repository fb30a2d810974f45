"""Predicts which package a window of source text is from: ``python -m train_examples.package_classifier layers=fused``.

Twelve lines of source become 65,536 hashed n-grams, a dense vector that is 99.8% zeros, for two linear layers. The
first has many inputs, few rows and few outputs: too few tiles to occupy a GPU, unless the reduction axis is split.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from zlib import crc32

import hydra
import torch
import torch.nn.functional as F
from omegaconf import DictConfig, OmegaConf
from torch import Tensor, nn

import fusedlayers
from train_examples import loop, split_factor
from train_examples.command import CONFIGS, in_one_line, start
from train_examples.hashed_features import HashedFeatures, SparseRows, dense_rows, linear_predictions
from train_examples.retrieval import shortened
from train_examples.rules import SettingsError
from train_examples.scores import Scores, accuracy_scores, majority_scores, score_table
from train_examples.settings import ClassifierSettings, LayerSettings, PackageClassifierSettings, register_settings
from train_examples.source_windows import Window, load_windows

# Windows that an evaluation makes dense at once: limits its memory.
DENSE_AT_ONCE = 256


class PackageClassifier(nn.Module):
    """Maps the entries of sparse rows to logits ``[samples, packages]``; dense rows live only as long as their
    batch."""

    def __init__(self, settings: ClassifierSettings, layers: LayerSettings, packages: int) -> None:
        super().__init__()
        self.features = settings.features
        self.wide = wide_linear(settings, layers)
        self.dropout = nn.Dropout(settings.dropout)
        self.head = nn.Linear(settings.hidden, packages)

    def forward(self, rows: Tensor, columns: Tensor, values: Tensor, samples: int) -> Tensor:
        device = values.device.type
        # Dense rows in the layers' compute dtype, so that nothing of this size is cast.
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        dense = dense_rows(rows, columns, values, (samples, self.features), dtype)
        return self.head(self.dropout(F.relu(self.wide(dense))))


def wide_linear(settings: ClassifierSettings, layers: LayerSettings) -> nn.Linear:
    """The layer with all the inputs, of the kind ``layers.kind``."""
    if layers.kind == "torch":
        return nn.Linear(settings.features, settings.hidden)
    return fusedlayers.SplitKLinear(settings.features, settings.hidden, split_k=layers.split_k)


@dataclass(frozen=True)
class Part:
    """Windows, their features and the indices of their packages, int64 ``[N]``."""

    windows: Sequence[Window]
    features: SparseRows
    labels: Tensor

    def batch(self, samples: Tensor) -> loop.Batch:
        """These windows as a batch for the loop."""
        return *self.features.take(samples), self.labels[samples]

    def batches(self, size: int) -> list[loop.Batch]:
        """All windows in order, in batches of ``size``."""
        return [self.batch(samples) for samples in torch.arange(len(self.windows)).split(size)]


def window_loss(model: nn.Module, batch: loop.Batch) -> Tensor:
    """Mean cross-entropy of the right package over the windows, in nats."""
    *entries, labels = batch
    return F.cross_entropy(model(*entries, len(labels)), labels)


@torch.no_grad()
def all_logits(model: nn.Module, part: Part) -> Tensor:
    """The logits of every window of a part, ``[N, packages]`` on the CPU."""
    device = next(model.parameters()).device
    logits = [
        model(*(entries.to(device) for entries in batch[:-1]), len(batch[-1])).float().cpu()
        for batch in part.batches(DENSE_AT_ONCE)
    ]
    return torch.cat(logits)


def references(training: Part, part: Part, linear: Tensor, packages: int) -> dict[str, Scores]:
    """Baselines on these windows: the linear classifier, always naming the largest package, and guessing."""
    return {
        "linear": accuracy_scores(linear, part.labels),
        "majority": majority_scores(training.labels, part.labels),
        "chance": {"accuracy": 1 / packages, "balanced_accuracy": 1 / packages},
    }


def report(
    model: nn.Module, test: Part, packages: Sequence[str], linear: Tensor, others: dict[str, Scores], shown: int
) -> tuple[str, loop.Row]:
    """The test scores beside the baselines, and some predictions, as text; and the numbers for the summary."""
    shares = all_logits(model, test).softmax(dim=1)
    reached = {"trained": accuracy_scores(shares.argmax(dim=1), test.labels), **others}
    lines = [f"{len(test.windows)} windows of held-out test modules, from one of {len(packages)} packages:"]
    lines += score_table(reached)
    for sample in torch.linspace(0, len(test.windows) - 1, min(shown, len(test.windows))).long().tolist():
        best = shares[sample].topk(min(3, len(packages)))
        named = ", ".join(
            f"{packages[label]} {share:.0%}"
            for label, share in zip(best.indices.tolist(), best.values.tolist(), strict=True)
        )
        mark = "right" if best.indices[0] == test.labels[sample] else "wrong"
        lines += [
            "",
            f"{test.windows[sample].name}: {shortened(' '.join(test.windows[sample].text.split()))}",
            f"  {mark}: {named}; linear: {packages[int(linear[sample])]}",
        ]
    return "\n".join(lines), {"test_scores": reached["trained"], "test_references": others}


def run(settings: PackageClassifierSettings) -> loop.Row:
    """Read the windows, build and train the model, time its wide layer if there is a GPU; returns the summary that is
    also in ``summary.json``."""
    chosen, batch_size = settings.classifier, settings.run.batch_size
    windows = load_windows(settings.data)
    packages = windows.packages
    print(windows.description)
    print(f"packages: {', '.join(packages)}")
    if batch_size > len(windows.training):
        raise SettingsError(
            f"run.batch_size is {batch_size}; expected at most the {len(windows.training)} training windows"
        )
    texts = [[window.text for window in part] for part in (windows.training, windows.validation, windows.test)]
    hashed = HashedFeatures(texts[0], chosen.features, chosen.n_gram, chosen.scale)
    matrices = [hashed.matrix(part) for part in texts]
    number = {package: label for label, package in enumerate(packages)}
    training, validation, test = (
        Part(part, hashed.rows(matrix), torch.tensor([number[window.package] for window in part]))
        for part, matrix in zip((windows.training, windows.validation, windows.test), matrices, strict=True)
    )
    linear = linear_predictions(matrices[0], training.labels, matrices[1], validation.labels, matrices[2:])
    test_references = references(training, test, linear[1], len(packages))

    torch.manual_seed(settings.run.seed)
    built = PackageClassifier(chosen, settings.layers, len(packages))
    parameters = sum(parameter.numel() for parameter in built.parameters())
    print(f"{parameters:,} parameters, {chosen.features:,} features, layers={settings.layers.kind}")

    # Neighbours come from one package: validation batches are shuffled, as training batches are.
    mixed = torch.randperm(len(validation.windows), generator=torch.Generator().manual_seed(0))
    example = loop.Example(
        name="package_classifier",
        model=built,
        fingerprint={
            **{f"classifier.{name}": getattr(chosen, name) for name in ("features", "n_gram", "scale", "hidden")},
            "packages": crc32(" ".join(packages).encode()),
        },
        training_batch=lambda generator: training.batch(
            torch.randperm(len(training.windows), generator=generator)[:batch_size]
        ),
        validation_batches=[
            validation.batch(samples) for samples in mixed.split(batch_size)[: settings.run.evaluation_batches]
        ],
        loss=window_loss,
        loss_unit="nats per window",
        # On average.
        tokens_per_batch=round(hashed.tokens(texts[0]) / len(texts[0]) * batch_size),
        sample=lambda trained: report(trained, test, packages, linear[1], test_references, chosen.shown),
        scores=lambda trained: accuracy_scores(all_logits(trained, validation).argmax(dim=1), validation.labels),
        references=references(training, validation, linear[0], len(packages)),
    )
    config = OmegaConf.to_yaml(OmegaConf.structured(settings))
    summary = loop.train(example, settings.layers.kind, settings.run, settings.optim, config)
    print(split_factor.picture(batch_size, built.wide, Path(settings.run.directory)))
    return summary


register_settings()


@in_one_line
@hydra.main(version_base="1.3", config_path=CONFIGS, config_name="package_classifier")
def main(config: DictConfig) -> None:
    """Entry point."""
    start(config, PackageClassifierSettings, run)


if __name__ == "__main__":
    main()
