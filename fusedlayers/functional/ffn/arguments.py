"""Arguments of ``ffn``: their checks, the planning problem, and which operands the measured kernels can read."""

import math

import torch
from torch import Tensor

from ...kernels.hopper import ALIGNMENT, matrix, untransposed
from ...planning import Problem
from ..call import PLAIN_TENSORS, call_facts, observed, traced, transformed, wants_gradient
from ..operands import check_given, check_layout, check_shape, check_tensors, check_width, said

_PLAIN = frozenset({*PLAIN_TENSORS, type(None)})
_NAMES = ("x", "w_up", "w_down", "w_gate", "b_up", "b_gate")
_MATRICES = 4
# Layers of up to this width run in the fused kernels, whose launches check every operand themselves.
_NARROW = 256


def check_ffn(
    x: Tensor,
    w_up: Tensor,
    w_down: Tensor,
    b_up: Tensor | None,
    b_down: Tensor | None,
    w_gate: Tensor | None,
    b_gate: Tensor | None,
    dropout_p: float,
    recompute: bool | int | str,
    residual: Tensor | None,
) -> None:
    """Checks every argument but the activation and the seed."""
    check_given(x=x, w_up=w_up, w_down=w_down)
    check_tensors(
        {
            "x": x, "w_up": w_up, "w_down": w_down, "b_up": b_up, "b_down": b_down,
            "w_gate": w_gate, "b_gate": b_gate, "residual": residual,
        },
        sparse=("x", "w_up", "w_down", "w_gate", "residual"),
    )  # fmt: skip
    if x.dim() < 1:
        raise ValueError(f"{said('x', x)}: expected [*B, M, K], at least one dimension")
    if w_up.dim() != 2:
        raise ValueError(f"{said('w_up', w_up)}: expected [N, K], nn.Linear's layout")
    hidden, width = w_up.shape
    check_width("x", x, "[*B, M, K]", "w_up", w_up)
    if w_down.dim() != 2 or w_down.shape[1] != hidden:
        hint = " (it looks transposed)" if w_down.dim() == 2 and w_down.shape[0] == hidden else ""
        raise ValueError(
            f"{said('w_down', w_down)}: expected [O, N] with N = {hidden}, the rows of w_up {list(w_up.shape)}{hint}"
        )
    out = w_down.shape[0]
    check_shape("b_up", b_up, (hidden,), "[N]", "as w_up has N rows")
    check_shape("b_down", b_down, (out,), "[O]", "as w_down has O rows")
    check_shape("w_gate", w_gate, (hidden, width), "[N, K]", "as w_up")
    if b_gate is not None and w_gate is None:
        raise ValueError(f"{said('b_gate', b_gate)}: expected None, because w_gate is None")
    check_shape("b_gate", b_gate, (hidden,), "[N]", "as w_gate has N rows")
    check_shape("residual", residual, (*x.shape[:-1], out), "[*B, M, O]", "as the result")
    check_dropout("dropout_p", dropout_p)
    check_recompute(recompute)


def check_dropout(name: str, probability: float) -> None:
    """Checks for a probability in [0, 1): at 1 the scale 1 / (1 - p) is infinite."""
    if isinstance(probability, bool) or not isinstance(probability, (int, float)):
        raise TypeError(f"{name} must be a float in [0, 1), got {probability!r}")
    if not 0 <= probability < 1:
        raise ValueError(f"{name} must be in [0, 1), got {probability!r}")


def check_dropout_seed(x: Tensor, seed: Tensor | None) -> None:
    """Checks for None, or one int64 on the device of x."""
    if seed is None:
        return
    if not isinstance(seed, Tensor):
        raise TypeError(f"dropout_seed must be a torch.Tensor or None, got {type(seed).__name__}")
    check_layout("dropout_seed", seed)
    if seed.dtype != torch.int64:
        raise TypeError(f"{said('dropout_seed', seed)}: expected dtype torch.int64")
    if seed.shape != (1,):
        raise ValueError(f"{said('dropout_seed', seed)}: expected [1]")
    if isinstance(x, Tensor) and seed.device != x.device:
        raise ValueError(f"{said('dropout_seed', seed)}: expected the device of x, {x.device}")


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
