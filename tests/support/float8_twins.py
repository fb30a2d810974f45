"""Calls in 8 bits on a CPU: the float32 model in the place of kernels, on a GPU that is assumed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib import import_module
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from fusedlayers.devices import assumed
from fusedlayers.functional import dispatch, float8, operation
from fusedlayers.functional.ffn import float8 as ffn
from fusedlayers.functional.moe_ffn import epilogue as experts
from fusedlayers.functional.moe_ffn import float8 as expert_weights
from fusedlayers.kernels import gemm_epilogue, grouped_gemm
from fusedlayers.kernels.float8 import Scaled
from fusedlayers.kernels.gemm_epilogue import LowRank
from fusedlayers.planning import float8 as planning
from fusedlayers.planning import moe_ffn_float8 as experts_planning
from fusedlayers.reference import float8 as reference
from tests.support import float8_experts_twins as twins

# Of auto mode here: tests are too small for its own.
LIMITS = planning.Limits(
    least_width=32,
    least_flops=2**15,
    least_launched_flops=2**17,
    least_launched_linear_flops=2**17,
    least_reuse=0,
    least_bounded_reuse=0,
)
EXPERTS_LIMITS = experts_planning.Limits(least_reuse=1, least_reuse_beside_16_bits=1, least_gradient_reuse=0)
HOPPER = {"kind": "cuda", "name": "H100", "architecture": "sm_90", "sms": 132, "triton": True, "backend": "sm90"}


def optimizer_step() -> None:
    """A step of an optimizer, which drops what is kept of weights."""
    torch.optim.SGD([torch.zeros(1, requires_grad=True)]).step()


def quantise_rows(
    x: Tensor, other: Tensor | None = None, ready: Any = None, *, factors: Tensor | None = None,
    norms: Tensor | None = None, weights: Tensor | None = None,
) -> Scaled:  # fmt: skip
    """As the kernel of that name, but rounding to nearest."""
    assert x.stride(1) == 1
    x = x if other is None else torch.cat((x, other), 1)
    x = x if factors is None else x.float() * factors
    if norms is not None:
        torch.linalg.vector_norm(x.float() if weights is None else x.float() * weights, dim=1, out=norms)
    return Scaled(*reference.quantised_rows(x))


def quantise_transposed(
    x: Tensor, other: Tensor | None = None, ready: Any = None, *, weights: Tensor | None = None,
    norms: Tensor | None = None,
) -> Scaled:  # fmt: skip
    """As the kernel of that name, but rounding to nearest."""
    if x.dim() == 3:
        found = [quantise_transposed(each, None if other is None else other[i]) for i, each in enumerate(x)]
        return Scaled(*(torch.stack(parts) for parts in zip(*found, strict=True)))
    given = [each for each in (x, other) if each is not None]
    given = given if weights is None else [each.float() * weights[i, :, None] for i, each in enumerate(given)]
    return quantise_rows(torch.cat(given).T.contiguous(), norms=norms)


def channel_numbers(w_up: Tensor, w_gate: Tensor, ready: Any = None) -> Tensor:
    """As the launcher of that name."""
    norms = torch.cat((w_up, w_gate)).float().norm(dim=0)
    numbers = (norms.view(torch.int32) & 0x7F800000).view(torch.float32).clamp(2.0**-40, 2.0**40)
    return torch.stack((numbers, 1 / numbers))


def transposed_pair(
    left: Scaled, right: Tensor, right_scale: Tensor, ready: Any = None, of_left: Tensor | None = None,
    starts: Tensor | None = None,
) -> tuple[Scaled, Scaled]:  # fmt: skip
    """As the kernels of that name."""
    assert right.stride(1) == 1
    if starts is not None:
        return twins.transposed_pair(left, right, right_scale, starts)
    (values, scale), of_right = reference.transposed_pair(left, right, right_scale)
    return Scaled(values, scale if of_left is None else scale * of_left), Scaled(*of_right)


def word(upper: Tensor, lower: Tensor) -> Tensor:
    """Two numbers as bfloat16, in the bits of one float32."""
    return torch.stack((lower.bfloat16(), upper.bfloat16()), -1).view(torch.float32)[..., 0]


def halves(words: Tensor) -> tuple[Tensor, Tensor]:
    """What :func:`word` was made of."""
    return (words & -65536).view(torch.float32), (words << 16).view(torch.float32)


def unit_table(up: Any, gate: Any, bias: Tensor | None, ready: Any = None) -> Tensor:
    """As the launcher of that name."""
    norms = [reference.unit_norms(each[1][:, None], bias) for each in (up, gate) if each is not None]
    other = norms[-1] if len(norms) == 2 else torch.ones_like(norms[0])
    words = [word(each[0].scale, 1 / norm) for each, norm in zip((up, gate), norms, strict=False)]
    return torch.stack((words[0], words[-1], norms[0], other, word(1 / norms[0], 1 / other), norms[0] * other))


def gradient_units(w_down: Scaled, norms: Tensor, units: Tensor, gated: bool, ready: Any = None) -> Tensor:
    """As the launcher of that name."""
    down = reference.unit_norms(norms[:, None])
    factors = (down * units[3], down * units[2]) if gated else (down,)
    return torch.stack((w_down.scale / down, *factors))


def _row_scales(norms: Tensor, other: Tensor | None, factor: float) -> Tensor:
    return reference.scales_of(norms * factor * (1 if other is None else other)).clamp(max=2.0**120)


def row_table(x: Scaled, norms: Tensor, gated: bool, biased: bool, factor: float, ready: Any = None) -> Tensor:
    """As the launcher of that name."""
    scales = _row_scales(norms + biased, norms if gated else None, factor)
    return torch.stack((word(x.scale, 1 / scales), scales, 1 / scales))


def gradient_rows(dy: Scaled, norms: Tensor, x_norms: Tensor | None, factor: float, ready: Any = None) -> Tensor:
    """As the launcher of that name."""
    scales = _row_scales(norms, x_norms, factor)
    return torch.stack((dy.scale / scales, scales))


def rounded(values: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """The values times factors of their rows and columns, in 8 bits."""
    values = values * rows[:, None] * columns
    return reference.quantised_rows(values, torch.ones_like(rows))[0]


def scaled_product(
    left: Scaled, right: Scaled, bias: Tensor | None, pipeline: Any, dtype: torch.dtype, ready: Any = None,
    low_rank: LowRank | None = None,
) -> Tensor:  # fmt: skip
    """As the launcher of that name."""
    y = reference.scaled_product(left, right)
    added = bias if low_rank is None else plus(bias, low_rank.left, low_rank.right)
    return (y if added is None else y + added).to(dtype)


def plus(bias: Any, left: Tensor, right: Tensor) -> Tensor:
    """The product of ``left``, whose further columns are padding, and ``right``, plus a bias or any other addend."""
    product = left[:, : right.shape[0]].float() @ right.float()
    return product if bias is None else product + bias


def scaled_hidden(
    x: Scaled, w_up: Scaled, b_up: Any, w_gate: Any, b_gate: Any, keep: bool, arithmetic: Any, pipeline: Any,
    dtype: torch.dtype, dropout: Any = None, ready: Any = None, low_rank: LowRank | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:  # fmt: skip
    """As the launcher of that name."""
    dropped = {} if dropout is None else {"dropout_p": dropout.p, "seed": dropout.seed}
    factors: Any = None
    if x.scale.dtype == torch.int32:
        given = [each for each in (x, w_up, w_gate) if each is not None]
        scales, (rows, *columns) = zip(*(halves(each.scale) for each in given), strict=True)
        x, w_up, *gate = (Scaled(each.values, scale) for each, scale in zip(given, scales, strict=True))
        w_gate = gate[0] if gate else None
        factors = rows, columns[0] * columns[-1] if gate else columns[0]
    if low_rank is not None:
        b_up = plus(b_up, low_rank.left, low_rank.right.T)
        if low_rank.other is not None:
            b_gate = plus(b_gate, low_rank.left[:, low_rank.first :], low_rank.other.T)
    made = reference.scaled_hidden(x, w_up, b_up, w_gate, b_gate, activation=arithmetic.activation, **dropped)
    z = [None if each is None or not keep else each.to(dtype) for each in made[1:]]
    return made[0].to(dtype) if factors is None else rounded(made[0], *factors), *z


def scaled_hidden_gradient(
    dy: Scaled, w_down: Scaled, z: Tensor, z_gate: Tensor | None, keep_hidden: bool, arithmetic: Any, pipeline: Any,
    dropout: Any = None, ready: Any = None, low_rank: LowRank | None = None, added: Tensor | None = None,
    units: Tensor | None = None, hidden_rows: Tensor | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:  # fmt: skip
    """As the launcher of that name."""
    dropped = {} if dropout is None else {"dropout_p": dropout.p, "seed": dropout.seed}
    dropped["added"] = added if low_rank is None else plus(added, low_rank.left, low_rank.right)
    dz, d_gate, h = reference.scaled_hidden_gradient(
        dy, w_down, z, z_gate, activation=arithmetic.activation, **dropped
    )  # fmt: skip
    if units is None:
        return dz.to(z.dtype), None if d_gate is None else d_gate.to(z.dtype), h.to(z.dtype) if keep_hidden else None
    assert hidden_rows is not None
    up, gate = halves(units)
    hidden = rounded(h, hidden_rows, up if z_gate is None else up * gate) if keep_hidden else None
    one = torch.ones(len(z), device=z.device)
    if d_gate is None:
        return rounded(dz, one, torch.ones_like(up)), None, hidden
    return torch.cat((rounded(dz, one, gate), rounded(d_gate, one, up)), 1), None, hidden


def column_sums(dy: Tensor, tiles: Any, ready: Any = None, scales: Tensor | None = None) -> Tensor:
    """As the launcher of that name."""
    if scales is None:
        return dy.sum(0, dtype=torch.float32).to(dy.dtype)
    return (dy.float() * scales[:, None]).sum(0)


@contextmanager
def in_8_bits() -> Iterator[Counter[str]]:
    """Inside, calls with a precision run in 8 bits, by the model, and are counted: how often what was quantised."""
    made: Counter[str] = Counter()

    def counted(name: str, function: Any) -> Any:
        def run(*given: Any, **named: Any) -> Any:
            made[name] += 1
            return function(*given, **named)

        return run

    rows, transposed = counted("rows", quantise_rows), counted("transposed", quantise_transposed)
    with ExitStack() as stack:
        stack.enter_context(assumed(**HOPPER))
        for place, name, value in (
            (planning, "LIMITS", LIMITS),
            (float8, "quantise_rows", rows),
            (float8, "quantise_transposed", transposed),
            (float8, "transposed_pair", counted("pairs", transposed_pair)),
            (float8, "channel_numbers", channel_numbers),
            (float8, "unit_table", unit_table),
            (float8, "gradient_units", gradient_units),
            (ffn, "row_table", row_table),
            (ffn, "gradient_rows", gradient_rows),
            (ffn, "quantise_rows", rows),
            (experts, "quantise_rows", rows),
            (experts, "transposed_pair", counted("pairs", transposed_pair)),
            (expert_weights, "quantise_rows", rows),
            (expert_weights, "quantise_transposed", transposed),
            (experts_planning, "LIMITS", EXPERTS_LIMITS),
            (grouped_gemm, "hidden", counted("products", twins.hidden)),
            (grouped_gemm, "product", counted("products", twins.product)),
            (grouped_gemm, "hidden_gradient", counted("gradients", twins.hidden_gradient)),
            (grouped_gemm, "weight_gradient", twins.weight_gradient),
            (grouped_gemm, "scaled_weight_gradient", twins.scaled_weight_gradient),
            (ffn, "column_sums", column_sums),
            # The name in the package is that of the function.
            (import_module("fusedlayers.functional.linear"), "column_sums", column_sums),
            (gemm_epilogue, "scaled_hidden", counted("products", scaled_hidden)),
            (gemm_epilogue, "scaled_product", counted("products", scaled_product)),
            (gemm_epilogue, "scaled_hidden_gradient", counted("gradients", scaled_hidden_gradient)),
        ):
            stack.enter_context(mock.patch.object(place, name, value))
        _forget()
        yield made
    _forget()


def _forget() -> None:
    float8.forget_weights()
    dispatch._cached_plan.cache_clear()
    operation.CALLS.clear()
