"""Triton's interpreter with products that round by the place in a tile, as those of some BLAS do.

Which of its elements a library adds up in which order is its own affair: OpenBLAS's kernels for Haswell and Zen round a
row of a tile otherwise than the same row elsewhere, those for processors with AVX-512 do not. Here every element takes
one of two orders, whatever the processor, so that a test which compares bits where none are promised fails anywhere.
The same operands in the same places give the same bits, as everywhere.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from triton.runtime import interpreter


def round_by_position() -> None:
    """Patch ``tl.dot``: forwards along the inner dimension, or backwards, by row and column."""
    multiply = interpreter.InterpreterBuilder.create_dot

    def create_dot(builder: Any, a: Any, b: Any, d: Any, *options: Any) -> Any:
        forwards = multiply(builder, a, b, d, *options)
        turned = (_like(a, a.data[..., ::-1]), _like(b, b.data[..., ::-1, :]))
        backwards = multiply(builder, *turned, d, *options)
        backward = _backward(*forwards.data.shape[-2:])
        return _like(forwards, np.where(backward, backwards.data, forwards.data))

    interpreter.InterpreterBuilder.create_dot = create_dot


def _like(value: Any, data: np.ndarray[Any, Any]) -> Any:
    return interpreter.TensorHandle(np.ascontiguousarray(data), value.dtype)


@functools.cache
def _backward(rows: int, columns: int) -> np.ndarray[Any, Any]:
    """By chance, so that no two rows and no two columns are alike, and always the same."""
    return np.random.default_rng(0).random((rows, columns)) < 0.5
