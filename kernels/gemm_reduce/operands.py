"""What a call of these kernels is made of: its tensors, its arithmetic, and the arguments that all kernels share."""

from dataclasses import dataclass
from typing import Any

import torch

from ..activations import activate, exact_exp, through_activation
from ..device import tl, triton
from ..launching import lines, vector_unit
from ..tiles import add_product, in_units, load_vector, product, strides_in_units

OPERATIONS = ("sum", "mean", "max", "min", "absmax", "sumsq", "logsumexp")


@triton.jit
def load_block(
    base_ptr, rows, cols, stride_row, stride_col, row_limit, col_limit, EVEN_ROWS: tl.constexpr,
    EVEN_COLS: tl.constexpr,
):  # fmt: skip
    """The tile ``[rows, cols]`` of a matrix, zero outside its limits; an even axis has no tile that reaches past it."""
    offsets = rows.to(tl.int64)[:, None] * stride_row + cols.to(tl.int64)[None, :] * stride_col
    if EVEN_ROWS and EVEN_COLS:
        return tl.load(base_ptr + offsets)
    elif EVEN_ROWS:
        return tl.load(base_ptr + offsets, mask=(cols < col_limit)[None, :], other=0.0)
    elif EVEN_COLS:
        return tl.load(base_ptr + offsets, mask=(rows < row_limit)[:, None], other=0.0)
    else:
        inside = (rows < row_limit)[:, None] & (cols < col_limit)[None, :]
        return tl.load(base_ptr + offsets, mask=inside, other=0.0)


@triton.jit
def operand_in_units(strides, rows, TRANSPOSED: tl.constexpr, UNIT: tl.constexpr):
    """The strides of an operand, and its number of rows, as :meth:`ReduceOperands.units` describes them."""
    stride_z, stride_row, stride_col = strides_in_units(strides, TRANSPOSED, UNIT)
    if TRANSPOSED:
        rows = in_units(rows, UNIT)
    return stride_z, stride_row, stride_col, rows


@triton.jit
def entry_rows(batch, lengths_ptr, offsets_ptr, stride_lengths, stride_offsets, R):
    """(first row in memory, rows that may take part, rows there are) of the reduced side of one batch entry."""
    if offsets_ptr is not None:
        first = tl.load(offsets_ptr + batch * stride_offsets).to(tl.int64)
        rows = (tl.load(offsets_ptr + (batch + 1) * stride_offsets).to(tl.int64) - first).to(tl.int32)
        taking = rows
    else:
        first = batch * 0
        rows = R
        taking = R
    if lengths_ptr is not None:
        taking = tl.minimum(tl.load(lengths_ptr + batch * stride_lengths).to(tl.int32), taking)
    return first, taking, rows


@triton.jit
def scores(
    row_ptr, col_ptr, rows, cols, stride_row, stride_row_k, stride_col, stride_col_k, row_limit, col_limit, zero,
    K: tl.constexpr, BLOCK_K: tl.constexpr, EVEN_ROWS: tl.constexpr, EVEN_COLS: tl.constexpr,
    INPUT_PRECISION: tl.constexpr,
):  # fmt: skip
    """The tile of products of rows of two matrices in float32, ``BLOCK_K`` of their inner dimension at once.

    Of float32 it takes 32, as the forward pass does: exponentials and slopes of a product that was rounded in another
    order would not be those of the result.
    """
    if K <= BLOCK_K:
        inner = tl.arange(0, BLOCK_K)
        left = load_block(row_ptr, rows, inner, stride_row, stride_row_k, row_limit, K, EVEN_ROWS, K == BLOCK_K)
        right = load_block(col_ptr, inner, cols, stride_col_k, stride_col, K, col_limit, K == BLOCK_K, EVEN_COLS)
        return product(left, right, INPUT_PRECISION)
    else:
        SINGLE: tl.constexpr = row_ptr.dtype.element_ty == tl.float32
        STEP: tl.constexpr = 32 if SINGLE and BLOCK_K > 32 else BLOCK_K
        EVEN_K: tl.constexpr = K % STEP == 0
        z = tl.zeros([rows.shape[0], cols.shape[0]], tl.float32)
        for k in tl.range(0, K, STEP):
            inner = k + tl.arange(0, STEP)
            left = load_block(row_ptr, rows, inner, stride_row, stride_row_k, row_limit, K, EVEN_ROWS, EVEN_K)
            right = load_block(col_ptr, inner, cols, stride_col_k, stride_col, K, col_limit, EVEN_K, EVEN_COLS)
            z = add_product(z, left, right, zero, INPUT_PRECISION)
        return z


@triton.jit
def exponential(x, ACCURACY: tl.constexpr):
    """exp(x); 0 at -inf."""
    if ACCURACY == "exact":
        return tl.where(x < -104.0, 0.0, exact_exp(x))
    else:
        return tl.exp(x)


@triton.jit
def gradient_weights(z, g, result, OP: tl.constexpr, ACTIVATION: tl.constexpr, ACCURACY: tl.constexpr):
    """W of ``backward``, from a tile of the product with its biases; ``g`` and ``result`` broadcast to it."""
    c, slope = activate(z, ACTIVATION, ACCURACY)
    if OP == "logsumexp":
        w = g * exponential(c - result, ACCURACY)
    elif OP == "sumsq":
        w = g * (2.0 * c)
    else:
        w = tl.zeros(z.shape, tl.float32) + g
    if ACTIVATION != "identity":
        w = through_activation(w, slope, z, ACTIVATION)
    return w


