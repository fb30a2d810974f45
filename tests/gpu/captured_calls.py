"""What a fresh process records where people capture: three plain calls in auto mode, then a CUDA graph, and no switch.

    python -m tests.gpu.captured_calls GROUP        one line of JSON for each call of the group

Records say that launched calls are faster on torch's path and recorded ones in the kernels, so that these are met for
the first time inside the capture. Within a group no call meets the kernels of an earlier one.
"""

from __future__ import annotations

import copy
import functools
import json
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from fusedlayers import FusedFFN, MaxSim, SplitKLinear, planning
from fusedlayers.bench.cases import ALL, CASES, Case, Draw, Options, Shape
from fusedlayers.bench.contenders import FUSED_SWITCHES
from fusedlayers.bench.work import Work, random_work, reference_results
from fusedlayers.closeness import compare_all
from fusedlayers.devices import assumed, describe
from fusedlayers.functional.dispatch import decisions
from fusedlayers.functional.switches import switched
from fusedlayers.planning import Device
from tests.support.records import where

PLAIN_CALLS, REPLAYS = 3, 3
Found = dict[str, Any]


@dataclass(frozen=True)
class CapturedCall:
    """A call that takes ``kernels`` where it is recorded, and ``launched`` where it is not: of a record that says so.

    ``chooses``: equal to forced kernels bit for bit instead of close to torch. Of two nearly equal products either may
    be the larger one, and another choice is another gradient.
    """

    case: Case
    options: Options
    shape: Shape
    kernels: str = "fused"
    chooses: bool = False
    launched: str = "torch"

    @functools.cached_property
    def problem(self) -> Any:
        """Of a launched call; nothing is allocated."""
        operands = self.case.operands(self.shape, self.options).items()
        blank = {name: operand.blank(torch.bfloat16, self.case.backward) for name, operand in operands}
        return self.case.problem(blank, self.options)

    def on(self, device: Device) -> Device:
        """``device`` with the record: launched one by one the kernels take twice the time of torch, in a graph half."""
        slow = {self.kernels: 2.0} if self.launched == "torch" else {self.kernels: 2.0, self.launched: 0.5}
        fast = {path: 1 / ratio for path, ratio in slow.items()}
        return where(device, self.problem, slow, fast)

    def paths(self, device: Device) -> tuple[str, str]:
        """(launched, recorded) in auto mode."""
        launched, recorded = (planning.plan(replace(self.problem, captured=each), device) for each in (False, True))
        return launched.path, recorded.path


_FFN, _GATED = Options("gelu_tanh", bias=True), Options("silu", gated=True)
CALLS: dict[str, dict[str, CapturedCall]] = {
    "narrow": {
        # No multiple of eight hidden units: the generic kernels.
        "ffn": CapturedCall(CASES["ffn"], _FFN, (4096, 64, 252)),
        "gated ffn": CapturedCall(CASES["ffn"], _GATED, (4096, 64, 252)),
        "gemm_gemm": CapturedCall(CASES["gemm_gemm"], Options("gelu_tanh"), (192, 256, 256, 64, 64)),
        "max": CapturedCall(CASES["gemm_reduce"], Options(op="max", dim=-2), (8, 1024, 1024, 128), chooses=True),
        "logsumexp": CapturedCall(CASES["gemm_reduce"], Options(op="logsumexp", dim=-1), (8, 1024, 1024, 128)),
        "maxsim": CapturedCall(CASES["maxsim"], Options(), (16, 64, 32, 256, 128), chooses=True),
        "linear": CapturedCall(CASES["split_k"], Options(bias=True), (16, 1024, 4096)),
        "linear_cross_entropy": CapturedCall(
            CASES["linear_cross_entropy"], Options(op="mean"), (1024, 256, 32000), "chunked"
        ),
        "linear_log_probs": CapturedCall(CASES["linear_log_probs"], Options(op="mean"), (1024, 256, 32000)),
        # Torch's product is in place of the kernel's, and a kernel for the sums beside it.
        "weight_gradient": CapturedCall(
            CASES["weight_gradient"], Options(bias=True), (12800, 128, 512), launched="sums"
        ),
        "hidden_gradient": CapturedCall(ALL["hidden_gradient"], Options("gelu_tanh", bias=True), (4096, 4096, 1024)),
    },
    # Recorded, the path for wider layers divides hidden units, too, and multiplies in torch; plain calls never do.
    "otherwise": {
        "ffn": CapturedCall(CASES["ffn"], _FFN, (10240, 256, 1024), "epilogue", launched="fused"),
        "gated ffn": CapturedCall(CASES["ffn"], _GATED, (10240, 256, 1024), "epilogue", launched="fused"),
    },
    "wide": {"ffn": CapturedCall(CASES["ffn"], _FFN, (4096, 1024, 4096), "epilogue")},
    "wide gated": {"gated ffn": CapturedCall(CASES["ffn"], _GATED, (4096, 1024, 2816), "epilogue")},
}


