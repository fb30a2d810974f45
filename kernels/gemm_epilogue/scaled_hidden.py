"""The hidden from 8-bit operands with scales, and its gradient, on Hopper."""

from typing import Any

import torch

from ..dropout import NO_DROPOUT, Dropout
from ..float8 import E4M3
from ..hopper import ALIGNMENT, Matrix, Scaled, untransposed
from ..launching import Launch, prepared
from ..matmul import sm90
from ..matmul.arithmetic import Arithmetic, Named
from ..matmul.low_rank import LowRank
from ..tuning import EpiloguePipeline

_READABLE = "only the left operand of a low-rank product can be unreadable, and that is contiguous"


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
    low_rank: LowRank | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """(H, Z, Zg) ``[M, N]`` of ``dtype``, contiguous; Z, and Zg with a gate, only to ``keep``.

    Rows of x's values ``[M, K]`` and of the weights' ``[N, K]`` begin at multiples of 16 bytes; N is a multiple of 8.
    Products of 8-bit values are summed in the tensor core, which keeps about 14 bits of a sum. ``low_rank`` has 16
    bits, and is added to these sums. The rest is as in :func:`hidden`.

    If the scales are words (int32), H is in 8 bits: see ``kernels.bounds``.

    Raises ValueError if TMA cannot read an operand or write a result, or if a bias is not contiguous.
    """

    gate, gate_scale = (None, None) if w_gate is None else w_gate
    added = None if low_rank is None else low_rank.divided(x.scale, w_up.scale, gate_scale, 0).copied(False)

    def prepare() -> Launch:
        left, up = scaled_matrix("x", x), scaled_matrix("w_up", w_up)
        other = None if w_gate is None else scaled_matrix("w_gate", w_gate)
        columns = up.rows
        if columns * dtype.itemsize % ALIGNMENT:
            raise ValueError(f"w_up has {columns} rows, and so many {dtype} are to be a multiple of 16 bytes")
        for name, bias in {"b_up": b_up, "b_gate": b_gate}.items():
            if bias is not None and bias.stride(0) != 1:
                raise ValueError(f"{name} has a stride of {bias.stride(0)}, and is to be contiguous")
        how = Arithmetic.of(arithmetic)
        launch = sm90.prepare_hidden(left, up, other, columns, keep, how, pipeline, dropout, added)
        assert launch is not None, _READABLE
        return launch

    in_8_bits = x.scale.dtype == torch.int32
    launch = prepared(ready, ("scaled hidden", keep, dtype, in_8_bits), prepare)
    found = x.values.new_empty(x.values.shape[0], w_up.values.shape[0], dtype=E4M3 if in_8_bits else dtype)
    kept = torch.empty_like(found, dtype=dtype) if keep else None
    kept_gate = torch.empty_like(found, dtype=dtype) if keep and w_gate is not None else None
    factors = (None, None, None) if added is None else added[:3]
    launch((
        x.values, w_up.values, gate, found, kept, kept_gate, *factors, b_up, b_gate, dropout.seed, None, None, x.scale,
        w_up.scale, gate_scale,
    ))  # fmt: skip
    return found, kept, kept_gate


def scaled_hidden_gradient(
    dy: Scaled,
    w_down: Scaled,
    z: torch.Tensor,
    z_gate: torch.Tensor | None,
    keep_hidden: bool,
    arithmetic: Named,
    pipeline: EpiloguePipeline,
    dropout: Dropout = NO_DROPOUT,
    ready: dict[Any, Any] | None = None,
    low_rank: LowRank | None = None,
    added: torch.Tensor | None = None,
    units: torch.Tensor | None = None,
    hidden_rows: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """(dZ, dZg, H) ``[M, N]`` of Z's dtype, contiguous; dZg with a gate, and H, with dropout, to ``keep_hidden``.

    Rows of dy's values ``[M, O]``, and of w_down's, transposed to ``[N, O]``, begin at multiples of 16 bytes. Z and Zg
    ``[M, N]`` are contiguous, and N is a multiple of 8. ``low_rank`` and ``added`` are as in :func:`hidden_gradient`.

    With ``units`` ``[N]``, the words of the inverses of all norms, and ``hidden_rows`` ``[M]``, the inverses of the
    scales of H's rows, all results are in 8 bits, dZg beside dZ: ``[M, 2 N]``, and None. See ``kernels.bounds``.

    Raises ValueError if TMA cannot read an operand or write a result.
    """

    product = None if low_rank is None else low_rank.divided(dy.scale, w_down.scale, None, 1).copied(True)
    in_8_bits, (rows, columns) = units is not None, z.shape
    stride = 2 * columns if in_8_bits and z_gate is not None else columns

    def prepare() -> Launch:
        left, right, first = scaled_matrix("dy", dy), scaled_matrix("w_down", w_down), scaled_matrix("z", z)
        gate = None if z_gate is None else scaled_matrix("z_gate", z_gate)
        launch = sm90.prepare_hidden_gradient(
            left, right._replace(transposed=True), first, gate, (stride, columns), keep_hidden, False,
            Arithmetic.of(arithmetic), pipeline, dropout, product,
        )  # fmt: skip
        assert launch is not None, _READABLE
        return launch

    launch = prepared(ready, ("scaled hidden gradient", keep_hidden, in_8_bits), prepare)
    both = z.new_empty(rows, stride, dtype=E4M3) if in_8_bits else None
    if both is None:
        dz, d_gate = torch.empty_like(z), None if z_gate is None else torch.empty_like(z)
    else:
        dz, d_gate = both[:, :columns], None if z_gate is None else both[:, columns:]
    hidden = torch.empty_like(z, dtype=E4M3 if in_8_bits else z.dtype) if keep_hidden else None
    factors = (None, None) if product is None else product[:2]
    launch((
        dy.values, w_down.values, z, z_gate, dz, d_gate, hidden, *factors, None, dropout.seed, added, None, None, None,
        None, dy.scale, w_down.scale, units, hidden_rows,
    ))  # fmt: skip
    return (dz, d_gate, hidden) if both is None else (both, None, hidden)


def scaled_matrix(name: str, operand: torch.Tensor | Scaled) -> Matrix:
    """The operand as TMA sees it."""
    found = untransposed(operand)
    if found is None:
        values = operand.values if isinstance(operand, Scaled) else operand
        layout = tuple(values.shape), values.stride()
        raise ValueError(f"{name} has shape and strides {layout}, and rows are to begin at multiples of 16 bytes")
    return found
