"""A statement inserted into a right block, at every place: the block stays, or computes what its author wrote.

Each test makes a module file with one class for every place in every right block of a kind, and replaces them all.
Select a kind by ``-k block``, ``-k layer``, ``-k norm``, ``-k experts`` or ``-k rule``.
"""

from __future__ import annotations

import copy
import linecache
import re
import warnings
from collections.abc import Callable, Iterable, Sequence
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


# All read a statement alike, so in the short run each of them reads every fifth one.
READERS = ("block", "layer", "norm", "experts", "rule")


def every_fifth(reader: str, names: Iterable[str], all_names: Sequence[str]) -> pytest.MarkDecorator:
    """A parameter of these names; those that another reader reads are for the full run."""
    mine = set(all_names[READERS.index(reader) :: len(READERS)])
    return pytest.mark.parametrize(
        "name", [pytest.param(name, marks=[] if name in mine else [pytest.mark.full]) for name in names]
    )


def hostile_to(reader: str, kind: str | None = None) -> pytest.MarkDecorator:
    """The hostile statements for blocks of a kind, by default that of the reader."""
    names = [name for name, hostile in STATEMENTS.items() if (kind or reader) not in hostile.but]
    return every_fifth(reader, names, list(STATEMENTS))


def harmless_to(reader: str) -> pytest.MarkDecorator:
    return every_fifth(reader, HARMLESS, list(HARMLESS))


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


def check_hostile(kind: str, name: str, folder: Path, patch: pytest.MonkeyPatch, ruled: bool = False) -> None:
    """Each block of the kind with the statement is left or right; and in one of them the statement shows, or no test
    of it would tell anything."""
    hostile = STATEMENTS[name]
    classes = list(sources(KINDS[kind], hostile.statement, hostile.setup, hostile.members, hostile.decorator))
    word = re.sub(r"\W", "_", f"hostile_{kind}_{name}_{ruled}")
    blocks, source = built(classes, kind, folder / f"{word}.py", patch)
    plain = imported(folder / f"{word}_plain.py", list(untouched(KINDS[kind])), patch)
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


def check_fused(kind: str, classes: Classes, folder: Path, patch: pytest.MonkeyPatch, ruled: bool = False) -> None:
    """All blocks are fused, and right."""
    blocks, source = built(classes, kind, folder / f"harmless_{kind}_{ruled}.py", patch)
    twins = copy.deepcopy(blocks)
    report = replaced(blocks, rules_for(classes, source) if ruled else ())
    assert [each for each, block in blocks.items() if not is_fused(block)] == [], report
    usual = Hostile("", always)
    for each, block in blocks.items():
        assert alike(observed(source, each, block, kind, usual), observed(source, each, twins[each], kind, usual)), each


def harmless(kind: str, name: str) -> Classes:
    statement, setup = HARMLESS[name]
    return list(sources(KINDS[kind], statement, setup))


