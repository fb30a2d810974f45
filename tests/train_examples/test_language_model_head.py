"""The language model with a learned vocabulary: its tokens, and both kinds of loss head."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.support.training_runs import TEXT, assert_same_checkpoint, settings, train, without_measurements
from train_examples import comparison, end_to_end, tokens
from train_examples.data import Text, load_text
from train_examples.language_model import flops_per_token
from train_examples.rules import SettingsError
from train_examples.settings import DataSettings, VocabularySettings
from train_examples.summaries import read_run
from train_examples.tokens import CUTS, learn, tokenized

SHORT = ("run.log_every=1", "run.steps=6", "run.evaluate_every=6", "sample.length=3")


@pytest.fixture(scope="module")
def learned(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    """The settings of a small vocabulary, which all tests here learn once."""
    return "vocabulary=bpe", "vocabulary.size=600", f"vocabulary.cache={tmp_path_factory.mktemp('vocabularies')}"


def text_of(training: bytes, validation: bytes) -> Text:
    parts = (torch.frombuffer(bytearray(part), dtype=torch.uint8) for part in (training, validation))
    return Text(*parts, description="words")


def test_the_most_frequent_pair_becomes_a_token_first() -> None:
    # "lo" and "ow" occur four times, "es", "st" and " l" thrice, and "w " never: a blank belongs to the word behind it.
    tokenizer = learn(["low low low lowest\n", "newest newest\n"], 261)
    merges = json.loads(tokenizer.to_str())["model"]["merges"]
    assert merges == [["l", "o"], ["lo", "w"], ["e", "s"], ["Ġ", "low"], ["es", "t"]]
    assert tokenizer.encode("lowest").tokens == ["low", "est"]


def test_every_text_can_be_written_in_tokens(tmp_path: Path) -> None:
    training, validation = Path(TEXT).read_bytes(), "naïve — 値段\n\tx  =  1\r\n\x00".encode()
    chosen = VocabularySettings("bpe", 600, str(tmp_path))
    text, learned = tokenized(text_of(training, validation), chosen, 4)
    assert learned.decode(text.training.tolist()).encode() == training
    assert learned.decode(text.validation.tolist()).encode() == validation
    assert text.training.max() == learned.size - 1 == 599
    # Where it is cut no token is: the whole text in one piece gives the same.
    assert learned.encode(training.decode()) == text.training.tolist()
    assert len(CUTS.split(training.decode())) > 10
    assert f"600 tokens, {len(training) / len(text.training):.2f} bytes each" in text.description


def test_a_vocabulary_is_learned_once_and_from_the_training_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    chosen = VocabularySettings("bpe", 300, str(tmp_path))
    first, one = tokenized(text_of(b"one two three\n" * 9, b"four five six\n" * 9), chosen, 4)
    assert "learning 300 tokens" in capsys.readouterr().out
    assert len(one.encode("one two three")) == 3
    assert len(one.encode(" four five six")) > 6
    monkeypatch.setattr(tokens, "learn", lambda *arguments: pytest.fail("learned again"))
    again, same = tokenized(text_of(b"one two three\n" * 9, b"four five six\n" * 9), chosen, 4)
    assert torch.equal(first.training, again.training)
    assert torch.equal(first.validation, again.validation)
    assert (same.size, same.digest) == (one.size, one.digest)
    assert not capsys.readouterr().out
    with pytest.raises(pytest.fail.Exception, match="learned again"):
        tokenized(text_of(b"another text\n" * 9, b"four five six\n" * 9), chosen, 4)


def test_a_text_with_few_pairs_has_a_smaller_vocabulary(tmp_path: Path) -> None:
    text, learned = tokenized(
        text_of(b"one two\n" * 9, b"one two\n"), VocabularySettings("bpe", 9999, str(tmp_path)), 2
    )
    assert 256 < learned.size < 270
    assert f"{learned.size} tokens of 9,999 asked for, as the training text has no more pairs" in text.description


def test_a_letter_that_the_split_cuts_is_left_out(tmp_path: Path) -> None:
    file = tmp_path / "text"
    file.write_text("値段" * 50 + "x")
    halves = load_text(DataSettings("text_file", str(file), 0.5), 4)
    assert len(halves.training) == 3 * 50 + 1
    text, learned = tokenized(halves, VocabularySettings("bpe", 256, str(tmp_path)), 4)
    assert learned.decode(text.training.tolist()) == "値段" * 25
    assert learned.decode(text.validation.tolist()) == "段" + "値段" * 24 + "x"


def test_what_cannot_be_tokens_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()

    def refused(match: str, training: bytes, cache: str = "cache", sequence: int = 4) -> None:
        with pytest.raises(SettingsError, match=match) as error:
            tokenized(text_of(training, b"x\n" * 9), VocabularySettings("bpe", 300, str(tmp_path / cache)), sequence)
        assert "\n" not in str(error.value)

    refused(
        r"vocabulary.kind is bpe, but the text is not UTF-8 \(.* 0xe9 .*; expected bytes", b"x\n" * 9 + b"caf\xe9 x"
    )
    refused(r"vocabulary.cache is '.*file'; expected a folder", b"x\n" * 9, cache="file")
    refused("vocabulary=bpe makes 4 tokens of the text for training; expected at least 5", b"one ", sequence=5)
    refused("vocabulary=bpe makes 18 tokens of the text for validation; expected at least 19", b"x\n" * 99, sequence=19)


@pytest.fixture(scope="module")
def runs(learned: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of each kind of loss head, in folders of their names."""
    folder = tmp_path_factory.mktemp("runs")
    for loss in ("torch", "fused"):
        train(folder / loss, *learned, f"loss={loss}", *SHORT)
    return folder


