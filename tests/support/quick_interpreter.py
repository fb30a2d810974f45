"""Triton's interpreter without repeated work of no effect, which takes half of the tests' time.

Nothing that it computes changes: operations run as Triton wrote them, on the same NumPy arrays.
"""

from __future__ import annotations

import functools
import inspect
import operator
from types import FunctionType
from typing import Any

import numpy as np
import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

from tests.support import quick_operands

# Triton's own functions, which the patches below replace; the tests compare both.
OF_TRITON = [
    (owner, name, getattr(owner, name))
    for owner, name in (
        (interpreter, "_patch_builtin"),
        (interpreter.ReduceOps, "generic_reduce"),
        (interpreter.TensorHandle, "__init__"),
        (TritonSemantic, "binary_op_sanitize_overflow_impl"),
        (tl.block_type, "__init__"),
        (tl.core, "_unwrap_if_constexpr"),
        (tl.tensor, "__init__"),
    )
    if hasattr(owner, name)
] + quick_operands.OF_TRITON


def speed_up() -> None:
    """Patch what is slow, in the releases of Triton that have it."""
    if hasattr(interpreter, "_patch_lang"):
        _patch_the_language_once()
    _cache_signatures()
    if hasattr(interpreter, "_patch_builtin"):
        _wrap_the_language_once()
    if hasattr(interpreter, "_get_np_dtype"):
        _cache_dtypes()
    if hasattr(TritonSemantic, "binary_op_sanitize_overflow_impl"):
        _check_overflow_in_debug_mode()
    if hasattr(interpreter, "TensorHandle") and hasattr(interpreter, "_validate_np_data_size"):
        _cache_element_widths()
    if hasattr(tl.core, "_unwrap_if_constexpr"):
        _return_plain_values()
    _cache_shapes()
    quick_operands.speed_up()
    interpreter.ReduceOps.generic_reduce = _reduce_whole_slices


class _Patches:
    """What Triton asks for at the end of a launch to undo its patches of triton.language."""

    def restore(self) -> None:
        """Undo nothing: the next launch would make the same patches again."""


_patches: list[Any] = []


def unpatch_the_language() -> None:
    """Give triton.language back as it was before the first launch; the next launch patches it again."""
    while _patches:
        _patches.pop().restore()


def _patch_the_language_once() -> None:
    """Triton patches triton.language for every launch and every call of a device function; once is enough."""
    patch = interpreter._patch_lang
    seen_from: dict[FunctionType, frozenset[str]] = {}
    patched: set[frozenset[str]] = set()

    def patch_once(function: FunctionType) -> _Patches:
        if function not in seen_from:
            modules = [value for value in function.__globals__.values() if inspect.ismodule(value)]
            seen_from[function] = frozenset(module.__name__ for module in modules if module in (tl, tl.core))
        if not _patches:
            patched.clear()
        if seen_from[function] not in patched:
            patched.add(seen_from[function])
            _patches.append(patch(function))
        return _Patches()

    interpreter._patch_lang = patch_once


def _cache_signatures() -> None:
    """Cache the signature of each kernel, which every launch reads."""
    make = interpreter.GridExecutor.__init__
    constexprs: dict[Any, list[str]] = {}
    read = functools.cache(inspect.getfullargspec)

    def make_known(executor: Any, fn: Any, arg_names: Any, grid: Any, *hooks: Any) -> None:
        if fn in constexprs:
            executor.fn, executor.arg_names, executor.grid, executor.constexprs = fn, arg_names, grid, constexprs[fn]
            executor.pre_run_hooks = hooks[0] if hooks else []
            return
        make(executor, fn, arg_names, grid, *hooks)
        constexprs[fn] = executor.constexprs

    class Inspect:
        """The module, but for one function."""

        def __getattr__(self, name: str) -> Any:
            return read if name == "getfullargspec" else getattr(inspect, name)

    interpreter.GridExecutor.__init__, interpreter.inspect = make_known, Inspect()


def _wrap_the_language_once() -> None:
    """Find and wrap the members of the language once: Triton does it at every patch, with two calls for each call."""
    patch_found, semantic = interpreter._patch_builtin, interpreter.interpreter_semantic

    def told(member: Any) -> Any:
        # The wrapper only checks that _semantic is given.
        function = getattr(member, "__wrapped__", member)

        def call(*args: Any, **kwargs: Any) -> Any:
            kwargs["_semantic"] = semantic
            return function(*args, **kwargs)

        return call

    def told_operator(member: Any, name: str) -> Any:
        # Skip the function between an operator of a tensor and the semantic's function of the same name.
        compute = getattr(type(semantic), name, None)
        if compute is None:
            return told(member)
        # Look it up at every call: a test puts Triton's own function back.
        return lambda one, other: getattr(semantic, name)(one, tl.core._unwrap_if_constexpr(other), True)

    operators = {f"__{name}__": name for name in ("add", "sub", "mul")}
    known = {
        owner: [
            (name, told_operator(each, operators[name]) if owner is tl.tensor and name in operators else told(each))
            for name, each in inspect.getmembers(owner)
            if tl.core.is_builtin(each)
        ]
        for owner in (tl, tl.core, tl.math, tl.tensor)
    }

    def patch_known(owner: Any, builder: Any, scope: Any) -> None:
        if owner not in known:
            patch_found(owner, builder, scope)
            return
        for name, call in known[owner]:
            scope.set_attr(owner, name, call)

    interpreter._patch_builtin = patch_known


