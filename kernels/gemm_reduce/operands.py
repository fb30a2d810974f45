"""What a call of these kernels is made of: its tensors, its arithmetic, and the arguments that all kernels share."""

from dataclasses import dataclass
from typing import Any

import torch

from ..activations import activate, exact_exp, through_activation
from ..device import tl, triton
from ..launching import lines, vector_unit
from ..matmul.generic.epilogues import add_bias
from ..matmul.generic.operands import strides
from ..tiles import add_product, in_units, load_tile, load_vector, product, strides_in_units

OPERATIONS = ("sum", "mean", "max", "min", "absmax", "sumsq", "logsumexp")


@triton.jit
def operand_in_units(strides, rows, TRANSPOSED: tl.constexpr, UNIT: tl.constexpr):
    """The strides of an operand, and its number of rows, as :meth:`ReduceOperands.units` describes them."""
    stride_z, stride_row, stride_col = strides_in_units(strides, TRANSPOSED, UNIT)
    if TRANSPOSED:
        rows = in_units(rows, UNIT)
    return stride_z, stride_row, stride_col, rows


@triton.jit
def entry_rows(batch, lengths_ptr, offsets_ptr, strides, R):
    """(first row in memory, rows that may take part, rows there are) of the reduced side of one batch entry."""
    if offsets_ptr is not None:
        first = tl.load(offsets_ptr + batch * strides[1]).to(tl.int64)
        rows = (tl.load(offsets_ptr + (batch + 1) * strides[1]).to(tl.int64) - first).to(tl.int32)
    else:
        first = batch * 0
        rows = R
    taking = rows
    if lengths_ptr is not None:
        taking = tl.minimum(tl.load(lengths_ptr + batch * strides[0]).to(tl.int32), taking)
    return first, taking, rows


@triton.jit
def let_in(mask_ptr, strides, batch, rows, taking):
    """Which of the reduced rows ``taking`` part the mask lets in; all of them without a mask."""
    if mask_ptr is not None:
        at = mask_ptr + batch.to(tl.int64) * strides[0] + rows.to(tl.int64) * strides[1]
        taking = tl.load(at, mask=taking, other=0) != 0
    return taking


@triton.jit
def scores(
    left, right, rows, cols, zero, K: tl.constexpr, BLOCK_K: tl.constexpr, EVEN_ROWS: tl.constexpr,
    EVEN_COLS: tl.constexpr, INPUT_PRECISION: tl.constexpr,
):  # fmt: skip
    """The tile of products of rows of two matrices in float32, ``BLOCK_K`` of their inner dimension at once.

    Of float32 it takes 32, as the forward pass does: exponentials and slopes of a product that was rounded in another
    order would not be those of the result.
    """
    SINGLE: tl.constexpr = left.ptr.dtype.element_ty == tl.float32
    STEP: tl.constexpr = 32 if SINGLE and BLOCK_K > 32 and K > BLOCK_K else BLOCK_K
    EVEN_K: tl.constexpr = K % STEP == 0
    z = tl.zeros([rows.shape[0], cols.shape[0]], tl.float32)
    for k in tl.range(0, K, STEP):
        inner = k + tl.arange(0, STEP)
        a = load_tile(left.ptr, rows, inner, left.stride_row, left.stride_inner, left.rows, K, EVEN_ROWS, EVEN_K)
        b = load_tile(right.ptr, inner, cols, right.stride_inner, right.stride_row, K, right.rows, EVEN_K, EVEN_COLS)
        if K <= BLOCK_K:
            z = product(a, b, INPUT_PRECISION)
        else:
            z = add_product(z, a, b, zero, INPUT_PRECISION)
    return z


@triton.jit
def exponential(x, ACCURACY: tl.constexpr):
    """exp(x); 0 at -inf."""
    if ACCURACY == "exact":
        return tl.where(x < -104.0, 0.0, exact_exp(x))
    else:
        return tl.exp(x)


@triton.jit
def of_kept_rows(ptr, first, rows, P, AXIS: tl.constexpr):
    """Numbers of some kept rows, of an entry that begins at ``first``; they broadcast along ``AXIS`` of a tile."""
    return tl.expand_dims(tl.load(ptr + first + rows, mask=rows < P, other=0.0), AXIS)


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
def add_biases(z, rows, cols, row_bias, col_bias):
    """``z`` with the biases that there are, of its rows and of its columns."""
    if row_bias.ptr is not None:
        z += load_vector(row_bias.ptr, rows, row_bias.stride, row_bias.columns)[:, None]
    return add_bias(z, col_bias, 0, cols)


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
        biases = strides(self.kept_bias, 1) + strides(self.reduced_bias, 1)
        entries = strides(self.lengths, 1) + strides(self.offsets, 1)
        return self.kept.stride(), strides(self.reduced, 3), biases, strides(self.mask, 2), entries

    def units(self) -> tuple[bool, int, bool, int]:
        """Whether kept lies transposed in memory, and in units of how many elements (``tiles.in_units``); the same of
        reduced."""
        (kept_transposed, kept_sizes), (transposed, sizes) = lines(self.kept), lines(self.reduced)
        return kept_transposed, vector_unit(self.kept, *kept_sizes), transposed, vector_unit(self.reduced, *sizes)

    def taking(self) -> torch.Tensor | None:
        """Which rows take part, bool ``[Z, R]``, or None where all of them do; not of packed rows."""
        if self.lengths is None:
            return self.mask
        within = torch.arange(self.reduced.shape[-2], device=self.kept.device) < self.lengths.unsqueeze(-1)
        return within if self.mask is None else within & self.mask

    def counts(self) -> torch.Tensor:
        """How many rows take part in each entry, float32 ``[Z]``: what mean divides by."""
        batch, _, reduced, _ = self.sizes()
        if self.mask is not None and (taking := self.taking()) is not None:
            return taking.sum(-1, dtype=torch.float32)
        if self.whole:
            return torch.full((batch,), reduced, dtype=torch.float32, device=self.kept.device)
        if self.offsets is None:
            assert self.lengths is not None
            return self.lengths.clamp(0, reduced).to(torch.float32)
        rows = self.offsets.diff()
        return (rows if self.lengths is None else torch.minimum(rows, self.lengths)).to(torch.float32)
