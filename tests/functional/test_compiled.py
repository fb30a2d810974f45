"""torch.compile and torch.export: one graph, few recompilations, the same numbers; the operations that they see."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters
from torch._functorch.aot_autograd import make_boxed_func
from torch.export import Dim, export
from torch.fx import GraphModule
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import fusedlayers as fl
from fusedlayers import folders, functional
from tests.support.compiled_cases import CALLS, ffn, given, nothing_compiled, outcome  # noqa: F401
from tests.support.ffn_blocks import GatedBlock, mlp, rule_for
from tests.support.operands import DEVICE, assert_equal, needs_kernels, on_path

# What torch says of itself while it compiles and exports.
pytestmark = [
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:`isinstance\\(treespec, LeafSpec\\)` is deprecated:FutureWarning"),
]
BACKENDS = [pytest.param("triton", marks=needs_kernels), "torch"]
LENGTHS = (5, 6, 9, 17, 2, 33, 8, 21, 64, 3)
# Other paths of an operation that is in CALLS: what they keep may differ, all else is that of the operation.
SAME_OPERATION = ("wide ffn", "wide gated ffn", "recomputed ffn", "split linear", "losses of tokens", "recomputed loss")


def another_path(name: str, backend: str, *marks: pytest.MarkDecorator) -> object:
    """A call and its backend. Compiling takes long, so the short run has one path of each operation."""
    return pytest.param(name, backend, marks=[*marks, *[pytest.mark.full] * (name in SAME_OPERATION)])


class Graphs:
    """A backend of torch.compile that runs graphs as they are, and knows the names of our operations in them."""

    def __init__(self) -> None:
        self.names: list[set[str]] = []
        self.backend = aot_autograd(fw_compiler=self._keep, bw_compiler=self._keep)

    def _keep(self, graph: GraphModule, inputs: Any) -> Any:
        targets = [node.target for node in graph.graph.nodes if isinstance(node.target, torch._ops.OpOverload)]
        self.names.append({target._opname for target in targets if target.namespace == "fusedlayers"})
        return make_boxed_func(graph.forward)

    def compiled(self, function: Any, **options: Any) -> Any:
        """``function``, compiled whole or not at all."""
        return torch.compile(function, fullgraph=True, backend=self.backend, **options)

    def operations(self) -> set[str]:
        return set().union(*self.names)


@pytest.fixture
def graphs() -> Graphs:
    return Graphs()


def operations(name: str, backend: str) -> set[str]:
    """The operations that a call of ``CALLS`` with gradients leaves in its graphs."""
    if name == "packed maxsim" or (backend == "triton" and name in ("maxsim", "gemm_gemm", "sum")):
        function = {"packed maxsim": "maxsim", "sum": "gemm_reduce"}.get(name, name)
    elif name == "recomputed ffn" or (backend == "triton" and name.endswith(" ffn")):
        function = "ffn"
    elif backend == "triton":
        function = {
            "logsumexp": "gemm_reduce", "argmax": "gemm_reduce", "split linear": "linear",
            "losses of tokens": "linear_cross_entropy", "recomputed loss": "linear_cross_entropy",
            "recomputed moe_ffn": "moe_ffn",
        }.get(name, name)  # fmt: skip
    else:
        return set()
    backward = name != "argmax" and function not in ("weight_gradient", "hidden_gradient")
    return {f"{function}_forward", *([f"{function}_backward"] if backward else [])}


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("name", "backend"),
    [
        # In the interpreter these take long, and are as gemm_reduce and maxsim.
        *(another_path(n, "triton", needs_kernels) for n in CALLS if n not in ("argmax", "packed maxsim")),
        *(another_path(name, "torch") for name in CALLS),
    ],
)
def test_one_graph_for_all_lengths(name: str, backend: str, graphs: Graphs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSEDLAYERS_BACKEND", backend)
    function, _ = CALLS[name](5)
    compiled = graphs.compiled(function)
    # The third length shows what all others would, but for one function.
    for rows in LENGTHS if name == "gemm_gemm" else LENGTHS[:3]:
        _, arguments = CALLS[name](rows)
        assert_equal(outcome(compiled, arguments), outcome(function, arguments))
    assert counters["stats"]["unique_graphs"] == 2, "of the first length, and of any"
    assert graphs.operations() == operations(name, backend)


@needs_kernels
@pytest.mark.parametrize("name", ["ffn", "wide ffn", "linear", "split linear"])
def test_dynamic_from_the_start_is_one_graph(name: str, graphs: Graphs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSEDLAYERS_BACKEND", "triton")
    function, _ = CALLS[name](5)
    compiled = graphs.compiled(function, dynamic=True)
    for rows in LENGTHS[:3]:
        _, arguments = CALLS[name](rows)
        with torch.no_grad():
            assert_equal(outcome(compiled, arguments), outcome(function, arguments))
    assert counters["stats"]["unique_graphs"] == 1


class Autocast(nn.Module):
    """A part of a model in half precision."""

    def __init__(self, ffn: nn.Module) -> None:
        super().__init__()
        self.ffn = ffn

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, torch.float16):
            return self.ffn(x)


class Checkpointed(nn.Module):
    """A block whose forward pass runs again in the backward pass."""

    def __init__(self, ffn: nn.Module, **options: Any) -> None:
        super().__init__()
        self.ffn, self.options = ffn, options

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.ffn, x, **self.options)


def replaced(block: nn.Module) -> nn.Module:
    model = nn.ModuleList([block])
    fl.replace(model, rules=[rule_for(GatedBlock)], strict=True)
    return model[0]


MODULES: dict[str, Callable[[], nn.Module]] = {
    "FusedFFN": lambda: fl.FusedFFN(6, 10, dropout=0.25),
    "gated": lambda: fl.FusedFFN(6, 10, "silu", gated=True, bias=False),
    "recompute": lambda: fl.FusedFFN(6, 10, recompute=True, dropout=0.25),
    "autocast": lambda: Autocast(fl.FusedFFN(6, 10, dropout=0.25)),
    "checkpoint": lambda: Checkpointed(fl.FusedFFN(6, 10, dropout=0.25), use_reentrant=False),
    "reentrant checkpoint": lambda: Checkpointed(fl.FusedFFN(6, 10, dropout=0.25), use_reentrant=True),
    "replaced sequence": lambda: replaced(mlp(nn.SiLU(), p=0.0)),
    "replaced by rule": lambda: replaced(GatedBlock()),
    "replaced encoder": lambda: replaced(nn.TransformerEncoderLayer(6, 2, 10, dropout=0.0, batch_first=True)),
}


def trained(module: nn.Module, call: nn.Module, x: Tensor) -> dict[str, Tensor]:
    """The result and all gradients; the same random numbers each time."""
    torch.manual_seed(1)
    y = call(x)
    torch.manual_seed(2)
    y.backward(torch.randn_like(y))
    found = {"y": y.detach(), "x": x.grad} | {name: each.grad for name, each in module.named_parameters()}
    x.grad = None
    module.zero_grad()
    return found


@needs_kernels
@pytest.mark.parametrize("name", MODULES)
def test_modules(name: str, graphs: Graphs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSEDLAYERS_BACKEND", "triton")
    module = MODULES[name]().to(DEVICE)
    compiled = graphs.compiled(module)
    for rows in (5, 6):
        x = torch.randn(2, rows, 6, device=DEVICE, requires_grad=True)
        assert_equal(trained(module, compiled, x), trained(module, module, x))
    assert counters["stats"]["unique_graphs"] == 2
    assert graphs.operations() == {"ffn_forward", "ffn_backward"}


def test_maxsim_module(graphs: Graphs) -> None:
    module = fl.MaxSim()
    arguments = CALLS["maxsim"](5)[1]
    assert_equal(outcome(graphs.compiled(module), arguments), outcome(module, arguments))


@needs_kernels
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_split_k_module(dynamic: bool, graphs: Graphs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSEDLAYERS_BACKEND", "triton")
    module = fl.SplitKLinear(300, 24, split_k=2).to(DEVICE)
    compiled = graphs.compiled(module, dynamic=dynamic)
    for rows in (5, 9):
        x = torch.randn(2, rows, 300, device=DEVICE, requires_grad=True)
        assert_equal(trained(module, compiled, x), trained(module, module, x))
        with torch.no_grad():
            assert torch.equal(compiled(x), module(x))
    assert graphs.operations() == {"linear_forward", "linear_backward"}


@needs_kernels
@pytest.mark.parametrize("frozen", [("x",), ("weight",), ("weight", "bias"), ("x", "weight")], ids=" ".join)
def test_a_frozen_operand_of_a_linear_layer(
    frozen: tuple[str, ...], graphs: Graphs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FUSEDLAYERS_BACKEND", "triton")
    function, arguments = CALLS["linear"](5)
    arguments |= {name: arguments[name].detach() for name in frozen}
    assert_equal(outcome(graphs.compiled(function), arguments), outcome(function, arguments))


@needs_kernels
def test_inductor(monkeypatch: pytest.MonkeyPatch) -> None:
    """The default compiler, beside which the kernels run as they are."""
    monkeypatch.setenv("FUSEDLAYERS_BACKEND", "triton")
    function, _ = ffn(5)
    compiled = torch.compile(function, fullgraph=True, dynamic=True)
    for rows in (5, 9):
        _, arguments = ffn(rows)
        assert_equal(outcome(compiled, arguments), outcome(function, arguments))


def test_the_switches_are_read_when_a_call_is_traced(graphs: Graphs, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once, without guards: a compiled call that asked the environment each time would pay for it each time."""
    compiled = graphs.compiled(functional.ffn)
    _, arguments = ffn(5, recompute=True)
    for backend in ("auto", "torch", "auto"):
        monkeypatch.setenv("FUSEDLAYERS_BACKEND", backend)
        compiled(**arguments)
    assert counters["stats"]["unique_graphs"] == 1
    torch._dynamo.reset()
    monkeypatch.setenv("FUSEDLAYERS_BACKEND", "wrong")
    with pytest.raises(Exception, match="FUSEDLAYERS_BACKEND is 'wrong'"):
        graphs.compiled(functional.ffn)(**arguments)


