"""The longest sequence: few tries find it, a step is one of the training, and wrong options are named."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.support.training_runs import settings
from train_examples import longest_sequence
from train_examples.longest_sequence import compose_settings, longest, table, train_step


def up_to(limit: int, tried: list[int]) -> Callable[[int], bool]:
    def fits(length: int) -> bool:
        assert length not in tried, "a length is tried once"
        tried.append(length)
        return length <= limit

    return fits


@pytest.mark.parametrize("first", [1024, 3072, 8192])
@pytest.mark.parametrize("limit", [0, 1023, 1024, 3071, 3072, 8192, 67_890, 131_072])
def test_the_search_finds_the_longest(limit: int, first: int) -> None:
    tried: list[int] = []
    assert longest(up_to(limit, tried), 1024, first) == limit // 1024 * 1024
    assert all(length > 0 and length % 1024 == 0 for length in tried)


def test_the_search_tries_few_lengths() -> None:
    tried: list[int] = []
    longest(up_to(67_890, tried), 1024, 8192)
    assert tried[:5] == [8192, 16384, 32768, 65536, 131072]
    assert len(tried) == 5 + 6


@pytest.mark.parametrize("wrong", [0.5, 0.9, 1.0, 1.02, 1.1, 3.0])
@pytest.mark.parametrize("limit", [0, 1024, 3071, 8192, 67_890, 131_072])
def test_a_guess_shortens_the_search_and_does_not_mislead_it(limit: int, wrong: float) -> None:
    tried: list[int] = []
    assert longest(up_to(limit, tried), 1024, 8192, lambda _: int(wrong * limit)) == limit // 1024 * 1024
    assert all(length > 0 and length % 1024 == 0 for length in tried)
    if wrong == 1.0 and limit > 8192:
        assert len(tried) == 3, "the first, the guessed and the next"


@pytest.mark.parametrize("options", [("layers=torch",), ("layers=fused",), ("layers=fused", "layers.recompute=true")])
def test_a_step_reads_more_than_the_context_of_the_preset(options: tuple[str, ...], tmp_path: Path) -> None:
    chosen = settings(tmp_path, *options)
    step = train_step(chosen, 3 * chosen.model.context, compiled=False, device=torch.device("cpu"))
    assert step["length"] == 3 * chosen.model.context
    assert step["seconds"] > 0
    assert step["parameters"] > 0


def test_every_contender_has_the_preset_and_the_overrides() -> None:
    small, narrow = compose_settings([]), compose_settings(["model=narrow", "model.layers=2"])
    assert {chosen.model.d_model for chosen in small.values()} == {768}
    assert {(chosen.model.d_model, chosen.model.layers) for chosen in narrow.values()} == {(256, 2)}
    kinds = [(chosen.layers.kind, chosen.layers.recompute) for chosen in small.values()]
    assert kinds == [("torch", "auto"), ("fused", "auto"), ("fused", True)]


def test_the_table_compares_with_torch() -> None:
    step = {"seconds": 0.5, "bytes_per_token": 1234.5}
    shown = table(
        {"torch": {**step, "length": 2048}, "fused": {**step, "length": 3072}, "other": {"length": 0}}
    ).splitlines()
    assert shown[2].split() == ["fused", "3,072", "1.50", "0.500", "6,144", "1,234"]
    assert shown[3].split() == ["other", "none"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--first", "1000"], "--first is 1000; expected a positive multiple of --multiple=1024"),
        (["--multiple", "0"], "--first is 8192; expected a positive multiple of --multiple=0"),
        (["model.width=3"], "Could not override 'model.width'"),
        (["model=huge"], "model is 'huge'; expected one of experts, narrow, small, tiny"),
        (["model=3"], "model is 3; expected one of experts, narrow, small, tiny"),
    ],
)
def test_options_that_cannot_work_are_named(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        longest_sequence.main(arguments)
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


def test_the_record_and_the_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    limits: list[float] = []
    step = {"length": 4096, "seconds": 0.5, "parameters": 7, "peak_bytes": 2**30, "bytes_per_token": 2**18, "tries": 3}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda: SimpleNamespace(total_memory=64 * 2**30))
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", limits.append)
    monkeypatch.setattr(longest_sequence, "longest_step", lambda *_: step)
    with pytest.raises(SystemExit):
        longest_sequence.main(["--gibibytes", "65"])
    assert "--gibibytes is 65.0; expected more than 0 and at most 64" in capsys.readouterr().err
    longest_sequence.main(["--gibibytes", "16", "--compile", "--output", str(tmp_path / "new" / "record.json")])
    assert limits == [0.25]
    record = json.loads((tmp_path / "new" / "record.json").read_text())
    assert record["memory_limit_bytes"] == 16 * 2**30
    names = list(longest_sequence.CONTENDERS)
    assert list(record["contenders"]) == [*names, *(f"{name}, compiled" for name in names)]
    assert {"device", "torch", "triton", "fusedlayers", "model"} <= record.keys()


def test_without_a_gpu_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="error: there is no CUDA device; expected a GPU"):
        longest_sequence.main([])
