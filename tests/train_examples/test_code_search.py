"""The code-search example: no query leaks into the code, the scores are right, and fused layers learn as torch does."""

from __future__ import annotations

import ast
import itertools
import json
import math
import sys
import sysconfig
from pathlib import Path

import pytest
import torch

from tests.support.training_runs import (
    TINY_SEARCH,
    band_width,
    distance,
    reordered_forward,
    search_settings,
    train_search,
)
from train_examples import code_search, comparison
from train_examples.code_pairs import Pair, Pairs, as_pair, functions, load_pairs
from train_examples.retrieval import chance_scores, ranking, ranks, retrieval_scores, tfidf_scores
from train_examples.rules import SettingsError
from train_examples.settings import PairSettings
from train_examples.transformer import FeedForward
from train_examples.vocabulary import PADDING, Vocabulary


@pytest.fixture(scope="session", params=["few modules", pytest.param("installed", marks=pytest.mark.full)])
def pairs(few_modules: Path, request: pytest.FixtureRequest) -> Pairs:
    """The pairs of a few modules, and of the whole library."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "few modules":
            patch.setattr(sysconfig, "get_path", lambda name: str(few_modules))
        return load_pairs(PairSettings(kind="stdlib"))


def parts(pairs: Pairs) -> dict[str, list[Pair]]:
    return {"training": pairs.training, "validation": pairs.validation, "test": pairs.test}


def pair_of(source: str) -> Pair | None:
    [(name, function)] = functions(ast.parse(source), "module")
    return as_pair(name, function)


def test_a_library_is_split_by_module(pairs: Pairs, request: pytest.FixtureRequest) -> None:
    modules = {part: {pair.name.split(".")[0] for pair in inside} for part, inside in parts(pairs).items()}
    for one, other in itertools.combinations(modules.values(), 2):
        assert not one & other
    few = "few modules" in request.node.name
    assert len(pairs.training) > (100 if few else 2000)
    assert min(len(pairs.validation), len(pairs.test)) > (20 if few else 100)
    assert f"{len(pairs.test):,} of {len(modules['test'])} modules for test" in pairs.description


def test_no_code_holds_its_docstring_and_no_two_pairs_are_equal(pairs: Pairs) -> None:
    every = [pair for inside in parts(pairs).values() for pair in inside]
    assert len({pair.query_words for pair in every}) == len({pair.code_words for pair in every}) == len(every)
    for pair in every:
        tree = ast.parse(pair.code)
        assert all(
            ast.get_docstring(node) is None
            for node in ast.walk(tree)
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Module))
        ), pair.name
        assert len(pair.query_words) >= 3
        assert len(pair.code_words) >= 10


def test_a_pair_is_the_first_paragraph_and_the_code_without_any_text() -> None:
    pair = pair_of(
        'class Reader:\n    async def readLine(self, HTTPServer):\n        """Read a line,\n        and no more.\n\n'
        '        A secret.\n        """\n        # hidden\n        def inner():\n            "also hidden"\n'
        '        "hidden comment"\n        return inner(HTTPServer.read_CRLF, "kept")\n'
    )
    assert pair.name == "module.Reader.readLine"
    assert pair.query == "Read a line, and no more."
    assert pair.query_words == ("read", "a", "line", "and", "no", "more")
    assert "hidden" not in pair.code_words
    assert "secret" not in pair.code_words
    start = ("async", "def", "read", "line", "self", "http", "server", "def", "inner", "pass")
    assert pair.code_words[: len(start)] == start
    assert pair.code_words[-3:] == ("read", "crlf", "kept")


@pytest.mark.parametrize(
    "source",
    [
        "def f(a, b):\n    return a.first + b.second - a.third * b.fourth\n",
        'def f(a, b):\n    "Return it."\n    return a.first + b.second - a.third * b.fourth\n',
        'def f(self):\n    "What a subclass has to write."\n    raise NotImplementedError\n',
        'def f(self):\n    "Nothing but what it says here."\n',
    ],
    ids=["no docstring", "short docstring", "short code", "no code"],
)
def test_what_is_trivial_makes_no_pair(source: str) -> None:
    assert pair_of(source) is None


