"""Compiles what a call would launch, for GPUs that need not be there, and reports what the compiler made of it.

The library's own functions run on uninitialised CPU tensors while a stand-in driver names the GPU, and every launch
stops after compilation: what is reported is the specialisation that a user gets, with the planner's tiles. The compiler
is needed and the tests' process may have the interpreter in its place, so the tests run this file as a script, which
prints one JSON object per kernel:

    python tests/code_generation.py rows sm_90/bfloat16     every row of the tuning table, and its hardest calls
    python tests/code_generation.py ends sm_80/float16      the narrowest and the widest row
    python tests/code_generation.py even sm_90/float16      the same, of sizes that tiles divide
    python tests/code_generation.py all gfx942/float32      every width, each in its hardest calls too
    python tests/code_generation.py '{"target": "sm_90", "dtype": "bfloat16", "width": 64, "gated": true}'

What the record of ``compilation_record.py`` tells of a kernel is not found out again.
"""

import contextlib
import functools
import io
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any
from unittest import mock

os.environ["TRITON_INTERPRET"] = "0"
os.environ["FUSEDLAYERS_BACKEND"] = "triton"

import compilation_record
import torch
import triton
import triton.compiler
from overflowing_products import int32_products
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from fusedlayers import functional, planning
from fusedlayers.functional import dispatch
from fusedlayers.kernels.device import RELEASE
from fusedlayers.kernels.tuning import TileConfig

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "sm_120": GPUTarget("cuda", 120, 32),
    "gfx90a": GPUTarget("hip", "gfx90a", 64),
    "gfx942": GPUTarget("hip", "gfx942", 64),
    "gfx950": GPUTarget("hip", "gfx950", 64),
}
WIDTHS = tuple(2**power for power in range(4, 12))
# Streaming multiprocessors of an H200: the splits, and so the launches, are those of a large GPU.
SMS = 132


@dataclass(frozen=True)
class Case:
    """One training step of ``functional.ffn`` with K = O = ``width``, compiled for ``target``.

    ``hidden`` 0 means four times the width. ``kernel`` compiles launches of that kernel alone. ``wanted`` names the
    tensors that ask for a gradient; None means all. ``sm90`` lets the warp-specialised kernels run; ``recompute``
    is the argument of that name.
    """

    target: str
    dtype: str
    width: int
    gated: bool = False
    activation: str = "gelu_tanh"
    dropout: bool = False
    rows: int = 4096
    hidden: int = 0
    kernel: str | None = None
    wanted: tuple[str, ...] | None = None
    sm90: bool = False
    recompute: bool | str = "auto"


def _device(target: str, sm90: bool) -> planning.Device:
    return planning.Device(
        "cuda", target, target, SMS, triton=True, backend="sm90" if sm90 else "generic", triton_release=RELEASE
    )


def _problem(case: Case) -> planning.Problem:
    return planning.Problem(
        operation="ffn", batch=1, M=case.rows, K=case.width, N=case.hidden or 4 * case.width, O=case.width,
        dtype=case.dtype, activation=case.activation, gated=case.gated, dropout=case.dropout,
        needs_data_gradient=True, needs_weight_gradient=True,
    )  # fmt: skip


class _StandInDriver:
    """As much of a driver as compilation asks for; the target's name serves as the device's index."""

    def __init__(self, target: str) -> None:
        self.target = target

    def get_current_device(self) -> str:
        return self.target

    def get_current_stream(self, device: str) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return TARGETS[self.target]


