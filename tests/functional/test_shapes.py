"""The string that describes the tensors of an operation, and what its errors say."""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor

from fusedlayers.functional.shapes import Shapes

CPU = "and dtype torch.float32 on cpu: expected"
ROWS = "x: *B M? K, w: N K"


def floats(*shapes: tuple[int, ...] | None) -> list[Tensor | None]:
    return [None if shape is None else torch.ones(shape) for shape in shapes]


@pytest.mark.parametrize(
    ("text", "shapes"),
    [
        (ROWS, [(6,), (4, 6)]),
        (ROWS, [(5, 6), (4, 6)]),
        (ROWS, [(2, 3, 5, 6), (4, 6)]),
        (ROWS, [(0, 6), (4, 6)]),
        ("w: N K, b?: N, c?: 2N", [(4, 6), None, (8,)]),
        ("x: *B K, w: V *D K, y: *B V *D", [(5, 6), (7, 2, 3, 6), (5, 7, 2, 3)]),
        ("x: *B K, w: V *D K, y: *B V *D", [(6,), (7, 6), (7,)]),
        ("a: ... M K, b: ... K N", [(2, 1, 5, 6), (3, 6, 4)]),
        ("s: 1 3", [(1, 3)]),
    ],
)
def test_shapes_that_fit(text: str, shapes: list[tuple[int, ...] | None]) -> None:
    Shapes(text).check(*floats(*shapes))


@pytest.mark.parametrize(
    ("text", "shapes", "message"),
    [
        (ROWS, [(), (4, 6)], f"x of shape [] {CPU} [*B, M, K], at least one dimension"),
        (ROWS, [(5, 7), (4, 6)], f"x of shape [5, 7] {CPU} [*B, M, K] with K = 6, as w is [N, K] = [4, 6]"),
        (
            ROWS,
            [(5, 4), (4, 6)],
            f"x of shape [5, 4] {CPU} [*B, M, K] with K = 6, as w is [N, K] = [4, 6], "
            "unless w is meant to be transposed",
        ),
        (
            "v: N, w: N K",
            [(6,), (4, 6)],
            f"w of shape [4, 6] {CPU} [N, K] with N = 6, as v is [N] = [6] (it looks transposed)",
        ),
        ("c: 2N", [(7,)], f"c of shape [7] {CPU} [2 N], where 2 N is even"),
        ("v: N, c: 2N", [(3,), (8,)], f"c of shape [8] {CPU} [2 N] = [6], as v is [N] = [3]"),
        ("s: 1 3", [(2, 3)], f"s of shape [2, 3] {CPU} [1, 3]"),
        ("x: *B K, y: *B K", [(5, 6), (6,)], f"y of shape [6] {CPU} [*B, K] = [5, 6], as x is [*B, K] = [5, 6]"),
    ],
)
def test_what_does_not_fit_is_named(text: str, shapes: list[tuple[int, ...]], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}; and a note$"):
        Shapes(text, note="; and a note").check(*floats(*shapes))


def test_a_word_says_the_dtype() -> None:
    shapes = Shapes("x: *B K, weights: float(*B), index: index(*B)")
    x, weights, index = torch.ones(5, 6), torch.ones(5, dtype=torch.float64), torch.arange(5)
    shapes.check(x, weights, index)
    with pytest.raises(TypeError, match=r"weights of .* torch.int64 on cpu: expected a real floating-point dtype"):
        shapes.check(x, index, index)
    with pytest.raises(TypeError, match=r"index of .* expected torch.int64 or torch.int32"):
        shapes.check(x, weights, weights)
