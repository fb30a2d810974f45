"""The hidden from 8-bit operands with scales, on Hopper; with the identity as its activation, their product."""

from typing import Any

import torch

from ..dropout import NO_DROPOUT, Dropout
from ..hopper import ALIGNMENT, Scaled, untransposed
from ..launching import Launch, prepared
from ..matmul import sm90
from ..matmul.arithmetic import Named
from ..tuning import EpiloguePipeline


def scaled_hidden(
    x: Scaled,
    w_up: Scaled,
    b_up: torch.Tensor | None,
    w_gate: Scaled | None,
    b_gate: torch.Tensor | None,
    keep: bool,
    arithmetic: Named,
    pipeline: EpiloguePipeline,
    dtype: torch.dtype,
    dropout: Dropout = NO_DROPOUT,
    ready: dict[Any, Any] | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """(H, Z, Zg) ``[M, N]`` of ``dtype``, contiguous; Z, and Zg with a gate, only to ``keep``.

    Rows of x's values ``[M, K]`` and of the weights' ``[N, K]`` begin at multiples of 16 bytes; N is a multiple of 8.
    Products of 8-bit values are summed in the tensor core, which keeps about 14 bits of a sum. The rest is as in
    :func:`hidden`.

    Raises ValueError if TMA cannot read an operand or write a result, or if a bias is not contiguous.
    """
    launch = prepared(
        ready, ("scaled hidden", keep, dtype), _prepare, x, w_up, b_up, w_gate, b_gate, keep, arithmetic, pipeline,
        dtype, dropout,
    )  # fmt: skip
    found = x.values.new_empty(x.values.shape[0], w_up.values.shape[0], dtype=dtype)
    kept = torch.empty_like(found) if keep else None
    kept_gate = torch.empty_like(found) if keep and w_gate is not None else None
    gate, gate_scale = (None, None) if w_gate is None else w_gate
    launch((
        x.values, w_up.values, gate, found, kept, kept_gate, None, None, None, b_up, b_gate, dropout.seed, None, None,
        x.scale, w_up.scale, gate_scale,
    ))  # fmt: skip
    return found, kept, kept_gate


def _prepare(
    x: Scaled,
    w_up: Scaled,
    b_up: torch.Tensor | None,
    w_gate: Scaled | None,
    b_gate: torch.Tensor | None,
    keep: bool,
    arithmetic: Named,
    pipeline: EpiloguePipeline,
    dtype: torch.dtype,
    dropout: Dropout,
) -> Launch:
    given = {"x": x, "w_up": w_up, "w_gate": w_gate}
    matrices = {name: None if each is None else untransposed(each) for name, each in given.items()}
    for name, operand in given.items():
        if operand is not None and matrices[name] is None:
            layout = tuple(operand.values.shape), operand.values.stride()
            raise ValueError(f"{name} has shape and strides {layout}, and rows are to begin at multiples of 16 bytes")
    columns = w_up.values.shape[0]
    if columns * dtype.itemsize % ALIGNMENT:
        raise ValueError(f"w_up has {columns} rows, and so many {dtype} are to be a multiple of 16 bytes")
    for name, bias in {"b_up": b_up, "b_gate": b_gate}.items():
        if bias is not None and bias.stride(0) != 1:
            raise ValueError(f"{name} has a stride of {bias.stride(0)}, and is to be contiguous")
    left, up = matrices["x"], matrices["w_up"]
    assert left is not None
    assert up is not None
    launch = sm90.prepare_hidden(
        left, up, matrices["w_gate"], columns, keep, arithmetic.activation, arithmetic.accuracy, pipeline, dropout, None
    )
    assert launch is not None, "without a product of low rank"
    return launch
