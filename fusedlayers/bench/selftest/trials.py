"""What the self-test calls: for every tile configuration that the planner can choose on a device, a call that takes it.

The sizes are small, and still every loop of a kernel runs several times: whole tiles only, and tails in all of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from ... import planning
from ...functional.switches import switched
from ...kernels import tuning
from ...planning import Decision, Device
from ..cases import CASES, DTYPES, Case, Inputs, Options, Shape
from ..cases.hidden_gradient import HIDDEN_GRADIENT

TESTED = CASES | {HIDDEN_GRADIENT.name: HIDDEN_GRADIENT}

# (tokens, hidden) of a feed-forward block: whole tiles, and tails in both.
WHOLE, RAGGED = (1024, 512), (1061, 488)
# Few processors, so that each program of a pipelined kernel takes many tiles, with two consumers; as many as there are,
# with one consumer; the portable kernels, where the pipelined ones would run; recomputing, where a backward pass would
# store what is hidden; recomputing in little memory, so that there are several groups of hidden units; and weights that
# lie transposed, which the pipelined kernels read as they are.
MACHINES: dict[str, dict[str, Any]] = {
    "few": {"processors": 4},
    "all": {},
    "portable": {"pipelined": False},
    "recomputing": {"processors": 4, "recompute": True},
    "recomputing, all": {"recompute": True},
    "in groups": {"processors": 4, "recompute": True, "workspace": 2},
    "in groups, portable": {"pipelined": False, "recompute": True, "workspace": 2},
    "few, transposed": {"processors": 4, "transposed": True},
    "in groups, transposed": {"processors": 4, "recompute": True, "workspace": 2, "transposed": True},
}
# What is no fact of the device: an argument of the call, MiB of temporary memory, and how weights lie.
_NO_FACTS = ("recompute", "workspace", "transposed")
_PIPELINED_WIDTHS = ((64, 64), (64, 128), (128, 64), (128, 128), (256, 256))
# (kept rows, reduced rows) and inner widths of a reduction: every number of consumers, both blocks.
_REDUCED = ((40, 16), (128, 304), (200, 64), (120, 600), (264, 1024))
# Widths of a feed-forward block that no fused kernel holds: whole tiles, and tails.
_WIDE = (512, 520)
# The same of one whose groups of hidden units take less than the memory of the machines above.
_GROUPED = ((2048, 512, 1024), (2077, 544, 1000))
# (rows, columns, inner width) of a linear layer: every tile of its product and of its data gradient, each split.
_LINEAR = (
    (1, 16, 8192),
    (1, 2048, 2048),
    (1, 4096, 1032),
    (16, 16, 4096),
    (16, 32, 4096),
    (16, 200, 2056),
    (40, 16, 2056),
    (32, 64, 2056),
    (64, 32, 4104),
    (64, 200, 2056),
    (64, 4096, 1032),
    (200, 64, 1032),
    (200, 1024, 64),
    (200, 200, 2056),
)
_ODD_LINEAR = ((1, 15, 1001), (16, 61, 1001), (65, 127, 1001))
_PORTABLE_WIDTHS = (16, 24, 64, 128, 256, 1000)
# (queries, documents, query tokens, document tokens).
_LATE = (
    (1, 9, 32, 40),
    (4, 9, 32, 40),
    (2, 5, 50, 300),
    (20, 3, 30, 72),
    (5, 3, 32, 600),
    (1, 9, 56, 600),
    (1, 9, 32, 72),
)


@dataclass(frozen=True)
class Trial:
    """One call of a benchmark case on integers, on ``device`` or as if it were this ``machine``; plain data."""

    case: str
    options: Options
    shape: Shape
    dtype: str
    machine: str = "all"
    backward: bool = True

    def __str__(self) -> str:
        dropping = " with dropout" if self.options.dropout_p else ""
        kind = ("gated " if self.options.gated else "") + self.case + dropping
        passes = "" if self.backward else ", forward alone"
        shape = "x".join(map(str, self.shape))
        return f"{kind} {shape} {self.options.activation} {self.dtype} ({self.machine}{passes})"

    @property
    def facts(self) -> dict[str, Any]:
        """What is assumed of the device; nothing is avoided, as that is what is tested."""
        assumed = {name: value for name, value in MACHINES[self.machine].items() if name not in _NO_FACTS}
        return assumed | {"avoided": frozenset()}

    @property
    def switches(self) -> dict[str, str]:
        """What the user's switches must say."""
        workspace = MACHINES[self.machine].get("workspace")
        return {} if workspace is None else {"FUSEDLAYERS_WORKSPACE_MIB": str(workspace)}

    def prepared(self) -> tuple[Case, Options]:
        """The case and its options."""
        case = TESTED[self.case]
        recompute = MACHINES[self.machine].get("recompute", "auto")
        return replace(case, backward=case.backward and self.backward), replace(self.options, recompute=recompute)

    def laid_out(self, inputs: Inputs) -> Inputs:
        """The inputs, and the weights among them as they lie in memory."""
        if not MACHINES[self.machine].get("transposed"):
            return inputs
        parameters = TESTED[self.case].parameters
        return {
            name: tensor.detach().T.contiguous().T.requires_grad_(tensor.requires_grad)
            if name in parameters and tensor.dim() == 2
            else tensor
            for name, tensor in inputs.items()
        }

    def plan(self, device: Device) -> Decision:
        """What runs on ``device`` if kernels are forced; planned without data."""
        case, options = self.prepared()
        operands = case.operands(self.shape, options)
        blank = {
            name: torch.empty(operand.shape, dtype=DTYPES[self.dtype], device="meta", requires_grad=case.backward)
            for name, operand in operands.items()
        }
        with torch.set_grad_enabled(case.backward), switched(self.switches):
            problem = case.problem(blank, options)
        plan: Decision = planning.plan(problem, replace(device, **self.facts), "triton")
        return plan


