"""Seconds of every path at random sizes, for the record that auto mode decides by: eager torch, auto mode and kernels.

    python -m benchmarks.paths                                   a size of each kind of call in turn, until time is up
    python -m benchmarks.paths --families moe_ffn --budget 60    of some operations, for a minute

Each is verified, and timed if it is right. Nothing is compiled by torch, so that a size takes a second or two.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from fusedlayers.bench import record as records
from fusedlayers.bench.arguments import add_record_options, record_path, several
from fusedlayers.bench.cases import ALL, Grid, Options
from fusedlayers.bench.contenders import AUTO, EAGER, FUSED
from fusedlayers.bench.runner import Row, Settings, is_right
from fusedlayers.bench.tables import KINDS

from .endings import answered, chosen_gpu, measured_alone

SECONDS = 0.12
# The most floating-point operations of a forward pass, and elements of an operand.
_MOST_FLOPS, _MOST_ELEMENTS = 3e12, 2**30
_SILU, _GELU = Options("silu", gated=True), Options("gelu_tanh", bias=True)
# By case: the options to draw from, and for each letter the least size, the greatest, and what it is a multiple of.
_DRAWN: Mapping[str, tuple[Sequence[Options], Sequence[tuple[int, int, Sequence[int]]]]] = {
    "ffn": ((_SILU, _GELU), ((16, 2**20, (8, 64)), (64, 8192, (8, 64)), (64, 16384, (8, 64)))),
    "gemm_gemm": (
        (Options(), Options("gelu_tanh")),
        ((1, 512, (1,)), (16, 8192, (1, 8, 64)), (64, 4096, (8, 64)), (16, 128, (8, 64)), (16, 128, (8, 64))),
    ),
    "gemm_reduce": (
        (Options(op="sumsq"), Options(op="logsumexp"), Options(op="sum"), Options(op="max")),
        ((1, 512, (1,)), (64, 8192, (8,)), (64, 16384, (8,)), (32, 256, (8, 32))),
    ),
    "maxsim": (
        (Options(),),
        ((1, 64, (1,)), (1, 4096, (1,)), (8, 512, (1, 8)), (32, 1024, (1, 8, 64)), (64, 128, (64,))),
    ),
    "weight_gradient": (
        (Options(bias=True), Options()),
        ((256, 2**18, (8, 64)), (64, 8192, (8, 64)), (64, 4096, (8, 64))),
    ),
    "hidden_gradient": ((_GELU, _SILU), ((256, 2**17, (8,)), (256, 16384, (8, 64)), (128, 8192, (8, 64)))),
    "split_k": (
        (Options(), Options(bias=True)),
        ((1, 2**15, (1, 8)), (8, 2**14, (1, 8, 64)), (256, 2**18, (1, 8, 64))),
    ),
    "linear_cross_entropy": (
        (Options(op="mean"),),
        ((16, 16384, (8,)), (256, 4096, (8, 64)), (1024, 160_000, (1, 8, 64))),
    ),
    "linear_log_probs": ((Options(),), ((16, 16384, (8,)), (256, 4096, (8, 64)), (1024, 160_000, (1, 8, 64)))),
    "moe_ffn": (
        (_SILU,),
        ((16, 16384, (8,)), (512, 4096, (64,)), (256, 8192, (16, 64)), (8, 128, (8,)), (1, 8, (1,))),
    ),
    "lora_ffn": ((_SILU, _GELU), ((16, 16384, (8,)), (512, 5120, (8, 64)), (1024, 16384, (8, 64)), (8, 64, (8,)))),
}


def drawn(case: str, number: int, seed: int) -> Row:
    """The random row of that number."""
    drawing = random.Random(f"{case} {number} {seed}")
    choices, ranges = _DRAWN[case]
    options = choices[number % len(choices)]
    while True:
        shape = tuple(_size(drawing, *limits) for limits in ranges)
        elements = max(math.prod(operand.shape) for operand in ALL[case].operands(shape, options).values())
        if ALL[case].forward_flops(shape, options) <= _MOST_FLOPS and elements <= _MOST_ELEMENTS:
            return Row(ALL[case], Grid(case, case, options, (shape,), (shape,)), options, shape)


def _size(drawing: random.Random, least: int, greatest: int, steps: Sequence[int]) -> int:
    size = round(math.exp(drawing.uniform(math.log(least), math.log(greatest))))
    step = drawing.choice(steps)
    return max(step, size // step * step)


def short(row: dict[str, Any]) -> dict[str, Any]:
    """A row with what the record is made of."""
    kept = ("case", "grid", "shape", "dtype", "activation", "gated", "bias", "recompute", "dropout_p", "op", "dim",
            "skewed", "direction")  # fmt: skip
    contenders = {
        name: {
            "status": entry["status"],
            "path": entry["path"],
            "replayed_path": entry["replayed_path"],
            **{kind: {"median": float(f"{entry[kind]['median']:.4g}")} for kind in KINDS if entry.get(kind)},
        }
        for name, entry in row["contenders"].items()
    }
    return {**{name: row[name] for name in kept}, "contenders": contenders}


def build_parser() -> argparse.ArgumentParser:
    """All options."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.paths", description=__doc__.split("\n")[0])
    parser.add_argument(
        "--families", type=lambda text: several(text, tuple(_DRAWN)), default=tuple(_DRAWN), metavar="NAME,…",
        help=f"of {','.join(_DRAWN)}; default: all",
    )  # fmt: skip
    parser.add_argument("--sizes", type=int, default=1000, help="the most of each operation (default: 1000)")
    add_record_options(parser)
    return parser


def main(arguments: list[str] | None = None) -> int:
    """Run the command line, and return the exit status: 1 if a result is wrong or nothing can be measured."""
    return answered(build_parser(), _run, arguments)


def _run(chosen: argparse.Namespace, words: list[str]) -> int:
    device, dtype = chosen_gpu(chosen, "paths are timed beside torch"), chosen.dtype or "bf16"
    path = record_path(chosen.output, "paths", dtype, device)
    settings = Settings(
        dtype, device, seed=chosen.seed, timed=True, contenders=(EAGER, AUTO, FUSED), seconds=SECONDS,
    )  # fmt: skip
    record = records.new_record(words, device, {"seconds_per_row": SECONDS, "seed": chosen.seed}, chosen.commit)
    until, right = time.time() + (chosen.budget or math.inf), True
    for number in range(chosen.sizes):
        for family in chosen.families:
            if time.time() > until:
                break
            row = drawn(family, number, chosen.seed)
            entries = measured_alone(row, settings)
            green = all(map(is_right, entries))
            right &= green
            print(f"{'timed ' if entries and green else 'skip  ' if green else 'RED   '} {row.label}", flush=True)
            if green:
                record["rows"] += map(short, entries)
                records.write(record, path)
    records.finish(record, path)
    print(f"record: {path}: {len(record['rows'])} rows")
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
