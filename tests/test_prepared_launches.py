"""Launches that are prepared once: with other data at other addresses they give what unprepared ones give."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from fusedlayers import planning
from fusedlayers.kernels import gemm_epilogue, gemm_gemm, gemm_reduce, hopper, launching, maxsim, relaunching
from fusedlayers.kernels.column_sums import column_sums
from fusedlayers.kernels.device import HAS_TRITON
from fusedlayers.kernels.dropout import Dropout
from fusedlayers.kernels.gemm_gemm import Arithmetic, Operands, WeightGradients
from fusedlayers.kernels.gemm_reduce import ReduceArithmetic, ReduceOperands
from fusedlayers.kernels.maxsim import MaxSimOperands
from fusedlayers.kernels.split_k import product
from fusedlayers.kernels.tuning import (
    COLUMN_SUM_TILES,
    ColumnSumTiles,
    EpilogueTiles,
    GatherConfig,
    OneHotConfig,
    ReduceConfig,
    SplitTiles,
    TileConfig,
    WeightGradientTiles,
)
from fusedlayers.kernels.weight_gradient import weight_gradient
from tests.operands import needs_kernels
from tests.stand_in_launchers import Compiled, stand_in_driver

GATED = pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
M, K, N = 40, 16, 24
HOPPER = planning.Device("cuda", "sm_90", "a Hopper GPU", 132, triton=True, pipelined=True)


def drawn(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape).to(dtype)


def ffn_operands(gated: bool, ready: dict[Any, Any] | None, seed: int | None = None) -> Operands:
    return Operands(
        drawn(M, K), drawn(N, K), drawn(K, N), drawn(N), drawn(N, K) if gated else None, drawn(N) if gated else None,
        None if seed is None else torch.tensor([seed]),
        Arithmetic("silu", 0.0 if seed is None else 0.5, "ieee", "exact"), ready,
    )  # fmt: skip


def without_ready(operands: Operands) -> Operands:
    names = ("x", "up", "down", "up_bias", "gate", "gate_bias", "seed", "arithmetic")
    return Operands(*[getattr(operands, name) for name in names])


def tensors_of(results: Any) -> list[Tensor | None]:
    if isinstance(results, Tensor) or results is None:
        return [results]
    return [tensor for result in results for tensor in tensors_of(result)]


def assert_same(ours: Any, theirs: Any) -> None:
    for one, other in zip(tensors_of(ours), tensors_of(theirs), strict=True):
        assert (one is None) == (other is None)
        if one is not None and other is not None:
            assert one.shape == other.shape
            assert torch.equal(one, other)


@pytest.mark.sampled(together=2)
@needs_kernels
@GATED
@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("passes", [1, 3])
def test_the_narrow_ffn(gated: bool, splits: int, passes: int) -> None:
    """Forward and backward, three times with one dict: wanted gradients and the layout of dy may change meanwhile."""
    ready: dict[Any, Any] = {}
    tiles = TileConfig(16, 16, 4, 1, passes)
    everything = WeightGradients(True, gated, True, True, gated)
    for turn, wanted in enumerate((everything, everything, WeightGradients(down=True), everything)):
        operands = ffn_operands(gated, ready, seed=turn)
        dy = drawn(M, K) if turn < 2 else drawn(1, K).expand(M, K)
        down_bias, residual = drawn(K), drawn(M, K)

        ours, theirs = (
            (
                gemm_gemm.forward(given, down_bias, residual, tiles),
                gemm_gemm.data_gradient(given, dy, tiles, column_sums=True),
                gemm_gemm.weight_gradients(given, dy, wanted, splits, tiles),
            )
            for given in (operands, without_ready(operands))
        )
        assert_same(ours, theirs)
    assert not any(isinstance(each, Tensor) for each in ready.values())


@needs_kernels
@GATED
def test_the_wide_ffn(gated: bool) -> None:
    ready: dict[Any, Any] = {}
    tiles = EpilogueTiles(16, 16, 16, 4, 1)
    for turn in range(4):
        x, w_up, b_up, w_down = drawn(M, K), drawn(N, K), drawn(N), drawn(K, N)
        w_gate, b_gate = (drawn(N, K), drawn(N)) if gated else (None, None)
        dropout = Dropout(torch.tensor([turn]), 0.5)
        keep = turn != 1
        dy = drawn(M, K) if turn != 2 else drawn(K, M).T

        found = []
        for given in (ready, None):
            h, z, z_gate = gemm_epilogue.hidden(
                x, w_up, b_up, w_gate, b_gate, keep, "silu", "exact", "ieee", tiles, dropout=dropout, ready=given
            )
            gradients = None
            if z is not None:
                gradients = gemm_epilogue.hidden_gradient(
                    dy, w_down, z, z_gate, turn != 3, 2, "silu", "exact", "ieee", tiles, keep_hidden=turn != 3,
                    side_by_side=True, dropout=dropout, column_sums=ColumnSumTiles(16, 16, 5), ready=given,
                )  # fmt: skip
            found.append((h, z, z_gate, gradients))
        assert_same(*found)


@needs_kernels
def test_column_sums() -> None:
    ready: dict[Any, Any] = {}
    for dy in (drawn(50, 20), drawn(50, 20), drawn(20, 50).T, drawn(50, 20)):
        assert_same(column_sums(dy, COLUMN_SUM_TILES, ready), column_sums(dy, COLUMN_SUM_TILES))


@needs_kernels
@pytest.mark.parametrize("splits", [1, 3])
def test_the_gradients_of_a_linear_layer(splits: int) -> None:
    ready: dict[Any, Any] = {}
    tiles = WeightGradientTiles(16, 16, 16, 4, 1)
    for turn in range(4):
        x, dy = drawn(100, K), drawn(100, N) if turn != 1 else drawn(1, N).expand(100, N)
        ours, theirs = (
            weight_gradient(dy, x, turn != 2, splits, "ieee", tiles, ready=given) for given in (ready, None)
        )
        assert_same(ours, theirs)


@needs_kernels
@pytest.mark.parametrize(("splits", "atomic"), [(1, False), (3, False), (3, True)])
@pytest.mark.parametrize("rows", [1, 5])
def test_split_products(rows: int, splits: int, atomic: bool) -> None:
    ready: dict[Any, Any] = {}
    tiles = SplitTiles(1 if rows == 1 else 16, 16, 16, 4, 1)
    for turn in range(4):
        left = drawn(rows, 64) if turn != 1 else drawn(64, rows).T
        right, bias = drawn(N, 64), drawn(N)
        ours, theirs = (
            product(left, right, bias, splits, tiles, activation="silu", atomic=atomic, ready=given)
            for given in (ready, None)
        )
        assert_same(ours, theirs)


@needs_kernels
@pytest.mark.parametrize("op", ["mean", "max", "logsumexp", "sumsq"])
@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("together", [False, True], ids=["one by one", "both at once"])
def test_reductions(op: str, splits: int, together: bool) -> None:
    """Forward and backward: with a mask and biases or without, and whatever is wanted in one execution."""
    tiles = ReduceConfig(16, 16, 16, 4, 1)
    for biased in (False, True):
        ready: dict[Any, Any] = {}
        for turn in range(4):
            kept, reduced = drawn(2, 10, K), drawn(2, 50, K) if turn != 1 else drawn(2, K, 50).mT
            biases = (drawn(10), drawn(50), torch.rand(2, 50) > 0.3) if biased else (None, None, None)
            arithmetic = ReduceArithmetic(op, "identity", "ieee", "exact")
            g = drawn(2, 10)
            found = []
            # Another layout belongs to another prepared call.
            for given in (ready if turn != 1 else {}, None):
                operands = ReduceOperands(kept, reduced, *biases, None, None, arithmetic, given)
                results = gemm_reduce.reduce(
                    operands, indices=op == "max", out_dtype=torch.float32, splits=splits, tiles=tiles
                )
                if op == "max":
                    assert results[1] is not None
                    weight, d_kept = gemm_reduce.route(operands, g, results[1], kept_gradient=turn != 2)
                    gradients = gemm_reduce.reduced_gradient(
                        operands, weight, results[1], matrix=True, bias=biased and turn != 3, tiles=tiles
                    )
                    found.append((results, weight, d_kept, gradients))
                elif together:
                    both = gemm_reduce.both_gradients(operands, g, results[0], tiles=tiles, splits=splits)
                    found.append((results, both))
                else:
                    wanted: Any = {"bias": biased and turn != 3, "tiles": tiles}
                    d_kept = gemm_reduce.kept_gradient(operands, g, results[0], matrix=turn != 2, **wanted)
                    d_reduced = gemm_reduce.reduced_gradient(operands, g, results[0], matrix=True, **wanted)
                    found.append((results, d_kept, d_reduced))
            assert_same(*found)
        assert not any(isinstance(each, Tensor) for each in ready.values())


@needs_kernels
@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("chunk", [5, 2], ids=["at once", "in chunks"])
@pytest.mark.parametrize("layout", ["padded", "masked", "packed"])
def test_late_interaction(layout: str, chunk: int, splits: int) -> None:
    ready: dict[Any, Any] = {}
    tiles, gathered, one_hot = (
        ReduceConfig(16, 16, 16, 4, 1),
        GatherConfig(16, 16, 2, 4),
        OneHotConfig(16, 16, 16, 4, 1),
    )
    for _ in range(3):
        queries, upstream = drawn(4 * 6, K), drawn(4, 5)
        documents = drawn(60, K) if layout == "packed" else drawn(5, 12, K)
        masks = (torch.rand(24) > 0.3, torch.rand(5, 12) > 0.3) if layout == "masked" else (None, None)
        offsets = (
            (torch.tensor([0, 5, 6, 20, 24]), torch.tensor([0, 13, 14, 40, 41, 60]))
            if layout == "packed"
            else (None, None)
        )
        found = []
        for given in (ready, None):
            operands = MaxSimOperands(
                queries, documents, 1 if layout == "packed" else 6, *masks, *offsets, "ieee", given
            )
            scores, chosen = maxsim.forward(operands, indices=True, splits=splits, chunk=chunk, tiles=tiles)
            assert chosen is not None
            d_queries = maxsim.query_gradient(operands, chosen, upstream, splits, gathered)
            d_documents = maxsim.document_gradient(operands, chosen, upstream, splits, chunk, one_hot)
            found.append((scores, chosen, d_queries, d_documents))
        assert_same(*found)
    assert not any(isinstance(each, Tensor) for each in ready.values())


class Watched:
    """Stands in for compiling: every kernel becomes one of this launcher."""

    def __init__(self, launcher: type) -> None:
        self.launcher = launcher
        self.compiled = 0

    def launch(
        self, kernel: Any, programs: int, pointers: tuple[Any, ...], numbers: Any, free_numbers: Any, constants: Any,
        num_warps: int, num_stages: int, descriptors: tuple[Any, ...], dependent: bool,
    ) -> relaunching.Variant:  # fmt: skip
        self.compiled += 1
        kinds = ["constexpr" if d is None else "tensordesc<bf16[8, 64]>" for d in descriptors]
        kinds += ["constexpr" if p is None else "*bf16" for p in pointers]
        rest = (*numbers, *free_numbers, *constants)
        signature = {str(place): kind for place, kind in enumerate([*kinds, *["i32"] * len(rest)])}
        variant = relaunching.Variant(
            Compiled(signature, self.launcher), [None if d is None else _Complete(d) for d in descriptors]
        )
        addresses = [None if p is None else p.data_ptr() for p in pointers]
        variant.launch(programs, None, descriptors, pointers, addresses, rest)  # type: ignore[arg-type]
        return variant


class _Complete:
    def __init__(self, descriptor: hopper.Descriptor) -> None:
        self.base: Any = None
        self.shape, self.strides = descriptor.shape, descriptor.strides


def launcher_of(calls: list[tuple[Any, ...]], nested: bool) -> type:
    """Triton's launcher in Python around a function in C, which is told the arguments in one tuple or one by one."""

    class Wrapping:
        global_scratch_size = profile_scratch_size = 0

        def __init__(self, src: Any, metadata: Any) -> None:
            pass

        @staticmethod
        def launch(*arguments: Any) -> None:
            calls.append(arguments)

        def __call__(self, gridX: int, gridY: int, gridZ: int, stream: int, function: str, *args: Any) -> None:
            flags = (False, True)
            if nested:
                metadata, *hooks = args[:4]
                self.launch(
                    gridX, gridY, gridZ, stream, function, *flags, metadata, *hooks, None, None, "kinds", args[4:]
                )
            else:
                self.launch(gridX, gridY, gridZ, stream, function, *flags, None, None, *args)

    return Wrapping


