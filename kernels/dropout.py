"""Dropout that is replayed, not stored: whether an element is kept is a pure function of (seed, row, column).

The generator is Philox 4x32 with 7 rounds (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011, the
fewest rounds that pass BigCrush there). A draw gives four 32-bit words, or eight 16-bit halves: one for each of the
columns c, c + 8, …, c + 56 of a row in a block of 64 columns, which a tensor core accumulator keeps in the same thread.
A column's half is compared with the upper 16 bits of the drop limit; on a tie, for one element in 65,536, the other
half of its word is compared with the lower 16 bits. Only then do two elements share bits. Kernels and torch paths draw
identical masks whatever the tiling or chunking, so the backward pass needs only the seed.
"""

from collections import namedtuple
from typing import NamedTuple

import torch

from .device import HAS_TRITON, interpreted, tl, triton
from .launching import ceil_div, launch

ROUNDS = 7
# Columns of a block, and draws for each of its rows.
BLOCK_COLUMNS, LANES = 64, 8
# Bits of a word, and so the resolution of the drop probability.
BITS = 32
_ROUNDS = tl.constexpr(ROUNDS)
_BLOCK_COLUMNS, _LANES = tl.constexpr(BLOCK_COLUMNS), tl.constexpr(LANES)
_BLOCK = 1024
# The tile of ``_drop_kernel``, rows and blocks of columns: 16 elements per thread.
_DROP_ROWS, _DROP_BLOCKS = 8, 4
_MASK_32 = 0xFFFFFFFF
# First (row, column) of the masks of an FFN's adapters, which share one seed: no batch has 2**40 rows.
ADAPTER_PLACES = {"up": (0, 0), "gate": (2**40, 0), "down": (2**41, 0)}
# What kernels take of a `Dropout`; nothing is dropped if ``seed_ptr`` is None.
DropoutNumbers = namedtuple("DropoutNumbers", "seed_ptr limit scale row column")


@triton.jit
def words(seed, rows, draws):
    """The four uint32 words of each draw: ``seed`` scalar int64, ``rows`` int64 and ``draws`` int32, broadcastable."""
    zero = (draws * 0 + rows.to(tl.int32) * 0).to(tl.uint32)
    word_0, word_1, word_2, word_3 = draws.to(tl.uint32) + zero, rows.to(tl.uint32) + zero, zero, zero
    word_2 += (rows >> 32).to(tl.uint32)
    key_0, key_1 = seed.to(tl.uint32), (seed >> 32).to(tl.uint32)
    for _ in tl.static_range(_ROUNDS):
        # One 64-bit multiplication gives both halves of the product.
        left, right = word_0.to(tl.uint64) * 0xD2511F53, word_2.to(tl.uint64) * 0xCD9E8D57
        word_0, word_1 = (right >> 32).to(tl.uint32) ^ word_1 ^ key_0, right.to(tl.uint32)
        word_2, word_3 = (left >> 32).to(tl.uint32) ^ word_3 ^ key_1, left.to(tl.uint32)
        key_0 = tl.add(key_0, 0x9E3779B9, sanitize_overflow=False)
        key_1 = tl.add(key_1, 0xBB67AE85, sanitize_overflow=False)
    return word_0, word_1, word_2, word_3


@triton.jit
def swapped(word):
    """The word with its halves swapped, a rotation: one instruction on GPUs."""
    return (word << 16) | (word >> 16)


@triton.jit
def above(word, limit):
    """``word >= limit``, unsigned; the limit arrives as an int32 with the same bits."""
    return word >= limit.to(tl.uint32)


