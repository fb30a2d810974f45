"""Whether a method is one formula, whatever its input is: only then may something else compute it in its place.

Numbers show what a method computes for some inputs. That it computes the same for others (of another shape, dtype or
size, in training, without gradients) is shown by a symbol: it goes through the method in the place of the input, knows
the operations of formulas, and refuses every question about what it stands for.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..modules import attributes_of
from .small_copies import linears, sizes_of_linear

# Functions of torch that compute an activation without options, by our name of it; gelu has one.
TORCH_FUNCTIONS: dict[str, tuple[Callable[..., Tensor], ...]] = {
    "relu": (F.relu, torch.relu),
    "silu": (F.silu,),
    "tanh": (F.tanh, torch.tanh),
    "sigmoid": (F.sigmoid, torch.sigmoid),
    "leaky_relu": (F.leaky_relu,),
}
# Operations without cases, by the names of functions and methods of torch. What cuts large numbers off is none.
_FUNCTIONS = frozenset(
    (
        *("add", "sub", "subtract", "rsub", "mul", "multiply", "div", "divide", "true_divide", "neg", "reciprocal"),
        *("pow", "square", "sqrt", "abs", "exp", "expm1", "log1p", "erf", "erfc", "softplus", "logsigmoid", "gelu"),
        *(function.__name__ for functions in TORCH_FUNCTIONS.values() for function in functions),
    )
)
# Of a merged hidden, along the last dimension.
_HALVES = ("chunk", "split", "glu", "unflatten")
# To float32, and back to the dtype of the input: kernels compute in float32 anyway.
_CASTS = ("float", "to", "type_as")
_OPERATORS = ("add", "radd", "mul", "rmul", "sub", "rsub", "truediv", "rtruediv", "neg", "pow")
_WRITING = ("iadd", "isub", "imul", "itruediv", "ipow")
_COMPARING = ("eq", "ne", "lt", "le", "gt", "ge", "bool", "hash", "len", "iter", "float", "int")
PLAIN = (bool, int, float, str, type(None))
# What a class may have besides, for its instances to call.
_FIXED = (types.FunctionType, types.BuiltinFunctionType)


class NoFormula(Exception):
    """What a method asks of its input."""


def _modes_now() -> tuple[bool, ...]:
    """Modes that a method may enter for some of its operations."""
    autocast = [torch.is_autocast_enabled(kind) for kind in ("cpu", "cuda")]
    return torch.is_grad_enabled(), torch.is_inference_mode_enabled(), *autocast


class _Shape:
    """The shape of a symbol, of which the last number is known."""

    def __init__(self, width: int | None) -> None:
        self._width = width

    def __getitem__(self, place: Any) -> int:
        if place != -1 or type(place) is not int or self._width is None:
            raise NoFormula("the shape of its input")
        return self._width


class Symbol:
    """A tensor of which nobody knows anything but its last size, if that, and a dtype, which is another every time."""

    def __init__(self, expression: tuple[Any, ...], width: int | None, dtype: torch.dtype, wide: bool = False) -> None:
        # ``wide``: whether it was cast to float32; ``dtype`` is the input's.
        self._expression, self._width, self._dtype, self._wide = expression, width, dtype, wide
        self._modes = _modes_now()

    def _made(self, name: str, given: Sequence[Any], width: int | None) -> Symbol:
        # A torch.autograd.Function computes without gradients, and has its own.
        if _modes_now()[1:] != self._modes[1:]:
            raise NoFormula("to be computed in another mode than its own")
        wide = any(isinstance(each, Symbol) and each._wide for each in given)
        made = Symbol((name, *map(_expressed, given)), width, self._dtype, wide)
        made._modes = self._modes
        return made

    def _computed(self, name: str, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        if name in _HALVES:
            return self._halved(name, *args[1:], **options)
        if name == "dropout":
            # When and how it drops is not asked here.
            return self
        if name in ("clamp", "clip") and len(args) == 1 and options == {"min": 0}:
            return self._made("relu", args, self._width)
        if name in _CASTS:
            as_input = all(each is self._dtype or (isinstance(each, Symbol) and not each._wide) for each in args[1:])
            if options or len(args) != (1 if name == "float" else 2) or not as_input:
                raise NoFormula(f"in {name}")
            made = self._made(name, (), self._width)
            made._expression, made._wide = (name, self._expression), name == "float"
            return made
        if name not in _FUNCTIONS:
            raise NoFormula(f"in {name}")
        if options.pop("inplace", False) and self._expression == ("x",):
            raise NoFormula("to be overwritten")
        return self._made(name, (*args, *sorted(options.items())), self._width)

    def _halved(self, name: str, *given: Any, **options: Any) -> Any:
        [*sizes, dim] = (*given, *options.values()) if name != "glu" or given or options else (-1,)
        if type(dim) is not int and name == "unflatten":
            dim, sizes = sizes[0], [dim]
        width = self._width
        if dim != -1 or width is None:
            raise NoFormula(f"in {name} along another dimension than the last one")
        if name == "glu":
            return self._made(name, (self,), width // 2)
        [size] = sizes
        if name == "unflatten":
            return self._made(name, (self, tuple(size)), None)
        if type(size) is int:
            part = width // size if name == "chunk" else size
            size = [part] * (width // part)
        if sum(size) != width:
            raise NoFormula(f"in {name}")
        return tuple(self._made(name, (self, tuple(size), place), part) for place, part in enumerate(size))

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        options = dict(kwargs or {})
        args = (options.pop("input"), *args) if "input" in options else args
        symbol = next((each for each in args if isinstance(each, Symbol)), None)
        if symbol is None:
            raise NoFormula("as an option")
        return symbol._computed(getattr(function, "__name__", str(function)), args, options)

    def __getattr__(self, name: str) -> Any:
        if name in (*_FUNCTIONS, *_HALVES, *_CASTS, "clamp"):
            return lambda *args, **options: self._computed(name, (self, *args), options)
        if name == "shape":
            return _Shape(self._width)
        if name == "size":
            return _Shape(self._width).__getitem__
        if name == "dtype" and not self._wide:
            return self._dtype
        raise NoFormula(f"its {name}")

    def __getitem__(self, places: Any) -> Symbol:
        places = places if isinstance(places, tuple) else (places,)
        # Places that are counted from the front mean other dimensions in inputs of other ranks.
        if places[0] is not Ellipsis:
            raise NoFormula("for some of its rows")
        return self._made("getitem", (self, repr(places)), None)


def _operator(name: str) -> Callable[..., Any]:
    def operator(self: Symbol, *others: Any) -> Any:
        return self._made(name, (self, *others), self._width)

    return operator


def _refusing(name: str) -> Callable[..., Any]:
    def operator(self: Any, *others: Any) -> Any:
        raise NoFormula(f"in {name}")

    return operator


for _name in _OPERATORS:
    setattr(Symbol, f"__{_name}__", _operator(_name))
for _name in (*_WRITING, *_COMPARING):
    setattr(Symbol, f"__{_name}__", _refusing(_name))


def _expressed(value: Any) -> Any:
    if isinstance(value, Symbol):
        return value._expression
    if isinstance(value, torch.Tensor):
        return id(value)
    return tuple(map(_expressed, value)) if isinstance(value, tuple) else repr(value)


def is_formula(
    function: Callable[[Any], Any], *, width: int | None = None, prepare: Callable[[torch.dtype], None] | None = None
) -> bool:
    """Whether ``function`` does the same with every input, with and without gradients and autocast.

    ``prepare`` is told the dtype of the input before each try.
    """
    found: list[object] = []
    half, autocast = torch.float16, torch.autocast("cpu", torch.bfloat16)
    tries = ((nullcontext(), torch.float32), (torch.no_grad(), half), (autocast, torch.bfloat16), (nullcontext(), half))
    for surroundings, dtype in tries:
        if prepare is not None:
            prepare(dtype)
        try:
            with surroundings:
                result = function(Symbol(("x",), width, dtype))
        except Exception:
            # The symbol's own refusal; or the function is one that takes tensors only.
            return False
        found.append(result._expression if isinstance(result, Symbol) and not result._wide else None)
    return None not in found and all(each == found[0] for each in found)


def is_formula_of_linears(blocks: Sequence[nn.Module], method: Callable[..., Any], width: int) -> bool:
    """Whether ``method`` of these copies, in training and in evaluation, does the same with every input.

    Their linears are not run, and get a forward that gives a symbol.
    """
    for block in blocks:
        for path, linear in linears(block):
            _, outputs = sizes_of_linear(linear) or (0, 0)
            linear.__dict__["forward"] = functools.partial(_linear, path, outputs)
        before = _state(block)
        of_dtype = functools.partial(_give_dtype, [linear for _, linear in linears(block)])
        if not is_formula(functools.partial(method, block), width=width, prepare=of_dtype) or _state(block) != before:
            return False
    return True


def _give_dtype(of_block: Sequence[nn.Module], dtype: torch.dtype) -> None:
    """Let the weights have the input's dtype, as those of an FFN have: some methods cast the hidden to it."""
    # Past the mode that makes float64 of float32.
    with torch._C.DisableTorchFunction():
        for linear in of_block:
            linear._parameters["weight"] = nn.Parameter(torch.empty(0, dtype=dtype, device="meta"))


