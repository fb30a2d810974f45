"""What README's first screen claims, held against its own tables, which are those of the results."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from fusedlayers import planning
from fusedlayers.planning import Device, Problem

ROOT = Path(__file__).resolve().parent.parent
TEXT = (ROOT / "README.md").read_text()
FIRST_SCREEN = TEXT.partition("\n## ")[0]
CLAIM = FIRST_SCREEN.split("\n\n")[1].replace("\n", " ")


def steps() -> dict[str, dict[str, tuple[float, float]]]:
    """Model -> column -> (ms, GiB) of the table of whole steps."""
    rows = [line.strip("| ").split(" | ") for line in FIRST_SCREEN.splitlines() if line.startswith("|")]
    headings, _, *lines = rows[:8]
    found = {}
    for title, *cells in lines:
        pairs = [cell.replace("*", "").split(" / ") for cell in cells]
        found[title] = {
            name: (float(pair[0]), float(pair[1]))
            for name, pair in zip(headings[1:], pairs, strict=True)
            if len(pair) == 2
        }
    assert len(found) == 6
    return found


def ratios(ours: str, theirs: str, which: int) -> list[float]:
    """Ours over theirs in ms (0) or GiB (1) of the models that ours has, the least first."""
    return sorted(row[ours][which] / row[theirs][which] for row in steps().values() if ours in row)


def test_the_first_screen_is_forty_lines() -> None:
    assert len(FIRST_SCREEN.strip().splitlines()) <= 40


def test_its_first_sentence_is_what_its_table_shows() -> None:
    claimed = [float(number) for number in re.findall(r"\d\.\d\d", CLAIM)]
    eager, eager_memory = ratios("fusedlayers", "torch", 0), ratios("fusedlayers", "torch", 1)
    *compiled, slowest = ratios("fusedlayers, compiled", "torch, compiled", 0)
    memory = ratios("fusedlayers, compiled", "torch, compiled", 1)
    in_8_bits = ratios("fusedlayers, fp8, compiled", "torch, compiled", 0)
    expected = [eager[0], eager[-1], eager_memory[0], eager_memory[-1], compiled[0], compiled[-1]]
    expected += [in_8_bits[0], in_8_bits[-1], slowest]
    # The table rounds GiB to one place.
    assert claimed == pytest.approx([*expected, memory[0], memory[-1]], abs=0.016)


def test_the_fastest_of_each_line_is_bold() -> None:
    for line in FIRST_SCREEN.splitlines():
        if " / " in line and "**" in line:
            times = [float(time) for time in re.findall(r"\**([\d.]+)\** /", line)]
            assert min(times) == float(re.findall(r"\*\*([\d.]+)\*\*", line)[0])


@pytest.mark.parametrize(
    ("words", "architecture", "kernels"),
    [
        ("H100, H200", "sm_90", True), ("GH200", "sm_90", True), ("A100", "sm_80", False), ("L40S", "sm_89", False),
        ("RTX 30", "sm_86", False), ("B200", "sm_100", False), ("MI300", "gfx942", False),
    ],
)  # fmt: skip
def test_its_table_of_machines_says_what_auto_mode_does(words: str, architecture: str, kernels: bool) -> None:
    [row] = [line for line in FIRST_SCREEN.splitlines() if line.startswith("|") and words in line.split("|")[1]][:1]
    runs = row.split("|")[2]
    assert ("torch, until" in runs or "as on an A100" in runs) != kernels
    device = Device("cuda", words, architecture, sms=132, triton=True, backend="sm90" if kernels else "generic")
    large = Problem("ffn", 1, M=1_048_576, K=64, N=256, O=64, dtype="bfloat16", activation="gelu_tanh")
    assert (planning.plan(large, device).path != "torch") == kernels


def test_it_names_the_targets_that_are_compiled() -> None:
    named = set(re.findall(r"\b(?:sm_|gfx)\w+", FIRST_SCREEN))
    compiled = re.findall(r'^    "(\w+)": GPUTarget', (ROOT / "tests" / "code_generation.py").read_text(), re.MULTILINE)
    assert named == set(compiled)