def supported(dtype: torch.dtype, width: int, gated: bool, device: Device) -> bool:
    """Whether all kernels of a feed-forward block have tiles for this width."""
    name = str(dtype).removeprefix("torch.")
    problem = planning.Problem(
        "ffn", 1, 1, width, 1, width, name, gated=gated, needs_data_gradient=True, needs_weight_gradient=True
    )
    return planning.gemm_gemm.why_unsupported(problem, device) is None


def widths_of_rows(bits: int, device: Device) -> list[int]:
    """The widest width of every row of the tables for this device: with it, the row is at its limits."""
    tables = [tuning.rows(kernel, device.architecture, bits, gated)
              for kernel in ("forward", "data_gradient", "weight_gradient") for gated in (False, True)]  # fmt: skip
    return sorted({width for rows in tables for width, _ in rows})


def machines(dtype: torch.dtype, width: int, device: Device) -> list[str]:
    """Those that differ for this width; float32 and widths in between have portable kernels alone."""
    if dtype == torch.float32 or width not in (64, 128, 256) or not device.pipelined:
        return ["all"]
    fused = {name: facts for name, facts in MACHINES.items() if not facts.keys() & {"workspace", "transposed"}}
    return [name for name, facts in fused.items() if "recompute" not in facts or width == 256]


def all_trials(device: Device) -> list[Trial]:
    """Every trial for a GPU; each configuration is taken by one with relu and by one without an activation."""
    found = (_blocks, _wide_blocks, _groups, _reductions, _late_interactions, _gradients, _linear_layers)
    return list(dict.fromkeys(trial for trials in found for trial in trials(device)))


def few_trials() -> list[Trial]:
    """A small subset for Triton's interpreter, which is slow, and wrong for bfloat16."""
    ffn = Options("relu", bias=True)
    return [
        Trial("ffn", ffn, (37, 24, 40), "fp16"),
        Trial("ffn", replace(ffn, gated=True), (37, 24, 40), "fp32"),
        Trial("gemm_gemm", Options(), (2, 37, 40, 24, 16), "fp16"),
        Trial("gemm_reduce", Options("relu", op="max"), (2, 37, 33, 24), "fp16"),
        Trial("gemm_reduce", Options(op="sumsq", dim=-1), (2, 37, 33, 24), "fp32"),
        Trial("maxsim", Options(), (3, 4, 5, 33, 24), "fp16"),
        Trial("weight_gradient", Options(bias=True), (37, 24, 40), "fp16"),
        Trial("hidden_gradient", Options("relu", bias=True), (37, 24, 40), "fp16"),
        Trial("ffn", ffn, (37, 144, 40), "fp32"),
        Trial("split_k", Options(bias=True), (1, 40, 700), "fp16"),
        Trial("split_k", Options("relu", bias=True), (5, 24, 300), "fp32", backward=False),
    ]