def _state(block: nn.Module) -> list[tuple[str, int]]:
    return [(name, id(value)) for module in block.modules() for name, value in vars(module).items()]


def _linear(path: str, outputs: int, x: Any) -> Symbol:
    if not isinstance(x, Symbol) or x._wide or x._modes != _modes_now():
        raise NoFormula("in a linear layer")
    return x._made(path, (x,), outputs)


def options_read(block: nn.Module, method: str, parts: Sequence[str]) -> tuple[tuple[str, Any], ...] | None:
    """Paths and values of what ``method``, and the children's forward, read beside modules and these ``parts``.

    None where one of them is more than a number or a name: what lies in it may change, and nobody would see it.
    """
    found: dict[str, Any] = {}
    inside = tuple(f"{part}." for part in parts if part)
    for path, module in block.named_modules():
        # What an activation is, is asked again, and so is what a linear wraps.
        if type(module).__module__.startswith("torch.nn.") or f"{path}.".startswith(inside):
            continue
        prefix = f"{path}." if path else ""
        names: set[str] = set()
        if not all(map(_is_fixed, _functions(type(module), method if module is block else "forward", names))):
            return None
        for name, value in attributes_of(module).items():
            if name not in names or name in ("training", "_modules", "_parameters") or prefix + name in parts:
                continue
            if not _is_plain(value) and (name in vars(module) or not isinstance(value, _FIXED)):
                return None
            found[prefix + name] = value
    return tuple(found.items())