@pytest.fixture
def buffers(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], None]]:
    """Results lie where they lay since the last call of what this gives, so that executions can be compared."""
    kept: list[Tensor] = []
    place = [0]

    def again(allocate: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def run(*arguments: Any, **options: Any) -> Tensor:
            fresh = allocate(*arguments, **options)
            if place[0] == len(kept):
                kept.append(fresh)
            found = kept[place[0]]
            place[0] += 1
            assert (found.shape, found.dtype) == (fresh.shape, fresh.dtype)
            return found

        return run

    monkeypatch.setattr(torch, "empty", again(torch.empty))
    monkeypatch.setattr(torch, "empty_like", again(torch.empty_like))
    monkeypatch.setattr(Tensor, "new_empty", again(Tensor.new_empty))
    return lambda: place.__setitem__(0, 0)  # type: ignore[return-value]


def planned(width: int, gated: bool) -> planning.Plan:
    problem = planning.Problem(
        operation="ffn", batch=1, M=200, K=width, N=2 * width, O=width, dtype="bfloat16", activation="silu",
        gated=gated, dropout=False, needs_data_gradient=True, needs_weight_gradient=True,
    )  # fmt: skip
    found: planning.Plan = planning.plan(problem, HOPPER, "triton")
    return found


def both_passes(width: int, gated: bool) -> Callable[[dict[Any, Any] | None], None]:
    """The kernels of a forward and a backward pass of a layer, as the plan for a Hopper GPU names them."""
    plan, hidden = planned(width, gated), 2 * width
    x, dy, up, down, gate = (
        drawn(*shape, dtype=torch.bfloat16)
        for shape in ((200, width), (200, width), (hidden, width), (width, hidden), (hidden, width))
    )
    bias, gate_bias = drawn(hidden, dtype=torch.bfloat16), drawn(hidden, dtype=torch.bfloat16)
    gates = (gate, gate_bias) if gated else (None, None)
    arithmetic = Arithmetic("silu", 0.0, "ieee", "coarse")

    def narrow(ready: dict[Any, Any] | None) -> None:
        operands = Operands(x, up, down, bias, *gates, None, arithmetic, ready)
        gemm_gemm.forward(operands, dy[0], x, plan.forward_tiles)
        if plan.stored is not None:
            found = gemm_gemm.stored_gradients(operands, dy, True, gated, True, plan.stored_splits, plan.stored)
            assert found is not None
            return
        gemm_gemm.data_gradient(operands, dy, plan.data_gradient_tiles, column_sums=True)
        wanted = WeightGradients(True, gated, True, True, gated)
        gemm_gemm.weight_gradients(operands, dy, wanted, 3, plan.weight_gradient_tiles)

    def wide(ready: dict[Any, Any] | None) -> None:
        tiles = plan.epilogue
        assert tiles is not None
        _, z, z_gate = gemm_epilogue.hidden(
            x, up, bias, *gates, True, "silu", "coarse", "ieee", tiles.hidden_tiles, tiles.hidden_pipeline, ready=ready
        )
        gradient = tiles.gradient
        assert z is not None
        assert gradient is not None
        assert gradient.tiles is not None
        gemm_epilogue.hidden_gradient(
            dy, down, z, z_gate, True, gradient.row_tiles, "silu", "coarse", "ieee", gradient.tiles, gradient.pipeline,
            keep_hidden=True, side_by_side=True, column_sums=COLUMN_SUM_TILES, ready=ready,
        )  # fmt: skip

    return narrow if plan.path == "fused" else wide


@pytest.mark.skipif(not hopper.HAS_GLUON, reason="this Triton has no Gluon")
@pytest.mark.parametrize("nested", [False, True], ids=["one by one", "in a tuple"])
@GATED
@pytest.mark.parametrize("width", [64, 128, 256, 768])
def test_pipelined_kernels_are_told_the_same(
    width: int, gated: bool, nested: bool, buffers: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert_told_the_same(both_passes(width, gated), nested, buffers, monkeypatch)


def assert_told_the_same(
    run: Callable[[dict[Any, Any] | None], None],
    nested: bool,
    buffers: Callable[[], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What the function in C receives, launch by launch: without preparation, at first with it, and then again."""
    calls: list[tuple[Any, ...]] = []
    launcher = launcher_of(calls, nested)
    watched = Watched(launcher)
    monkeypatch.setattr(launching, "launch", watched.launch)
    monkeypatch.setattr(launching, "_current_device", lambda: None)
    with stand_in_driver(launcher) as encoded:
        told: list[list[tuple[Any, ...]]] = []
        ready: dict[Any, Any] = {}
        for given in (None, ready, ready, ready):
            buffers()
            calls.clear()
            compiled, seen = watched.compiled, len(encoded)
            run(given)
            told.append(list(calls))
        assert watched.compiled == compiled, "the third execution was prepared"
        assert len(encoded) == seen, "and encodes nothing that lies where it lay"
    assert len(told[0]) >= 3
    assert told[1:] == [told[0]] * 3
    assert {call[3] for call in told[0]} == {7}


def late_interaction(ready: dict[Any, Any] | None, tensors: tuple[Tensor, ...]) -> None:
    queries, documents, upstream, _ = tensors
    problem = planning.MaxSimProblem(
        queries=4, documents=50, query_tokens=4 * 32, document_tokens=50 * 200, K=128,
        query_layout="padded", document_layout="padded", dtype="bfloat16", needs_query_gradient=True,
        needs_document_gradient=True,
    )  # fmt: skip
    plan = planning.plan(problem, HOPPER, "triton")
    assert plan.forward_tiles.pipelined is not None
    operands = MaxSimOperands(queries, documents, 32, None, None, None, None, "ieee", ready)
    _, chosen = maxsim.forward(operands, indices=True, splits=plan.splits, chunk=plan.chunk, tiles=plan.forward_tiles)
    assert chosen is not None
    maxsim.query_gradient(operands, chosen, upstream, plan.query_gradient_splits, plan.query_gradient_tiles)
    maxsim.document_gradient(
        operands, chosen, upstream, plan.document_gradient_splits, plan.chunk, plan.document_gradient_tiles
    )


def logsumexp(ready: dict[Any, Any] | None, tensors: tuple[Tensor, ...]) -> None:
    queries, documents, *_, upstream = tensors
    kept = queries[:100].expand(50, -1, -1)
    problem = planning.ReduceProblem(
        batch=50, kept=100, reduced=200, K=128, op="logsumexp", dtype="bfloat16",
        needs_kept_gradient=True, needs_reduced_gradient=True,
    )  # fmt: skip
    plan = planning.plan(problem, HOPPER, "triton")
    assert plan.forward_tiles.pipelined is not None
    arithmetic = ReduceArithmetic("logsumexp", "identity", "ieee", plan.accuracy)
    operands = ReduceOperands(kept, documents, None, None, None, None, None, arithmetic, ready)
    result, _ = gemm_reduce.reduce(operands, indices=False, out_dtype=torch.float32, splits=2, tiles=plan.forward_tiles)
    wanted: Any = {"matrix": True, "bias": False, "tiles": plan.gradient_tiles}
    gemm_reduce.kept_gradient(operands, upstream, result, **wanted)
    gemm_reduce.reduced_gradient(operands, upstream, result, **wanted)


@pytest.mark.skipif(not hopper.HAS_GLUON, reason="this Triton has no Gluon")
@pytest.mark.parametrize("run", [late_interaction, logsumexp])
def test_pipelined_reductions_are_told_the_same(
    run: Callable[[dict[Any, Any] | None, tuple[Tensor, ...]], None],
    buffers: Callable[[], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shapes = ((128, 128), (50, 200, 128), (4, 50))
    tensors = (*[drawn(*shape, dtype=torch.bfloat16) for shape in shapes], drawn(50, 100))
    assert_told_the_same(lambda ready: run(ready, tensors), False, buffers, monkeypatch)


@pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed")
@pytest.mark.parametrize("built", ["scratch", "twice", "shuffled", "nothing"])
def test_a_launcher_that_does_more_is_called_itself(built: str) -> None:
    """Only where all that it does is to hand its arguments on can it be left out."""
    calls: list[tuple[Any, ...]] = []
    launcher = launcher_of(calls, nested=False)

    class Other(launcher):  # type: ignore[misc, valid-type]
        global_scratch_size = 128 if built == "scratch" else 0

        def __call__(self, *arguments: Any) -> None:
            if built == "shuffled":
                self.launch(*arguments[:4], *reversed(arguments[4:]))
                return
            for _ in range({"scratch": 1, "twice": 2, "nothing": 0}[built]):
                self.launch(*arguments)

    with stand_in_driver(Other):
        compiled = Compiled({"p": "*fp32", "n": "i32"}, Other)
        function, before, after, nested = relaunching._innermost(compiled.run, 3, compiled, (None, 5))
        assert function is compiled.run
        assert (before, after, nested) == ((3, 1, 1), ("function", "packed", None, None, None), False)


@pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed")
def test_encodings_of_a_slot_are_bounded_and_keep_no_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relaunching, "_SLOT_LIMIT", 4)
    found = hopper.matrix(drawn(64, 64, dtype=torch.bfloat16))
    assert found is not None
    with stand_in_driver() as encoded:
        variant = relaunching.Variant(Compiled(), [_Complete(found.descriptor(8, 64)), None])
        repeated = relaunching.Repeated(variant, 3, 0, (found.geometry(8, 64), None), 1, (5,))
        whole = drawn(64, 64, dtype=torch.bfloat16)
        (slot, _) = repeated._slots
        assert slot is not None
        for row in range(10):
            repeated((drawn(4),), (whole[row:], None))
            assert len(slot._encodings) <= 4
        assert len(encoded) == 10
        assert not any(isinstance(each, Tensor) for each in (*slot._encodings.values(), *slot.last))