def recorded(call: CapturedCall, device: torch.device) -> Found:
    """What the plain calls and the capture took, and what was wrong with the replays."""
    planned = call.paths(describe(device))
    if planned[1] != call.kernels:
        return {"skipped": f"the kernels do not run here: {call}"}
    case, options, shape = call.case, call.options, call.shape
    draw = Draw(torch.bfloat16, device)
    work = random_work(case, options, shape, draw, case.backward)
    keywords = case.our_keywords(options)

    def step() -> tuple[Tensor, ...]:
        return work.run(lambda **inputs: case.ours(**inputs, **keywords))

    with decisions() as launched:
        for _ in range(PLAIN_CALLS):
            step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with decisions() as captured, torch.cuda.graph(graph):
        replayed = step()
    found: Found = {
        "shape": shape, "planned": list(planned), "launched": dict(launched),
        "captured": dict(captured), "faults": [],
    }  # fmt: skip
    names = [*case.results[: len(replayed)], *(f"d{name}" for name in work.leaves if case.backward)]
    for seed in range(1, 1 + REPLAYS):
        _overwrite(work, random_work(case, options, shape, draw.another(17 * seed), case.backward))
        graph.replay()
        ours = {name: tensor.clone() for name, tensor in zip(names, replayed, strict=True)}
        if call.chooses:
            with switched(FUSED_SWITCHES):
                found["faults"] += _unequal(ours, dict(zip(names, step(), strict=True)))
            continue
        with switched({**FUSED_SWITCHES, "FUSEDLAYERS_BACKEND": "torch"}):
            torchs = dict(zip(names, step(), strict=True))
        truth = dict(zip(names, reference_results(case, options, work), strict=True))
        found["faults"] += _far(ours, torchs, truth)
    return found


def _overwrite(work: Work, fresh: Work) -> None:
    """New data where the graph reads."""
    with torch.no_grad():
        for old, new in zip((*work.inputs.values(), *work.upstream), (*fresh.inputs.values(), *fresh.upstream),
                            strict=True):  # fmt: skip
            old.copy_(new)