@contextlib.contextmanager
def compiling_for(
    target: str, kernels: Collection[str] | None = None, sm90: bool = False
) -> Iterator[list[dict[str, Any]]]:
    """Inside, kernels on CPU tensors are compiled for ``target`` instead of run; yields the reports as they grow.

    None means every kernel; launches of others leave no report.
    """
    reports: list[dict[str, Any]] = []
    run = JITFunction.run

    def compile_only(function: JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        name = function.__name__.removeprefix("_").removesuffix("_kernel")
        if kernels is None or name in kernels:
            compile_it = functools.partial(run, function, *args, grid=grid, warmup=True, **kwargs)
            about = {"kernel": name, "target": target, "triton": triton.__version__}
            reports.append(_launch(function, args, kwargs) | about | _outcome(compile_it))

    described = _device(target, sm90)
    dispatch._cached_plan.cache_clear()
    driver.set_active(_StandInDriver(target))
    with (
        mock.patch.object(JITFunction, "run", compile_only),
        mock.patch.object(dispatch, "describe", return_value=described),
        mock.patch.object(triton.knobs.nvidia, "dump_ptxas_log", True),
        # A kernel from the cache comes without the assembler's log.
        mock.patch.object(triton.knobs.compilation, "always_compile", True),
        # Nobody reads the results of torch's own products between the launches, and they take most of the time.
        mock.patch.object(torch, "mm", _no_product),
        mock.patch.object(torch, "addmm", _no_product),
    ):
        yield reports
    dispatch._cached_plan.cache_clear()


def _no_product(*operands: torch.Tensor, out: torch.Tensor | None = None, **options: Any) -> torch.Tensor:
    """A result as long and as wide as that of torch's product, and nothing in it."""
    left, right = operands[-2:]
    return left.new_empty(left.shape[0], right.shape[1]) if out is None else out


def _launch(function: JITFunction, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """What this launch asks for: its compile-time names and numbers, and which pointers it has."""
    options = ("num_warps", "num_stages", "enable_fp_fusion", "launch_pdl")
    arguments = function.signature.bind(*args, **{k: v for k, v in kwargs.items() if k not in options}).arguments
    constants = dict(_constants(arguments.items()))
    tiles = {name: constants[name] for name in ("BLOCK_M", "BLOCK_N") if name in constants}
    return {
        "tiles": tiles | {name: kwargs[name] for name in options[:2] if name in kwargs},
        "constants": constants,
        "pointers": [name for name, value in arguments.items() if name.endswith("_ptr") and value is not None],
    }


def _constants(arguments: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    """The compile-time arguments in capitals; the fields of a record are told as if each were one of them."""
    for name, value in arguments:
        if hasattr(value, "_asdict") and name.isupper():
            yield from _constants((field.upper(), each) for field, each in value._asdict().items())
        elif name.isupper():
            yield name, value


def _outcome(compile_it: Callable[[], Any]) -> dict[str, Any]:
    """What the compiler made of one launch, or its error."""
    log = io.StringIO()
    try:
        with contextlib.redirect_stdout(log):
            compiled = compile_it()
    except compilation_record.Known as known:
        return known.findings
    except Exception as error:
        # An error in a device function that another one calls arrives as the cause of the caller's.
        innermost: BaseException = error
        while innermost.__cause__ is not None:
            innermost = innermost.__cause__
        return {"error": f"{type(innermost).__name__}: {str(innermost)[-400:]}"}
    if compiled.hash not in _known:
        _known[compiled.hash] = _findings(compiled, log.getvalue())
        compilation_record.note(compiled, _known[compiled.hash])
    return _known[compiled.hash]


# What Triton's launches call from now on.
triton.compiler.compile = compilation_record.unless_known(triton.compiler.compile)

# Triton compiles a specialisation once per process, and tells the assembler's log only then.
_known: dict[str, dict[str, Any]] = {}


def _findings(compiled: Any, log: str) -> dict[str, Any]:
    assembler = compiled.asm
    # A Gluon kernel starts a stage later.
    source = assembler["ttir" if "ttir" in assembler else "ttgir"]
    found = {
        "hash": compiled.hash,
        "shared": compiled.metadata.shared,
        "products": len(re.findall(r" (?:tt\.dot|ttng\.warp_group_dot) ", source)),
        # A product that stays in a blocked layout is computed by scalar multiply-adds.
        "scalar_products": len(re.findall(r" tt\.dot .*-> tensor<\w+, #blocked\w*>", assembler["ttgir"])),
        "int32_products": int32_products(source),
    }
    found["overwritten"] = overwritten_operands(assembler["ttgir"])
    if "ptx" in assembler:
        return found | _nvidia(assembler["ptx"], assembler["cubin"], log)
    return found | _amd(assembler["amdgcn"])


# The operands of a product, how many products a wait leaves running, and the end of a loop.
_PRODUCTS = re.compile(
    r"ttng\.warp_group_dot (%\w+), (%\w+),.*isAsync = true|warp_group_dot_wait .*pendings = (\d+)|(scf\.yield)"
)


def overwritten_operands(ttgir: str) -> list[str]:
    """Ring buffers in shared memory that are filled again while a wgmma may still read them.

    Triton's pipeliner lets one product run on while the next copies start, and gives its operands a buffer more for
    that, but not to an operand that something else reads as well: a race. Copies that are started ``n`` iterations
    ahead, as ``n`` of them stand before the loop, need ``n + 1`` buffers.
    """
    buffers = {
        name: int(count) for name, count in re.findall(r"(%\w+) = ttg\.local_alloc :.*!ttg\.memdesc<(\d+)x", ttgir)
    }
    slots = dict(re.findall(r"(%\w+) = ttg\.memdesc_index (%\w+)\[", ttgir))
    copies = Counter(
        slots.get(target) for target in re.findall(r"ttg\.async_copy_global_to_local %\w+, (%\w+)", ttgir)
    )  # fmt: skip
    running: set[str | None] = set()
    started: list[tuple[str, str]] = []
    for left, right, pending, end in _PRODUCTS.findall(ttgir):
        if left:
            started.append((left, right))
        elif pending:
            started = started[len(started) - min(int(pending), len(started)) :]
        elif end:
            # What no wait of the loop ends runs on when the next iteration starts.
            running |= {slots.get(operand) for operands in started for operand in operands}
            started = []
    return sorted(name for name, count in buffers.items() if name in running and copies[name] > count)


def _nvidia(ptx: str, cubin: bytes, log: str) -> dict[str, Any]:
    used = re.search(r"Used (\d+) registers", log)
    if used is None:
        raise RuntimeError(f"the assembler's log tells no registers:\n{log}")
    spilled = sum(int(n) for n in re.findall(r"(\d+) bytes spill", log))
    return {
        "registers": int(used[1]),
        "spill_bytes": spilled,
        "loop_spills": _loop_spills(cubin) if spilled else 0,
        "serialised": "instructions are serialized" in log,
        "matrix_instructions": len(re.findall(r"wgmma\.mma_async|mma\.sync|tcgen05\.mma", ptx)),
        "wgmma": len(re.findall(r"wgmma\.mma_async", ptx)),
        "tf32": len(re.findall(r"\.tf32", ptx)),
        "wide_multiplications": len(re.findall(r"mul\.(?:wide|hi)\.u32", ptx)),
        "vectors": len(re.findall(r"(?:ld|st)\.global[.\w]*\.v4", ptx)),
        "loads_of_16_bits": len(re.findall(r"ld\.global[.\w]*\.[bu]16", ptx)),
    }


def _loop_spills(cubin: bytes) -> int:
    """Instructions that move spilled registers inside the loops around matrix instructions, the innermost of each."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [triton.knobs.nvidia.nvdisasm.path, "-c", file.name]
        lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    labels = {line.split(":")[0]: number for number, line in enumerate(lines) if re.match(r"\.L_x_\d+:", line)}
    loops = []
    for end, line in enumerate(lines):
        target = re.search(r"BRA.*?(\.L_x_\d+)", line)
        start = labels[target[1]] if target else end
        if start < end and any("HGMMA" in inner for inner in lines[start:end]):
            loops.append((start, end))
    products = [number for number, line in enumerate(lines) if "HGMMA" in line]
    around = [[(end - start, start, end) for start, end in loops if start < number < end] for number in products]
    inside = {number for found in around if found for number in range(*min(found)[1:])}
    return sum(bool(re.search(r"\b(STL|LDL)\b", lines[number])) for number in inside)


def _amd(assembly: str) -> dict[str, Any]:
    return {
        "registers": max(int(n) for n in re.findall(r"\.vgpr_count:\s+(\d+)", assembly)),
        "spill_bytes": 4 * sum(int(n) for n in re.findall(r"\.[vs]gpr_spill_count:\s+(\d+)", assembly)),
        "loop_spills": 0,
        "serialised": False,
        "matrix_instructions": len(re.findall(r"v_mfma_", assembly)),
        "wgmma": 0,
        "tf32": len(re.findall(r"v_mfma_\w*xf32", assembly)),
    }


def compile_case(case: Case) -> list[dict[str, Any]]:
    """A report for every launch of the case, forward and backward; a launch that repeats is reported once."""
    dtype = getattr(torch, case.dtype)
    hidden = case.hidden or 4 * case.width

    def operand(name: str, *shape: int) -> torch.Tensor:
        wants = case.wanted is None or name in case.wanted
        return torch.empty(*shape, dtype=dtype, requires_grad=wants)

    weights = {"w_up": operand("w_up", hidden, case.width), "w_down": operand("w_down", case.width, hidden)}
    weights |= {"b_up": operand("b_up", hidden), "b_down": operand("b_down", case.width)}
    if case.gated:
        weights |= {"w_gate": operand("w_gate", hidden, case.width), "b_gate": operand("b_gate", hidden)}
    dropout_p = 0.1 if case.dropout else 0.0
    with compiling_for(case.target, case.kernel and (case.kernel,), case.sm90) as reports:
        x = operand("x", case.rows, case.width)
        y = functional.ffn(x, **weights, activation=case.activation, dropout_p=dropout_p, recompute=case.recompute)
        y.backward(torch.empty_like(y))
    different = {json.dumps(report): report for report in reports}
    return [asdict(case) | report for report in different.values()]


def compile_kernel(
    kernel: str, target: str, dtype: str, width: int, tiles: TileConfig, **options: Any
) -> list[dict[str, Any]]:
    """``kernel`` with tiles of your choice, for finding better ones; options are fields of :class:`Case`."""
    with mock.patch.object(planning.gemm_gemm_tiles, "tile_config", return_value=tiles):
        return compile_case(Case(target, dtype, width, kernel=kernel, **options))


def shipped(target: str, dtype: str, selection: str) -> list[Case]:
    """The cases of a target and dtype, of a selection that the module's docstring describes."""
    cases = []
    for gated in (False, True):
        widest_of_row: dict[str, Case] = {}
        for width in WIDTHS:
            case = Case(target, dtype, width, gated)
            plan = planning.plan(_problem(case), _device(target, sm90=False), "triton")
            if plan.path != "fused":
                break
            row = (plan.forward_tiles, plan.data_gradient_tiles, plan.weight_gradient_tiles)
            widest_of_row[str(width if selection == "all" else row)] = case
        found = list(widest_of_row.values())
        # Dropout and the erf cost the most registers; sizes that no tile divides cost masks and wide loads.
        costly = [replace(case, activation="gelu", dropout=True) for case in found]
        ragged = [replace(case, width=case.width - 3, rows=4099, hidden=4 * case.width - 5) for case in found]
        cases += {
            "ends": [costly[0] if gated else ragged[0], *found[-1:]],
            "even": [found[0], found[-1]],
            "rows": [*found, costly[0], ragged[-1]] if dtype == "bfloat16" else found,
            "all": [*found, *costly, *ragged],
        }[selection]
        if target == "sm_90" and dtype != "float32":
            whole = [Case(target, dtype, width, gated, sm90=True) for width in (64, 128, 256)]
            uneven = [replace(case, rows=4099, hidden=4 * case.width - 8, activation="gelu") for case in whole]
            # The backward pass that stores what is hidden runs instead of kernels that others still need.
            recomputing = [replace(case, recompute=True) for case in (whole[-1], uneven[-1])]
            padded = replace(whole[1], width=104, rows=4099, hidden=152, activation="gelu")
            # Where both selections run, in bfloat16 and float16, the widest runs in both, the others in one of them.
            cases += {
                "even": uneven[1:],
                "rows": [*whole, uneven[0], uneven[-1], *recomputing, padded],
            }.get(selection, [*whole, *uneven, *recomputing, padded])
    return cases


if __name__ == "__main__":
    first, *targets = sys.argv[1:]
    if first.startswith("{"):
        chosen = [Case(**json.loads(first))]
    else:
        chosen = [case for target in targets for case in shipped(*target.split("/"), first)]
    for case in chosen:
        for report in compile_case(case):
            print(json.dumps(report), flush=True)