def _blocks(device: Device) -> Iterator[Trial]:
    """Feed-forward blocks and products of three matrices, which are the same kernels."""
    for gated in (False, True):
        relu, plain = (Options(activation, gated=gated, bias=True) for activation in ("relu", "identity"))
        if device.pipelined:
            for machine in ("few", "all", "recomputing", "recomputing, all"):
                for K, O in _PIPELINED_WIDTHS:
                    if "recompute" in MACHINES[machine] and K < 256:
                        continue
                    for M, N in (WHOLE, RAGGED):
                        # A feed-forward block of a benchmark has as many columns out as in.
                        if K == O:
                            yield Trial("ffn", relu, (M, K, N), "bf16", machine)
                            yield Trial("ffn", plain, (M, K, N), "fp16", machine)
                        elif not gated:
                            yield Trial("gemm_gemm", Options("relu"), (1, M, N, K, O), "bf16", machine)
                            yield Trial("gemm_gemm", Options(), (1, M, N, K, O), "fp16", machine)
        for dtype, width in [("bf16", width) for width in widths_of_rows(16, device)] + [
            ("fp32", width) for width in widths_of_rows(32, device)
        ]:
            if not supported(DTYPES[dtype], width, gated, device):
                continue
            yield Trial("ffn", relu, (RAGGED[0], width, RAGGED[1]), dtype, "portable")
            yield Trial("ffn", plain, (WHOLE[0], width, WHOLE[1]), "fp16" if dtype == "bf16" else dtype, "portable")
    for width in (64, 128):
        yield Trial("gemm_gemm", Options(), (3, *WHOLE, width, width), "bf16")
    # Widths that no tile fits.
    for K, O in ((16, 61), (203, 200), (101, 80)):
        yield Trial("gemm_gemm", Options(), (2, *RAGGED, K, O), "bf16")


def _wide_blocks(device: Device) -> Iterator[Trial]:
    """Feed-forward blocks that are too wide to be one kernel: activations in the epilogues of products."""
    for gated in (False, True):
        relu, plain = (Options(activation, gated=gated, bias=True) for activation in ("relu", "identity"))
        for width, (M, N) in zip(_WIDE, (WHOLE, RAGGED), strict=True):
            if device.pipelined:
                for backward in (False, True):
                    yield Trial("ffn", relu, (M, width, N), "bf16", "few", backward)
                    yield Trial("ffn", plain, (M, width, N), "fp16", "few", backward)
                if (M, N) == RAGGED:
                    yield Trial("ffn", relu, (M, width, N), "bf16", "few, transposed")
                    yield Trial("ffn", plain, (M, width, N), "fp16", "few, transposed")
            for dtype in DTYPES:
                yield Trial("ffn", relu, (M, width, N), dtype, "portable")
                yield Trial("ffn", plain, (M, width, N), dtype, "portable")
        # Half of the hidden: what is left is doubled.
        dropping = replace(relu, dropout_p=0.5)
        for machine in ("few", "portable") if device.pipelined else ("portable",):
            for dtype in ("bf16", "fp16") if machine == "few" else DTYPES:
                yield Trial("ffn", dropping, (M, width, N), dtype, machine)


def _groups(device: Device) -> Iterator[Trial]:
    """Feed-forward blocks whose gradient of x is carried from one group of hidden units to the next."""
    for gated in (False, True):
        relu, plain = (Options(activation, gated=gated, bias=True) for activation in ("relu", "identity"))
        for machine in ("in groups", "in groups, portable") if device.pipelined else ("in groups, portable",):
            for shape in _GROUPED:
                yield Trial("ffn", relu, shape, "bf16", machine)
                yield Trial("ffn", plain, shape, "fp16", machine)
        if device.pipelined:
            yield Trial("ffn", relu, _GROUPED[1], "bf16", "in groups, transposed")
            yield Trial("ffn", plain, _GROUPED[0], "fp16", "in groups, transposed")


