"""What the tests of the examples share: a run of seconds, and what it wrote."""

from __future__ import annotations

import argparse
import copy
import functools
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path

import pytest
import torch
from hydra import compose, initialize_config_dir
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.override_parser.overrides_parser import OverridesParser
from matplotlib.figure import Figure
from omegaconf import DictConfig
from torch import Tensor

from train_examples import code_search, language_model, loop, package_classifier
from train_examples.settings import (
    CodeSearchSettings,
    LanguageModelSettings,
    ModelSettings,
    PackageClassifierSettings,
    as_settings,
)
from train_examples.transformer import FeedForward

ROOT = Path(__file__).resolve().parents[2]
# Real text that every Python brings, small enough to be read in no time.
TEXT = argparse.__file__

# Few steps, whatever is trained.
FEW_STEPS = (
    "optim.warmup_steps=2",
    "run.accelerator=cpu",
    "run.checkpoint_every=4",
    "run.evaluate_every=4",
    "run.evaluation_batches=2",
    "run.log_every=2",
    "run.steps=12",
)

# And few parameters, for a Transformer.
SHORT = (
    *FEW_STEPS,
    "model.context=32",
    "model.d_ff=64",
    "model.d_model=32",
    "model.heads=2",
)

TINY = (
    *SHORT,
    "data=text_file",
    f"data.path={TEXT}",
    "model.layers=2",
    "run.batch_size=4",
    "sample.length=20",
)


# A search with an encoder of few parameters, in batches of few pairs.
TINY_SEARCH = (
    *SHORT,
    "model.layers=1",
    "search.query_words=12",
    "search.vector_size=32",
    "run.batch_size=8",
)

# A classifier of few features.
TINY_CLASSIFIER = (
    *FEW_STEPS,
    "classifier.features=512",
    "classifier.hidden=16",
    "run.batch_size=8",
)


def settings(directory: Path, *overrides: str) -> LanguageModelSettings:
    """The configuration of a run of seconds, with further overrides as they are typed on the command line."""
    return as_settings(
        composed("language_model", *TINY, f"run.directory={directory}", *overrides), LanguageModelSettings
    )


def search_settings(directory: Path, *overrides: str) -> CodeSearchSettings:
    """The same for the code search."""
    return as_settings(
        composed("code_search", *TINY_SEARCH, f"run.directory={directory}", *overrides), CodeSearchSettings
    )


def classifier_settings(directory: Path, *overrides: str) -> PackageClassifierSettings:
    """The same for the classifier of packages."""
    return as_settings(
        composed("package_classifier", *TINY_CLASSIFIER, f"run.directory={directory}", *overrides),
        PackageClassifierSettings,
    )


def composed(example: str, *overrides: str) -> DictConfig:
    """What the files say and the overrides change. Hydra takes long for the files, and reads them once for each choice
    among them; the single settings it changes in a copy."""
    choices = tuple(word for word in overrides if "." not in word.partition("=")[0])
    config = copy.deepcopy(_chosen(example, choices))
    words = [word for word in overrides if word not in choices]
    ConfigLoaderImpl._apply_overrides_to_config(OverridesParser.create().parse_overrides(words), config)
    return config


@functools.cache
def _chosen(example: str, choices: tuple[str, ...]) -> DictConfig:
    with initialize_config_dir(str(ROOT / "configs"), version_base="1.3"):
        return compose(example, list(choices))


# What every PNG begins with.
PNG = b"\x89PNG"
_counted: dict[str, float] = {}


@contextmanager
def _in_short() -> Iterator[None]:
    """A run without what takes as long as its steps: pictures are not drawn, arithmetic is counted once for a model."""
    count = language_model.flops_per_token

    def counted(model: ModelSettings, vocabulary: int) -> float:
        key = f"{model} {vocabulary}"
        if key not in _counted:
            _counted[key] = count(model, vocabulary)
        return _counted[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Figure, "savefig", lambda figure, path, **options: Path(path).write_bytes(PNG))
        patch.setattr(language_model, "flops_per_token", counted)
        yield


def train(directory: Path, *overrides: str, in_short: bool = True) -> list[loop.Row]:
    """Run the language model and return the rows of its metrics."""
    with _in_short() if in_short else nullcontext():
        language_model.run(settings(directory, *overrides))
    return loop.read_metrics(directory / "metrics.jsonl")


def traced(
    train: Callable[..., list[loop.Row]], directory: Path, *overrides: str
) -> tuple[list[loop.Row], list[torch.fx.GraphModule]]:
    """The rows of a run with ``run.compile=true`` and the graphs of its model, which run as they are: a compiler would
    take its time."""
    graphs = []

    def keep(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., object]:
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "compile", partial(torch.compile, backend=keep))
        rows = train(directory, "run.compile=true", *overrides)
    torch._dynamo.reset()
    return rows, graphs


