"""Shortcuts for the operands of interpreted operations, where the result of Triton's checks is known."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

Builder = interpreter.InterpreterBuilder
# Triton's own functions, which the patches here replace.
OF_TRITON = [
    (owner, name, getattr(owner, name))
    for owner, name in (
        (TritonSemantic, "binary_op_type_checking_impl"),
        (TritonSemantic, "broadcast_impl_value"),
        (TritonSemantic, "cast"),
        (TritonSemantic, "scalar_constant"),
        *((TritonSemantic, name) for name in ("add", "sub", "mul")),
        (tl.block_type, "with_element_ty"),
        (tl.dtype, "__eq__"),
        (Builder, "binary_op"),
        (Builder, "create_addptr"),
        (Builder, "create_broadcast"),
        (Builder, "create_expand_dims"),
        (Builder, "create_splat"),
    )
    if hasattr(owner, name)
]
# The most elements of cached constants: of one block, and of all blocks together.
_SMALL, _KEPT = 4096, 2**22


def speed_up() -> None:
    """Patch what is slow, in the releases of Triton that have it."""
    if len(OF_TRITON) < 14:
        return
    _share_constants()
    _cast_integers_at_once()
    _convert_operands_that_differ()
    _compute_with_arrays()
    for name, function in (("add", np.add), ("sub", np.subtract), ("mul", np.multiply)):
        _compute_at_once(name, function)


def _compute_at_once(name: str, function: Callable[..., Any]) -> None:
    """Compute sums, differences and products directly: Triton checks the operands' types several times, and broadcasts
    both, which NumPy does itself."""
    compute = getattr(TritonSemantic, name)

    def compute_known(semantic: Any, one: Any, other: Any, sanitize_overflow: bool) -> Any:
        if sanitize_overflow and semantic.builder.options.debug:
            return compute(semantic, one, other, sanitize_overflow)
        if type(one) is tl.tensor and type(other) is tl.tensor:
            if one.dtype.name == other.dtype.name and not one.dtype.is_ptr():
                kind = _joined(one.type, other.type)
                if kind is not None:
                    return tl.tensor(semantic.builder.binary_op(one.handle, other.handle, function), kind)
            elif name == "add" and one.dtype.is_ptr() and other.dtype.is_int_signed():
                kind = _joined(one.type, other.type)
                if kind is not None:
                    handle = semantic.builder.create_addptr(one.handle, other.handle)
                    return tl.tensor(handle, kind.with_element_ty(one.dtype))
            return compute(semantic, one, other, sanitize_overflow)
        tensor, number = (one, other) if type(one) is tl.tensor else (other, one)
        if type(tensor) is not tl.tensor or tensor.dtype.is_ptr() or not _holds(tensor.dtype, number):
            return compute(semantic, one, other, sanitize_overflow)
        made = semantic.scalar_constant(number, dtype=tensor.dtype).handle
        handles = (tensor.handle, made) if tensor is one else (made, tensor.handle)
        return tl.tensor(semantic.builder.binary_op(*handles, function), tensor.type)

    setattr(TritonSemantic, name, compute_known)


# The shape of the result, by the ids of two shapes, which are kept so that their ids are not reused.
_joined_shapes: dict[tuple[int, int], tuple[Any, Any, Any]] = {}


def _joined(one: Any, other: Any) -> Any:
    """The type that two types broadcast to, with elements of the first; None where Triton must decide."""
    if not other.is_block():
        return one
    if not one.is_block() or one.shape is other.shape:
        return other
    key = id(one.shape), id(other.shape)
    if key not in _joined_shapes:
        sizes = list(zip(one.shape, other.shape, strict=False))
        fits = len(one.shape) == len(other.shape) and all(left == right or 1 in (left, right) for left, right in sizes)
        shape = tl.block_type(one.scalar, [max(pair) for pair in sizes]).shape if fits else None
        _joined_shapes[key] = one.shape, other.shape, shape
    shape = _joined_shapes[key][2]
    return None if shape is None else one if shape is one.shape else tl.block_type(one.element_ty, shape)


def _share_constants() -> None:
    """Share the arrays of scalar constants, which nobody writes to."""
    make = TritonSemantic.scalar_constant
    known: dict[tuple[type, object, str], np.ndarray[Any, Any]] = {}

    def make_known(semantic: Any, value: Any, dtype: Any) -> Any:
        if type(value) not in (bool, int, float) or dtype is None:
            return make(semantic, value, dtype)
        key = type(value), value, dtype.name
        if key not in known:
            made = make(semantic, value, dtype)
            known[key] = _shared(made.handle.data)
            return made
        return tl.tensor(interpreter.TensorHandle(known[key], dtype), dtype)

    TritonSemantic.scalar_constant = make_known


def _shared(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The same array, to which a write is an error."""
    array.flags.writeable = False
    return array


