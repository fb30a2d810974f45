"""The tables that show what `replace` does to real models, and the record of a GPU that the documentation shows."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch

from fusedlayers import functional
from tests.conftest import ROOT
from tests.models import device_table, family_table, step_table
from tests.models.every_family import FAMILIES as EVERY_FAMILY
from tests.models.small import FAMILIES, PUBLISHED_WORDS, Results
from tests.models.test_families import installed
from tests.support.operands import patch_ffn

SMALL = ("--device", "cpu", "--small", "--seconds", "0", "--output", "unused")


def test_a_row_of_the_table_of_families() -> None:
    found = family_table.row("gemma3n_text", EVERY_FAMILY["gemma3n_text"])
    assert found["fused"] == {"Gemma3nTextMLP": 1}
    assert found["ffns"] == ["gated gelu_tanh"]
    assert found["left"]["Gemma3nTextMLP"].startswith("its forward reads torch.tensor in `target")
    assert all(0 < error < 1e-5 for error in found["errors"])
    table = family_table.markdown({"versions": {"torch": "2", "transformers": "5"}, "rows": [found]})
    assert "| gemma3n_text | `Gemma3nTextMLP` | gated gelu_tanh |" in table
    assert "1 have blocks that run fused" in table


def test_the_record_of_families_is_of_all_of_them_and_the_page_counts_them() -> None:
    rows = json.loads(family_table.RECORD.read_text())["rows"]
    assert [row["family"] for row in rows] == sorted(EVERY_FAMILY)
    page = " ".join((ROOT / "docs" / "models.md").read_text().split())
    fused = sum(bool(row["fused"]) for row in rows)
    assert f"{fused} of the {len(rows)} families [in this table](families.md) have blocks that run fused" in page


def test_a_row_of_the_record_of_a_device() -> None:
    """On a CPU, with a small model: what the script is, not what a GPU does."""
    found = device_table.row("BERT", installed("BERT"), device_table.arguments(SMALL))
    assert found["ffn"] == "gelu, 24 -> 52 -> 24"
    assert list(found["contenders"]) == ["torch", "auto", "recompute"]
    for entry in found["contenders"].values():
        assert not entry["red"]
        assert 0 < entry["logits_error"] < 0.1
        assert 0 < entry["gradients_error"] < 0.1
        assert entry["launched"]["median"] > 0
        assert entry["peak_bytes"] is None
    kept = [entry["saved_bytes"] for entry in found["contenders"].values()]
    assert kept[2] < kept[0]
    assert found["contenders"]["recompute"]["paths"] == {"ffn chunked": 2}, "of one draw"
    json.dumps(found, allow_nan=False)


def test_published_positions_hold_the_texts() -> None:
    """RoBERTa counts them from the padding's on."""
    family = installed("RoBERTa")
    logits, _ = family.run(family.build_published("cpu"), family.published_inputs(512))
    assert logits.shape == (1, 512, PUBLISHED_WORDS)


def test_convolutions_are_judged_as_matrices_and_draws_apart() -> None:
    draws: list[Results] = [
        {"logits": torch.zeros(2, 4, 5), "dconv": torch.zeros(6, 3, 2, 2), "dbias": torch.zeros(6), "dfrozen": None}
    ] * 3
    shapes = {name: None if each is None else tuple(each.shape) for name, each in device_table.stacked(draws).items()}
    assert shapes == {"logits": (3, 2, 4, 5), "dconv": (3, 6, 12), "dbias": (3, 6), "dfrozen": None}


def test_families_measured_anew_take_the_place_of_their_rows() -> None:
    older = json.loads(step_table.RECORD.read_text())
    families = [row["family"] for row in older["rows"]]
    kept = device_table.kept_rows(older, older, families[:1])
    assert [row["family"] for row in kept] == families[1:]
    assert all(len(row["commit"]) == 40 for row in kept)
    assert "of its rows at" in step_table.markdown({**older, "rows": [older["rows"][0], *kept]})
    with pytest.raises(ValueError, match="versions: expected those of the record"):
        device_table.kept_rows(older, {**older, "versions": {}}, [])


def test_draws_differ_and_the_parameters_come_back() -> None:
    model = installed("BERT").build()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    seen = []
    for draw in range(3):
        with device_table.changed(model, draw):
            # As results do.
            torch.manual_seed(1)
            seen.append(torch.cat([parameter.detach().flatten().clone() for parameter in model.parameters()]))
        assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert torch.equal(seen[0], torch.cat([parameter.detach().flatten() for parameter in model.parameters()]))
    for first, second in ((0, 1), (0, 2), (1, 2)):
        changes = (seen[first] - seen[second]).abs()
        assert float(changes[seen[0] != 0].count_nonzero()) > 0.9 * int(seen[0].count_nonzero())
        assert bool((changes <= 2.01 * device_table.CHANGE * seen[0].abs()).all())


def test_what_is_wrong_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:

    def wrong(*tensors: torch.Tensor, **options: Any) -> torch.Tensor:
        return 2 * functional.ffn(*tensors, **options)

    patch_ffn(monkeypatch, wrong)
    found = device_table.row("BERT", installed("BERT"), device_table.arguments(SMALL))["contenders"]
    assert found["torch"]["launched"]
    for name in ("auto", "recompute"):
        assert any("NOT close" in line for line in found[name]["red"])
        assert found[name]["draws"] == device_table.MOST_DRAWS
        assert "launched" not in found[name]


def test_what_is_red_is_judged_with_more_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    judge, shapes = device_table.judged, []

    def unlucky(found: Results, expected: Results, truth: Results) -> dict[str, str]:
        shapes.append({name: len(tensor) for name, tensor in found.items() if tensor is not None})
        assert all(found[name] is None or len(expected[name]) == len(truth[name]) == count
                   for name, count in shapes[-1].items())  # fmt: skip
        return judge(found, expected, truth) | ({"logits": "unlucky"} if 3 <= len(shapes) <= 4 else {})

    monkeypatch.setattr(device_table, "judged", unlucky)
    found = device_table.row("BERT", installed("BERT"), device_table.arguments(SMALL))["contenders"]
    assert [set(counts.values()) for counts in shapes] == [{3}, {3}, {3}, {4}, {5}]
    assert [set(counts) for counts in shapes[3:]] == [{"logits"}, {"logits"}]
    assert not found["recompute"]["red"]
    assert found["recompute"]["draws"] == 5
    assert found["recompute"]["launched"]


def test_the_committed_record_is_of_known_families() -> None:
    record = json.loads(step_table.RECORD.read_text())
    assert {found["family"] for found in record["rows"]} <= set(FAMILIES)
    entries = [found["contenders"][name] for found in record["rows"] for name in step_table.KINDS]
    for entry in entries:
        assert not (entry["red"] and "launched" in entry), "what is wrong must not be timed"
        assert math.isfinite(entry["logits_error"])
