"""Which launches of Hopper's kernel of GEMM-reduce a test has caused."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest

from fusedlayers.kernels.gemm_reduce import ReduceOperands, sm90
from fusedlayers.kernels.tuning import Sm90ReduceConfig
from tests.support.operands import forget_calls


class Reduction(NamedTuple):
    """One launch: its configuration, its splits, and whether kept and reduced lie transposed in memory."""

    config: Sm90ReduceConfig
    splits: int
    transposed: tuple[bool, bool]


def watch_reductions(monkeypatch: pytest.MonkeyPatch) -> list[Reduction]:
    """A list that every launch from now on is added to, those of prepared calls included."""
    found: list[Reduction] = []
    known: dict[Any, Reduction] = {}
    prepare, launch = sm90.prepare_reduce, sm90.launch_reduce

    def preparing(operands: ReduceOperands, matrices: Any, splits: int, config: Sm90ReduceConfig) -> Any:
        prepared = prepare(operands, matrices, splits, config)
        known[prepared] = Reduction(config, splits, (matrices[0].transposed, matrices[1].transposed))
        return prepared

    def launching(*arguments: Any) -> None:
        found.append(known[arguments[-1]])
        launch(*arguments)

    # What earlier tests have prepared is not known here.
    forget_calls()
    monkeypatch.setattr(sm90, "prepare_reduce", preparing)
    monkeypatch.setattr(sm90, "launch_reduce", launching)
    return found
