"""Which path times decide for: never one without a time, and of a layer as few changes as its tokens grow as pay."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest

from fusedlayers.planning import CARDS, Problem, choosing, plan
from fusedlayers.planning.choosing import MOST_KEPT, choose
from fusedlayers.planning.record import TORCH, Record, Row
from tests.support.records import where

H200 = CARDS["H200"]
WIDE = Problem(
    "ffn", batch=1, M=4096, K=1024, N=4096, O=1024, dtype="bfloat16", activation="gelu_tanh", captured=True,
    needs_data_gradient=True, needs_weight_gradient=True,
)  # fmt: skip
INFERENCE = replace(WIDE, needs_data_gradient=False, needs_weight_gradient=False)


def along(**ratios: list[float]) -> Record:
    """Of the wide layer with 64, 512, 4096 and 32,768 tokens: by path, how many times as long as torch.

    With fewer tokens, and with more, it takes as many times as long as with the least, and with the most.
    """
    rows = []
    whole = [[*values[:1] * 2, *values, *values[-1:] * 2] for values in ratios.values()]
    for place, values in enumerate(zip(*whole, strict=True)):
        times = {TORCH: 1e-3, **{path: 1e-3 * value for path, value in zip(ratios, values, strict=True)}}
        rows.append(Row(WIDE.recorded_kin, WIDE.variant, (8**place, WIDE.K, WIDE.N), times, times))
    return Record(rows)


def chosen(record: Record, kept: dict[str, int] | None = None, problem: Problem = WIDE) -> list[str]:
    """The path with 64, 128, ... tokens; ``kept`` for each of them by path."""
    device = replace(H200, override=record)
    found = []
    for power in range(6, 17):
        each = replace(problem, M=2**power)
        able = dict.fromkeys([path for path in ("other", "epilogue") if path in _known(record)])
        share = None if kept is None else lambda path, M=each.M: kept[path] * M
        found.append(choose(each, device, "auto", able, share).path)
    return found


def _known(record: Record) -> set[str]:
    return {path for row in record.rows() for path in row.replayed}


def test_the_wish_of_the_user() -> None:
    device = where(H200, WIDE, {"epilogue": 2.0})
    cannot = {"fused": "it is too wide", "epilogue": None}
    assert choose(WIDE, device, "torch", cannot).against == {
        "fused": "it is too wide",
        "epilogue": "the backend is set to torch",
    }
    forced = choose(WIDE, device, "triton", cannot)
    assert (forced.path, forced.timed) == ("epilogue", ())
    assert forced.against == {"fused": "it is too wide", TORCH: "the epilogue path comes first"}
    both = choose(WIDE, device, "triton", dict.fromkeys(("fused", "epilogue")))
    assert both.path == "fused"
    none = choose(WIDE, device, "triton", {"fused": "it is too wide"})
    assert (none.path, none.against) == (TORCH, {"fused": "it is too wide"})


def test_what_cannot_run_or_was_not_measured_is_never_taken() -> None:
    device = where(H200, INFERENCE, {"fused": 0.1, "epilogue": 0.5})
    able: dict[str, str | None] = {"fused": "it is too wide", "epilogue": None, "other": None}
    made = choose(INFERENCE, device, "auto", able)
    assert made.path == "epilogue"
    assert made.against["fused"] == "it is too wide"
    assert made.against["other"].startswith("nothing like it was measured")
    assert set(made.timed) == {("epilogue", "epilogue"), (TORCH, TORCH)}
    # Launched alone was it measured: a graph is another question.
    alone = replace(device, override=Record(row._replace(replayed={}) for row in device.override.rows()))  # type: ignore[union-attr]
    assert choose(INFERENCE, alone, "auto", {"epilogue": None}).path == TORCH
    assert choose(replace(INFERENCE, captured=False), alone, "auto", {"epilogue": None}).path == "epilogue"
    assert choose(replace(INFERENCE, captured=False, compiled=True), alone, "auto", {"epilogue": None}).path == TORCH


def test_without_a_gradient_the_fastest_is_taken() -> None:
    record = along(other=[0.5, 0.5, 2.0, 2.0], epilogue=[0.7, 0.7, 0.7, 0.7])
    inference = Record(row._replace(kin=INFERENCE.recorded_kin) for row in record.rows())
    found = chosen(inference, problem=INFERENCE)
    assert found[0] == "other"
    assert found[-1] == "epilogue"


def test_of_alike_paths_the_one_that_keeps_least() -> None:
    kept = {"other": 1, "epilogue": 3, TORCH: 4}
    assert set(chosen(along(other=[0.8] * 4, epilogue=[0.78] * 4), kept)) == {"other"}
    assert set(chosen(along(other=[1.0] * 4, epilogue=[0.98] * 4), kept)) == {"other"}
    assert set(chosen(along(other=[0.8] * 4, epilogue=[0.6] * 4), kept)) == {"epilogue"}
    alike = dict.fromkeys(kept, 1)
    assert set(chosen(along(other=[0.8] * 4, epilogue=[0.78] * 4), alike)) == {"epilogue"}


@pytest.mark.parametrize(
    "ratios",
    [[0.5, 2.0, 0.5, 2.0], [2.0, 0.5, 2.0, 0.5], [0.5, 0.5, 2.0, 2.0], [2.0, 2.0, 0.5, 0.5], [0.97, 1.03, 0.97, 1.03]],
    ids=str,
)
def test_more_tokens_never_keep_twice_the_bytes(ratios: list[float]) -> None:
    kept = {"epilogue": 2, TORCH: 4}
    found = chosen(along(epilogue=ratios), kept)
    bytes_kept = [kept[path] for path in found]
    assert all(after <= MOST_KEPT * before for before, after in itertools.pairwise(bytes_kept))
    # So there is one change at most, to what keeps less.
    assert sum(one != other for one, other in itertools.pairwise(found)) <= 1
    # Where neither keeps much more, times decide; but not for what is hardly faster.
    free = chosen(along(epilogue=ratios), {"epilogue": 3, TORCH: 4})
    changes = sum(one != other for one, other in itertools.pairwise(free))
    most = sum(one != other for one, other in itertools.pairwise(ratios))
    assert changes == most if 0.5 in ratios else changes <= 1


def test_a_change_must_be_worth_it() -> None:
    """As much as STAYS altogether."""
    kept = {"epilogue": 3, TORCH: 3}
    slower = along(epilogue=[0.6, 1.02, 0.6, 0.6])
    assert set(chosen(slower, kept)) == {"epilogue"}
    assert choosing.STAYS > 0


@pytest.mark.parametrize("card", CARDS)
@pytest.mark.parametrize("training", [False, True], ids=["forward", "training"])
@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
class TestShipped:
    """What users see of the files: a layer that is a little wider, or has a few tokens more, is not another layer."""

    @staticmethod
    def layer(M: int, K: int, gated: bool, training: bool, captured: bool) -> Problem:
        facts: dict[str, Any] = {"needs_data_gradient": training, "needs_weight_gradient": training}
        activation = "silu" if gated else "gelu_tanh"
        return Problem(
            "ffn", 1, M, K, 4 * K, K, "bfloat16", activation=activation, gated=gated, captured=captured, **facts
        )

    @pytest.mark.parametrize("captured", [False, True], ids=["launched", "replayed"])
    @pytest.mark.parametrize(("widths", "most"), [(range(64, 4097, 64), 6), (range(8, 4097, 96), 5)], ids=["64", "8"])
    def test_widths(self, widths: range, most: int, gated: bool, training: bool, card: str, captured: bool) -> None:
        paths = [plan(self.layer(4096, K, gated, training, captured), CARDS[card]).path for K in widths]
        assert sum(one != other for one, other in itertools.pairwise(paths)) <= most, paths

    @pytest.mark.parametrize("captured", [False, True], ids=["launched", "replayed"])
    @pytest.mark.parametrize("K", [64, 128, 256, 1024])
    def test_tokens(self, K: int, gated: bool, training: bool, card: str, captured: bool) -> None:
        # Every multiple of 64 up to 1024, then coarser.
        tokens = [*range(64, 1025, 64), *range(1216, 8193, 192), *range(8704, 65_537, 2048)]
        plans = [plan(self.layer(M, K, gated, training, captured), CARDS[card]) for M in tokens]
        paths = [made.path for made in plans]
        assert sum(one != other for one, other in itertools.pairwise(paths)) <= 3, paths
        for (before, less), (after, more) in itertools.pairwise(zip(tokens, plans, strict=True)):
            if before > 2000:
                assert more.saved_bytes / after <= 2 * less.saved_bytes / before, (before, after)