@triton.jit
def add_biases(z, rows, cols, row_bias_ptr, col_bias_ptr, stride_row_bias, stride_col_bias, row_limit, col_limit):
    """``z`` with the biases that there are, of its rows and of its columns."""
    if row_bias_ptr is not None:
        z += load_vector(row_bias_ptr, rows, stride_row_bias, row_limit)[:, None]
    if col_bias_ptr is not None:
        z += load_vector(col_bias_ptr, cols, stride_col_bias, col_limit)[None, :]
    return z


@dataclass(frozen=True)
class ReduceArithmetic:
    """What is computed, besides the tensors: names that the kernels of one call share.

    ``op`` is one of ``OPERATIONS``, ``activation`` one of ``activations.ACTIVATIONS``; ``input_precision`` goes to
    every ``tl.dot``; ``accuracy`` is "exact" or "half" (a sum of many values would show the errors of "coarse").
    """

    op: str
    activation: str
    input_precision: str
    accuracy: str

    @property
    def names(self) -> tuple[str, str, str]:
        """(activation, accuracy, input precision) as kernels take them: one compile-time argument."""
        return self.activation, self.accuracy, self.input_precision


# Not frozen: to set the fields of a frozen one takes three times as long, in every call.
@dataclass(slots=True, eq=False)
class ReduceOperands:
    """The tensors of one call, checked: kept ``[Z, P, K]``, reduced ``[Z, R, K]``, or packed ``[T, K]`` with offsets.

    A batch stride of 0 shares a matrix. kept_bias ``[P]``, reduced_bias ``[R]``; mask bool ``[Z, R]`` of any strides;
    lengths int32 ``[Z]``; offsets int32 ``[Z + 1]``: the rows of entry z are ``offsets[z] … offsets[z + 1]``. Packed
    rows have neither a mask nor a reduced_bias.

    ``ready`` belongs to one prepared call: see ``gemm_gemm.Operands``. Gradients of the result are aligned.
    """

    kept: torch.Tensor
    reduced: torch.Tensor
    kept_bias: torch.Tensor | None
    reduced_bias: torch.Tensor | None
    mask: torch.Tensor | None
    lengths: torch.Tensor | None
    offsets: torch.Tensor | None
    arithmetic: ReduceArithmetic
    ready: dict[Any, Any] | None = None

    def sizes(self) -> tuple[int, int, int, int]:
        """Z, P, R, K; of packed rows R is T, the most that an entry can have."""
        batch, kept, width = self.kept.shape
        return batch, kept, self.reduced.shape[-2], width

    @property
    def whole(self) -> bool:
        """Whether every batch entry has all R rows in its loop: no lengths, no packed rows."""
        return self.lengths is None and self.offsets is None

    def pointers(self) -> tuple[torch.Tensor | None, ...]:
        """The operands, in the order of the kernels' signatures."""
        mask = None if self.mask is None else self.mask.view(torch.uint8)
        return self.kept, self.reduced, self.kept_bias, self.reduced_bias, mask, self.lengths, self.offsets

    def strides(self) -> tuple[tuple[int, ...], ...]:
        """Strides of kept, reduced, biases, the mask, lengths and offsets, in the order of the kernels' signatures."""
        reduced = self.reduced.stride() if self.reduced.dim() == 3 else (0, *self.reduced.stride())
        mask = (0, 0) if self.mask is None else self.mask.stride()
        vectors = (self.kept_bias, self.reduced_bias, self.lengths, self.offsets)
        kept_bias, reduced_bias, lengths, offsets = (0 if v is None else v.stride(0) for v in vectors)
        return self.kept.stride(), reduced, (kept_bias, reduced_bias), mask, (lengths, offsets)

    def units(self) -> tuple[bool, int, bool, int]:
        """Whether kept lies transposed in memory, and in units of how many elements (``tiles.in_units``); the same of
        reduced."""
        found: list[bool | int] = []
        for tensor in (self.kept, self.reduced):
            transposed, sizes = lines(tensor)
            found += [transposed, vector_unit(tensor, *sizes)]
        return tuple(found)  # type: ignore[return-value]

    def taking(self) -> torch.Tensor | None:
        """Which rows take part, bool ``[Z, R]``, or None where all of them do; not of packed rows."""
        if self.lengths is None:
            return self.mask
        within = torch.arange(self.reduced.shape[-2], device=self.kept.device) < self.lengths.unsqueeze(-1)
        return within if self.mask is None else within & self.mask

    def counts(self) -> torch.Tensor:
        """How many rows take part in each entry, float32 ``[Z]``: what mean divides by."""
        batch, _, reduced, _ = self.sizes()
        if self.mask is not None:
            taking = self.taking()
            assert taking is not None
            return taking.sum(-1, dtype=torch.float32)
        if self.offsets is not None:
            rows = self.offsets.diff()
            rows = rows if self.lengths is None else torch.minimum(rows, self.lengths)
        elif self.lengths is not None:
            rows = self.lengths.clamp(0, reduced)
        else:
            return torch.full((batch,), reduced, dtype=torch.float32, device=self.kept.device)
        return rows.to(torch.float32)