def test_both_kinds_of_loss_train_the_same(runs: Path) -> None:
    """On a CPU torch computes both, and the checkpoints, with the same names in them, agree bit by bit."""
    assert_same_checkpoint(runs / "torch", runs / "fused")
    one, other = (read_run(runs / loss) for loss in ("torch", "fused"))
    assert without_measurements(one[1]) == without_measurements(other[1])
    assert one[1][-1]["validation_loss"] < one[1][0]["train_loss"]
    for loss, (summary, _) in zip(("torch", "fused"), (one, other), strict=True):
        assert (summary["loss"], summary["vocabulary"], summary["loss_unit"]) == (loss, 600, "nats per token")
        assert summary["model_flops_per_token"] == flops_per_token(settings(runs).model, 600)
    assert (runs / "torch" / "sample.txt").read_text().startswith("def ")


def test_a_checkpoint_fits_the_other_kind_of_loss(runs: Path, learned: tuple[str, ...], tmp_path: Path) -> None:
    train(tmp_path, *learned, "loss=fused", *SHORT, "run.stop_after=4")
    rows = train(tmp_path, *learned, "loss=torch", *SHORT, "run.resume=auto")
    assert without_measurements(rows) == without_measurements(read_run(runs / "torch")[1])
    assert_same_checkpoint(tmp_path, runs / "torch")
    # As many tokens, and others.
    with pytest.raises(SettingsError, match=r"a checkpoint of another model: vocabulary is [0-9a-f]+ there and"):
        train(tmp_path, *learned, "data.validation_fraction=0.2", "run.resume=auto")


@pytest.mark.interpreter
@pytest.mark.parametrize("recompute", [False, True])
def test_kernels_train_as_torch_does(
    recompute: bool, runs: Path, learned: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FUSEDLAYERS_BACKEND", "triton")
    monkeypatch.setenv("FUSEDLAYERS_STRICT", "1")
    options = (*learned, *SHORT, "layers=torch", "loss=fused", f"loss.recompute={recompute}", "run.stop_after=1")
    [row] = train(tmp_path, *options)
    expected = read_run(runs / "torch")[1][0]
    for name in ("train_loss", "gradient_norm"):
        assert row[name] == pytest.approx(expected[name], rel=1e-5)


def test_runs_are_told_apart_by_their_loss(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    comparison.main([str(runs / "torch"), str(runs / "fused"), "--output", str(runs / "comparison.png")])
    output = capsys.readouterr().out
    assert output.split()[:3] == ["layers=fused", "layers=fused,", "loss=fused"]
    assert comparison.ON_A_CPU in output
    assert "kept for a backward pass, MiB" in output
    record = end_to_end.record_of([runs / "torch", runs / "fused"], None)
    [(name, group)] = record["groups"].items()
    assert name == "model=tiny, vocabulary=bpe, 128 tokens a step"
    assert list(group["runs"]) == ["fused", "fused, fused loss"]
