"""A small training step of every kind of kernel, to be run under NVIDIA's compute-sanitizer: see test_sanitizer.py.

python -m tests.gpu.sanitized [products] [reductions] [splits] [losses] [experts]       those groups of steps alone
"""

from __future__ import annotations

import os
import sys
from typing import Any
from unittest import mock

os.environ["FUSEDLAYERS_BACKEND"] = "triton"

import torch

from fusedlayers import functional
from fusedlayers.kernels import cross_entropy
from fusedlayers.kernels import gemm_epilogue as kernels
from fusedlayers.kernels.gemm_gemm import stored
from fusedlayers.kernels.matmul.arithmetic import Arithmetic
from fusedlayers.kernels.tuning import EPILOGUE_ELEMENTS, EPILOGUE_PIPELINES, epilogue_tiles
from fusedlayers.kernels.tuning.cross_entropy import gradient_tiles, logit_tiles, row_tiles
from tests.support.operands import ffn_inputs, leaves, like_result

# Widths of sm90 and of generic kernels; rows and hidden units that no tile divides.
FFNS = [
    (130, 64, 136, False, False),
    (200, 64, 192, True, False),
    (130, 104, 136, False, False),
    (200, 24, 192, True, False),
    (130, 128, 72, False, False),
    (70, 256, 40, False, True),
    (150, 256, 136, False, False),
    (70, 256, 72, True, False),
    (100, 48, 50, True, False),
]
BATCHES = [(3, 128, 64, 128, 64), (2, 128, 128, 64, 128), (3, 50, 33, 20, 17)]
# Rows, columns of dy and of x: with one split and with several; the last is for the generic kernel.
WEIGHT_GRADIENTS = [(70, 136, 264), (1500, 72, 40), (3000, 264, 72), (700, 50, 33)]
# Rows, width and hidden units of a wide FFN; the last is for the generic kernels.
WIDE = [(150, 136, 200), (70, 33, 50)]
# Groups, rows, hidden units of a group, columns of x, whether weights lie transposed.
DATA_GRADIENTS = [(3, 150, 40, 96, False), (2, 300, 200, 168, True)]
# Batch, M, N, K, operation, axis. Kept rows for one, two and four consumers of the sm90 kernel, splits of a long
# axis; the last two are for the generic kernels.
REDUCTIONS = [
    (3, 200, 40, 64, "max", -2),
    (2, 200, 130, 64, "min", -2),
    (3, 150, 200, 128, "logsumexp", -2),
    (2, 300, 136, 64, "absmax", -1),
    (1, 3000, 72, 72, "max", -2),
    (1, 40, 3000, 128, "logsumexp", -1),
    (3, 150, 200, 64, "sumsq", -2),
    (2, 70, 50, 33, "max", -2),
    (2, 90, 70, 200, "logsumexp", -1),
]
# Rows, columns, inner axis: every kind of tile, ragged, aligned and not.
LINEARS = [(1, 40, 5000), (16, 30, 4100), (9, 200, 3001), (40, 72, 2064), (200, 70, 1031)]
# Tokens and classes: less than a block of columns, one, and several, the last of which is ragged.
LOGITS = [(5, 100), (9, 4096), (33, 9001)]
DOCUMENTS = [33, 0, 130, 64, 1]
# Tokens, width, hidden units, experts, experts of a token; the last is for the generic kernels.
MIXTURES = [(150, 136, 200, 5, 2), (300, 64, 128, 3, 3), (70, 33, 50, 4, 2)]


def main() -> None:
    chosen = sys.argv[1:]
    for group in (products, reductions, splits, losses, experts):
        if not chosen or group.__name__ in chosen:
            group()
    torch.cuda.synchronize()
    print("ran to the end")


def products() -> None:
    """FFNs, batched products of products, and gradients of weights."""
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
    wide()
    scaled()
    for groups, rows, units, width, transposed in DATA_GRADIENTS:
        dx = torch.empty(rows, width, device="cuda", dtype=torch.bfloat16)
        total = torch.empty(rows, width, device="cuda")
        for gated in (False, True):
            d_pre, weight = (
                torch.randn(size, device="cuda", dtype=dx.dtype) for size in ((rows, units), (units, width))
            )
            if transposed:
                weight = weight.T.contiguous().T
            terms, pipeline = [(d_pre, weight)] * (1 + gated), EPILOGUE_PIPELINES["data_gradient", gated]
            for group in range(groups):
                assert kernels.data_gradient(terms, dx, total, group == 0, group == groups - 1, pipeline)


