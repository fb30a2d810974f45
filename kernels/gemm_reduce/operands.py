"""The tensors and the arithmetic of a call, the kernel arguments that follow from them, and shared device functions."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from ..activations import activate, exact_exp, through_activation
from ..device import tl, triton
from ..launching import lines, vector_unit
from ..matmul.arithmetic import Constants
from ..matmul.generic.epilogues import add_bias
from ..matmul.generic.operands import strides
from ..tiles import add_product, assume_aligned, assume_multiple, load_tile, load_vector, product

OPERATIONS = ("sum", "mean", "max", "min", "absmax", "sumsq", "logsumexp")


class Strides(NamedTuple):
    """The strides of the operands: ``bias`` of kept_bias and reduced_bias, ``entries`` of lengths and offsets."""

    kept: tuple[int, ...]
    reduced: tuple[int, ...]
    bias: tuple[int, ...]
    mask: tuple[int, ...]
    entries: tuple[int, ...]


class Layouts(NamedTuple):
    """Whether kept and reduced are transposed in memory, and their alignment hints: see ``tiles.assume_multiple``."""

    kept_transposed: bool
    kept_unit: int
    reduced_transposed: bool
    reduced_unit: int


@triton.jit
def aligned_operand(strides, rows, TRANSPOSED: tl.constexpr, UNIT: tl.constexpr):
    """(the strides of an operand, its number of rows) with the hints of :class:`Layouts`."""
    stride_z, stride_row, stride_col = assume_aligned(strides, TRANSPOSED, UNIT)
    if TRANSPOSED:
        rows = assume_multiple(rows, UNIT)
    return stride_z, stride_row, stride_col, rows


@triton.jit
def entry_rows(batch, lengths_ptr, offsets_ptr, strides, R):
    """(first row in memory, active rows, all rows) of the reduced side of one batch entry.

    Rows past the length of an entry are not active: no reduction includes them.
    """
    if offsets_ptr is not None:
        first = tl.load(offsets_ptr + batch * strides[1]).to(tl.int64)
        rows = (tl.load(offsets_ptr + (batch + 1) * strides[1]).to(tl.int64) - first).to(tl.int32)
    else:
        first = batch * 0
        rows = R
    active = rows
    if lengths_ptr is not None:
        active = tl.minimum(tl.load(lengths_ptr + batch * strides[0]).to(tl.int32), active)
    return first, active, rows


@triton.jit
def unmasked(mask_ptr, strides, batch, rows, active):
    """Which of the ``active`` reduced rows the mask includes; all of them without a mask."""
    if mask_ptr is not None:
        at = mask_ptr + batch.to(tl.int64) * strides[0] + rows.to(tl.int64) * strides[1]
        active = tl.load(at, mask=active, other=0) != 0
    return active


@triton.jit
def scores(
    left, right, rows, cols, zero, K: tl.constexpr, BLOCK_K: tl.constexpr, EVEN_ROWS: tl.constexpr,
    EVEN_COLS: tl.constexpr, INPUT_PRECISION: tl.constexpr,
):  # fmt: skip
    """The tile of products of rows of two matrices in float32, in steps of ``BLOCK_K`` of their inner dimension.

    float32 operands take steps of 32 in every pass: exponentials and slopes of a product that is summed in another
    order would differ from those of the forward pass.
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
    """Values of some kept rows of the entry that begins at ``first``; they broadcast along ``AXIS`` of a tile."""
    return tl.expand_dims(tl.load(ptr + first + rows, mask=rows < P, other=0.0), AXIS)


@triton.jit
def gradient_weights(z, g, result, OP: tl.constexpr, ARITHMETIC: tl.constexpr):
    """W of ``backward``, from a tile of the product with its biases; ``g`` and ``result`` broadcast to it."""
    ACTIVATION: tl.constexpr = ARITHMETIC.activation
    ACCURACY: tl.constexpr = ARITHMETIC.accuracy
    c, slope = activate(z, ACTIVATION, ACCURACY)
    if OP == "logsumexp":
        w = g * exponential(c - result, ACCURACY)
    elif OP == "sumsq":
        w = g * (2.0 * c)
    else:
        w = tl.zeros(z.shape, tl.float32) + g
    if ACTIVATION != "identity":
        w = through_activation(w, slope, z, ARITHMETIC)
    return w


@triton.jit
def add_biases(z, rows, cols, row_bias, col_bias):
    """``z`` plus the biases of its rows and of its columns, if there are any."""
    if row_bias.ptr is not None:
        z += load_vector(row_bias.ptr, rows, row_bias.stride, row_bias.columns)[:, None]
    return add_bias(z, col_bias, 0, cols)


@dataclass(frozen=True)
class ReduceArithmetic:
    """Everything but the tensors that the result depends on.

    ``op`` is one of ``OPERATIONS``, ``activation`` one of ``activations.ACTIVATIONS``; ``input_precision`` goes to
    every ``tl.dot``; ``accuracy`` is "exact" or "half" (a sum of many values would show the errors of "coarse").
    """

    op: str
    activation: str
    input_precision: str
    accuracy: str

    @property
    def constants(self) -> Constants:
        """What kernels are compiled for, besides ``op``."""
        return Constants(self.activation, self.accuracy, self.input_precision)


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
        """Whether all R rows of every batch entry are active: no lengths, no packed rows."""
        return self.lengths is None and self.offsets is None

    def pointers(self) -> tuple[torch.Tensor | None, ...]:
        """The operands, in the order of the kernels' signatures."""
        mask = None if self.mask is None else self.mask.view(torch.uint8)
        return self.kept, self.reduced, self.kept_bias, self.reduced_bias, mask, self.lengths, self.offsets

    def strides(self) -> Strides:
        """The strides of all operands."""
        biases = strides(self.kept_bias, 1) + strides(self.reduced_bias, 1)
        entries = strides(self.lengths, 1) + strides(self.offsets, 1)
        return Strides(self.kept.stride(), strides(self.reduced, 3), biases, strides(self.mask, 2), entries)

    def layouts(self) -> Layouts:
        """The layouts of kept and reduced."""
        (kept_transposed, kept_sizes), (transposed, sizes) = lines(self.kept), lines(self.reduced)
        units = vector_unit(self.kept, *kept_sizes), vector_unit(self.reduced, *sizes)
        return Layouts(kept_transposed, units[0], transposed, units[1])

    def taking(self) -> torch.Tensor | None:
        """Which rows are reduced, bool ``[Z, R]``, or None if all of them are; not for packed rows."""
        if self.lengths is None:
            return self.mask
        within = torch.arange(self.reduced.shape[-2], device=self.kept.device) < self.lengths.unsqueeze(-1)
        return within if self.mask is None else within & self.mask

    def counts(self) -> torch.Tensor:
        """How many rows of each entry are reduced, float32 ``[Z]``: mean divides by it."""
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