def train_search(directory: Path, *overrides: str, in_short: bool = True) -> list[loop.Row]:
    """Run the code search and return the rows of its metrics."""
    with _in_short() if in_short else nullcontext():
        code_search.run(search_settings(directory, *overrides))
    return loop.read_metrics(directory / "metrics.jsonl")


def train_classifier(directory: Path, *overrides: str, in_short: bool = True) -> list[loop.Row]:
    """Run the classifier of packages and return the rows of its metrics."""
    with _in_short() if in_short else nullcontext():
        package_classifier.run(classifier_settings(directory, *overrides))
    return loop.read_metrics(directory / "metrics.jsonl")


def without_measurements(rows: list[loop.Row]) -> list[loop.Row]:
    """The rows without what depends on the machine, or is counted of some runs only: two equal runs agree in the rest,
    bit by bit."""
    measured = ("tokens_per_second", "peak_memory_bytes", "kept_bytes")
    return [{name: value for name, value in row.items() if name not in measured} for row in rows]


def load_checkpoint(directory: Path) -> dict[str, object]:
    return torch.load(directory / "checkpoint.pt", weights_only=True)


def flatten(value: object, name: str = "") -> dict[str, object]:
    """Every leaf of nested dicts and lists by its path."""
    if isinstance(value, dict):
        return {key: leaf for k, v in value.items() for key, leaf in flatten(v, f"{name}.{k}").items()}
    if isinstance(value, (list, tuple)):
        return {key: leaf for k, v in enumerate(value) for key, leaf in flatten(v, f"{name}.{k}").items()}
    return {name: value}


def assert_same_checkpoint(one: Path, other: Path) -> None:
    leaves, others = flatten(load_checkpoint(one)), flatten(load_checkpoint(other))
    assert leaves.keys() == others.keys()
    for name, leaf in leaves.items():
        same = torch.equal(leaf, others[name]) if isinstance(leaf, Tensor) else leaf == others[name]
        assert same, f"{name} differs"


def distance(one: list[float], other: list[float]) -> float:
    """The largest difference between two loss curves."""
    return max(abs(a - b) for a, b in zip(one, other, strict=True))


def reordered_forward(hidden_parts: int, token_parts: int) -> Callable[[FeedForward, Tensor], Tensor]:
    """The torch block in parts that are summed one after the other, forward and backward: a valid but other order."""

    def forward(self: FeedForward, x: Tensor) -> Tensor:
        activate = self.activate
        weights = (
            self.up_proj.weight.chunk(hidden_parts),
            self.up_proj.bias.chunk(hidden_parts),
            self.down_proj.weight.chunk(hidden_parts, dim=1),
        )
        outputs = []
        for rows in x.flatten(0, 1).chunk(token_parts):
            total = self.down_proj.bias.expand_as(rows)
            for w_up, b_up, w_down in zip(*weights, strict=True):
                total = total + activate(rows @ w_up.T + b_up) @ w_down.T
            outputs.append(total)
        return torch.cat(outputs).view_as(x)

    return forward


PARITY = (
    "run.log_every=1",
    "run.steps=60",
    "run.evaluate_every=60",
    "run.checkpoint_every=60",
    "run.batch_size=2",
    "model.context=16",
    # Large steps, and a seed that takes them through a rough patch, lift the band clear of the last bit of a loss.
    "optim.learning_rate=1e-2",
    "run.seed=1",
    "sample.length=1",
)
# Into how many parts the hidden and the tokens are cut.
REORDERINGS = ((2, 1), (8, 1), (1, 2), (1, 4), (4, 4))


def parity_losses(directory: Path, *overrides: str) -> list[float]:
    """The training loss of every step of a run that is compared with :func:`torch_curves`."""
    rows = train(directory, *PARITY, *overrides)
    return [row["train_loss"] for row in rows]


def band_width(curves: list[list[float]]) -> float:
    """The largest distance between two of the curves."""
    return max(distance(one, other) for one, other in itertools.combinations(curves, 2))


def torch_curves(directory: Path, *overrides: str) -> tuple[list[list[float]], float]:
    """Training losses of torch runs that differ in the order of one sum, and the width of their band."""
    curves = [parity_losses(directory / "torch", "layers=torch", *overrides)]
    for number, parts in enumerate(REORDERINGS):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(FeedForward, "forward", reordered_forward(*parts))
            curves.append(parity_losses(directory / f"reordered{number}", "layers=torch", *overrides))
    return curves, band_width(curves)