def names_read(kind: type[nn.Module], method: str) -> set[str]:
    """The names of attributes and methods in a method of a class, and in those of the class that these name."""
    names: set[str] = set()
    for _ in _functions(kind, method, names):
        pass
    return names


def _is_plain(value: Any) -> bool:
    return type(value) in PLAIN or (type(value) is tuple and all(map(_is_plain, value)))


def _functions(kind: type[nn.Module], method: str, names: set[str]) -> Iterator[types.FunctionType]:
    """The functions that a method of a class runs: itself, and those of the class that it names; notes all names."""
    left, seen = [method], {method}
    while left:
        name = left.pop()
        for base in kind.__mro__:
            if base is nn.Module:
                break
            found = vars(base).get(name)
            found = found.fget if isinstance(found, property) else getattr(found, "__func__", found)
            while isinstance(found, types.FunctionType):
                yield found
                for code in codes_in(found.__code__):
                    names.update(code.co_names)
                    left += set(code.co_names) - seen
                    seen.update(code.co_names)
                found = getattr(found, "__wrapped__", None)


def codes_in(code: types.CodeType) -> Iterator[types.CodeType]:
    """A function's code, and that of the functions inside of it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from codes_in(constant)


def _is_fixed(function: types.FunctionType) -> bool:
    """Whether all that a function takes from around it are modules, functions and constants: nobody changes these."""
    names = {name for code in codes_in(function.__code__) for name in code.co_names}
    around = [(name, function.__globals__[name]) for name in names if name in function.__globals__]
    try:
        around += zip(function.__code__.co_freevars, inspect.getclosurevars(function).nonlocals.values(), strict=False)
    except ValueError:
        # A variable that is not set yet.
        return False
    return all(
        isinstance(value, types.ModuleType) or callable(value) or (name.isupper() and _is_plain(value))
        for name, value in around
    )