def summed_product(left: torch.Tensor, right: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """``left @ right`` without cuBLAS, whose kernels do not all run under the tools."""
    found = (left.float()[:, :, None] * right.float()).sum(1).to(left.dtype)
    return found if out is None else out.copy_(found)


def wide() -> None:
    """The hidden of wide FFNs, and its gradient, with weights as they are and transposed; without torch's products."""
    rest = (Arithmetic("silu", "coarse", "ieee"),)
    for rows, width, hidden in WIDE:
        for gated in (False, True):
            tiles = epilogue_tiles("sm_90", 16, gated)
            first, second = EPILOGUE_PIPELINES["hidden", gated], EPILOGUE_PIPELINES["hidden_gradient", gated]
            x, dy, z = (torch.randn(rows, n, device="cuda", dtype=torch.bfloat16) for n in (width, width, hidden))
            bias, b_gate = torch.randn_like(z[0]), torch.randn_like(z[0]) if gated else None
            for transposed in (False, True):
                w = torch.randn(width, hidden, device="cuda", dtype=torch.bfloat16)
                w_up, w_down = (w.T, w.T.contiguous().T) if transposed else (w.T.contiguous(), w)
                kernels.hidden(x, w_up, bias, w_up if gated else None, b_gate, True, *rest, tiles, first)
                z_gate = z.clone() if gated else None
                kernels.hidden_gradient(dy, w_down, z, z_gate, True, 1, *rest, tiles, second, keep_hidden=transposed)
            # What follows products that are not theirs.
            elements = EPILOGUE_ELEMENTS[gated]
            with (
                mock.patch.object(torch.nn.functional, "linear", lambda x, w, b: summed_product(x, w.T) + b),
                mock.patch.object(torch, "mm", summed_product),
            ):
                kernels.hidden(x, w_up, bias, w_up if gated else None, b_gate, gated, *rest, elements)
                kernels.hidden_gradient(dy, w_down, z, z_gate, True, 3, *rest, elements, keep_hidden=gated)


def scaled() -> None:
    """The hidden of 8-bit operands, of which no tile divides anything."""
    rows, width, hidden = 150, 144, 200
    x, w = (
        kernels.Scaled(torch.randn(n, width, device="cuda").to(torch.float8_e4m3fn), torch.rand(n, device="cuda"))
        for n in (rows, hidden)
    )
    bias, arithmetic = torch.randn(hidden, device="cuda", dtype=torch.bfloat16), Arithmetic("silu", "coarse", "ieee")
    for gated in (False, True):
        gate, pipeline = w if gated else None, EPILOGUE_PIPELINES["scaled_hidden", gated]
        b_gate = bias if gated else None
        kernels.scaled_hidden(x, w, bias, gate, b_gate, gated, arithmetic, pipeline, bias.dtype)
        z = torch.randn(rows, hidden, device="cuda", dtype=bias.dtype)
        pipeline = EPILOGUE_PIPELINES["scaled_hidden_gradient", gated]
        kernels.scaled_hidden_gradient(x, w, z, z if gated else None, gated, arithmetic, pipeline)


def reductions() -> None:
    """Products reduced over an axis: as they are, masked, of some lengths, with an activation; late interaction."""

    def operand(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True)

    for batch, M, N, K, op, dim in REDUCTIONS:
        a, b, rows = operand(batch, M, K), operand(batch, K, N), M if dim == -2 else N
        masks: list[dict[str, Any]] = [
            {},
            {"mask": torch.rand(batch, rows, device="cuda") < 0.5},
            {"lengths": torch.randint(1, rows + 1, (batch,), device="cuda")},
        ]
        for taking in masks:
            d = functional.gemm_reduce(a, b, op=op, dim=dim, **taking)
            d.backward(torch.ones_like(d))
            with torch.no_grad():
                functional.gemm_reduce(a, b, op=op, dim=dim, return_indices=op in ("max", "min", "absmax"), **taking)
        d = functional.gemm_reduce(a, b, op=op, dim=dim, bias=operand(N), activation="silu")
        d.backward(torch.ones_like(d))
    ends = torch.tensor([0, *DOCUMENTS], device="cuda").cumsum(0).int()
    queries, documents = operand(5, 32, 128), operand(sum(DOCUMENTS), 128)
    scores = functional.maxsim(queries, documents, cu_seqlens_documents=ends)
    scores.nan_to_num(neginf=0.0).sum().backward()
    padded = operand(4, 77, 128)
    masked = torch.rand(4, 77, device="cuda") < 0.7
    functional.maxsim(queries, padded, document_mask=masked).sum().backward()


def splits() -> None:
    """Linear layers whose products are split: with and without gradients, in both reductions."""
    for rows, columns, inner in LINEARS:
        shapes = ((rows, inner), (columns, inner), (columns,))
        x, w, b = (torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True) for shape in shapes)
        for split_k in (1, 3):
            y = functional.linear(x, w, b, split_k=split_k)
            y.backward(torch.randn_like(y))
            with torch.no_grad():
                functional.linear(x, w, b, activation="silu", split_k=split_k)
                functional.linear(x, w, b, activation="silu", split_k=split_k, reduction="atomic")