class TestBlock:
    """Blocks whose whole forward is an FFN."""

    @hostile_to("block")
    def test_hostile(self, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        check_hostile("block", name, tmp_path, monkeypatch)

    @harmless_to("block")
    def test_harmless(self, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        check_fused("block", harmless("block", name), tmp_path, monkeypatch)

    def test_untouched(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        check_fused("block", list(untouched(KINDS["block"])), tmp_path, monkeypatch)

    def test_without_a_source(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        file = tmp_path / "hostile_gone.py"
        blocks, _ = built(list(untouched(BLOCKS)), "block", file, monkeypatch)
        file.unlink()
        linecache.clearcache()
        report = replaced(blocks)
        assert not any(map(is_fused, blocks.values()))
        assert all("source" in entry.reason for entry in report.skipped if entry.path in blocks)

    def test_a_source_that_was_edited_after_the_import(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """What is read must be what runs."""
        file = tmp_path / "hostile_edited.py"
        classes = list(sources(BLOCKS, "$v = $v * 1.0 if len($v) < 64 else $v * 2.0"))
        blocks, source = built(classes, "block", file, monkeypatch)
        twins = copy.deepcopy(blocks)
        file.write_text(re.sub(r"\w+ = \w+ \* 1\.0 if len.*", "pass", file.read_text()))
        linecache.clearcache()
        replaced(blocks)
        longer = Hostile("", lambda call: call.rows(LONG))
        for each, block in blocks.items():
            found, expected = (observed(source, each, some, "block", longer) for some in (block, twins[each]))
            assert alike(found, expected), each


class TestLayer:
    """Layers with attention and an FFN in one method."""

    @hostile_to("layer")
    def test_hostile(self, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        check_hostile("layer", name, tmp_path, monkeypatch)

    @harmless_to("layer")
    def test_harmless(self, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        check_fused("layer", harmless("layer", name), tmp_path, monkeypatch)

    def test_untouched(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        check_fused("layer", list(untouched(KINDS["layer"])), tmp_path, monkeypatch)


class TestNorm:
    """Norms written out."""

    @hostile_to("norm")
    def test_hostile(self, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        check_hostile("norm", name, tmp_path, monkeypatch)

    @harmless_to("norm")
    def test_harmless(self, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        check_fused("norm", harmless("norm", name), tmp_path, monkeypatch)

    def test_untouched(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        check_fused("norm", list(untouched(KINDS["norm"])), tmp_path, monkeypatch)


class TestExperts:
    """Modules with the interface of transformers' experts."""

    @hostile_to("experts")
    def test_hostile(self, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        check_hostile("experts", name, tmp_path, monkeypatch)

    @harmless_to("experts")
    def test_harmless(self, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        check_fused("experts", harmless("experts", name), tmp_path, monkeypatch)

    def test_untouched(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        check_fused("experts", list(untouched(KINDS["experts"])), tmp_path, monkeypatch)


NORM_BETWEEN = """
class NormBetween(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.act, self.down = nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16)

    def forward(self, x):
        h = self.act(self.up(x))
        return self.down(F.layer_norm(h, (32,)))
"""


class TestRule:
    """The same blocks, of whose classes a rule says that they compute an FFN."""

    @hostile_to("rule", kind="block")
    def test_hostile(self, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        check_hostile("block", name, tmp_path, monkeypatch, ruled=True)

    @harmless_to("rule")
    def test_harmless(self, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        check_fused("block", harmless("block", name), tmp_path, monkeypatch, ruled=True)

    def test_untouched(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        check_fused("block", list(untouched(KINDS["block"])), tmp_path, monkeypatch, ruled=True)

    @pytest.fixture
    def norm_between(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> nn.Module:
        """A norm between activation and second linear, which no FFN has."""
        classes = [("NormBetween", "NormBetween", NORM_BETWEEN)]
        return built(classes, "block", tmp_path / "norm_between.py", monkeypatch)[0]["NormBetween"]

    def test_one_that_says_something_else_is_refused(self, norm_between: nn.Module) -> None:
        rule = FFNRule(type(norm_between), up="up", activation="act", down="down")
        report = replaced(norm_between, (rule,))
        assert not is_fused(norm_between)
        assert report.replaced == ()
        # The line of code that differs.
        assert "F.layer_norm(h, (32,))" in str(report.skipped[0])

    def test_no_rule_is_advised_that_would_be_refused(self, norm_between: nn.Module) -> None:
        report = replaced(norm_between)
        assert not is_fused(norm_between)
        assert "FFNRule" not in str(report)
        assert "layer_norm(relu(up(x))), which is no activation of up(x)" in str(report.skipped[0])

    def test_a_trusted_one_is_believed_and_the_report_says_so(self, norm_between: nn.Module) -> None:
        trusting: Callable[..., FFNRule] = FFNRule
        rule = trusting(type(norm_between), up="up", activation="act", down="down", trusted=True)
        report = replaced(norm_between, (rule,))
        assert is_fused(norm_between)
        assert "trusted" in str(report.replaced[0])
