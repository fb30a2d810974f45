"""What all examples have in common: settings that cannot work are named, a run goes on where it was interrupted."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hydra.errors import ConfigCompositionException

from tests.support.training_runs import (
    ROOT,
    assert_same_checkpoint,
    classifier_settings,
    search_settings,
    settings,
    train,
    train_classifier,
    train_search,
    without_measurements,
)
from train_examples.loop import Row
from train_examples.settings import SettingsError


class Example(NamedTuple):
    """Its settings and runs, the fixture of what it reads, and dropout, which makes a generator's state matter."""

    settings: Callable[..., Any]
    train: Callable[..., list[Row]]
    reads: str = "tmp_path"
    dropout: tuple[str, ...] = ()


EXAMPLES = {
    "language_model": Example(settings, train, dropout=("model.dropout=0.2",)),
    "code_search": Example(
        search_settings, train_search, "modules", ("model.dropout=0.2", "search.word_dropout=0.2")
    ),
    "package_classifier": Example(classifier_settings, train_classifier, "packages"),
}  # fmt: skip
UNKNOWN = {
    "language_model": [
        "model.width=3", "run.stpes=3", "layers.kinds=fused", "optim.momentum=0.9", "+model.width=3", "+extra=3",
    ],
    "code_search": ["search.words=3", "model.width=3", "data.path=3", "+search.words=3", "+extra=3"],
    "package_classifier": ["classifier.widht=3", "model.width=3", "data.path=3", "+classifier.widht=3"],
}  # fmt: skip
WRONG = {
    "language_model": [
        ("model.heads=3", "model.d_model is 32 and model.heads is 3"),
        ("model.heads=32", "model.d_model is 32 and model.heads is 32"),
        ("model.layers=0", "model.layers is 0"),
        ("model.activation=glue", "model.activation: .*'glue'.*gelu"),
        ("model.dropout=1", r"model.dropout is 1.0; expected a probability in \[0, 1\)"),
        ("layers.recompute=often", "layers.recompute is 'often'; expected auto, true or false"),
        ("layers.split_k=4", "layers.split_k is 4; expected auto"),
        ("layers.kind=eager", "layers.kind is 'eager'; expected fused, torch or replaced"),
        ("optim.name=sgd", "optim.name is 'sgd'"),
        ("run.evaluate_every=3", "run.evaluate_every is 3; expected a positive multiple of run.log_every=2"),
        ("run.stop_after=3", "run.stop_after is 3"),
        ("run.steps=0", "run.steps is 0"),
        ("sample.prompt=''", "sample.prompt"),
        ("sample.temperature=0", "sample.temperature"),
        ("data.kind=web", "data.kind is 'web'; expected stdlib or text_file"),
    ],
    "code_search": [
        ("search.vector_size=0", "search.vector_size is 0"),
        ("search.hash_buckets=0", "search.hash_buckets is 0"),
        ("search.query_words=64", "search.query_words is 64 and model.context is 32"),
        ("search.word_dropout=1", r"search.word_dropout is 1.0; expected a share in \[0, 1\)"),
        ("search.sharpness=0", "search.sharpness is 0.0"),
        ("run.batch_size=1", "run.batch_size is 1; expected 2 or more"),
        ("run.batch_size=100000", "run.batch_size is 100000.*training pairs"),
        ("run.evaluate_every=3", "run.evaluate_every is 3"),
        ("model.heads=3", "model.d_model is 32 and model.heads is 3"),
        ("layers.kind=eager", "layers.kind is 'eager'"),
    ],
    "package_classifier": [
        ("classifier.features=0", "classifier.features is 0"),
        ("classifier.hidden=0", "classifier.hidden is 0"),
        ("classifier.n_gram=0", "classifier.n_gram is 0"),
        ("classifier.scale=0", "classifier.scale is 0.0; expected a number above 0"),
        ("classifier.dropout=1", r"classifier.dropout is 1.0; expected a probability in \[0, 1\)"),
        ("run.batch_size=100000", "run.batch_size is 100000.*training windows"),
        ("run.evaluate_every=3", "run.evaluate_every is 3"),
        ("layers=replaced", "layers.kind is 'replaced'; expected fused or torch"),
        ("layers.recompute=true", "layers.recompute is True; expected auto"),
        ("layers.split_k=0", "layers.split_k: .*0"),
        ("layers.split_k=often", "layers.split_k: .*'often'"),
    ],
}


