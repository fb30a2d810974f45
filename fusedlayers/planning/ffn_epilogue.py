"""The epilogue path of an FFN: activations, gate and bias gradients in the epilogues of products, of any width.

Where torch's product was measured faster, torch computes it, and an elementwise kernel does what the epilogue would do.
The forward pass saves the pre-activations; torch saves these, the activated ones and, with a gate, their product.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..kernels.tuning import (
    EPILOGUE_ELEMENTS,
    EpiloguePipeline,
    EpilogueTiles,
    epilogue_tiles,
    gradients_joined,
    hidden_stride,
)
from ..kernels.tuning.dtypes import GENERIC
from . import hidden_gradient
from .call import VECTOR, Facts
from .devices import Device
from .hidden_gradient import HiddenGradientPlan, HiddenGradientProblem, epilogue_text


@dataclass(frozen=True)
class EpiloguePlan:
    """The tiles of the kernels; ``gradient`` is None if no gradient goes through the hidden.

    ``data_gradient_pipeline`` belongs to the chunked path, which sums dx over groups of hidden units; where it is None,
    torch's products do that.
    """

    hidden_tiles: EpilogueTiles
    hidden_pipeline: EpiloguePipeline | None
    gradient: HiddenGradientPlan | None
    data_gradient_pipeline: EpiloguePipeline | None = None

    def facts(self) -> Facts:
        """The tiles in words."""
        rows = [("hidden tiles", epilogue_text(self.hidden_tiles, self.hidden_pipeline))]
        if self.gradient is not None and self.gradient.tiles is not None:
            rows.append(("hidden-gradient tiles", epilogue_text(self.gradient.tiles, self.gradient.pipeline)))
        if self.data_gradient_pipeline is not None:
            rows.append(("data-gradient tiles", epilogue_text(self.hidden_tiles, self.data_gradient_pipeline)))
        return rows


def plan(problem: Any, device: Device, columns: int, summed: bool = False) -> EpiloguePlan:
    """The tiles for ``problem``, a ``planning.Problem`` of an FFN, whose backward pass takes ``columns`` at a time.

    ``summed``: dx is summed over such groups of hidden units.
    """
    p = problem
    gradient = data = None
    if p.training:
        multiplies = not summed and torch_multiplies_gradient(p, device)
        gradient = hidden_gradient.plan(_gradient_problem(p, columns), device, "triton", torch_multiplies=multiplies)
        if summed and p.needs_data_gradient:
            data = hidden_gradient.epilogue_pipeline("data_gradient", p, device)
    if not summed and torch_multiplies_hidden(p, device):
        return EpiloguePlan(EPILOGUE_ELEMENTS[p.gated], None, gradient, data)
    pipeline = hidden_gradient.epilogue_pipeline("hidden", p, device)
    tiles = epilogue_tiles(device.architecture, p.format.bits, p.gated, p.dropout)
    return EpiloguePlan(tiles, pipeline, gradient, data)


def torch_multiplies_hidden(problem: Any, device: Device) -> bool:
    """Whether torch computes the product of the hidden, and a kernel what follows.

    Measured for 16-bit layers without adapters. It depends on the layer alone, because compilers ask, too, which may
    not know the number of tokens.
    """
    p, figures = problem, device.preferences
    if figures is None or _adapted(p) or not p.format.narrow:
        return False
    few_units = not p.gated and figures.few_units_width <= p.K and 2 * p.N <= p.K
    return few_units or _starts_unevenly(p.K, figures.uneven_from)


def torch_multiplies_gradient(problem: Any, device: Device) -> bool:
    """Whether torch computes the product of the hidden's gradient, and a kernel what follows."""
    p, figures = problem, device.preferences
    pipeline = hidden_gradient.epilogue_pipeline("hidden_gradient", p, device)
    if figures is None or pipeline is None or _adapted(p):
        return False
    wide = figures.wide_gradient_from <= p.O
    few_tiles = math.prod(pipeline.tiles(p.M, p.N)) <= figures.few_tiles[wide] * device.sms
    return few_tiles or _starts_unevenly(p.O, figures.uneven_gradient_from)


def _starts_unevenly(width: int, widths: Mapping[int, int]) -> bool:
    """Whether rows are no multiple of some number of elements; ``widths``: that number -> from which width on."""
    return any(least <= width and width % elements > 0 for elements, least in widths.items())


def kept_columns(problem: Any, device: Device) -> Any:
    """Columns of the saved pre-activations: N, or a few more, so that a kernel writes rows from memory sectors on."""
    p = problem
    if _adapted(p) or torch_multiplies_hidden(p, device):
        return p.N
    return hidden_stride(p.N, p.element_bytes)


def in_place(problem: Any, device: Device, plan: EpiloguePlan) -> bool:
    """Whether dz and dz_gate have the layout of the saved pre-activations, so that the kernel can overwrite these.

    It cannot where torch computes the product, which would overwrite what the kernel is still to read.
    """
    p, tiles = problem, None if plan.gradient is None else plan.gradient.tiles
    if tiles is None or not tiles.block_inner:
        return False
    if _adapted(p):
        return True
    joined = p.gated and gradients_joined(p.M, p.N, p.element_bytes)
    return not joined and kept_columns(p, device) == hidden_stride(p.N, p.element_bytes)


def _adapted(problem: Any) -> bool:
    """Whether there are adapters: only a kernel that computes the large product can add their products to it."""
    return problem.family != "gemm_gemm"


def _gradient_problem(p: Any, columns: int) -> HiddenGradientProblem:
    return HiddenGradientProblem(
        M=p.M, N=columns, O=p.O, dtype=p.dtype, activation=p.activation, gated=p.gated, dropout=p.dropout,
        bias=p.needs_bias_gradient,
    )  # fmt: skip


def why_unsupported(problem: Any, device: Device) -> str | None:
    """Why the path cannot run ``problem``, or None."""
    if problem.recompute is True:
        return "it keeps pre-activations, which recompute=True forbids"
    return problem.why_no_kernels(device)


def why_generic(problem: Any, device: Device) -> str | None:
    """Why the warp-specialised kernels do not run ``problem``, or None."""
    if device.backend == GENERIC:
        return "only the warp-specialised kernels were measured, and they do not run here"
    if problem.K % VECTOR or problem.N % VECTOR or problem.O % VECTOR:
        return f"only the warp-specialised kernels were measured; their widths are multiples of {VECTOR}"
    if problem.generic:
        return f"only the warp-specialised kernels were measured; they cannot copy {problem.generic} as it lies"
    return None
