"""Checks of the arguments of ``gemm_reduce``."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..operands import describe_tensor, leading_dims
from ..options import checked_choice, checked_flag
from ..shapes import Shapes

# Each op -> the one that kernels compute; an argmax is the index of a maximum.
OPERATIONS = {
    "sum": "sum", "mean": "mean", "max": "max", "min": "min", "absmax": "absmax", "sumsq": "sumsq",
    "logsumexp": "logsumexp", "argmax": "max", "argmin": "min",
}  # fmt: skip
INDEXED = ("max", "min", "absmax")
ATOMIC = ("sum", "mean", "sumsq")

_SHAPES = Shapes("a: ... M K, b: ... K N, mask?: mask(*mask), lengths?: integer(*lengths), bias?: N", sparse="a b")


def check_gemm_reduce(tensors: Sequence[Any], options: tuple[Any, ...]) -> None:
    """Checks every argument but the activation."""
    a, b, mask, lengths, _ = tensors
    op, dim, _, return_indices, return_product, atomic = options
    _SHAPES.check(*tensors)
    checked_choice("op", op, OPERATIONS)
    if type(dim) is not int or dim not in (-2, -1):
        raise ValueError(f"dim must be -2 (over M) or -1 (over N), got {dim!r}")
    reduced, letter = (a.shape[-2], "M") if dim == -2 else (b.shape[-1], "N")
    batch = tuple(leading_dims(a, b))
    _check_broadcasts_to("mask", mask, (*batch, reduced), f"[*B, {letter}]")
    _check_broadcasts_to("lengths", lengths, batch, "[*B]")
    for name, value in (("return_indices", return_indices), ("return_product", return_product), ("atomic", atomic)):
        checked_flag(name, value)
    if return_indices and op not in INDEXED:
        alone = "; argmax and argmin return indices alone" if op.startswith("arg") else ""
        raise ValueError(f"return_indices=True: expected op to be one of {', '.join(INDEXED)}, got {op!r}{alone}")
    if atomic and op not in ATOMIC:
        raise ValueError(f"atomic=True: expected op to be one of {', '.join(ATOMIC)}, got {op!r}")
    if atomic and torch.are_deterministic_algorithms_enabled():
        raise RuntimeError(
            "gemm_reduce with atomic=True adds in no fixed order, and torch.use_deterministic_algorithms(True) is set; "
            "atomic=False is deterministic"
        )
    if reduced == 0 and OPERATIONS[op] in INDEXED:
        described = f"{describe_tensor('a', a)}, {describe_tensor('b', b)}"
        raise ValueError(f"{described}: expected {letter} > 0, as the {op} of no elements does not exist")


def _check_broadcasts_to(name: str, tensor: Tensor | None, shape: tuple[int, ...], letters: str) -> None:
    if tensor is None:
        return
    sizes = zip(reversed(tensor.shape), reversed(shape), strict=False)
    if tensor.dim() > len(shape) or any(size not in (1, most) for size, most in sizes):
        described = describe_tensor(name, tensor)
        raise ValueError(f"{described}: expected a shape that broadcasts to {letters} = {list(shape)}")
