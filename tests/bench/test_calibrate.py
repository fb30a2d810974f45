"""The command that measures on the user's own GPU: what is a win, what it says, and what it records."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache as cached
from pathlib import Path
from typing import Any

import pytest
import torch

import fusedlayers as fl
from fusedlayers import calibrations, devices
from fusedlayers.bench import __main__ as command
from fusedlayers.bench import calibrate
from fusedlayers.bench.calibrate import measuring
from fusedlayers.bench.cases import Options
from fusedlayers.bench.cases.trial import Trial
from fusedlayers.bench.contenders import AUTO, COMPILED, EAGER, FUSED
from fusedlayers.bench.selftest.trials import few_trials
from fusedlayers.bench.timing import NotTimed, Spread, Timing
from fusedlayers.functional.dispatch import decisions
from fusedlayers.planning import Device
from tests.support.operands import forget_calls

CPU = torch.device("cpu")
CARD = Device("cuda", "Some Card", "sm_86", sms=4, triton=True)
BLOCK = Trial("ffn", Options("relu"), (37, 24, 40), "fp16")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's cache folder, empty."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "fusedlayers" / "calibration.json"


@pytest.fixture
def card(cache: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A GPU without figures that is the CPU, whose kernels the interpreter runs; the file of its record."""

    @cached
    def described(device: torch.device) -> Device:
        return replace(CARD, calibration=calibrations.on_record(CARD) if devices._calibrated else None)

    monkeypatch.setattr(devices, "_describe", described)
    monkeypatch.setattr(calibrate, "why_nothing_to_measure", lambda device: None)
    monkeypatch.setattr(calibrate, "all_trials", lambda facts: few_trials())
    forget_calls()
    yield cache
    forget_calls()


def timing(launched: float, replayed: float | None = None, spread: float = 0.0) -> Timing:
    def around(median: float) -> Spread:
        return Spread(median, median * (1 - spread / 2), median * (1 + spread / 2), median, 9)

    return Timing(around(launched), None if replayed is None else around(replayed), "", 0.0, False)