def _linear_layers(device: Device) -> Iterator[Trial]:
    plain, biased = Options(), Options(bias=True)
    for shape in _LINEAR:
        yield Trial("split_k", biased, shape, "bf16")
        yield Trial("split_k", plain, shape, "fp16")
        # While gradients are wanted the activation is torch's.
        yield Trial("split_k", Options("relu", bias=True), shape, "bf16", backward=False)
    for shape in _ODD_LINEAR:
        for dtype in DTYPES:
            yield Trial("split_k", biased, shape, dtype, "portable")


def _reductions(device: Device) -> Iterator[Trial]:
    # Indices are found for the gradients of a maximum alone, and a sum of squares stays exact in float16 alone.
    kinds = (("max", "bf16"), ("sumsq", "fp16"))
    if device.pipelined:
        for kept, reduced in _REDUCED:
            for width in (64, 128):
                for op, dtype in kinds:
                    yield Trial("gemm_reduce", Options(op=op, dim=-1), (2, kept, reduced, width), dtype, "few")
                    yield Trial("gemm_reduce", Options(op=op, dim=-2), (2, reduced, kept, width), dtype, "few")
    for width in _PORTABLE_WIDTHS:
        for op, dtype in kinds:
            yield Trial("gemm_reduce", Options("relu", op=op), (2, 127, 129, width), dtype, "portable")
            yield Trial("gemm_reduce", Options(op=op, dim=-1), (2, 127, 129, width), "fp32", "portable")


def _late_interactions(device: Device) -> Iterator[Trial]:
    if device.pipelined:
        for sizes in _LATE:
            for width in (64, 128):
                for backward in (False, True):
                    yield Trial("maxsim", Options(), (*sizes, width), "fp16", "few", backward)
    for width in _PORTABLE_WIDTHS:
        for dtype in ("fp16", "fp32"):
            yield Trial("maxsim", Options(), (7, 13, 31, 130, width), dtype, "portable")


def _gradients(device: Device) -> Iterator[Trial]:
    for bias in (False, True):
        if device.pipelined:
            for shape in ((1000, 64, 136), (1024, 128, 64), (1000, 136, 264), (512, 128, 1024), (1000, 520, 128)):
                for dtype in ("bf16", "fp16"):
                    yield Trial("weight_gradient", Options(bias=bias), shape, dtype, "few")
        for dtype in DTYPES:
            yield Trial("weight_gradient", Options(bias=bias), (1000, 127, 200), dtype, "portable")
    for gated in (False, True):
        relu, plain = (Options(activation, gated=gated, bias=True) for activation in ("relu", "identity"))
        if device.pipelined:
            for dtype in ("bf16", "fp16"):
                yield Trial("hidden_gradient", relu, (1000, 392, 200), dtype, "few")
                yield Trial("hidden_gradient", plain, (1024, 384, 512), dtype, "few")
        for dtype in DTYPES:
            # Rows of odd length, as the pipelined kernel cannot copy them.
            yield Trial("hidden_gradient", relu, (300, 127, 72), dtype, "portable")
            yield Trial("hidden_gradient", plain, (256, 256, 128), dtype, "portable")


def launched(plan: Decision) -> dict[str, str]:
    """Field of the plan -> the configuration that runs where operands lie as in the trials: in whole, aligned rows."""
    found = {field: names[0] for field, names in planning.configurations(plan).items()}
    if "stored" in found:
        # Its kernels take the place of both gradients'.
        return {field: name for field, name in found.items() if field in ("forward_tiles", "stored")}
    for field in [field for field in found if field.endswith("pipeline")]:
        found.pop(field.removesuffix("pipeline") + "tiles")
    return found


def covered(trials: list[Trial], device: Device) -> set[str]:
    """The configurations that these trials run."""
    return {name for trial in trials for name in launched(trial.plan(device)).values()}