def _unequal(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> list[str]:
    return [f"{name}: not the bits of the kernels" for name in ours if not torch.equal(ours[name], theirs[name])]


def _far(ours: dict[str, Tensor], torchs: dict[str, Tensor], truth: dict[str, Tensor]) -> list[str]:
    return [verdict.message for verdict in compare_all(ours, torchs, truth).values() if not verdict.ok]


@dataclass(frozen=True)
class GraphedModule:
    """A module for ``torch.cuda.make_graphed_callables``, the call that it makes, and the shapes of its inputs."""

    make: Callable[[Shape], nn.Module]
    call: CapturedCall
    inputs: Callable[[Shape], tuple[Shape, ...]]


def _ffn_module(options: Options) -> Callable[[Shape], nn.Module]:
    return lambda shape: FusedFFN(shape[1], shape[2], options.activation, options.gated, options.bias)


def _of_x(shape: Shape) -> tuple[Shape, ...]:
    return (shape[:2],)


MODULES: dict[str, GraphedModule] = {
    "FusedFFN": GraphedModule(_ffn_module(_FFN), CALLS["narrow"]["ffn"], _of_x),
    "FusedFFN, wide and gated": GraphedModule(_ffn_module(_GATED), CALLS["wide gated"]["gated ffn"], _of_x),
    "SplitKLinear": GraphedModule(
        lambda shape: SplitKLinear(shape[2], shape[1]), CALLS["narrow"]["linear"], lambda shape: ((shape[0], shape[2]),)
    ),
    "MaxSim": GraphedModule(
        lambda shape: MaxSim(), CALLS["narrow"]["maxsim"],
        lambda shape: ((shape[0], shape[2], shape[4]), (shape[1], shape[3], shape[4])),
    ),
}  # fmt: skip


def graphed(module: GraphedModule, device: torch.device) -> Found:
    """The same through ``torch.cuda.make_graphed_callables``, after three plain steps of the module."""
    shape, planned = module.call.shape, module.call.paths(describe(device))
    if planned[1] != module.call.kernels:
        return {"skipped": f"the kernels do not run here: {module.call}"}
    layer = module.make(shape).to(device, torch.bfloat16)
    plain = copy.deepcopy(layer)

    def drawn() -> tuple[Tensor, ...]:
        made = (torch.randn(size, device=device, dtype=torch.bfloat16) for size in module.inputs(shape))
        return tuple(tensor.requires_grad_() for tensor in made)

    with decisions() as launched:
        for _ in range(PLAIN_CALLS):
            layer(*drawn()).sum().backward()
    layer.zero_grad()
    with decisions() as captured:
        layer = torch.cuda.make_graphed_callables(layer, drawn())
    found: Found = {
        "shape": shape, "planned": list(planned), "launched": dict(launched),
        "captured": dict(captured), "faults": [],
    }  # fmt: skip
    exact = copy.deepcopy(plain).double()
    for _ in range(REPLAYS):
        inputs = drawn()
        upstream = torch.randn_like(plain(*inputs))
        ours = _results(layer, inputs, upstream)
        if module.call.chooses:
            with switched(FUSED_SWITCHES):
                found["faults"] += _unequal(ours, _results(plain, inputs, upstream))
            continue
        doubled = tuple(tensor.detach().double().requires_grad_() for tensor in inputs)
        truth = _results(exact, doubled, upstream.double())
        found["faults"] += _far(ours, _results(plain, inputs, upstream), truth)
    return found


def _results(layer: nn.Module, inputs: Iterable[Tensor], upstream: Tensor) -> dict[str, Tensor]:
    """The result and all gradients."""
    inputs = tuple(inputs)
    named = dict(layer.named_parameters())
    y = layer(*inputs)
    leaves = [*inputs, *named.values()]
    gradients = torch.autograd.grad(y, leaves, upstream)
    names = [f"d{place}" for place in range(len(inputs))] + [f"d{name}" for name in named]
    return {"y": y.detach().clone()} | {name: each.clone() for name, each in zip(names, gradients, strict=True)}


def main(group: str) -> None:
    """Run the calls of a group, or the modules, and print what was found of each."""
    device = torch.device("cuda", 0)
    runs: dict[str, Callable[[], Found]] = {}
    if group == "modules":
        runs = {name: lambda module=module: graphed(module, device) for name, module in MODULES.items()}  # type: ignore[misc]
        calls = {name: module.call for name, module in MODULES.items()}
    else:
        runs = {name: lambda call=call: recorded(call, device) for name, call in CALLS[group].items()}  # type: ignore[misc]
        calls = CALLS[group]
    for name, run in runs.items():
        try:
            with assumed(override=calls[name].on(describe(device)).override):
                found = run()
        except Exception as error:  # the others are tried nevertheless
            found = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps({"name": name, **found}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