@pytest.mark.parametrize(("name", "override"), [(name, each) for name, rows in UNKNOWN.items() for each in rows])
def test_unknown_keys_fail(name: str, override: str, tmp_path: Path) -> None:
    # Hydra itself refuses the plain form, and adds what comes with a plus.
    expected = SettingsError if override.startswith("+") else ConfigCompositionException
    key = override.strip("+").split("=")[0].split(".")[-1]
    with pytest.raises(expected, match=f"Key '{key}'|Could not override.*{key}"):
        EXAMPLES[name].settings(tmp_path, override)


@pytest.mark.parametrize(
    ("name", "override", "message"), [(name, *row) for name, rows in WRONG.items() for row in rows]
)
def test_settings_that_cannot_work_are_named(
    name: str, override: str, message: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    request.getfixturevalue(EXAMPLES[name].reads)
    with pytest.raises(SettingsError, match=message):
        EXAMPLES[name].train(tmp_path / "run", override)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("name", "layers"),
    [
        ("language_model", "fused"), ("language_model", "torch"), ("code_search", "fused"),
        ("package_classifier", "fused"),
        *(pytest.param(name, "torch", marks=pytest.mark.full) for name in ("code_search", "package_classifier")),
    ],
)  # fmt: skip
def test_an_interrupted_run_continues_bit_by_bit(
    name: str, layers: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    train, options = EXAMPLES[name].train, (f"layers={layers}", *EXAMPLES[name].dropout)
    request.getfixturevalue(EXAMPLES[name].reads)
    straight = train(tmp_path / "straight", *options)
    stopped = train(tmp_path / "resumed", *options, "run.stop_after=8")
    assert [row["step"] for row in stopped] == [2, 4, 6, 8]
    resumed = train(tmp_path / "resumed", *options, "run.resume=auto")
    assert without_measurements(resumed) == without_measurements(straight)
    assert_same_checkpoint(tmp_path / "straight", tmp_path / "resumed")
    assert (tmp_path / "straight" / "sample.txt").read_text() == (tmp_path / "resumed" / "sample.txt").read_text()


def made_of_modules() -> str:
    """Everything that a search makes of the library before its model."""
    from train_examples.code_pairs import load_pairs
    from train_examples.settings import PairSettings
    from train_examples.vocabulary import Vocabulary

    pairs = load_pairs(PairSettings(kind="stdlib"))
    codes = [pair.code_words for pair in pairs.training]
    return f"{pairs} {Vocabulary(codes, 500, 50).encode(codes, 40).tolist()}"


def made_of_packages() -> str:
    """The windows of the classifier, and their features."""
    from train_examples.hashed_features import HashedFeatures
    from train_examples.settings import WindowSettings
    from train_examples.source_windows import load_windows

    windows = load_windows(WindowSettings(kind="stdlib", validation_fraction=0.15, test_fraction=0.15))
    texts = [window.text for window in windows.training]
    hashed = HashedFeatures(texts, 256, 2, 1.0)
    rows = hashed.rows(hashed.matrix(texts[:5]))
    return f"{windows} {rows.columns.tolist()} {rows.values.tolist()}"


@pytest.mark.full
@pytest.mark.parametrize(("made", "reads"), [(made_of_modules, "modules"), (made_of_packages, "packages")])
def test_what_is_made_of_the_library_is_the_same_in_every_process(
    made: Callable[[], str], reads: str, request: pytest.FixtureRequest
) -> None:
    """Another process has another hash seed, on which the order of a set of strings depends."""
    library = request.getfixturevalue(reads)
    code = (
        "import sysconfig, sys; sysconfig.get_path = lambda name: sys.argv[1]\n"
        f"{inspect.getsource(made)}\nprint({made.__name__}())"
    )
    environment = {**os.environ, "PYTHONHASHSEED": "1", "PYTHONIOENCODING": "utf-8"}
    command = [sys.executable, "-c", code, str(library)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout == made() + "\n"
