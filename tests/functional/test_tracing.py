"""What a traced call knows: sizes without guards, and whether a CUDA graph will record it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._inductor import config as inductor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from torch.utils.flop_counter import FlopCounterMode

from fusedlayers import functional
from fusedlayers.functional import custom_ops, dispatch
from fusedlayers.functional.call import observed, traced, with_known_sizes
from fusedlayers.functional.ffn import FFN
from fusedlayers.planning import Device, Problem
from fusedlayers.planning.record import Record, Row
from tests.support.operands import Allocations

# By tokens, how many times as long as torch kernels take, launched one by one and in a graph.
TIMES = {2**19: (0.5, 0.5), 2**15: (2, 0.5), 2**6: (0.5, 2)}
ROWS = [
    Row("ffn", "gelu", (rows, 64, 256), *({"torch": 1, "fused": ratio} for ratio in ratios))
    for rows, ratios in TIMES.items()
]
H200 = Device("cuda", "NVIDIA H200", "sm_90", sms=132, triton=True, backend="sm90", override=Record(ROWS))


@pytest.fixture
def h200(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every tensor lies on an H200, of which there is none."""
    monkeypatch.setattr(dispatch, "describe", lambda device: H200)
    dispatch._cached_plan.cache_clear()
    yield
    dispatch._cached_plan.cache_clear()


def operations(rows: int, **options: Any) -> set[str]:
    """Which of our operations a call on a GPU would be written down as."""

    def call() -> Tensor:
        x, w_up, w_down = (
            torch.empty(*s, device="cuda", dtype=torch.bfloat16) for s in ((rows, 64), (256, 64), (64, 256))
        )
        return functional.ffn(x, w_up, w_down, **options)

    with FakeTensorMode():
        graph = make_fx(call)().graph
    found = (node.target for node in graph.nodes if isinstance(node.target, torch._ops.OpOverload))
    return {target._opname for target in found if target.namespace == "fusedlayers"}


def test_who_observes_operations() -> None:
    assert not observed()
    assert not traced()
    for mode, without_numbers in (
        (Allocations(), False),
        (FlopCounterMode(display=False), False),
        (FakeTensorMode(), True),
    ):
        with mode:
            assert observed()
            assert traced() == without_numbers


@pytest.mark.usefixtures("h200")
def test_small_problems_run_as_kernels_where_a_graph_will_be_recorded() -> None:
    """Without a call before, as torch.compile makes one itself before it records."""
    assert operations(2**19) == {"ffn_forward"}, "large enough anyway"
    assert operations(2**15) == set()
    with inductor.patch({"triton.cudagraphs": True}):
        assert operations(2**15) == {"ffn_forward"}
        assert operations(2**4) == set()


@pytest.mark.usefixtures("h200")
def test_few_rows_are_torchs_where_a_compiler_saves_the_host_its_launches() -> None:
    x, w_up, w_down = (torch.empty(*s, dtype=torch.bfloat16) for s in ((64, 64), (256, 64), (64, 256)))
    problem = FFN.problem_of(x=x, w_up=w_up, w_down=w_down)
    assert dispatch.dispatch(problem, torch.device("cuda")).path == "fused"
    assert operations(64) == set()


@pytest.mark.usefixtures("h200")
def test_chunks_are_one_operation() -> None:
    assert operations(2**14, recompute=True) == {"ffn_forward"}


def test_sizes_are_those_of_the_example() -> None:
    symbols = ShapeEnv()
    context: Any = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC, DimDynamic.STATIC])
    x = FakeTensorMode(shape_env=symbols).from_tensor(torch.empty(100, 8), symbolic_context=context)
    problem = Problem(operation="ffn", batch=1, M=x.shape[0] * 3, K=x.shape[1], N=16, O=8, dtype="float32")
    known = with_known_sizes(problem)
    assert (type(problem.M), type(known.M)) == (torch.SymInt, int)
    assert known == Problem(operation="ffn", batch=1, M=300, K=8, N=16, O=8, dtype="float32")
    assert hash(known)
    assert not symbols.guards


def test_operations_take_symbols_beside_what_is_known() -> None:
    """A list of plain numbers would have to be read at every call of a compiled graph."""
    plain = Problem(operation="ffn", batch=1, M=300, K=8, N=16, O=8, dtype="float32")
    symbol: Any = ShapeEnv().create_unbacked_symint()
    for problem, expected in ((plain, []), (replace(plain, N=symbol), [symbol])):
        sizes, call = custom_ops._description(problem, "epilogue", {}, [True])
        assert sizes == expected
        assert FFN.kernel_operation._described(sizes, call) == (problem, "epilogue", {}, [True])


def test_a_size_that_depends_on_data_is_for_torch() -> None:
    unknown = ShapeEnv().create_unbacked_symint()
    problem = Problem(operation="ffn", batch=1, M=unknown, K=8, N=16, O=8, dtype="float32")
    assert "depends on data" in with_known_sizes(problem).subclass
