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
from fusedlayers.kernels import gemm_epilogue
from fusedlayers.kernels.float8 import Scaled
from fusedlayers.kernels.gemm_epilogue import LowRank
from fusedlayers.planning import float8 as planning
from fusedlayers.reference import float8 as reference

# Of auto mode here: tests are too small for its own.
LIMITS = planning.Limits(least_width=32, least_flops=(2**15, 2**15), least_reuse=0)
HOPPER = {"kind": "cuda", "name": "H100", "architecture": "sm_90", "sms": 132, "triton": True, "backend": "sm90"}


def quantise_rows(x: Tensor, other: Tensor | None = None, ready: Any = None) -> Scaled:
    """As the kernel of that name, but rounding to nearest."""
    assert x.stride(1) == 1
    return Scaled(*reference.quantised_rows(x if other is None else torch.cat((x, other), 1)))


def quantise_transposed(x: Tensor, other: Tensor | None = None, ready: Any = None) -> Scaled:
    """As the kernel of that name, but rounding to nearest."""
    return Scaled(*reference.quantised_rows((x if other is None else torch.cat((x, other))).T))


def transposed_pair(left: Scaled, right: Tensor, right_scale: Tensor, ready: Any = None) -> tuple[Scaled, Scaled]:
    """As the kernels of that name."""
    assert right.stride(1) == 1
    of_left, of_right = reference.transposed_pair(left, right, right_scale)
    return Scaled(*of_left), Scaled(*of_right)


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
    if low_rank is not None:
        b_up = plus(b_up, low_rank.left, low_rank.right.T)
        if low_rank.other is not None:
            b_gate = plus(b_gate, low_rank.left[:, low_rank.first :], low_rank.other.T)
    made = reference.scaled_hidden(x, w_up, b_up, w_gate, b_gate, activation=arithmetic.activation, **dropped)
    h, *z = (None if each is None else each.to(dtype) for each in made)
    assert h is not None
    return (h, *z) if keep else (h, None, None)


def scaled_hidden_gradient(
    dy: Scaled, w_down: Scaled, z: Tensor, z_gate: Tensor | None, keep_hidden: bool, arithmetic: Any, pipeline: Any,
    dropout: Any = None, ready: Any = None, low_rank: LowRank | None = None, added: Tensor | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:  # fmt: skip
    """As the launcher of that name."""
    dropped = {} if dropout is None else {"dropout_p": dropout.p, "seed": dropout.seed}
    dropped["added"] = added if low_rank is None else plus(added, low_rank.left, low_rank.right)
    made = reference.scaled_hidden_gradient(dy, w_down, z, z_gate, activation=arithmetic.activation, **dropped)
    dz, d_gate, h = (None if each is None else each.to(z.dtype) for each in made)
    assert dz is not None
    return dz, d_gate, h if keep_hidden else None


def column_sums(dy: Tensor, *_: Any) -> Tensor:
    """As the launcher of that name."""
    return dy.sum(0, dtype=torch.float32).to(dy.dtype)


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
            (ffn, "quantise_rows", rows),
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
