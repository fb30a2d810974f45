"""Which launches of Hopper's kernel of GEMM-reduce a test has caused."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
from torch import Tensor

from fusedlayers.kernels.gemm_reduce import ReduceOperands, sm90
from fusedlayers.kernels.launching import Launch
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
    prepare, run = sm90.prepare_reduce, Launch.__call__

    def preparing(operands: ReduceOperands, matrices: Any, splits: int, config: Sm90ReduceConfig) -> Any:
        prepared = prepare(operands, matrices, splits, config)
        known[prepared] = Reduction(config, splits, (matrices[0].transposed, matrices[1].transposed))
        return prepared

    def running(self: Any, tensors: tuple[Tensor | None, ...]) -> None:
        if self in known:
            found.append(known[self])
        run(self, tensors)

    # What earlier tests have prepared is not known here.
    forget_calls()
    monkeypatch.setattr(sm90, "prepare_reduce", preparing)
    monkeypatch.setattr(Launch, "__call__", running)
    return found
