"""Dropout that is replayed, not stored: whether an element is kept is a pure function of (seed, row, column).

The generator is Philox 4x32 with 7 rounds (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011, the
fewest rounds that pass BigCrush there). Kernels and torch paths draw identical masks, whatever the tiling or chunking,
so that the backward pass needs the seed alone.
"""

from typing import NamedTuple

import torch

from .device import HAS_TRITON, interpreted, tl, triton
from .launching import ceil_div, launch

ROUNDS = 7
_ROUNDS = tl.constexpr(ROUNDS)
_BLOCK = 1024
_MASK_32 = 0xFFFFFFFF


@triton.jit
def is_kept(seed, rows, cols, dropout_p):
    """Whether a hidden element is kept.

    ``seed`` scalar int64, ``rows`` and ``cols`` broadcastable int64 tiles of coordinates, ``dropout_p`` float32.
    """
    zero = (rows + cols).to(tl.int32) * 0
    row_low = (rows + zero).to(tl.int32)
    row_high = ((rows + zero) >> 32).to(tl.int32)
    random, _, _, _ = tl.philox(seed, (cols + zero).to(tl.int32), row_low, row_high, zero, n_rounds=_ROUNDS)
    # 24 bits are exact in float32, so whole numbers compare as the numbers in [0, 1) that they stand for.
    return (random >> 8).to(tl.int32) >= tl.ceil(dropout_p * 16777216.0).to(tl.int32)


@triton.jit
def keep(seed, rows, cols, dropout_p):
    """1.0 where a hidden element is kept, 0.0 where it is dropped; the caller scales what is kept."""
    return tl.where(is_kept(seed, rows, cols, dropout_p), 1.0, 0.0)


@triton.jit
def keep_factor(dropout, rows, cols):
    """What the tile ``[rows, cols]`` of a hidden is multiplied by: the scale where it is kept, else 0.

    ``dropout`` is (pointer to the seed, probability, scale, first row, first column), the last two as in
    :class:`Dropout`.
    """
    rows, cols = rows + dropout[3], cols + dropout[4]
    kept = is_kept(tl.load(dropout[0]), rows.to(tl.int64)[:, None], cols.to(tl.int64)[None, :], dropout[1])
    return tl.where(kept, dropout[2], 0.0)


@triton.jit(do_not_specialize=["first_row", "first_column", "M", "dropout_p"])
def _keep_kernel(seed_ptr, out_ptr, N, first_row, first_column, M, dropout_p, BLOCK: tl.constexpr):
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    kept = keep(tl.load(seed_ptr), first_row + index // N, first_column + index % N, dropout_p)
    tl.store(out_ptr + index, kept.to(out_ptr.dtype.element_ty), mask=index < tl.cast(M, tl.int64) * N)


def probability_and_scale(dropout_p: float) -> tuple[float, float]:
    """The probability, and the factor of what is kept: computed here in float64, as torch does."""
    return dropout_p, 1.0 / (1.0 - dropout_p)


class Dropout(NamedTuple):
    """The dropout of a hidden: the seed of its mask, int64 ``[1]``, and the probability of dropping an element.

    Of a part of a hidden, too: ``place`` is where it begins, a row and a column of the whole.
    """

    seed: torch.Tensor | None = None
    p: float = 0.0
    place: tuple[int, int] = (0, 0)

    def numbers(self) -> tuple[float, float, int, int]:
        """What kernels take beside the seed: the probability, the factor of what is kept, and the place."""
        return *probability_and_scale(self.p), *self.place


NO_DROPOUT = Dropout()


def _multiply_high_low(constant: int, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """High and low 32 bits of ``constant * value``; int64 would overflow, so the constant is taken in 16-bit halves."""
    low_part = (constant & 0xFFFF) * value
    high_part = (constant >> 16) * value + (low_part >> 16)
    return high_part >> 16, ((high_part & 0xFFFF) << 16) | (low_part & 0xFFFF)


def _philox(seed: torch.Tensor, columns: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """First 32-bit word of Philox 4x32 at counter (column, row low, row high, 0), as int64 tensors in [0, 2^32)."""
    word_0, word_1, word_2, word_3 = columns, rows & _MASK_32, rows >> 32, torch.zeros_like(rows)
    key_0, key_1 = seed & _MASK_32, (seed >> 32) & _MASK_32
    for _ in range(ROUNDS):
        high_b, low_b = _multiply_high_low(0xCD9E8D57, word_2)
        high_a, low_a = _multiply_high_low(0xD2511F53, word_0)
        word_0, word_1, word_2, word_3 = high_b ^ word_1 ^ key_0, low_b, high_a ^ word_3 ^ key_1, low_a
        key_0, key_1 = (key_0 + 0x9E3779B9) & _MASK_32, (key_1 + 0xBB67AE85) & _MASK_32
    return word_0


def keep_mask(
    seed: torch.Tensor,
    first_row: int,
    rows: int,
    columns: int,
    dropout_p: float,
    dtype: torch.dtype,
    first_column: int = 0,
) -> torch.Tensor:
    """1 where an element of the hidden is kept, else 0: ``[rows, columns]`` of ``dtype``, from the first ones on.

    ``seed`` int64 ``[1]`` on the device of the result. CUDA tensors take one kernel launch; other devices take integer
    torch operations, with temporaries of 8 bytes an element.
    """
    if seed.is_cuda and HAS_TRITON and not interpreted():
        out = torch.empty(rows, columns, dtype=dtype, device=seed.device)
        launch(
            _keep_kernel,
            ceil_div(max(out.numel(), 1), _BLOCK),
            (seed, out),
            (columns,),
            (first_row, first_column, rows, dropout_p),
            (_BLOCK,),
        )
        return out
    row = torch.arange(first_row, first_row + rows, device=seed.device)[:, None]
    column = torch.arange(first_column, first_column + columns, device=seed.device)[None, :]
    uniform = (_philox(seed, column, row) >> 8).to(torch.float32) * (1.0 / 16777216.0)
    probability = torch.tensor(dropout_p, dtype=torch.float32, device=seed.device)
    return (uniform >= probability).to(dtype)


def draw_seed(device: torch.device) -> torch.Tensor:
    """A fresh seed, int64 ``[1]``, from the device's default generator: ``torch.manual_seed`` rules, no host sync."""
    return torch.randint(2**63 - 1, (1,), dtype=torch.int64, device=device)
