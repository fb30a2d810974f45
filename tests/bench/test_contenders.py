"""Contenders of other libraries: named and not there is an error, and no version of some cases is a line."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from fusedlayers import functional
from fusedlayers.bench import __main__ as command
from fusedlayers.bench import record
from fusedlayers.bench.cases import CASES


def bench(*words: object) -> int:
    return command.main([str(word) for word in words])


PEERS = {"liger": "liger_kernel", "cce": "cut_cross_entropy", "quack": "quack"}
INSTALLS = {"liger": "liger-kernel", "cce": "cut-cross-entropy", "quack": "quack-kernels"}
QUICK = ("--time", "--device", "cpu", "--seconds", 0.01)


@pytest.mark.parametrize("peer", PEERS)
def test_a_contender_that_is_not_installed_is_an_error_that_says_what_to_install(
    peer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, PEERS[peer], None)
    with pytest.raises(SystemExit) as stopped:
        bench("linear_cross_entropy", "--shape", "17x16x129", *QUICK, "--contenders", peer, "--output", tmp_path)
    assert stopped.value.code == 2
    said = capsys.readouterr().err
    assert "argument --contenders: " in said
    assert "cannot run here (" in said
    assert PEERS[peer] in said
    assert f": pip install {INSTALLS[peer]}" in said
    assert not list(tmp_path.iterdir()), "before the work"


def test_a_contender_that_fails_when_it_is_imported_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "quack").mkdir()
    (tmp_path / "quack" / "linear_cross_entropy.py").write_text("raise TypeError('an unknown release')")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(SystemExit):
        bench("linear_cross_entropy", "--shape", "17x16x129", *QUICK, "--contenders", "quack,auto")
    assert "quack fails when it is imported: TypeError: an unknown release" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words", [("gemm_gemm", "--shape", "1x8x8x8x8"), ("moe_ffn", "--shape", "17x16x24x4x2", "--activation", "gelu")]
)
def test_a_contender_of_other_cases_is_an_error(
    words: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        bench(*words, *QUICK, "--contenders", "liger,auto", "--output", tmp_path)
    assert stopped.value.code == 2
    said = f"argument --contenders: Liger has no version of {words[0]} with these options"
    assert said in capsys.readouterr().err


def test_a_contender_of_some_cases_is_skipped_with_a_line_in_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def as_ours(input: Tensor, linear_weight: Tensor, target: Tensor) -> Tensor:
        return functional.linear_cross_entropy(input, linear_weight, target)

    case, names = CASES["linear_cross_entropy"], ["Liger"]
    monkeypatch.setitem(case.peers, "Liger", lambda: as_ours)  # type: ignore[arg-type]
    chosen = "liger,auto"
    if hasattr(torch.nn, "LinearCrossEntropyOptions"):
        chosen, names = f"function,{chosen}", ["torch function", *names]
    words = ("--families", "gemm_gemm,linear_cross_entropy", "--contenders", chosen, "--output", tmp_path)
    assert bench("all", *QUICK, *words) == 0
    said = capsys.readouterr().out
    [path] = tmp_path.iterdir()
    assert "liger_kernel" in record.read(path)["versions"]
    for name in names:
        assert f"skip   {name} has no version of gemm_gemm with these options\n" in said
        for row in record.read(path)["rows"]:
            status = "timed" if row["case"] == "linear_cross_entropy" else "not timed"
            assert row["contenders"][name]["status"] == status


def test_where_nothing_was_timed_that_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench("ffn", "--shape", "5x6x7", *QUICK, "--contenders", "fused", "--output", tmp_path) == 1
    assert "error: nothing was timed: fused: " in capsys.readouterr().err
