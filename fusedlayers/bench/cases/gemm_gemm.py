"""The batched GEMM-GEMM."""

from __future__ import annotations

from collections.abc import Iterator

from ... import functional, reference
from ...kernels.tuning.dtypes import GENERIC
from ...planning import Device
from .case import Case, Grid, Operand, Options, Shape
from .trial import RAGGED, WHOLE, Trial


def _operands(shape: Shape, options: Options) -> dict[str, Operand]:
    batch, rows, hidden, width, columns = shape
    return {
        "a": Operand((batch, rows, width)),
        "b": Operand((batch, width, hidden), width**-0.5),
        "c": Operand((batch, hidden, columns), hidden**-0.5),
    }


def _flops(shape: Shape, options: Options) -> int:
    batch, rows, hidden, width, columns = shape
    return 2 * batch * rows * hidden * (width + columns)


def _trials(device: Device) -> Iterator[Trial]:
    # The kernels are those of a feed-forward block, whose trials have as many columns out as in.
    if device.backend != GENERIC:
        for machine in ("few", "all"):
            for K, O in ((64, 128), (128, 64)):
                for M, N in (WHOLE, RAGGED):
                    yield Trial("gemm_gemm", Options("relu"), (1, M, N, K, O), "bf16", machine)
                    yield Trial("gemm_gemm", Options(), (1, M, N, K, O), "fp16", machine)
    for width in (64, 128):
        yield Trial("gemm_gemm", Options(), (3, *WHOLE, width, width), "bf16")
    # Widths that no tile fits.
    for K, O in ((16, 61), (203, 200), (101, 80)):
        yield Trial("gemm_gemm", Options(), (2, *RAGGED, K, O), "bf16")


CASE = Case(
    name="gemm_gemm",
    operation="gemm_gemm",
    place=1,
    letters=("B", "M", "N", "K", "O"),
    meaning="batch × rows × hidden × inner × output columns",
    grids=(
        Grid(
            "gemm_gemm", "Batched GEMM-GEMM, no activation", Options(),
            (
                (4, 1024, 1024, 64, 128), (64, 1024, 1024, 64, 64), (64, 1024, 1024, 128, 128),
                (16, 4096, 4096, 128, 128), (512, 256, 256, 64, 64),
            ),
            ((4, 128, 256, 32, 64), (2, 130, 70, 24, 24)),
        ),
        Grid(
            "gemm_gemm_gelu_tanh", "Batched GEMM-GEMM, gelu_tanh", Options("gelu_tanh"),
            ((64, 1024, 1024, 64, 64), (64, 1024, 1024, 128, 128)),
            ((2, 130, 70, 24, 24),),
        ),
    ),
    operands=_operands,
    ours=functional.gemm_gemm,
    torch_expression=reference.gemm_gemm,
    forward_flops=_flops,
    trials=_trials,
    few_trials=(Trial("gemm_gemm", Options(), (2, 37, 40, 24, 16), "fp16"),),
)  # fmt: skip
