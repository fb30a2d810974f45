"""A statement inserted into a right block, at every place: the block stays, or computes what its author wrote.

Each test makes a module file with one class for every place in every right block of a kind, and replaces them all.
Select a reader by ``-k block``, ``-k layer``, ``-k norm``, ``-k experts`` or ``-k rule``.
"""

from __future__ import annotations

import copy
import linecache
import re
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import nn

import fusedlayers as fl
from fusedlayers import FFNRule
from tests.support.hostile import HARMLESS, HOSTILE, Hostile, always
from tests.support.hostile_blocks import BLOCKS, KINDS, imported, original_class, sources, untouched
from tests.support.hostile_calls import LONG, Call, Observed, alike
from tests.support.hostile_ways import HOSTILE_WAYS

STATEMENTS = HOSTILE | HOSTILE_WAYS
Classes = list[tuple[str, str, str]]
# What reads a block: its kind, and whether a rule says what its class computes.
READERS = {
    "block": ("block", False), "layer": ("layer", False), "norm": ("norm", False), "experts": ("experts", False),
    "rule": ("block", True),
}  # fmt: skip
each_reader = pytest.mark.parametrize("reader", READERS)


def cases(names: Iterable[str], but: Callable[[str], tuple[str, ...]]) -> pytest.MarkDecorator:
    """Every statement for every reader but those of some kinds.

    All read a statement alike, so in the short run each of them reads every fifth one.
    """
    found = []
    for place, name in enumerate(names):
        for number, (reader, (kind, _)) in enumerate(READERS.items()):
            if kind not in but(name):
                marks = [] if place % len(READERS) == number else [pytest.mark.full]
                found.append(pytest.param(reader, name, marks=marks, id=f"{reader}-{name}"))
    return pytest.mark.parametrize(("reader", "name"), found)


def built(classes: Classes, kind: str, file: Path, patch: pytest.MonkeyPatch) -> tuple[nn.ModuleDict, ModuleType]:
    """A block of every class, in evaluation."""
    source = imported(file, classes, patch)
    source.seed(5)
    blocks = nn.ModuleDict({name: getattr(source, name)() for name, _, _ in classes})
    # Torch's fused norms take no float64.
    return blocks.eval().to(torch.float32 if kind == "norm" else torch.float64), source


def replaced(model: nn.Module, rules: tuple[FFNRule, ...] = ()) -> fl.Report:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "nothing was replaced")
        return fl.replace(model, norm=True, rules=rules)


def rules_for(classes: Classes, source: ModuleType) -> tuple[FFNRule, ...]:
    return tuple(FFNRule(getattr(source, each), **BLOCKS[template].rule) for each, template, _ in classes)


def is_fused(block: nn.Module) -> bool:
    return type(block) is not original_class(block)