def losses() -> None:
    """Losses and gradients of rows of logits, padded as they are in a chunk; without torch's products."""
    for tokens, classes in LOGITS:
        memory = torch.randn(tokens, -(-classes // 64) * 64, device="cuda", dtype=torch.bfloat16)
        logits = memory[:, :classes]
        target = torch.randint(classes, (tokens,), device="cuda")
        target[1], weight = -100, torch.rand(classes, device="cuda")
        found, statistics = torch.empty(2, tokens, device="cuda"), torch.empty(2, tokens, device="cuda")
        plain = cross_entropy.LossArithmetic(-100, "half")
        full = plain._replace(label_smoothing=0.1, z_loss=0.1, softcap=5.0)
        none: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None)
        weights: tuple[torch.Tensor | None, torch.Tensor | None] = (weight, weight.sum())
        for arithmetic, given in ((plain, none), (full, weights)):
            rest = (target, *given, arithmetic, row_tiles(classes))
            cross_entropy.losses(logits, *rest, loss=found[0], statistics=statistics)
            cross_entropy.losses(memory.clone()[:, :classes], *rest, loss=found[0], gradient=True, factor=weight[0])
            cross_entropy.gradient(memory.clone()[:, :classes], *rest, statistics=statistics, upstream=found[0])
        cross_entropy.scaled(memory, weight[0], torch.bfloat16)
        input = torch.randn(tokens, 320, device="cuda", dtype=torch.bfloat16)
        linear_weight = torch.randn(classes, 320, device="cuda", dtype=torch.bfloat16)
        for sm90 in (False, True):
            tiles = logit_tiles("sm_90", 16, 4, sm90)
            for arithmetic, given in ((plain, none), (full, weights), (full, none)):
                cross_entropy.losses_of_product(
                    input, linear_weight, linear_weight[:, 0], target, *given, arithmetic, "ieee", tiles, 3,
                    loss=found[0], entropy=found[1], statistics=statistics, argmax=torch.empty_like(target),
                )  # fmt: skip
                factors = cross_entropy.row_factors(target, *given, classes, arithmetic, statistics, found[0])
                cross_entropy.gradient_of_product(
                    input, linear_weight, linear_weight[:, 0], target, given[0], statistics[0], factors, 0, arithmetic,
                    "ieee", gradient_tiles("sm_90", 16, 4, sm90), out=torch.empty_like(memory),
                )  # fmt: skip


def experts() -> None:
    """Mixtures whose last expert has no token, with indices that are no expert, and with a limited gate."""
    for tokens, width, hidden, number, k in MIXTURES:
        index = torch.randint(-1, number - 1, (tokens, k), device="cuda")
        shapes = {
            "x": (tokens, width), "top_k_weights": (tokens, k), "w_up": (number, 2 * hidden, width),
            "w_down": (number, width, hidden), "b_up": (number, 2 * hidden), "b_down": (number, width),
        }  # fmt: skip
        given = {
            name: torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True)
            for name, shape in shapes.items()
        }
        for layout in ("concatenated", "interleaved"):
            for options in ({}, {"limit": 1.0, "up_offset": 1.0, "recompute": True}):
                y = functional.moe_ffn(**given, top_k_index=index, gate_and_up=layout, **options)
                y.backward(torch.randn_like(y))
                with torch.no_grad():
                    functional.moe_ffn(**given, top_k_index=index, gate_and_up=layout, **options)
    many = torch.randint(64, (3000, 1), device="cuda")
    one = torch.randn(3000, 16, device="cuda", dtype=torch.bfloat16)
    functional.moe_ffn(one, many, one[:, :1], one[:1024].view(64, 16, 16), one[1024:2048].view(64, 16, 16))


if __name__ == "__main__":
    main()
