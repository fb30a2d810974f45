"""Checks of the arguments of ``gemm_reduce``."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..operands import check_given, check_layout, check_tensors, checked_flag, leading_dims, said

# Each op -> the one that kernels compute; an argmax is the index of a maximum.
OPERATIONS = {
    "sum": "sum", "mean": "mean", "max": "max", "min": "min", "absmax": "absmax", "sumsq": "sumsq",
    "logsumexp": "logsumexp", "argmax": "max", "argmin": "min",
}  # fmt: skip
INDEXED = ("max", "min", "absmax")
ATOMIC = ("sum", "mean", "sumsq")
INTEGER_DTYPES = (
    torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32, torch.uint64,
)  # fmt: skip


def check_gemm_reduce(tensors: Sequence[Any], options: tuple[Any, ...]) -> None:
    """Checks every argument but the activation."""
    a, b, mask, lengths, bias = tensors
    op, dim, _, return_indices, return_product, atomic = options
    check_given(a=a, b=b)
    check_tensors({"a": a, "b": b, "bias": bias}, sparse=("a", "b"))
    for name, tensor, letters in (("a", a, "[*B, M, K]"), ("b", b, "[*B, K, N]")):
        if tensor.dim() < 2:
            raise ValueError(f"{said(name, tensor)}: expected {letters}, at least two dimensions")
    if b.shape[-2] != a.shape[-1]:
        raise ValueError(
            f"{said('b', b)}: expected [*B, K, N] with K = {a.shape[-1]}, the last dimension of a {list(a.shape)}"
        )
    try:
        batch = leading_dims(a, b)
    except RuntimeError as error:
        raise ValueError(
            f"{said('a', a)}, {said('b', b)}: expected leading dimensions *B that broadcast, "
            f"got {list(a.shape[:-2])} and {list(b.shape[:-2])}"
        ) from error
    if not isinstance(op, str) or op not in OPERATIONS:
        raise ValueError(f"op must be one of {', '.join(OPERATIONS)}, got {op!r}")
    if type(dim) is not int or dim not in (-2, -1):
        raise ValueError(f"dim must be -2 (over M) or -1 (over N), got {dim!r}")
    reduced, letter = (a.shape[-2], "M") if dim == -2 else (b.shape[-1], "N")
    if bias is not None and tuple(bias.shape) != (b.shape[-1],):
        raise ValueError(f"{said('bias', bias)}: expected [N] = [{b.shape[-1]}], as b {list(b.shape)} has N columns")
    _check_rows("mask", mask, (torch.bool,), "bool", (*batch, reduced), f"[*B, {letter}]", a)
    _check_rows("lengths", lengths, INTEGER_DTYPES, "an integer dtype", tuple(batch), "[*B]", a)
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
        raise ValueError(
            f"{said('a', a)}, {said('b', b)}: expected {letter} > 0, as the {op} of no elements does not exist"
        )


def _check_rows(
    name: str,
    tensor: Tensor | None,
    dtypes: tuple[torch.dtype, ...],
    expected_dtype: str,
    shape: tuple[int, ...],
    letters: str,
    a: Tensor,
) -> None:
    """Checks a mask or lengths."""
    if tensor is None:
        return
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(tensor).__name__}")
    check_layout(name, tensor)
    if tensor.dtype not in dtypes:
        raise TypeError(f"{said(name, tensor)}: expected {expected_dtype}")
    if tensor.device != a.device:
        raise ValueError(f"{said(name, tensor)}: expected the device of a, {a.device}")
    sizes = zip(reversed(tensor.shape), reversed(shape), strict=False)
    if tensor.dim() > len(shape) or any(size not in (1, most) for size, most in sizes):
        raise ValueError(f"{said(name, tensor)}: expected a shape that broadcasts to {letters} = {list(shape)}")