@pytest.fixture
def times(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Says how long each contender takes."""

    def say(**found: Timing | NotTimed) -> None:
        names = {"eager": EAGER, "compiled": COMPILED, "kernels": FUSED, "auto": AUTO}
        known = {names[name]: value for name, value in found.items()}
        monkeypatch.setattr(
            measuring, "measure", lambda entrants, *rest, **options: {each.name: known[each.name] for each in entrants}
        )

    return say


# What is measured.


# What is recorded.


@pytest.mark.parametrize(
    ("found", "launched", "replayed"),
    [
        ({EAGER: timing(1.2, 1.1), COMPILED: NotTimed("no compiler"), FUSED: timing(1.0, 0.9)},
         {"torch": 1.2, "generic": 1.0}, {"torch": 1.1, "generic": 0.9}),
        # The best of torch counts.
        ({EAGER: timing(1.2, 1.2), COMPILED: timing(1.0, 1.1), FUSED: timing(1.0, 1.0)},
         {"torch": 1.0, "generic": 1.0}, {"torch": 1.1, "generic": 1.0}),
        # Nothing is recorded of what could not be put into a graph.
        ({EAGER: timing(1.2), COMPILED: timing(2.0), FUSED: timing(1.0, 1.0)}, {"torch": 1.2, "generic": 1.0},
         {"generic": 1.0}),
    ],
)  # fmt: skip
def test_every_path_is_recorded(
    found: dict[str, Timing | NotTimed], launched: dict[str, float], replayed: dict[str, float],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(measuring, "measure", lambda entrants, *rest, **options: found)
    monkeypatch.setattr(measuring, "verify", lambda *given, **options: [])
    row = measuring.row_of(BLOCK, CPU, 0.1)
    assert (row.launched, row.replayed, row.sure) == (launched, replayed, True)
    problem = BLOCK.problem()
    assert (row.kin, row.variant, row.sizes) == (problem.recorded_kin, "relu", (37, 24, 40))


def test_what_cannot_be_timed_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {EAGER: timing(1.2), COMPILED: timing(1.2), FUSED: NotTimed("no registers")}
    monkeypatch.setattr(measuring, "measure", lambda entrants, *rest, **options: found)
    monkeypatch.setattr(measuring, "verify", lambda *given, **options: [])
    with pytest.raises(measuring.DroppedError, match="no registers"):
        measuring.row_of(BLOCK, CPU, 0.1)


# The command.


@pytest.mark.interpreter
def test_from_measuring_to_auto_mode(
    card: Path, times: Callable[..., None], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    x, w_up, w_down = (torch.randn(*sizes).half() for sizes in ((37, 24), (40, 24), (24, 40)))

    def paths() -> set[str]:
        with decisions() as taken, torch.no_grad():
            fl.functional.ffn(x, w_up, w_down, activation="relu")
        return {*taken}

    assert paths() == {"ffn torch"}
    times(eager=timing(1.5, 0.5), compiled=timing(1.3, 0.6), kernels=timing(1.0, 1.0))
    words = ["calibrate", "--shape", "ffn:37x24x40:relu", "--dtype", "fp16"]
    assert command.main(words) == 0
    said = capsys.readouterr().out
    assert said.startswith("calibrate: 2 of 2 calls are to be measured on Some Card, Triton ")
    assert "calibrate: self-test of 3 configurations first\n" in said
    assert (
        "  ffn 37×24×40 relu fp16, forward: launched generic 1,000 ms, torch 1,300 ms; "
        "replayed torch 500 ms, generic 1,000 ms\n"
    ) in said
    assert "ffn 37×24×40 relu fp16, forward and backward: launched generic 1,000 ms" in said
    assert f"calibrate: 0 of 2 were faster in kernels; recorded in {card}, which auto mode reads" in said
    assert not (card.parent / "selftest.json").exists()

    # Known from now on, also to calls that ran before.
    assert paths() == {"ffn fused"}
    text = fl.explain(fl.functional.ffn, x, w_up, w_down, activation="relu", details=True)
    assert "(measured: 1,000 ms), torch" in text

    # Measured once, unless again.
    assert command.main(words) == 0
    assert capsys.readouterr().out.startswith("calibrate: 0 of 2 calls are to be measured")
    times(eager=timing(0.9, 0.5), compiled=NotTimed("no compiler"), kernels=timing(1.0, 1.0))
    assert command.main([*words, "--again"]) == 0
    assert "0 of 2 were faster in kernels" in capsys.readouterr().out
    assert paths() == {"ffn torch"}
    text = fl.explain(fl.functional.ffn, x, w_up, w_down, activation="relu", details=True)
    assert "torch is expected to be faster" in text

    # Others' files.
    team = tmp_path / "team.json"
    assert command.main(["calibrate", "--export", str(team)]) == 0
    assert capsys.readouterr().out == f"calibrate: 2 entries in {team}\n"
    card.unlink()
    assert command.main(["calibrate", "--merge", str(team)]) == 0
    assert "calibrate: 2 entries are new: " in capsys.readouterr().out
    assert json.loads(card.read_text()) == json.loads(team.read_text())


@pytest.mark.interpreter
def test_what_cannot_be_trusted_is_dropped_with_a_word(
    card: Path, times: Callable[..., None], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["calibrate", "--shape", "ffn:37x24x40:relu", "--dtype", "fp16"]
    times(eager=timing(1.0), compiled=timing(1.0), kernels=NotTimed("CompilationError: no registers"))
    assert command.main(words) == 1
    assert "  dropped: ffn 37×24×40 relu fp16, forward: CompilationError: no registers\n" in capsys.readouterr().out

    # A kernel that is wrong at this size, although its integers were right.
    from fusedlayers.kernels import gemm_gemm

    right = gemm_gemm.forward
    with monkeypatch.context() as patch:
        patch.setattr(calibrate, "find_failures", lambda trials, device: {})
        patch.setattr(gemm_gemm, "forward", lambda *given, **options: right(*given, **options) * 1.5)
        assert command.main(words) == 1
    assert "relu fp16, forward: fused (fused path): RED: y: " in capsys.readouterr().out

    # What fails the self-test is recorded there, too, and none of its calls is measured.
    [name] = [name for name in calibrate.launched(BLOCK.plan(CARD)).values() if "weight_gradient" in name]
    with monkeypatch.context() as patch:
        patch.setattr(calibrate, "find_failures", lambda trials, device: {name: "dw_up: NOT equal"})
        times(eager=timing(1.3), compiled=timing(1.3), kernels=timing(1.0))
        assert command.main(words) == 0
    said = capsys.readouterr().out
    assert f"FAILED {name}\n         dw_up: NOT equal" in said
    assert "dropped: ffn 37×24×40 relu fp16, forward and backward: its kernels give wrong numbers here" in said
    assert "1 of 1 were faster in kernels" in said
    [failed] = json.loads((card.parent / "selftest.json").read_text()).values()
    assert failed == [name]


@pytest.mark.interpreter
def test_the_time_is_kept_and_a_broken_gpu_ends_it(
    card: Path, times: Callable[..., None], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["calibrate", "--shape", "ffn:37x24x40:relu", "--dtype", "fp16"]
    monkeypatch.setattr(calibrate, "find_failures", lambda trials, device: {})
    times(eager=timing(1.3), compiled=timing(1.3), kernels=timing(1.0))
    assert command.main([*words, "--minutes", "0.000001"]) == 1
    assert "the time is up before 2 calls; run it again to go on with them" in capsys.readouterr().out
    assert not card.exists()

    def fails(*given: Any) -> Any:
        raise RuntimeError("CUDA error: an illegal memory access was encountered\nmore words")

    monkeypatch.setattr(calibrate, "row_of", fails)
    monkeypatch.setattr(calibrate, "is_broken", lambda device: True)
    assert command.main(words) == 1
    said = capsys.readouterr()
    assert said.out.count("dropped:") == 1
    assert "forward: RuntimeError: CUDA error: an illegal memory access was encountered\n" in said.out
    assert said.err == "calibrate: the GPU takes no more calls of this process; run it again\n"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_one_line_says_so(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["calibrate"]) == 1
    said = capsys.readouterr()
    assert (said.out, said.err) == ("", "calibrate: there is nothing to measure: there is no GPU\n")
    assert not cache.exists()


def test_why_nothing_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = torch.device("cuda", 0)
    monkeypatch.setattr(calibrate, "HAS_TRITON", True)
    monkeypatch.setattr(calibrate, "interpreted", lambda: True)
    assert "TRITON_INTERPRET is set" in str(calibrate.why_nothing_to_measure(gpu))
    monkeypatch.setattr(calibrate, "interpreted", lambda: False)
    assert calibrate.why_nothing_to_measure(gpu) is None
    monkeypatch.setattr(calibrate, "HAS_TRITON", False)
    assert "Triton is not installed" in str(calibrate.why_nothing_to_measure(gpu))


def test_one_rank_measures(cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("RANK", "3")
    assert command.main(["calibrate"]) == 0
    assert capsys.readouterr().out.startswith("calibrate: rank 0 measures; what it writes is read by the other ranks")


def test_a_cache_folder_that_cannot_be_written_is_named_before_any_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    for words in ([], ["--merge", "team.json"]):
        with pytest.raises(SystemExit):
            command.main(["calibrate", *words])
        assert "file is no folder)" in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--shape", "ffn:1x2"], "argument --shape: '1x2': expected 3 positive integers MxKxN"),
        (["--minutes", "0"], "argument --minutes: '0': expected more than 0 seconds"),
        (["--merge", "none.json"], "none.json: cannot be read: No such file or directory"),
        (["--export", "team.json"], "calibration.json: nothing was measured here yet"),
        (["--device", "tpu"], "argument --device: 'tpu': expected cuda, cuda:N or cpu"),
    ],
)
@pytest.mark.usefixtures("cache")
def test_wrong_words_end_in_one_line(
    words: list[str],
    complaint: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        command.main(["calibrate", *words])
    assert ended.value.code == 2
    assert complaint in capsys.readouterr().err.splitlines()[-1]