def test_what_dynamo_writes_down_names_the_sources_and_records(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """By that, torch's caches on disk tell graphs of another version of the package, or before a calibration."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    seen: list[str] = []
    ours = import_module("fusedlayers.functional.custom_ops")._SOURCES
    assert len(ours) == 16

    def keep(graph: GraphModule, inputs: Any) -> Any:
        seen.extend(node.args[-1] for node in graph.graph.nodes if node.op == "call_function" and len(node.args) > 5)
        return graph.forward

    _, arguments = ffn(5, recompute=True)
    torch.compile(functional.ffn, fullgraph=True, backend=keep)(**arguments)
    monkeypatch.setattr("fusedlayers.functional.custom_ops._SOURCES", "others")
    torch._dynamo.reset()
    torch.compile(functional.ffn, fullgraph=True, backend=keep)(**arguments)
    monkeypatch.undo()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for name in ("selftest.json", "calibration.json"):
        folders.write_json({}, folders.cache_folder() / name)
        torch._dynamo.reset()
        torch.compile(functional.ffn, fullgraph=True, backend=keep)(**arguments)
    assert seen[:2] == [f"auto False {ours}", "auto False others"]
    assert all(said.startswith(f"auto False {ours} 3-") for said in seen[2:])
    assert len(seen[2].split()) + 1 == len(seen[3].split()) == 5


def test_inference_mode(graphs: Graphs) -> None:
    function, arguments = CALLS["gemm_gemm"](5)
    with torch.inference_mode():
        assert torch.equal(graphs.compiled(function)(**arguments), function(**arguments))


def test_a_dropout_probability_that_changes(graphs: Graphs) -> None:
    function, arguments = ffn(5)
    compiled = graphs.compiled(function)
    for probability in (0.0, 0.25, 0.5):
        given_now = arguments | {"dropout_p": probability}
        assert_equal(outcome(compiled, given_now), outcome(function, given_now))


def test_transforms_of_torch_func(graphs: Graphs) -> None:
    w_up, w_down, x = torch.randn(24, 16), torch.randn(16, 24), torch.randn(3, 5, 16)

    def per_sample(x: Tensor) -> Tensor:
        def loss(row: Tensor) -> Tensor:
            return functional.ffn(row, w_up, w_down).sum()

        return torch.func.vmap(torch.func.grad(loss))(x)

    torch.testing.assert_close(graphs.compiled(per_sample)(x), per_sample(x))


def test_an_error_names_the_argument(graphs: Graphs) -> None:
    _, arguments = ffn(5)
    with pytest.raises(RuntimeError, match=r"w_down of shape .* expected"):
        graphs.compiled(functional.ffn)(**arguments | {"w_down": torch.randn(16, 23)})


# The last one compares all that a forward pass keeps; of experts nobody writes the rows that no token has.
CHECKS = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")


class Recorded(TorchDispatchMode):
    """Every one of our operations that is called, with its arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[str, tuple[Any, tuple[Any, ...]]] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN204
        if func.namespace == "fusedlayers":
            self.calls[func._opname] = func, args
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("name", "backend"),
    [
        *(
            pytest.param(name, "triton", marks=needs_kernels)
            for name in CALLS
            if name not in ("gated ffn", "recomputed ffn", "gemm_reduce", "argmax", "sum", "packed maxsim")
        ),
        ("recomputed ffn", "torch"),
        ("packed maxsim", "torch"),
    ],
)
def test_opcheck(name: str, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSEDLAYERS_BACKEND", backend)
    with FlopCounterMode(display=False), Recorded() as recorded:
        outcome(*CALLS[name](5))
    assert set(recorded.calls) == operations(name, backend)
    for operation, arguments in recorded.calls.values():
        leaves = [t.detach().requires_grad_(t.requires_grad) if isinstance(t, Tensor) else t for t in arguments]
        if operation._opname.endswith("_backward"):
            # It has no gradient of its own.
            leaves[:3] = ([None if t is None else t.detach() for t in each] for each in leaves[:3])
        checks = CHECKS[2:3] if name in SAME_OPERATION else CHECKS[: 3 if "moe" in name else None]
        torch.library.opcheck(operation, tuple(leaves), test_utils=checks)


@pytest.mark.parametrize("name", ["ffn", "gemm_reduce", "hidden_gradient", "linear"])
def test_opcheck_of_public_functions(name: str) -> None:
    function, arguments = CALLS[name](5)
    operation = getattr(torch.ops.fusedlayers, function.__name__).default
    given = inspect.signature(function).bind(**arguments)
    given.apply_defaults()
    named = dict(given.arguments) | {"switches": ""}
    torch.library.opcheck(operation, (), named)


class Calls(nn.Module):
    """One call with some of its arguments fixed."""

    def __init__(self, function: Callable[..., Any], arguments: dict[str, Any]) -> None:
        super().__init__()
        self.function, self.arguments = function, arguments

    def forward(self, first: Tensor) -> Any:
        [name, *_] = self.arguments
        return self.function(**self.arguments | {name: first})


@pytest.mark.sampled
@pytest.mark.parametrize("strict", [False, True], ids=["", "strict"])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ["ffn", "wide ffn", "gemm_gemm", "gemm_reduce", "maxsim", "linear", "split linear"])
def test_export(name: str, backend: str, strict: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSEDLAYERS_BACKEND", backend)
    function, arguments = CALLS[name](5)
    arguments = {key: t.detach() if isinstance(t, Tensor) else t for key, t in arguments.items()}
    # Other tensors would have the exported length.
    arguments |= {other: None for other in ("residual", "lengths") if other in arguments}
    module = Calls(function, arguments)
    [first, *_] = arguments.values()
    exported = export(module, (first,), dynamic_shapes={"first": {1: Dim("rows", min=2)}}, strict=strict)
    for program in (exported, exported.run_decompositions()):
        longer = torch.randn(first.shape[0], 9, first.shape[2], device=DEVICE)
        ours, eager = given(program.module()(longer)), given(module(longer))
        assert len(ours) == len(eager)
        for one, other in zip(ours, eager, strict=True):
            assert torch.equal(one, other)


@needs_kernels
@pytest.mark.parametrize("path", ["kernels", "chunked"])
def test_a_compiled_path_does_not_run_what_it_cannot(path: str, graphs: Graphs) -> None:
    """An exported program may be given no rows at all, which its path has no plan for."""
    arguments = {"w_up": torch.randn(24, 16), "w_down": torch.randn(16, 24)}
    with on_path(path) as options:
        module = Calls(functional.ffn, {"x": None} | arguments | options)
        program = export(module, (torch.randn(5, 16),), dynamic_shapes={"first": {0: Dim("rows", min=0)}}).module()
        with pytest.raises(RuntimeError, match="cannot run these sizes"):
            program(torch.randn(0, 16))