def _cast_integers_at_once() -> None:
    """Cast integers directly, and skip casts to the same type: nearly all casts are of these."""
    cast = TritonSemantic.cast
    of_integers = {
        kind.name: np.dtype(kind.name)
        for kind in (tl.int8, tl.uint8, tl.int16, tl.uint16, tl.int32, tl.uint32, tl.int64, tl.uint64)
    }

    def cast_others(semantic: Any, value: Any, kind: Any, rounding: Any = None) -> Any:
        source, target = value.dtype, kind.scalar
        if source is target:
            return value
        if rounding is None and source.name in of_integers and target.name in of_integers:
            if source.name == target.name:
                return value
            handle = interpreter.TensorHandle(value.handle.data.astype(of_integers[target.name]), target)
            return tl.tensor(handle, value.type.with_element_ty(target))
        return cast(semantic, value, kind, rounding)

    TritonSemantic.cast = cast_others


def _convert_operands_that_differ() -> None:
    """Skip Triton's checks for operands of one type, a tensor and a number of its type, or a pointer and an offset."""
    convert, broadcast, equal = (
        TritonSemantic.binary_op_type_checking_impl, TritonSemantic.broadcast_impl_value, tl.dtype.__eq__,
    )  # fmt: skip
    # The dtype that two dtypes are computed in, by their names and whether they are divided.
    common: dict[tuple[str, str, bool], Any] = {}
    constants: dict[tuple[type, object, str, tuple[int, ...]], np.ndarray[Any, Any]] = {}
    kept = 0

    def beside(semantic: Any, number: Any, tensor: Any) -> Any:
        """A number as a tensor of the other operand's type and shape."""
        nonlocal kept
        dtype, kind = tensor.dtype, tensor.type
        if not kind.is_block():
            return semantic.scalar_constant(number, dtype=dtype)
        key = type(number), number, dtype.name, kind.shape
        if key not in constants:
            made = spread(semantic, semantic.scalar_constant(number, dtype=dtype), tensor)
            if kind.numel > _SMALL:
                return made
            if kept > _KEPT:
                constants.clear()
                kept = 0
            kept += kind.numel
            constants[key] = _shared(made.handle.data)
            return made
        return tl.tensor(interpreter.TensorHandle(constants[key], dtype), kind)

    def convert_others(
        semantic: Any, lhs: Any, rhs: Any, allow_lhs_ptr: bool = False, allow_rhs_ptr: bool = False,
        arithmetic_check: bool = True, div_or_mod: bool = False,
    ) -> Any:  # fmt: skip
        if type(lhs) is not tl.tensor or type(rhs) is not tl.tensor:
            tensor, number = (lhs, rhs) if type(lhs) is tl.tensor else (rhs, lhs)
            dtype = getattr(tensor, "dtype", None)
            # Triton divides 16-bit numbers in float32.
            usual = arithmetic_check and dtype is not None and not dtype.is_ptr()
            if usual and not (div_or_mod and _is_half(dtype)) and _holds(dtype, number):
                made = beside(semantic, number, tensor)
                return (tensor, made) if tensor is lhs else (made, tensor)
            return convert(semantic, lhs, rhs, allow_lhs_ptr, allow_rhs_ptr, arithmetic_check, div_or_mod)
        one, other = lhs.dtype, rhs.dtype
        if one.is_ptr() or other.is_ptr():
            if (one.is_ptr() and allow_lhs_ptr and other.is_int()) or (
                other.is_ptr() and allow_rhs_ptr and one.is_int()
            ):
                return semantic.broadcast_impl_value(lhs, rhs)
        elif arithmetic_check:
            if one.name == other.name and not (div_or_mod and _is_half(one)):
                return semantic.broadcast_impl_value(lhs, rhs)
            key = one.name, other.name, div_or_mod
            if key in common:
                return semantic.broadcast_impl_value(*(semantic.cast(each, common[key]) for each in (lhs, rhs)))
            found = convert(semantic, lhs, rhs, allow_lhs_ptr, allow_rhs_ptr, arithmetic_check, div_or_mod)
            common[key] = found[0].dtype
            return found
        return convert(semantic, lhs, rhs, allow_lhs_ptr, allow_rhs_ptr, arithmetic_check, div_or_mod)

    def broadcast_others(semantic: Any, one: Any, other: Any) -> Any:
        if not one.type.is_block():
            return (spread(semantic, one, other), other) if other.type.is_block() else (one, other)
        if not other.type.is_block():
            return one, spread(semantic, other, one)
        # Equal shapes are one object: see quick_interpreter._cache_shapes.
        if one.type.shape is other.type.shape:
            return one, other
        kind = _joined(one.type, other.type)
        if kind is None:
            return broadcast(semantic, one, other)
        return over(semantic, one, kind.shape), over(semantic, other, kind.shape)

    def over(semantic: Any, block: Any, shape: Any) -> Any:
        if block.type.shape is shape:
            return block
        kind = tl.block_type(block.dtype, shape)
        return tl.tensor(semantic.builder.create_broadcast(block.handle, shape), kind)

    def spread(semantic: Any, scalar: Any, block: Any) -> Any:
        kind = block.type.with_element_ty(scalar.type.scalar)
        return tl.tensor(semantic.builder.create_splat(kind, scalar.handle), kind)

    def is_or_equals(dtype: Any, other: Any) -> bool:
        return dtype is other or equal(dtype, other)

    TritonSemantic.binary_op_type_checking_impl, TritonSemantic.broadcast_impl_value = convert_others, broadcast_others
    tl.dtype.__eq__ = is_or_equals


