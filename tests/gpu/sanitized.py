"""A small training step of every kind of kernel, to be run under NVIDIA's compute-sanitizer: see test_sanitizer.py."""

from __future__ import annotations

import os

os.environ["FUSEDLAYERS_BACKEND"] = "triton"

import torch

from fusedlayers import functional
from fusedlayers.kernels.gemm_gemm import stored
from tests.operands import ffn_inputs, leaves, like_result

# Widths of pipelined and of portable kernels; rows and hidden units that no tile divides.
FFNS = [
    (130, 64, 136, False, False),
    (200, 64, 192, True, False),
    (130, 128, 72, False, False),
    (70, 256, 40, False, True),
    (150, 256, 136, False, False),
    (70, 256, 72, True, False),
    (100, 48, 50, True, False),
]
BATCHES = [(3, 128, 64, 128, 64), (2, 128, 128, 64, 128), (3, 50, 33, 20, 17)]
# Rows, columns of dy and of x: with one split and with several; the last is for the portable kernel.
WEIGHT_GRADIENTS = [(70, 136, 264), (1500, 72, 40), (3000, 264, 72), (700, 50, 33)]


def main() -> None:
    # A product of torch's: cuBLAS fails under the tool that looks for races.
    stored._data_gradient = lambda operands, hidden: torch.zeros_like(operands.x)
    for rows, width, hidden, gated, recompute in FFNS:
        inputs = leaves(ffn_inputs(rows, width, hidden, width, torch.bfloat16, gated=gated, residual=True))
        functional.ffn(**inputs, activation="silu", recompute=recompute).backward(like_result(inputs))
    for batch, M, K, N, O in BATCHES:
        shapes = ((batch, M, K), (batch, K, N), (batch, N, O))
        a, b, c = (torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True) for shape in shapes)
        e = functional.gemm_gemm(a, b, c, activation="gelu_tanh")
        e.backward(torch.randn_like(e))
    for rows, out, width in WEIGHT_GRADIENTS:
        dy, x = (torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16) for columns in (out, width))
        for bias in (True, False):
            functional.weight_gradient(dy, x, bias=bias)
            z, w_down = torch.randn_like(x), torch.randn(out, width, device="cuda", dtype=torch.bfloat16)
            functional.hidden_gradient(dy, w_down, z, z if bias else None, activation="silu", bias=bias)
    torch.cuda.synchronize()
    print("ran to the end")


if __name__ == "__main__":
    main()
