"""The self-test on a GPU: in this process, a trial of each kind; and a fault in one sm90 kernel is named."""

from __future__ import annotations

from typing import Any

import pytest

from fusedlayers.bench.cases.trial import Trial
from fusedlayers.bench.selftest import running
from fusedlayers.bench.selftest.trials import all_trials, launched
from fusedlayers.devices import describe
from fusedlayers.kernels.gemm_gemm import sm90
from tests.support.operands import DEVICE

FACTS = describe(DEVICE)


def one_of_each_kind() -> list[Trial]:
    found: dict[object, Trial] = {}
    for trial in all_trials(FACTS):
        kinds = tuple(name.split("(")[0] for name in launched(trial.plan(FACTS)).values())
        found.setdefault((trial.case, trial.machine, kinds), trial)
    return list(found.values())


@pytest.mark.parametrize("trial", one_of_each_kind(), ids=str)
def test_a_trial_of_each_kind_passes(trial: Trial) -> None:
    assert running.run(trial, DEVICE) == running.Outcome({})


@pytest.mark.skipif(FACTS.backend != "sm90", reason="no Hopper GPU with Gluon")
def test_a_fault_in_a_sm90_kernel_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    prepare = sm90.prepare_forward

    def off_by_one(*arguments: Any) -> Any:
        launch = prepare(*arguments)

        def run(tensors: tuple[Any, ...]) -> None:
            launch(tensors)
            y = tensors[4]
            y.view(-1)[-1] += 1

        return run

    monkeypatch.setattr(sm90, "prepare_forward", off_by_one)
    trial = next(one for one in all_trials(FACTS) if one.case == "ffn" and one.machine == "few")
    [(name, reason)] = running.run(trial, DEVICE).failures.items()
    assert name == launched(trial.plan(FACTS))["forward_tiles"]
    assert "y: NOT equal at 1 of" in reason