_ranges: dict[str, tuple[int, int]] = {}


def _holds(dtype: Any, number: Any) -> bool:
    """Whether Triton would convert this number to this dtype."""
    if type(number) is int and dtype.is_int() and not dtype.is_bool():
        if dtype.name not in _ranges:
            _ranges[dtype.name] = dtype.get_int_min_value(), dtype.get_int_max_value()
        least, most = _ranges[dtype.name]
        return bool(least <= number <= most)
    return dtype.is_floating() and (type(number) is float or (type(number) is int and abs(number) < 2**31))


def _is_half(dtype: Any) -> bool:
    return bool(dtype.is_floating() and dtype.primitive_bitwidth < 32)


def _compute_with_arrays() -> None:
    """Replace NumPy's functions written in Python, whose checks take longer than the work."""
    compute, point, retyped = Builder.binary_op, Builder.create_addptr, tl.block_type.with_element_ty
    widths: dict[str, int] = {}
    bytes_of: dict[str, int] = {}

    def compute_known(builder: Any, lhs: Any, rhs: Any, function: Callable[..., Any]) -> Any:
        found, dtype = function(lhs.data, rhs.data), lhs.dtype
        if found.itemsize > widths.get(dtype.name, 0):
            made = compute(builder, lhs, rhs, function)
            widths[dtype.name] = max(made.data.itemsize, widths.get(dtype.name, 0))
            return made
        return interpreter.TensorHandle(found, dtype)

    def point_known(builder: Any, pointer: Any, offset: Any) -> Any:
        name = pointer.dtype.name
        if name not in bytes_of:
            bytes_of[name] = max(1, pointer.get_element_ty().primitive_bitwidth // 8)
            return point(builder, pointer, offset)
        return interpreter.TensorHandle(pointer.data + bytes_of[name] * offset.data.astype(np.uint64), pointer.dtype)

    def spread_array(builder: Any, kind: Any, value: Any) -> Any:
        data = value.data
        array = np.empty(kind.shape, data.dtype)
        array[...] = data[0]
        return interpreter.TensorHandle(array, value.dtype.scalar)

    def expand(builder: Any, value: Any, axis: int) -> Any:
        place = (slice(None),) * axis + (None,)
        return interpreter.TensorHandle(value.data[place], value.dtype.scalar)

    def broadcast_array(builder: Any, value: Any, shape: Any) -> Any:
        array = np.empty(tuple(shape), value.data.dtype)
        array[...] = value.data
        return interpreter.TensorHandle(array, value.dtype.scalar)

    def with_element(block: Any, scalar: Any) -> Any:
        if type(scalar) is tl.dtype and scalar is block.element_ty:
            return block
        return retyped(block, scalar)

    Builder.binary_op, Builder.create_addptr = compute_known, point_known
    Builder.create_splat, Builder.create_expand_dims, Builder.create_broadcast = spread_array, expand, broadcast_array
    tl.block_type.with_element_ty = with_element
