"""A small training step of every kind of kernel, to be run under NVIDIA's compute-sanitizer: see test_sanitizer.py."""

from __future__ import annotations

import os

os.environ["FUSEDLAYERS_BACKEND"] = "triton"

import torch

from fusedlayers import functional
from tests.operands import ffn_inputs, leaves, like_result

# Widths of pipelined and of portable kernels; rows and hidden units that no tile divides.
FFNS = [(130, 64, 136, False), (200, 64, 192, True), (130, 128, 72, False), (70, 256, 40, False), (100, 48, 50, True)]
BATCHES = [(3, 128, 64, 128, 64), (2, 128, 128, 64, 128), (3, 50, 33, 20, 17)]


def main() -> None:
    for rows, width, hidden, gated in FFNS:
        inputs = leaves(ffn_inputs(rows, width, hidden, width, torch.bfloat16, gated=gated, residual=True))
        functional.ffn(**inputs, activation="silu").backward(like_result(inputs))
    for batch, M, K, N, O in BATCHES:
        shapes = ((batch, M, K), (batch, K, N), (batch, N, O))
        a, b, c = (torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True) for shape in shapes)
        e = functional.gemm_gemm(a, b, c, activation="gelu_tanh")
        e.backward(torch.randn_like(e))
    torch.cuda.synchronize()
    print("ran to the end")


if __name__ == "__main__":
    main()
