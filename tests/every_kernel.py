"""Compiles a call or two of every kernel for one GPU of each kind; see ``code_generation.py``.

Run as a script it prints one JSON object per launch, with the release of Triton that compiled it:

    python tests/every_kernel.py sm_90 gfx942
"""

import json
import sys
from collections.abc import Callable, Iterator

import torch
from code_generation import compiling_for  # sets the switches before the library is imported

from fusedlayers import functional
from fusedlayers.functional.linear_cross_entropy.parts import Part, losses_of_part
from fusedlayers.kernels import bounds
from fusedlayers.kernels import gemm_epilogue as products
from fusedlayers.kernels.column_sums import column_sums
from fusedlayers.kernels.dropout import drop
from fusedlayers.kernels.float8 import E4M3, quantise_rows, quantise_transposed, transposed_pair
from fusedlayers.kernels.hopper import Scaled
from fusedlayers.kernels.matmul.arithmetic import Arithmetic
from fusedlayers.kernels.tuning import COLUMN_SUM_TILES, EPILOGUE_PIPELINES

SEED = torch.zeros(1, dtype=torch.int64)
SILU = Arithmetic("silu", "coarse", "ieee")


def matrix(*shape: int) -> torch.Tensor:
    return torch.empty(*shape, dtype=torch.bfloat16, requires_grad=True)


def in_8_bits(rows: int, columns: int) -> Scaled:
    return Scaled(torch.empty(rows, columns, dtype=E4M3), torch.empty(rows))


def bounded(gated: bool, z: torch.Tensor) -> Iterator[Callable[[], torch.Tensor]]:
    """Those of an FFN whose hidden and gradients leave their kernels in 8 bits."""
    x, w = in_8_bits(4096, 1024), in_8_bits(2048, 1024)
    words = [Scaled(each.values, each.scale.view(torch.int32)) for each in (x, w)]
    more = (words[1], None) if gated else (None, None)
    gate, table = (w, w.scale) if gated else None, torch.empty(6, 2048)
    yield lambda: bounds.channel_numbers(matrix(2048, 1024), matrix(2048, 1024))
    yield lambda: bounds.unit_table((w, w.scale), gate, None)
    yield lambda: bounds.gradient_units(w, w.scale, table, gated)
    yield lambda: bounds.row_table(x, x.scale, gated, False, 1.0)
    yield lambda: bounds.gradient_rows(x, x.scale, x.scale if gated else None, 1.0)
    yield lambda: products.scaled_hidden(
        *words, None, *more, True, SILU, EPILOGUE_PIPELINES["scaled_hidden", gated], torch.bfloat16
    )[0].view(torch.int8)  # fmt: skip
    yield lambda: products.scaled_hidden_gradient(
        x, w, z, z if gated else None, True, SILU, EPILOGUE_PIPELINES["scaled_hidden_gradient", gated],
        units=words[1].scale, hidden_rows=x.scale,
    )[0].view(torch.int8)  # fmt: skip


def ffn(width: int, gated: bool, recompute: bool | str = "auto") -> torch.Tensor:
    weights = {"w_up": matrix(4 * width, width), "w_down": matrix(width, 4 * width), "b_up": matrix(4 * width)}
    if gated:
        weights |= {"w_gate": matrix(4 * width, width), "b_gate": matrix(4 * width)}
    return functional.ffn(matrix(4096, width), **weights, activation="gelu_tanh", recompute=recompute)


