"""The epilogue path of an FFN: activations, gate and bias gradients in the epilogues of products, of any width.

Where torch's product was measured faster, a kernel for what follows it takes the place of an epilogue. The forward pass
keeps the pre-activations, where torch keeps them, the activated ones and, gated, their product.
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
from .call import VECTOR, Facts, no_kernels
from .devices import Device
from .hidden_gradient import HiddenGradientPlan, HiddenGradientProblem, epilogue_text


@dataclass(frozen=True)
class EpiloguePlan:
    """The tiles of the kernels; no gradient without one that goes through the hidden.

    ``data_gradient_pipeline`` is there where dx is summed over groups of hidden units: on the chunked path alone, and
    where no kernel does that, torch's product does.
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

    Measured of layers without adapters in 16 bits. It depends on the layer alone: a compiler that does not know the
    number of tokens asks, too.
    """
    p, figures = problem, device.preferences
    if figures is None or _adapted(p) or not p.format.narrow:
        return False
    few_units = not p.gated and figures.few_units_width <= p.K and 2 * p.N <= p.K
    return few_units or _starts_unevenly(p.K, figures.uneven_from)


def torch_multiplies_gradient(problem: Any, device: Device) -> bool:
    """The same of the hidden's gradient."""
    p, figures = problem, device.preferences
    pipeline = hidden_gradient.epilogue_pipeline("hidden_gradient", p, device)
    if figures is None or pipeline is None or _adapted(p):
        return False
    wide = figures.wide_gradient_from <= p.O
    few_tiles = math.prod(pipeline.tiles(p.M, p.N)) <= figures.few_tiles[wide] * device.sms
    return few_tiles or _starts_unevenly(p.O, figures.uneven_gradient_from)


def _starts_unevenly(width: int, widths: Mapping[int, int]) -> bool:
    """Whether rows are at least as wide as one of ``widths``, and start at no multiple of its number of elements."""
    return any(least <= width and width % elements > 0 for elements, least in widths.items())


def kept_columns(problem: Any, device: Device) -> Any:
    """Columns of the kept pre-activations: as many as hidden units or, unless torch computes them, a few more."""
    p = problem
    if _adapted(p) or torch_multiplies_hidden(p, device):
        return p.N
    return hidden_stride(p.N, p.element_bytes)


def in_place(problem: Any, device: Device, plan: EpiloguePlan) -> bool:
    """Whether dz and dz_gate lie in memory of their own as the pre-activations do, whose place they can take then.

    Torch's product does not fill the place of what is still to be read.
    """
    p, tiles = problem, None if plan.gradient is None else plan.gradient.tiles
    if tiles is None or not tiles.block_inner:
        return False
    if _adapted(p):
        return True
    joined = p.gated and gradients_joined(p.M, p.N, p.element_bytes)
    return not joined and kept_columns(p, device) == hidden_stride(p.N, p.element_bytes)


def _adapted(problem: Any) -> bool:
    """Whether products of adapters are to join those of an FFN, which happens within one kernel alone."""
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
    return no_kernels(problem, device)


def why_generic(problem: Any, device: Device) -> str | None:
    """Why the warp-specialised kernels do not run ``problem``, or None."""
    if device.backend == GENERIC:
        return "only the warp-specialised kernels were measured, and they do not run here"
    if problem.K % VECTOR or problem.N % VECTOR or problem.O % VECTOR:
        return f"only the warp-specialised kernels were measured; their widths are multiples of {VECTOR}"
    if problem.generic:
        return f"only the warp-specialised kernels were measured; they cannot copy {problem.generic} as it lies"
    return None
