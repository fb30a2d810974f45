"""The published grids, and others' versions: one that is named and not installed is an error before the work."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from benchmarks import layers, peers
from fusedlayers import functional
from fusedlayers.bench import record
from fusedlayers.bench.cases import CASES
from fusedlayers.bench.cases.case import Case
from tests.support.loss_operands import loss_inputs, results


def run(*words: object) -> int:
    return layers.main([str(word) for word in (*words, "--time", "--device", "cpu", "--seconds", 0.01)])


MODULES = {"liger": "liger_kernel", "cce": "cut_cross_entropy", "quack": "quack", "trl": "trl.kernels"}
HEAD = ("--families", "linear_cross_entropy")


@pytest.mark.parametrize("peer", MODULES)
def test_a_library_that_is_not_installed_is_an_error_that_says_what_to_install(
    peer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, MODULES[peer], None)
    with pytest.raises(SystemExit) as stopped:
        run(*HEAD, "--contenders", peer, "--output", tmp_path)
    assert stopped.value.code == 2
    said = capsys.readouterr().err
    assert "argument --contenders: " in said
    assert "cannot run here (" in said
    assert MODULES[peer] in said
    assert f": {peers.PEERS[peer].installed_by}" in said
    assert not list(tmp_path.iterdir()), "before the work"


def test_a_library_that_fails_when_it_is_imported_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "quack").mkdir()
    (tmp_path / "quack" / "linear_cross_entropy.py").write_text("raise TypeError('an unknown release')")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(SystemExit):
        run(*HEAD, "--contenders", "quack,auto")
    assert "quack fails when it is imported: TypeError: an unknown release" in capsys.readouterr().err


def test_a_library_without_a_version_of_any_case_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        run("--families", "gemm_gemm", "--contenders", "liger,auto", "--output", tmp_path)
    assert stopped.value.code == 2
    assert "argument --contenders: Liger has no version of gemm_gemm" in capsys.readouterr().err


def test_a_library_with_a_version_of_some_cases_is_skipped_with_a_line_in_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def as_ours(input: Tensor, linear_weight: Tensor, target: Tensor) -> Tensor:
        return functional.linear_cross_entropy(input, linear_weight, target)

    names = ["Liger"]
    monkeypatch.setitem(peers.PEERS["liger"].versions, HEAD[1], lambda: as_ours)  # type: ignore[arg-type]
    chosen = "liger,auto"
    if hasattr(torch.nn, "LinearCrossEntropyOptions"):
        chosen, names = f"function,{chosen}", ["torch function", *names]
    assert run("--families", "gemm_gemm,linear_cross_entropy", "--contenders", chosen, "--output", tmp_path) == 0
    said = capsys.readouterr().out
    [path] = tmp_path.iterdir()
    assert "liger_kernel" in record.read(path)["versions"]
    for name in names:
        assert f"skip   {name} has no version of gemm_gemm\n" in said
        for row in record.read(path)["rows"]:
            status = "timed" if row["case"] == "linear_cross_entropy" else "not timed"
            assert row["contenders"][name]["status"] == status


@pytest.mark.parametrize("family", ["linear_cross_entropy", "linear_log_probs"])
def test_sizes_of_ones_own_beside_torch_in_chunks(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "_CHUNK", 16)
    chosen = ("--shape", "40x24x300", "--contenders", "eager,chunks,auto", "--output", tmp_path)
    assert run("--families", family, *chosen) == 0
    [path] = tmp_path.iterdir()
    rows = record.read(path)["rows"]
    assert {tuple(row["shape"]) for row in rows} == {(40, 24, 300)}
    assert {row["contenders"]["torch in chunks"]["status"] for row in rows} == {"timed"}


def test_torch_in_chunks_computes_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "_CHUNK", 16)
    given = loss_inputs((40,), 24, 300, torch.float64, ignored=0)
    for name in ("linear_cross_entropy", "linear_log_probs"):
        case = CASES[name]
        chunked = peers.PEERS["chunks"].version(case)
        found = results(lambda linear_bias, version=chunked, **rest: version(**rest), given)
        expected = results(case.torch_expression, given, **case.keywords(case.grids[0].options))
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(
    ("words", "reason"),
    [(("--families", "ffn,maxsim"), "one family"), (("--families", "linear_log_probs"), "3 positive integers MxKxV")],
)
def test_sizes_that_are_none_are_errors(
    words: tuple[str, ...], reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        run(*words, "--shape", "40x24", "--output", tmp_path)
    assert stopped.value.code == 2
    said = capsys.readouterr().err
    assert "argument --shape: " in said
    assert reason in said


def test_every_published_grid_is_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    ran: list[tuple[Case, str]] = []
    monkeypatch.setattr(layers, "report", lambda rows, *rest: ran.extend((row.case, row.grid.name) for row in rows))
    run("--output", tmp_path)
    assert set(ran) == {(case, grid.name) for case in CASES.values() for grid in case.grids}
    ran.clear()
    run("--families", "ffn,gemm_gemm", "--output", tmp_path)
    assert {name for _, name in ran} == {grid.name for name in ("ffn", "gemm_gemm") for grid in CASES[name].grids}