def calls(target: str) -> Iterator[Callable[[], torch.Tensor]]:
    """Those whose launches are compiled, as are those of their gradients."""
    yield lambda: ffn(128, gated=False)
    yield lambda: ffn(256, gated=False)
    yield lambda: ffn(256, gated=True)
    yield lambda: ffn(1024, gated=False)
    yield lambda: ffn(1024, gated=True, recompute=True)
    # Whose products are torch's on Hopper.
    yield lambda: ffn(2056, gated=False)
    yield lambda: ffn(2056, gated=True)
    yield lambda: functional.gemm_gemm(matrix(8, 512, 64), matrix(8, 64, 256), matrix(8, 256, 64))
    yield lambda: functional.gemm_reduce(matrix(8, 1024, 128), matrix(8, 128, 1024), op="max", dim=-1)
    yield lambda: functional.gemm_reduce(matrix(8, 1024, 128), matrix(8, 128, 1024), op="logsumexp", dim=-2)
    yield lambda: functional.gemm_reduce(matrix(8, 64, 128), matrix(8, 128, 1024), op="logsumexp", dim=-1)
    yield lambda: functional.maxsim(matrix(8, 32, 128), matrix(64, 256, 128))
    yield lambda: functional.linear(matrix(64, 65536), matrix(64, 65536), matrix(64))
    yield lambda: functional.linear(matrix(1, 4096), matrix(4096, 4096))
    yield lambda: functional.weight_gradient(matrix(4096, 512), matrix(4096, 1024))[0]
    words = torch.zeros(512, dtype=torch.int64)
    yield lambda: functional.linear_cross_entropy(matrix(512, 256), matrix(32_000, 256), words)
    yield lambda: functional.linear_cross_entropy(matrix(512, 256), matrix(32_000, 256), words, reduction="none")
    yield lambda: functional.linear_cross_entropy(matrix(512, 256).detach(), matrix(32_000, 256).detach(), words)
    yield lambda: functional.linear_cross_entropy(matrix(512, 256), matrix(32_000, 256), words, recompute=True)
    alone = Part(0, 32_000, lambda found: found[None])
    yield lambda: losses_of_part(matrix(512, 256), matrix(32_000, 256), words, None, alone)
    chosen, merged = torch.zeros(4096, 2, dtype=torch.int64), {"gate_and_up": "concatenated"}
    yield lambda: functional.moe_ffn(
        matrix(4096, 512), chosen, matrix(4096, 2), matrix(8, 512, 512), matrix(8, 512, 256), **merged
    )
    yield lambda: functional.moe_ffn(
        matrix(4096, 520), chosen, matrix(4096, 2), matrix(8, 520, 260), matrix(8, 260, 520), b_up=matrix(8, 260),
        b_down=matrix(8, 520), transposed=True,
    )  # fmt: skip
    yield lambda: functional.moe_ffn(
        matrix(64, 512).detach(), chosen[:64], matrix(64, 2).detach(), matrix(64, 512, 512).detach(),
        matrix(64, 512, 256).detach(), **merged,
    )  # fmt: skip
    yield lambda: column_sums(matrix(4096, 512), COLUMN_SUM_TILES)
    yield lambda: drop(matrix(4096, 512), SEED, 0.1)
    if target == "sm_90":
        # Others have no products in 8 bits, and most of them no such numbers.
        yield lambda: quantise_rows(matrix(4096, 1024).detach()).values
        yield lambda: quantise_transposed(matrix(4096, 1024).detach()).values
        yield lambda: transposed_pair(in_8_bits(4096, 2048), matrix(4096, 1024).detach(), torch.ones(4096))[1].values
        yield lambda: products.scaled_product(
            in_8_bits(4096, 8192), in_8_bits(1024, 8192), matrix(1024).detach(),
            EPILOGUE_PIPELINES["scaled_product", False], torch.bfloat16,
        )  # fmt: skip
        for gated in (False, True):
            more = (in_8_bits(2048, 1024), None) if gated else (None, None)
            yield lambda gated=gated, more=more: products.scaled_hidden(
                in_8_bits(4096, 1024), in_8_bits(2048, 1024), None, *more, True, SILU,
                EPILOGUE_PIPELINES["scaled_hidden", gated], torch.bfloat16,
            )[0]  # fmt: skip
            z = matrix(4096, 2048).detach()
            yield lambda gated=gated, z=z: products.scaled_hidden_gradient(
                in_8_bits(4096, 1024), in_8_bits(2048, 1024), z, z if gated else None, True, SILU,
                EPILOGUE_PIPELINES["scaled_hidden_gradient", gated],
            )[0]  # fmt: skip
            yield from bounded(gated, z)
        yield lambda: functional.moe_ffn(
            matrix(4096, 512), chosen, matrix(4096, 2), matrix(8, 512, 512), matrix(8, 512, 256), precision="fp8",
            **merged,
        )  # fmt: skip


if __name__ == "__main__":
    for target in sys.argv[1:]:
        for call in calls(target):
            with compiling_for(target, sm90=target == "sm_90") as reports:
                y = call()
                if y.requires_grad and y.grad_fn is not None:
                    y.backward(torch.empty_like(y))
            for report in reports:
                about = {"dtype": "bfloat16", "width": 0, "gated": True}
                print(json.dumps(about | report), flush=True)