@triton.jit
def keep(seed, rows, cols, limit):
    """1.0 where a hidden element is kept, 0.0 where it is dropped; the caller scales the kept ones.

    ``seed`` scalar int64, ``rows`` and ``cols`` broadcastable int64 tiles of coordinates, ``limit`` as in
    :meth:`Dropout.numbers`. Each element makes its own draw and uses one half of it, so a tile may start anywhere.
    """
    cols = cols.to(tl.int32)
    first, second, third, fourth = words(seed, rows, cols // _BLOCK_COLUMNS * _LANES + cols % _LANES)
    half = cols % _BLOCK_COLUMNS // _LANES
    word = tl.where(half < 4, tl.where(half < 2, first, second), tl.where(half < 6, third, fourth))
    return tl.where(above(tl.where(half % 2 == 0, swapped(word), word), limit), 1.0, 0.0)


@triton.jit
def keep_factor(dropout, rows, cols):
    """The factor for the tile ``[rows, cols]`` of a hidden: the scale where an element is kept, else 0.

    ``dropout`` is a ``DropoutNumbers``.
    """
    rows, cols = rows + dropout.row, cols + dropout.column
    kept = keep(tl.load(dropout.seed_ptr), rows.to(tl.int64)[:, None], cols.to(tl.int64)[None, :], dropout.limit)
    return kept * dropout.scale


@triton.jit(do_not_specialize=["first_row", "first_column", "M", "limit"])
def _keep_kernel(seed_ptr, out_ptr, N, first_row, first_column, M, limit, BLOCK: tl.constexpr):
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    kept = keep(tl.load(seed_ptr), first_row + index // N, first_column + index % N, limit)
    tl.store(out_ptr + index, kept.to(out_ptr.dtype.element_ty), mask=index < tl.cast(M, tl.int64) * N)


@triton.jit(do_not_specialize=["M", "limit", "scale", "first_row"])
def _drop_kernel(
    seed_ptr, values_ptr, out_ptr, stride_m, N, M, limit, scale, first_row, ROWS: tl.constexpr, BLOCKS: tl.constexpr
):  # fmt: skip
    column_tiles = tl.cdiv(N, BLOCKS * _BLOCK_COLUMNS)
    row_tile, column_tile = tl.program_id(0) // column_tiles, tl.program_id(0) % column_tiles
    rows = row_tile.to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    draws = column_tile * (BLOCKS * _LANES) + tl.arange(0, BLOCKS * _LANES)[None, :]
    first, second, third, fourth = words(tl.load(seed_ptr), first_row + rows, draws)
    # One bit per half of a draw.
    bits = above(swapped(first), limit).to(tl.int32) | above(first, limit).to(tl.int32) << 1
    bits |= above(swapped(second), limit).to(tl.int32) << 2 | above(second, limit).to(tl.int32) << 3
    bits |= above(swapped(third), limit).to(tl.int32) << 4 | above(third, limit).to(tl.int32) << 5
    bits |= above(swapped(fourth), limit).to(tl.int32) << 6 | above(fourth, limit).to(tl.int32) << 7
    # With vectorised loads a thread has neighbouring columns, of eight draws: gather their bits from other threads.
    inner = tl.arange(0, BLOCKS * _BLOCK_COLUMNS)[None, :]
    drawn = tl.broadcast_to(inner // _BLOCK_COLUMNS * _LANES + inner % _LANES, [ROWS, BLOCKS * _BLOCK_COLUMNS])
    kept = tl.gather(bits, drawn, 1) >> (inner % _BLOCK_COLUMNS // _LANES) & 1
    cols = column_tile.to(tl.int64) * (BLOCKS * _BLOCK_COLUMNS) + inner
    inside = (rows < M) & (cols < N)
    values = tl.load(values_ptr + rows * stride_m + cols, mask=inside).to(tl.float32)
    dropped = values * tl.where(kept != 0, scale, 0.0)
    tl.store(out_ptr + rows * N + cols, dropped.to(out_ptr.dtype.element_ty), mask=inside)


def limit_and_scale(dropout_p: float) -> tuple[int, float]:
    """(limit, scale): elements whose word is below the limit are dropped, kept ones are multiplied by the scale.

    The limit is the probability rounded to 32 bits, at least 1 unless the probability is 0 and at most 2³² - 1; it is
    returned as an int32 with the same bits. The scale belongs to the rounded probability, so that the expectation is
    that of no dropout; it is 0 for a probability of 1.
    """
    limit = min(max(round(dropout_p * 2**BITS), dropout_p > 0), 2**BITS - 1)
    scale = 2**BITS / (2**BITS - limit) if dropout_p < 1 else 0.0
    return limit - (limit >> (BITS - 1) << BITS), scale


class Dropout(NamedTuple):
    """The dropout of a hidden: the seed of its mask, int64 ``[1]``, and the probability of dropping an element.

    For a part of a hidden, ``place`` is the row and column of the whole at which the part begins.
    """

    seed: torch.Tensor | None = None
    p: float = 0.0
    place: tuple[int, int] = (0, 0)

    def numbers(self) -> tuple[int, float, int, int]:
        """(limit, scale, first row, first column): the kernel arguments besides the seed."""
        return *limit_and_scale(self.p), *self.place

    @property
    def in_whole_draws(self) -> bool:
        """Whether the hidden starts at a block of columns: then tiles of whole blocks use every half of their draws."""
        return self.place[1] % BLOCK_COLUMNS == 0


NO_DROPOUT = Dropout()


def _multiply_high_low(constant: int, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """High and low 32 bits of ``constant * value``; int64 would overflow, so the constant is taken in 16-bit halves."""
    low_part = (constant & 0xFFFF) * value
    high_part = (constant >> 16) * value + (low_part >> 16)
    return high_part >> 16, ((high_part & 0xFFFF) << 16) | (low_part & 0xFFFF)


def _philox(seed: torch.Tensor, draws: torch.Tensor, rows: torch.Tensor) -> list[torch.Tensor]:
    """The words of Philox 4x32 at counter (draw, row low, row high, 0), as int64 tensors in [0, 2^32)."""
    word_0, word_1, word_2, word_3 = draws, rows & _MASK_32, rows >> 32, torch.zeros_like(rows)
    key_0, key_1 = seed & _MASK_32, (seed >> 32) & _MASK_32
    for _ in range(ROUNDS):
        high_b, low_b = _multiply_high_low(0xCD9E8D57, word_2)
        high_a, low_a = _multiply_high_low(0xD2511F53, word_0)
        word_0, word_1, word_2, word_3 = high_b ^ word_1 ^ key_0, low_b, high_a ^ word_3 ^ key_1, low_a
        key_0, key_1 = (key_0 + 0x9E3779B9) & _MASK_32, (key_1 + 0xBB67AE85) & _MASK_32
    return [word_0, word_1, word_2, word_3]


def keep_mask(
    seed: torch.Tensor,
    first_row: int,
    rows: int,
    columns: int,
    dropout_p: float,
    dtype: torch.dtype,
    first_column: int = 0,
) -> torch.Tensor:
    """The mask ``[rows, columns]`` in ``dtype`` from ``first_row`` and ``first_column`` on: 1 where kept, else 0.

    ``seed`` int64 ``[1]`` on the device of the result. CUDA tensors take one kernel launch; other devices take integer
    torch operations, with temporaries of about 8 bytes for each element. So do calls that torch traces or transforms:
    these need to see every operation, and no in-place one.
    """
    limit, _ = limit_and_scale(dropout_p)
    smallest_kept = limit & _MASK_32
    # torch.jit.trace records torch operations only, and sizes are tensors there.
    read = _read_by_torch(seed) or torch._C._get_tracing_state() is not None
    if not read and seed.is_cuda and HAS_TRITON and not interpreted():
        out = torch.empty(rows, columns, dtype=dtype, device=seed.device)
        launch(
            _keep_kernel,
            ceil_div(max(out.numel(), 1), _BLOCK),
            (seed, out),
            (columns,),
            (first_row, first_column, rows, limit),
            (_BLOCK,),
        )
        return out
    # A quarter at a time, or less if there are few columns: only whole blocks can be drawn, and most would be unused.
    step = rows
    if not read:
        whole = BLOCK_COLUMNS * max(1, _blocks(first_column, columns))
        step = max(1, rows * columns // (4 * whole))
    if step is rows or step >= rows:
        return (_drawn(seed, first_row, rows, first_column, columns) >= smallest_kept).to(dtype)
    out = torch.empty(rows, columns, dtype=dtype, device=seed.device)
    for start in range(0, rows, step):
        part = out[start : start + step]
        part.copy_(_drawn(seed, first_row + start, part.shape[0], first_column, columns) >= smallest_kept)
    return out


def _read_by_torch(seed: torch.Tensor) -> bool:
    """Whether torch.compile, make_fx or a transform of torch.func traces the operations on ``seed``."""
    if type(seed) is not torch.Tensor or torch._C._are_functorch_transforms_active():
        return True
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY) is not None


def _blocks(first_column: int, columns: int) -> int:
    """The number of blocks that these columns touch."""
    return ceil_div(first_column + columns, BLOCK_COLUMNS) - first_column // BLOCK_COLUMNS


def _drawn(seed: torch.Tensor, first_row: int, rows: int, first_column: int, columns: int) -> torch.Tensor:
    """The words ``[rows, columns]`` of these elements, in [0, 2^32), by integer torch operations."""
    row = torch.arange(first_row, first_row + rows, device=seed.device)[:, None]
    first = first_column // BLOCK_COLUMNS
    last = first + _blocks(first_column, columns)
    draw = torch.arange(first * LANES, last * LANES, device=seed.device)[None, :]
    words = [each for word in _philox(seed, draw, row) for each in (((word & 0xFFFF) << 16) | (word >> 16), word)]
    # [rows, blocks, lanes] of every half -> [rows, blocks × halves × lanes], the order of the columns.
    drawn = torch.stack([each.unflatten(1, (-1, LANES)) for each in words], dim=2).flatten(1)
    skipped = first_column - first * BLOCK_COLUMNS
    return drawn[:, skipped : skipped + columns]


def drop(
    values: torch.Tensor, seed: torch.Tensor, dropout_p: float, first_row: int = 0, out: torch.Tensor | None = None
) -> torch.Tensor:
    """``values`` ``[M, N]`` after dropout, contiguous, by one kernel: the mask is never written to memory.

    float16, bfloat16 or float32; rows of any stride. ``seed`` int64 ``[1]`` on the same device. The first row of
    ``values`` is row ``first_row`` of the mask. ``out`` may be ``values`` itself if that is contiguous.
    """
    if values.stride(1) != 1:
        values = values.contiguous()
    rows, columns = values.shape
    if out is None:
        out = torch.empty(rows, columns, dtype=values.dtype, device=values.device)
    launch(
        _drop_kernel,
        ceil_div(rows, _DROP_ROWS) * ceil_div(columns, _DROP_BLOCKS * BLOCK_COLUMNS),
        (seed, values, out),
        (values.stride(0), columns),
        (rows, *limit_and_scale(dropout_p), first_row),
        (_DROP_ROWS, _DROP_BLOCKS),
    )
    return out


def draw_seed(device: torch.device) -> torch.Tensor:
    """A fresh seed, int64 ``[1]``, from the device's default generator: follows ``torch.manual_seed``, no host sync."""
    return torch.randint(2**63 - 1, (1,), dtype=torch.int64, device=device)


def adapter_places(shared: bool) -> dict[str, tuple[int, int]]:
    """``ADAPTER_PLACES``; ``shared``: gate and up projection share one mask."""
    return ADAPTER_PLACES | ({"gate": ADAPTER_PLACES["up"]} if shared else {})
