"""Arguments of ``ffn``: their checks, the planning problem, and which operands the measured kernels can read."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...kernels.hopper import ALIGNMENT, matrix, untransposed
from ...planning import Problem
from ..call import PLAIN_TENSORS, call_facts, observed, traced, transformed, wants_gradient
from ..operands import describe_tensor
from ..options import checked_number
from ..shapes import Shapes, check_absent

_PLAIN = frozenset({*PLAIN_TENSORS, type(None)})
_NAMES = ("x", "w_up", "w_down", "w_gate", "b_up", "b_gate")
_MATRICES = 4
# Layers of up to this width run in the fused kernels, whose launches check every operand themselves.
_NARROW = 256

_LAYER = "x: *B M? K, w_up: N K, w_down: O N, b_up?: N, b_down?: O, w_gate?: N K, b_gate?: N"
_SPARSE = "x w_up w_down w_gate"
_FFN = Shapes(f"{_LAYER}, residual?: *B M? O, dropout_seed?: seed(1)", f"{_SPARSE} residual")
_LORA_FFN = Shapes(
    f"{_LAYER}, up_a?: R_up K, up_b?: N R_up, down_a?: R_down N, down_b?: O R_down, gate_a?: R_gate K, "
    "gate_b?: N R_gate, dropout_seed?: seed(1)",
    _SPARSE,
)


def check_ffn(tensors: Sequence[Any]) -> None:
    """Checks the tensors of ``ffn``."""
    _FFN.check(*tensors)
    w_gate, b_gate = tensors[5:7]
    if w_gate is None:
        check_absent("b_gate", b_gate, "w_gate is None")


def check_lora_ffn(tensors: Sequence[Any]) -> None:
    """Checks the tensors of ``lora_ffn``: an adapter has both factors and a rank, and only a gate has the gate's."""
    _LORA_FFN.check(*tensors)
    w_gate, b_gate, *factors = tensors[5:13]
    for name, a, b in zip(("up", "down", "gate"), factors[::2], factors[1::2], strict=True):
        if (a is None) != (b is None):
            missing, given = ("a", "b") if a is None else ("b", "a")
            raise ValueError(f"{name}_{missing} must be given with {name}_{given}: an adapter has both")
        if a is not None and not a.shape[0]:
            raise ValueError(f"{describe_tensor(f'{name}_a', a)}: expected a rank of at least 1")
    if w_gate is None:
        check_absent("b_gate", b_gate, "w_gate is None")
        check_absent("gate_a", factors[4], "w_gate is None")


def checked_dropout(name: str, probability: Any) -> float:
    """Checks for a probability in [0, 1): at 1 the scale 1 / (1 - p) is infinite."""
    return checked_number(name, probability, "a number in [0, 1)", lambda number: 0 <= number < 1)


def check_recompute(recompute: bool | int | str) -> None:
    """Checks for ``"auto"``, ``True``, ``False``, or a number of bytes."""
    if isinstance(recompute, int):
        # 0 and 1 equal False and True, but a budget of 0 bytes would mean the opposite of False.
        if isinstance(recompute, bool) or recompute > 1:
            return
    elif recompute == "auto":
        return
    raise ValueError(f'recompute must be "auto", True, False or an int of bytes above 1, got {recompute!r}')


def ffn_problem(
    x: Tensor,
    w_up: Tensor,
    w_down: Tensor,
    b_up: Tensor | None = None,
    b_down: Tensor | None = None,
    w_gate: Tensor | None = None,
    b_gate: Tensor | None = None,
    *,
    activation: str,
    dropout_p: float,
    recompute: bool | int | str,
    residual: Tensor | None = None,
) -> Problem:
    """The planning problem of one ``ffn`` call, its leading dims flattened into rows."""
    budget = None if isinstance(recompute, (bool, str)) else recompute
    return Problem(
        operation="ffn",
        batch=1,
        M=math.prod(x.shape[:-1]),
        K=x.shape[-1],
        N=w_up.shape[0],
        O=w_down.shape[0],
        activation=activation,
        gated=w_gate is not None,
        dropout=dropout_p > 0,
        needs_data_gradient=wants_gradient(x),
        needs_weight_gradient=wants_gradient(w_up, w_down, b_up, w_gate, b_gate),
        needs_bias_gradient=wants_gradient(b_up, b_gate),
        recompute=recompute if isinstance(recompute, (bool, str)) else "auto",
        saved_limit=budget,
        compiled=traced(),
        generic=generic_operand(x, w_up, w_down, b_up, w_gate, b_gate),
        **call_facts(x, w_up, w_down, b_up, b_down, w_gate, b_gate, residual),
    )


def generic_operand(
    x: Tensor,
    w_up: Tensor,
    w_down: Tensor,
    b_up: Tensor | None = None,
    w_gate: Tensor | None = None,
    b_gate: Tensor | None = None,
) -> str:
    """The name of the first operand of a wide FFN that only generic kernels can read, or an empty string.

    Not checked for narrow layers, nor for tensors of traces and transforms, which have no address.
    """
    if type(x) not in PLAIN_TENSORS or x.is_nested or not (sizes := x.shape) or sizes[-1] <= _NARROW:
        return ""
    if observed() or transformed():
        return ""
    operands = (x, w_up, w_down, w_gate, b_up, b_gate)
    if not _PLAIN.issuperset(map(type, operands)):
        return ""
    for position, tensor in enumerate(operands):
        # Layouts without strides, and scalars, are judged elsewhere.
        if tensor is None or tensor.layout is not torch.strided or tensor.is_nested or not tensor.dim():
            continue
        if tensor.is_contiguous() and (position >= _MATRICES or tensor.data_ptr() % ALIGNMENT == 0):
            continue
        if position >= _MATRICES or not (_readable_weight(tensor) if position else _readable(tensor)):
            return _NAMES[position]
    # One kernel reads both in one pass, in one layout.
    if w_gate is not None and _transposed(w_gate) != _transposed(w_up):
        return "w_gate"
    return ""


def _transposed(weight: Tensor) -> bool:
    return weight.layout is torch.strided and weight.dim() == 2 and weight.stride(1) != 1


def _readable_weight(weight: Tensor) -> bool:
    """Whether TMA can read it, as it is or transposed."""
    return weight.dim() == 2 and matrix(weight) is not None


def _readable(x: Tensor) -> bool:
    """Whether TMA can read it, a matrix or a batch of rows."""
    if x.dim() == 2:
        return untransposed(x) is not None
    try:
        flat = x.view(-1, x.shape[-1])
    except RuntimeError:
        # Without a view as rows it is copied before any kernel reads it.
        return True
    return untransposed(flat) is not None