@cases(STATEMENTS, lambda name: STATEMENTS[name].but)
def test_hostile(reader: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each block of the kind with the statement is left or right; and in one of them the statement shows, or no test
    of it would tell anything."""
    kind, ruled = READERS[reader]
    hostile = STATEMENTS[name]
    classes = list(sources(KINDS[kind], hostile.statement, hostile.setup, hostile.members, hostile.decorator))
    word = re.sub(r"\W", "_", f"hostile_{reader}_{name}")
    blocks, source = built(classes, kind, tmp_path / f"{word}.py", monkeypatch)
    plain = imported(tmp_path / f"{word}_plain.py", list(untouched(KINDS[kind])), monkeypatch)
    twins = copy.deepcopy(blocks)
    shows = False
    for each, template, _ in classes:
        if not shows:
            # What a block would compute if the statement were not there.
            believed = copy.deepcopy(twins[each])
            believed.__class__ = getattr(plain, template)
            written = copy.deepcopy(twins[each])
            shows = not alike(*(observed(source, each, block, kind, hostile) for block in (believed, written)))
    assert shows, "the statement has no effect"
    replaced(blocks, rules_for(classes, source) if ruled else ())
    wrong = []
    for each, block in blocks.items():
        if not is_fused(block):
            continue
        usual = Hostile(hostile.statement, always)
        for case in [hostile] if hostile.trigger is always else [usual, hostile]:
            if not alike(observed(source, each, block, kind, case), observed(source, each, twins[each], kind, case)):
                wrong.append(f"{each} {'as usual' if case is usual else 'triggered'}")
                break
    assert not wrong, f"fused, and wrong: {', '.join(wrong)}"


def observed(source: ModuleType, written: str, block: nn.Module, kind: str, hostile: Hostile) -> Observed:
    with Call(source, written, block, kind) as call:
        hostile.trigger(call)
        return call.observe()


def assert_fused(reader: str, classes: Classes, folder: Path, patch: pytest.MonkeyPatch) -> None:
    """All blocks are fused, and right."""
    kind, ruled = READERS[reader]
    blocks, source = built(classes, kind, folder / f"harmless_{reader}.py", patch)
    twins = copy.deepcopy(blocks)
    report = replaced(blocks, rules_for(classes, source) if ruled else ())
    assert [each for each, block in blocks.items() if not is_fused(block)] == [], report
    usual = Hostile("", always)
    for each, block in blocks.items():
        assert alike(observed(source, each, block, kind, usual), observed(source, each, twins[each], kind, usual)), each


@cases(HARMLESS, lambda name: ())
def test_harmless(reader: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    statement, setup = HARMLESS[name]
    assert_fused(reader, list(sources(KINDS[READERS[reader][0]], statement, setup)), tmp_path, monkeypatch)


@each_reader
def test_untouched(reader: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_fused(reader, list(untouched(KINDS[READERS[reader][0]])), tmp_path, monkeypatch)


def test_without_a_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "hostile_gone.py"
    blocks, _ = built(list(untouched(BLOCKS)), "block", file, monkeypatch)
    file.unlink()
    linecache.checkcache(str(file))
    report = replaced(blocks)
    assert not any(map(is_fused, blocks.values()))
    assert all("source" in entry.reason for entry in report.skipped if entry.path in blocks)


def test_a_source_that_was_edited_after_the_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is read must be what runs."""
    file = tmp_path / "hostile_edited.py"
    classes = list(sources(BLOCKS, "$v = $v * 1.0 if len($v) < 64 else $v * 2.0"))
    blocks, source = built(classes, "block", file, monkeypatch)
    twins = copy.deepcopy(blocks)
    file.write_text(re.sub(r"\w+ = \w+ \* 1\.0 if len.*", "pass", file.read_text()))
    linecache.checkcache(str(file))
    replaced(blocks)
    longer = Hostile("", lambda call: call.rows(LONG))
    for each, block in blocks.items():
        found, expected = (observed(source, each, some, "block", longer) for some in (block, twins[each]))
        assert alike(found, expected), each


NORM_BETWEEN = """
class NormBetween(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.act, self.down = nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16)

    def forward(self, x):
        h = self.act(self.up(x))
        return self.down(F.layer_norm(h, (32,)))
"""


@pytest.fixture
def norm_between(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> nn.Module:
    """A norm between activation and second linear, which no FFN has."""
    classes = [("NormBetween", "NormBetween", NORM_BETWEEN)]
    return built(classes, "block", tmp_path / "norm_between.py", monkeypatch)[0]["NormBetween"]


def test_a_rule_that_says_something_else_is_refused(norm_between: nn.Module) -> None:
    rule = FFNRule(type(norm_between), up="up", activation="act", down="down")
    report = replaced(norm_between, (rule,))
    assert not is_fused(norm_between)
    assert report.replaced == ()
    # The line of code that differs.
    assert "F.layer_norm(h, (32,))" in str(report.skipped[0])


def test_no_rule_is_advised_that_would_be_refused(norm_between: nn.Module) -> None:
    report = replaced(norm_between)
    assert not is_fused(norm_between)
    assert "FFNRule" not in str(report)
    assert "layer_norm(relu(up(x))), which is no activation of up(x)" in str(report.skipped[0])


def test_a_trusted_rule_is_believed_and_the_report_says_so(norm_between: nn.Module) -> None:
    trusting: Callable[..., FFNRule] = FFNRule
    rule = trusting(type(norm_between), up="up", activation="act", down="down", trusted=True)
    report = replaced(norm_between, (rule,))
    assert is_fused(norm_between)
    assert "trusted" in str(report.replaced[0])