def _cache_dtypes() -> None:
    """Cache NumPy's dtype for each of Triton's: Triton builds the table anew at every look-up."""
    look_up = interpreter._get_np_dtype
    known: dict[str, np.dtype[Any]] = {}

    def remembered(dtype: Any) -> np.dtype[Any]:
        scalar = dtype.element_ty if isinstance(dtype, tl.block_type) else dtype
        if scalar.name not in known:
            known[scalar.name] = look_up(scalar)
        return known[scalar.name]

    interpreter._get_np_dtype = remembered


def _check_overflow_in_debug_mode() -> None:
    """Skip the check of integer overflow outside of debug mode: Triton computes it in 64 bits, and drops it."""
    look = TritonSemantic.binary_op_sanitize_overflow_impl

    def look_if_told(semantic: Any, *operands: Any) -> None:
        if semantic.builder.options.debug:
            look(semantic, *operands)

    TritonSemantic.binary_op_sanitize_overflow_impl = look_if_told


def _cache_element_widths() -> None:
    """Cache how wide elements may be: every value checks that those of its array are not wider."""
    make = interpreter.TensorHandle.__init__
    known: dict[str, int] = {}

    def make_known(handle: Any, data: Any, dtype: Any, attr: Any = None) -> None:
        if data.itemsize > known.get(dtype.name, 0):
            make(handle, data, dtype, {} if attr is None else attr)
            known[dtype.name] = data.itemsize
            return
        handle.data, handle.dtype, handle.attr = data, dtype, {} if attr is None else attr

    interpreter.TensorHandle.__init__ = make_known


def _return_plain_values() -> None:
    """Return plain values at once: every operation tries to unwrap each operand as a constexpr or a list of some."""
    unwrap = tl.core._unwrap_if_constexpr
    plain = frozenset({tl.tensor, tl.dtype, tl.block_type, bool, int, float, str, type(None)})
    tl.core._unwrap_if_constexpr = lambda value: value if type(value) in plain else unwrap(value)


def _cache_shapes() -> None:
    """Cache what every type and value of a block derives from its shape; there are few shapes."""
    make_type, make_value = tl.block_type.__init__, tl.tensor.__init__
    of_types: dict[tuple[int, ...], tuple[Any, Any, str]] = {}
    # Keyed by id, which is not reused: the shapes in of_types are kept.
    of_values: dict[int, tuple[Any, Any]] = {}
    scalar = None

    def make_known_type(block: Any, element: Any, shape: Any) -> None:
        try:
            key = tuple(map(operator.index, shape))
        except TypeError:
            make_type(block, element, shape)
            return
        if key not in of_types:
            make_type(block, element, shape)
            of_types[key] = block.shape, block.numel, str(block.shape)
            return
        block.element_ty = element
        block.shape, block.numel, written = of_types[key]
        block.name = f"<{written}, {element}>"

    def make_known_value(value: Any, handle: Any, kind: Any) -> None:
        nonlocal scalar
        if type(kind) is tl.block_type:
            known, dtype = of_values.get(id(kind.shape)), kind.element_ty
        else:
            known, dtype = scalar, kind.scalar
        if known is None:
            make_value(value, handle, kind)
            if not kind.is_block():
                scalar = value.shape, value.numel
            elif kind.shape is of_types.get(tuple(kind.shape), (None,))[0]:
                of_values[id(kind.shape)] = value.shape, value.numel
            return
        value.handle, value.type, value.dtype = handle, kind, dtype
        value.shape, value.numel = known

    tl.block_type.__init__, tl.tensor.__init__ = make_known_type, make_known_value


def _reduce_whole_slices(reduction: Any, values: tuple[Any, ...]) -> list[Any]:
    """``tl.reduce`` with a function of one's own: all elements of a slice at once, slices in the order of their index.

    Triton calls the function for each element, in the same order along the axis.
    """
    over, axis = reduction.unravel(values, reduction.axis)
    arrays = [value.handle.data for value in over]
    kept = arrays[0].shape[:axis] + arrays[0].shape[axis + 1 :]

    def tensors(found: list[np.ndarray[Any, Any]]) -> list[Any]:
        return [reduction.to_tensor(array, value.dtype) for array, value in zip(found, over, strict=True)]

    total = [np.take(array, 0, axis) for array in arrays]
    for index in range(1, arrays[0].shape[axis]):
        found = reduction.combine_fn.fn(*tensors(total), *tensors([np.take(array, index, axis) for array in arrays]))
        total = [
            np.broadcast_to(getattr(part, "handle", part).data, kept or 1).reshape(kept).astype(array.dtype)
            for part, array in zip(found if isinstance(found, tuple) else (found,), arrays, strict=True)
        ]
    if reduction.axis is None:
        whole = (1,) * values[0].handle.data.ndim
        return tensors([array.reshape(whole) if reduction.keep_dims else array for array in total])
    return tensors([np.expand_dims(array, axis) if reduction.keep_dims else array for array in total])
