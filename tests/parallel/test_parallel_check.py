"""``fl.parallel.check`` in two processes over gloo: each kind of finding, and right models without any."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.support import parallel_check_checks as checks
from tests.support.operands import ON_GPU
from tests.support.processes import Processes

# They share the processes of tests/parallel/test_parallel.py.
pytestmark = [
    pytest.mark.xdist_group("two processes"),
    pytest.mark.skipif(ON_GPU, reason="it looks at modules, wherever their tensors are"),
]


@pytest.mark.parametrize(
    "checked",
    [
        checks.check_tied_losses,
        checks.check_tied_blocks,
        checks.check_experts,
        checks.check_experts_in_fsdp,
        checks.check_tokens_in_parts,
        checks.check_dropout,
        checks.check_what_ddp_leaves_out,
        checks.check_optimizers,
        checks.check_printing,
        checks.check_wrong_arguments,
        checks.check_one_process_alone,
    ],
    ids=lambda function: function.__name__.removeprefix("check_"),
)
def test_what_it_finds(processes: Processes, checked: Callable[[], None]) -> None:
    processes.run(checked)
