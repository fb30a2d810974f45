"""Float32 partial sums, added up in a fixed order and rounded once: no atomics, the same bits every time.

An epilogue (bias, activation) is applied to a sum before it is rounded.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from .activations import activated
from .device import tl, triton
from .launching import Launch, ceil_div, prepared
from .tiles import load_vector, wait_for_previous_grid


class ReduceBlocks(NamedTuple):
    """``block`` sums per program, ``splits`` partials at a time: many loads in flight hide the memory latency."""

    block: int = 128
    splits: int = 32
    num_warps: int = 4


class Epilogue(NamedTuple):
    """``act(sum + bias)`` of a single output ``[rows, columns]``; ``bias`` ``[columns]`` may have any stride."""

    bias: torch.Tensor | None
    columns: int
    activation: str
    accuracy: str


_NO_EPILOGUE = Epilogue(None, 1, "identity", "exact")
_BLOCKS = ReduceBlocks()


@triton.jit
def _total(partials_ptr, index, end, splits, SPLITS: tl.constexpr, BLOCK: tl.constexpr):
    """The sums over ``splits`` rows of ``end`` partials each, at the columns ``index``."""
    total = tl.zeros([BLOCK], tl.float32)
    for first in range(0, splits, SPLITS):
        split = first + tl.arange(0, SPLITS)
        offsets = split.to(tl.int64)[:, None] * end + index[None, :]
        inside = (split < splits)[:, None] & (index < end)[None, :]
        total += tl.sum(tl.load(partials_ptr + offsets, mask=inside, other=0.0), 0)
    return total


@triton.jit(do_not_specialize=["splits", "other_splits"])
def _reduce_partials_kernel(
    partials_ptr, bias_ptr, out_0_ptr, out_1_ptr, out_2_ptr, out_3_ptr, out_4_ptr, out_5_ptr,
    other_partials_ptr, other_out_ptr, stride_b, columns, ends, splits, other_splits,
    SPLITS: tl.constexpr, BLOCK: tl.constexpr, ACTIVATION: tl.constexpr, ACCURACY: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    # A row of the partials has the outputs one after another; ``ends`` has the end of each, and of the other output.
    wait_for_previous_grid(DEPENDENT)
    end_0, end_1, end_2, end_3, end_4, end_5, other_end = ends
    program = tl.program_id(0)
    if other_partials_ptr is not None:
        # Programs past those of the first partials reduce the other ones.
        behind = program - tl.cdiv(end_5, BLOCK)
        if behind >= 0:
            index = behind.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
            total = _total(other_partials_ptr, index, other_end, other_splits, SPLITS, BLOCK)
            tl.store(other_out_ptr + index, total.to(other_out_ptr.dtype.element_ty), mask=index < other_end)
            return
    index = program.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    total = _total(partials_ptr, index, end_5, splits, SPLITS, BLOCK)
    if bias_ptr is not None:
        total += load_vector(bias_ptr, index % columns, stride_b, columns)
    if ACTIVATION != "identity":
        total = activated(total, ACTIVATION, ACCURACY)
    total = total.to(out_0_ptr.dtype.element_ty)
    tl.store(out_0_ptr + index, total, mask=index < end_0)
    if out_1_ptr is not None:
        tl.store(out_1_ptr + (index - end_0), total, mask=(index >= end_0) & (index < end_1))
    if out_2_ptr is not None:
        tl.store(out_2_ptr + (index - end_1), total, mask=(index >= end_1) & (index < end_2))
    if out_3_ptr is not None:
        tl.store(out_3_ptr + (index - end_2), total, mask=(index >= end_2) & (index < end_3))
    if out_4_ptr is not None:
        tl.store(out_4_ptr + (index - end_3), total, mask=(index >= end_3) & (index < end_4))
    if out_5_ptr is not None:
        tl.store(out_5_ptr + (index - end_4), total, mask=(index >= end_4) & (index < end_5))


def reduce_partials(
    partials: torch.Tensor,
    outputs: list[torch.Tensor],
    epilogue: Epilogue = _NO_EPILOGUE,
    blocks: ReduceBlocks = _BLOCKS,
    dependent: bool = False,
    other: tuple[torch.Tensor, torch.Tensor] | None = None,
    ready: dict[Any, Any] | None = None,
) -> None:
    """Sum ``partials [splits, total]`` over the splits into up to six contiguous outputs, one rounding each.

    An ``epilogue`` requires a single output. ``dependent``: the previous kernel, which writes the partials, lets this
    one start early. ``other``: partials of any number of splits, and the output ``[columns]`` of their sums; reducing
    them here saves a launch. ``ready`` caches the prepared launch for calls that differ in addresses only.
    """

    def prepare() -> Launch:
        other_end, other_splits = (0, 0) if other is None else (other[0].shape[1], other[0].shape[0])
        bias = epilogue.bias
        ends = list(itertools.accumulate([output.numel() for output in outputs]))
        return Launch(
            _reduce_partials_kernel,
            ceil_div(ends[-1], blocks.block) + ceil_div(other_end, blocks.block),
            (
                0 if bias is None else bias.stride(0), epilogue.columns,
                (*ends, *[ends[-1]] * (_OUTPUTS - len(ends)), other_end),
            ),
            (partials.shape[0], other_splits),
            (blocks.splits, blocks.block, epilogue.activation, epilogue.accuracy, dependent),
            blocks.num_warps,
            dependent=dependent,
        )  # fmt: skip

    launch = prepared(ready, "sums", prepare)
    other_partials, other_output = other or (None, None)
    launch((partials, epilogue.bias, *outputs, *_MISSING[len(outputs)], other_partials, other_output))


_OUTPUTS = 6
_MISSING = [(None,) * (_OUTPUTS - count) for count in range(_OUTPUTS + 1)]


def split_size(shapes: Sequence[tuple[int, ...] | None], splits: int) -> int:
    """How many elements the partials of one split have; 0 for a single split, which needs no partials."""
    return sum([math.prod(shape) for shape in shapes if shape is not None]) if splits > 1 else 0


def summed_over_splits(
    like: torch.Tensor,
    shapes: Sequence[tuple[int, ...] | None],
    splits: int,
    fill: Callable[[list[torch.Tensor | None], int], None],
    ready: dict[Any, Any] | None = None,
) -> list[torch.Tensor | None]:
    """Contiguous tensors of these shapes, None for None, in the dtype and on the device of ``like``.

    ``fill(targets, split_size)`` computes them or, with several splits, all partials: those of the first split in the
    targets, those of each further split ``split_size`` elements later. ``ready`` caches the prepared launch for calls
    that differ in addresses only.
    """
    outputs = [None if shape is None else like.new_empty(shape) for shape in shapes]
    if splits == 1:
        fill(outputs, 0)
        return outputs
    sizes, total = [math.prod(shape) for shape in shapes if shape is not None], split_size(shapes, splits)
    # 1D, so that one operation yields the pieces of the first split.
    partials = like.new_empty(splits * total, dtype=torch.float32)
    pieces = iter(partials.split_with_sizes([*sizes, (splits - 1) * total]))
    fill([None if shape is None else next(pieces) for shape in shapes], total)
    found = [output for output in outputs if output is not None]
    reduce_partials(partials.view(splits, total), found, ready=ready)
    return outputs