def test_settings_of_the_pairs_that_cannot_work_are_named(
    modules: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(match: str, **settings: object) -> None:
        with pytest.raises(SettingsError, match=match):
            load_pairs(PairSettings(**{"kind": "stdlib", **settings}))

    refused("data.kind is 'text_file'; expected stdlib", kind="text_file")
    refused("data.validation_fraction is 0.0; expected a number between 0 and 1", validation_fraction=0.0)
    refused("data.test_fraction is 1.5; expected a number between 0 and 1", test_fraction=1.5)
    refused("expected their sum to be below 1", test_fraction=0.5, validation_fraction=0.5)
    refused(r"gives 0 pairs for test .*expected at least 20", test_fraction=1e-9)
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    refused(r"gives 0 pairs for training .*expected at least 20")


def test_a_vocabulary_knows_the_frequent_words_and_hashes_the_others() -> None:
    vocabulary = Vocabulary([("a", "b", "a"), ("b", "c"), ("b", "a"), ("once", "d"), ("d",)], size=3, buckets=4)
    # By the number of texts, then by the letters; once is in one text, and c too.
    assert vocabulary.tokens == {"b": 5, "a": 6, "d": 7}
    assert len(vocabulary) == 8
    encoded = vocabulary.encode([("a", "unseen", "b"), ("unseen",)], length=2)
    assert encoded[0, 0] == 6
    assert 1 <= encoded[0, 1] <= 4
    assert encoded[1].tolist() == [encoded[0, 1], PADDING]


def test_scores_by_hand() -> None:
    scores = torch.tensor([[3.0, 1.0, 2.0], [5.0, 4.0, 4.0], [1.0, float("nan"), 2.0]])
    # The second query's own ties with another, which counts against it; what is not a number counts as before it.
    assert ranks(scores).tolist() == [1, 3, 2]
    reached = retrieval_scores(torch.tensor([1, 2, 10, 11]))
    assert reached["recall_at_1"] == 0.25
    assert reached["recall_at_10"] == 0.75
    assert math.isclose(reached["mrr"], (1 + 1 / 2 + 1 / 10 + 1 / 11) / 4)
    chance = chance_scores(20)
    assert chance["recall_at_1"] == 1 / 20
    assert chance["recall_at_10"] == 10 / 20
    assert math.isclose(chance["mrr"], sum(1 / rank for rank in range(1, 21)) / 20)


def test_tfidf_by_hand() -> None:
    texts = [("a", "a", "b"), ("b", "c"), ("c", "d", "e")]
    pairs = [
        Pair(f"m.{k}", "", "", query, code) for k, (query, code) in enumerate(zip([("a",)] * 3, texts, strict=True))
    ]
    # Only the first holds the word: 1 + log 2 occurrences, times 1 + log(4 / 2), over the length of its vector.
    a, b = (1 + math.log(2)) * (1 + math.log(4 / 2)), 1 + math.log(4 / 3)
    expected = torch.tensor([a / math.hypot(a, b), 0, 0], dtype=torch.float64).expand(3, 3)
    torch.testing.assert_close(tfidf_scores(pairs), expected)


def test_a_ranking_in_words() -> None:
    pairs = [Pair(f"m.f{k}", f"query {k}", f"def f{k}(): pass", (), ()) for k in range(4)]
    scores = torch.tensor([[1.0, 3.0, 2.0, 0.0]] * 4)
    lines = ranking(pairs, scores, scores.flip(1), 2)
    assert lines[0] == "query: query 2"
    assert lines[1] == "  its function is number 2, with TF-IDF 1"
    assert [line.split()[-4] for line in lines[2:]] == ["m.f1:", "m.f2:", "m.f0:"]
    assert [line.strip().startswith("→") for line in lines[2:]] == [False, True, False]


@pytest.mark.usefixtures("modules")
def test_padding_and_other_texts_do_not_change_a_score(tmp_path: Path) -> None:
    chosen = search_settings(tmp_path, "layers=fused")
    model = code_search.build_model(chosen, torch.ones(200)).eval()
    queries, codes = torch.randint(1, 200, (3, 12)), torch.randint(1, 200, (5, 32))
    queries[1, 4:], codes[2, 10:] = PADDING, PADDING
    with torch.no_grad():
        scores = model(queries, codes)
        alone = model(queries[1:2, :4], codes[2:3, :10])
    assert scores.shape == (3, 5)
    torch.testing.assert_close(scores[1:2, 2:3], alone)


@pytest.mark.usefixtures("modules")
@pytest.mark.parametrize("layers", ["fused", *(pytest.param(n, marks=pytest.mark.full) for n in ("torch", "replaced"))])
def test_a_run_learns_and_writes_everything(layers: str, tmp_path: Path) -> None:
    rows = train_search(tmp_path, f"layers={layers}", "run.steps=40", "optim.learning_rate=5e-3", in_short=False)
    # Less than what a model loses that gives all of a batch the same score.
    assert rows[-1]["train_loss"] < rows[0]["train_loss"] < math.log(8)
    names = {"config.yaml", "metrics.jsonl", "loss.png", "scores.png", "checkpoint.pt", "sample.txt", "summary.json"}
    assert {path.name for path in tmp_path.iterdir()} == names
    for picture in ("loss.png", "scores.png"):
        assert (tmp_path / picture).read_bytes().startswith(b"\x89PNG")
    measured = [row["step"] for row in rows if row["scores"] is not None]
    assert measured == [row["step"] for row in rows if row["validation_loss"] is not None] == list(range(4, 41, 4))
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["layers"] == layers
    assert set(summary["references"]) == set(summary["test_references"]) == {"TF-IDF", "untrained", "chance"}
    assert list(summary["test_scores"]) == ["recall_at_10", "recall_at_1", "mrr"]
    assert summary["test_scores"]["mrr"] > 3 * summary["test_references"]["chance"]["mrr"]
    sample = (tmp_path / "sample.txt").read_text()
    assert f"{summary['test_scores']['recall_at_10']:.3f}" in sample
    assert sample.count("query: ") == 5


@pytest.mark.usefixtures("modules")
def test_a_checkpoint_of_another_vocabulary_is_refused(tmp_path: Path) -> None:
    train_search(tmp_path, "run.stop_after=4")
    with pytest.raises(SettingsError, match=r"another model.*vocabulary is"):
        train_search(tmp_path, "run.resume=auto", "search.vocabulary=50")


PARITY = (
    "run.log_every=1",
    "run.steps=25",
    "run.evaluate_every=25",
    "run.checkpoint_every=25",
    "model.dropout=0",
    "search.shown=1",
    # Large steps lift the band clear of the last bit of a loss.
    "optim.learning_rate=2e-2",
)
# Into how many parts the hidden and the tokens are cut.
REORDERINGS = ((8, 1), (1, 4), (4, 4))


def parity_losses(directory: Path, *overrides: str) -> list[float]:
    return [row["train_loss"] for row in train_search(directory, *PARITY, *overrides)]


# In `make test` the language model's runs are compared so.
@pytest.mark.full
@pytest.mark.usefixtures("modules")
def test_fused_layers_stay_within_the_band_of_torch_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    curves = [parity_losses(tmp_path / "torch", "layers=torch")]
    for number, cut in enumerate(REORDERINGS):
        with monkeypatch.context() as patch:
            patch.setattr(FeedForward, "forward", reordered_forward(*cut))
            curves.append(parity_losses(tmp_path / f"reordered{number}", "layers=torch"))
    band = band_width(curves)
    assert band > 0, "the orders of summation make no difference, so the band would prove nothing"
    fused = parity_losses(tmp_path / "fused", "layers=fused")
    assert min(distance(fused, curve) for curve in curves) <= band
    other = parity_losses(tmp_path / "other", "layers=fused", "model.activation=gelu_tanh")
    assert min(distance(other, curve) for curve in curves) > band


@pytest.mark.usefixtures("modules")
def test_the_command_and_a_comparison(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for layers in ("torch", "fused"):
        arguments = [*TINY_SEARCH, f"layers={layers}", f"run.directory={tmp_path / layers}"]
        monkeypatch.setattr(sys, "argv", ["code_search", *arguments])
        code_search.main()
    output = capsys.readouterr().out
    assert "vector_size: 32" in (tmp_path / "fused" / "config.yaml").read_text()
    assert "recall at 10" in output
    assert (tmp_path / "fused" / "sample.txt").read_text() in output
    picture = tmp_path / "comparison.png"
    comparison.main([str(tmp_path / "torch"), str(tmp_path / "fused"), "--output", str(picture)])
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "recall@10 on held-out test modules" in capsys.readouterr().out
