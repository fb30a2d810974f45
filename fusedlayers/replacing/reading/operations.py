"""The functions and methods of torch that a formula may consist of, on tensors in normal form.

In-place operations are the reader's business: there is no ``inplace`` option here.
"""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from . import polynomials, shapes
from .activation_modules import TORCH_FUNCTIONS
from .arguments import arguments, last_dimension, plain
from .polynomials import Polynomial, atom, number
from .values import Dtype, Formula, Known, NotUnderstood, Training

# Each operation, with the functions of torch that compute it. In-place ones are the same operation.
_ELEMENTARY: dict[str, tuple[Callable[..., Any], ...]] = {
    **{name: functions for name, functions in TORCH_FUNCTIONS.items() if name != "leaky_relu"},
    "erf": (torch.erf, torch.special.erf),
    "exp": (torch.exp,),
    "softplus": (F.softplus,),
    "square": (torch.square,),
}
_BINARY: dict[str, tuple[Callable[..., Any], ...]] = {
    "add": (torch.add, operator.add),
    "sub": (torch.sub, torch.subtract, operator.sub),
    "mul": (torch.mul, torch.multiply, operator.mul),
    "div": (torch.div, torch.divide, torch.true_divide, operator.truediv),
    "pow": (torch.pow, operator.pow),
}
_NAMES: dict[Any, str] = {
    **{each: name for table in (_ELEMENTARY, _BINARY) for name, functions in table.items() for each in functions},
    torch.relu_: "relu", F.relu_: "relu", torch.tanh_: "tanh", torch.sigmoid_: "sigmoid",
    F.gelu: "gelu", F.leaky_relu: "leaky_relu", F.dropout: "dropout", F.glu: "glu", torch.chunk: "chunk",
    torch.split: "split", torch.mean: "mean", torch.var: "var", torch.rsqrt: "rsqrt", torch.sqrt: "sqrt",
    torch.reciprocal: "reciprocal", torch.neg: "neg", F.rms_norm: "rms_norm", torch.rms_norm: "rms_norm",
    F.layer_norm: "layer_norm", torch.clamp: "clamp", torch.clip: "clamp", torch.unbind: "unbind",
    torch.var_mean: "var_mean",
}  # fmt: skip
_ALIASES = {"multiply": "mul", "subtract": "sub", "divide": "div", "true_divide": "div", "clip": "clamp"}
_METHODS = {
    *_BINARY, *_ALIASES, "relu", "tanh", "sigmoid", "erf", "exp", "square", "chunk", "split", "mean", "var", "rsqrt",
    "sqrt", "reciprocal", "neg", "to", "float", "type_as", "view", "reshape", "view_as", "reshape_as", "flatten",
    "contiguous", "clamp", "size", "dim", "unflatten", "unbind",
}  # fmt: skip
# Operations that end the reading. Not even clamp(min=0) is relu: its gradient at 0 is 1.
_REFUSED = {
    "clamp": "cuts values off by clamp",
    "unbind": "takes a tensor apart by unbind",
    "dim": "asks how many dimensions its input has",
}


def is_known(function: Any) -> bool:
    """Whether this module can read a function of torch."""
    try:
        return function in _NAMES
    except TypeError:
        return False


def call(function: Any, args: Sequence[Any], options: dict[str, Any]) -> Any:
    """The result of a function of torch."""
    options = dict(options)
    if "input" in options:
        args = (options.pop("input"), *args)
    return _run(_NAMES[function], args, options)


def method(owner: Formula, name: str, args: Sequence[Any], options: dict[str, Any]) -> Any:
    """The result of a method of a tensor."""
    if name not in _METHODS:
        raise NotUnderstood(f"calls {name} of a tensor")
    return _run(_ALIASES.get(name, name), (owner, *args), dict(options))


def binary(name: str, one: Any, other: Any) -> Formula:
    """The sum, difference, product, quotient or power of two tensors, or of a tensor and a number."""
    first, second = _as_formula(one), _as_formula(other)
    if name == "pow":
        exponent = second.value.constant
        if exponent is None:
            raise NotUnderstood("takes a power that is no constant")
        value = polynomials.power(first.value, exponent)
    elif name == "div":
        divisor = second.value.constant
        if divisor == 0:
            raise NotUnderstood("divides by zero")
        inverse = number(1 / divisor) if divisor is not None else polynomials.power(second.value, -1.0)
        value = first.value * inverse
    elif name == "mul" and 0.0 in (first.value.constant, second.value.constant):
        # A product with 0 is not 0: it has gradients, and infinity times 0 is NaN.
        raise NotUnderstood("multiplies by zero")
    else:
        value = {"add": operator.add, "sub": operator.sub, "mul": operator.mul}[name](first.value, second.value)
    widths = {each.width for each in (first, second) if each.width not in (1, 0)}
    if len(widths) > 1 or (None in widths and len(_inputs(first.value) | _inputs(second.value)) != 1):
        raise NotUnderstood("combines tensors of several widths")
    shaped = {each.shaped for each in (first, second) if each.width != 0}
    if len(shaped) > 1:
        raise NotUnderstood("combines tensors of several shapes")
    width = next(iter(widths), 1)
    return Formula(value, width, next(iter(shaped), True), first.wide or second.wide)


def _inputs(value: Polynomial) -> set[polynomials.Atom]:
    """The atoms that may determine the width of a tensor of unknown width."""
    found: set[polynomials.Atom] = set()
    for each in value.atoms():
        inner = [part for part in each if isinstance(part, Polynomial)]
        found = found.union(*map(_inputs, inner)) if inner else found | {each}
    return {each for each in found if each[0] != "parameter"}


def _as_formula(value: Any) -> Formula:
    if isinstance(value, Formula):
        return value
    if isinstance(value, Known) and type(value.value) in (int, float) and math.isfinite(value.value):
        return Formula(number(value.value), 0)
    raise NotUnderstood("computes with something else than tensors and numbers")


def _run(name: str, args: Sequence[Any], options: dict[str, Any]) -> Any:
    if not args or not isinstance(args[0], Formula):
        raise NotUnderstood(f"calls {name} without a tensor")
    x = args[0]
    if name in _BINARY:
        if len(args) != 2 or options:
            raise NotUnderstood(f"gives options to {name}")
        return binary(name, x, args[1])
    if name in _ELEMENTARY:
        if len(args) != 1 or options:
            raise NotUnderstood(f"gives options to {name}")
        return x.with_value(polynomials.function(name, x.value))
    if name in _REFUSED:
        raise NotUnderstood(_REFUSED[name])
    return _HANDLERS[name](x, args[1:], options)


def _gelu(x: Formula, args: Sequence[Any], options: dict[str, Any]) -> Formula:
    kind = arguments(args, options, "gelu", approximate="none")["approximate"]
    if kind not in ("none", "tanh"):
        raise NotUnderstood(f"approximates gelu by {kind!r}")
    return x.with_value(polynomials.function("gelu" if kind == "none" else "gelu_tanh", x.value))


def _leaky_relu(x: Formula, args: Sequence[Any], options: dict[str, Any]) -> Formula:
    slope = arguments(args, options, "leaky_relu", negative_slope=0.01)["negative_slope"]
    return x.with_value(atom("function", f"leaky_relu {slope:g}", x.value))


def _dropout(x: Formula, args: Sequence[Any], options: dict[str, Any]) -> Formula:
    given = dict(zip(("p", "training"), args, strict=False)) | options
    training, p = given.get("training", Known(True)), given.get("p", Known(0.5))
    if len(args) > 2 or set(given) - {"p", "training"} or not isinstance(p, Known):
        raise NotUnderstood("gives options to dropout")
    if training == Known(False) or (p.path is None and p.value == 0):
        return x
    if not isinstance(training, Training) or training.path or p.path is None:
        raise NotUnderstood("drops with a probability, or in a mode, that is no attribute of its own")
    return x.with_value(atom("dropout", p.path, x.value))


def _glu(x: Formula, args: Sequence[Any], options: dict[str, Any]) -> Formula:
    last_dimension(x, arguments(args, options, "glu", dim=-1)["dim"], "glu")
    first, last = shapes.halves_of(x, ((x.width or 0) // 2,) * 2)
    return first.with_value(first.value * polynomials.function("sigmoid", last.value))


def _mean(x: Formula, args: Sequence[Any], options: dict[str, Any]) -> Formula:
    options = {("dim" if name == "axis" else name): value for name, value in options.items()}
    given = arguments(args, options, "mean", dim=None, keepdim=False)
    last_dimension(x, given["dim"], "mean")
    if not given["keepdim"] or x.width in (0, 1):
        raise NotUnderstood("takes a mean that does not keep its dimension")
    return x.with_value(polynomials.mean(x.value), 1)


def _var(x: Formula, args: Sequence[Any], options: dict[str, Any]) -> Formula:
    given = arguments(args, options, "var", dim=None, unbiased=True, keepdim=False, correction=None)
    last_dimension(x, given["dim"], "var")
    biased = given["unbiased"] is False or given["correction"] == 0
    if not given["keepdim"] or not biased or x.width in (0, 1):
        raise NotUnderstood("takes a variance that is unbiased, or does not keep its dimension")
    first = polynomials.mean(x.value)
    return x.with_value(polynomials.mean(x.value * x.value) - first * first, 1)


def _var_mean(x: Formula, args: Sequence[Any], options: dict[str, Any]) -> tuple[Formula, Formula]:
    return _var(x, args, options), x.with_value(polynomials.mean(x.value), 1)


def _pointwise(compute: Callable[[Polynomial], Polynomial]) -> Callable[..., Formula]:
    def run(x: Formula, args: Sequence[Any], options: dict[str, Any]) -> Formula:
        if args or options:
            raise NotUnderstood("gives options to a power")
        return x.with_value(compute(x.value))

    return run


def _norm(name: str) -> Callable[..., Formula]:
    def run(x: Formula, args: Sequence[Any], options: dict[str, Any]) -> Formula:
        names = ("normalized_shape", "weight", *(("bias",) if name == "layer_norm" else ()), "eps")
        given = dict(zip(names, args, strict=False)) | options
        shape = plain(given.get("normalized_shape"), name)
        eps = plain(given.get("eps", Known(1e-5 if name == "layer_norm" else None)), name)
        shape = shape if isinstance(shape, tuple) else (shape,)
        if x.width is None and len(shape) == 1 and type(shape[0]) is int:
            # It accepts only this width, then.
            x = dataclasses.replace(x, width=shape[0])
        if set(given) - set(names) or shape != (x.width,) or eps is None:
            raise NotUnderstood(f"calls {name} otherwise than over the last dimension")
        value = normalised(x.value, name, eps)
        for part, combine in (("weight", operator.mul), ("bias", operator.add)):
            parameter = given.get(part, Known(None))
            if isinstance(parameter, Formula):
                value = combine(value, parameter.value)
            elif not isinstance(parameter, Known) or parameter.value is not None:
                raise NotUnderstood(f"gives {name} a {part} that is no parameter")
        return x.with_value(value)

    return run


def normalised(x: Polynomial, name: str, eps: float) -> Polynomial:
    """``rms_norm`` or ``layer_norm`` of x over its last dimension, without weight and bias."""
    first = polynomials.mean(x) if name == "layer_norm" else number(0.0)
    variance = polynomials.mean(x * x) - first * first
    return (x - first) * polynomials.power(variance + number(eps), -0.5)


def _to(x: Formula, args: Sequence[Any], options: dict[str, Any]) -> Formula:
    [target, *others] = [*args, *options.values()] or [None]
    if others or set(options) - {"dtype"}:
        raise NotUnderstood("moves a tensor by to")
    if isinstance(target, Known) and target.value is torch.float32:
        return dataclasses.replace(x, wide=True)
    if isinstance(target, Dtype):
        return dataclasses.replace(x, wide=target.wide)
    raise NotUnderstood("casts to a dtype that is none of its input's and not float32")


def _float(x: Formula, args: Sequence[Any], options: dict[str, Any]) -> Formula:
    return dataclasses.replace(x, wide=True)


def _type_as(x: Formula, args: Sequence[Any], options: dict[str, Any]) -> Formula:
    if len(args) != 1 or options or not isinstance(args[0], Formula):
        raise NotUnderstood("casts to a dtype that is none of its input's and not float32")
    return dataclasses.replace(x, wide=args[0].wide)


_HANDLERS: dict[str, Callable[[Formula, Sequence[Any], dict[str, Any]], Any]] = {
    "gelu": _gelu, "leaky_relu": _leaky_relu, "dropout": _dropout, "glu": _glu, "mean": _mean, "var": _var,
    "var_mean": _var_mean, "rms_norm": _norm("rms_norm"), "layer_norm": _norm("layer_norm"), "to": _to,
    "float": _float, "type_as": _type_as, "chunk": shapes.chunk, "split": shapes.split, "view": shapes.view,
    "reshape": shapes.view, "view_as": shapes.view_as, "reshape_as": shapes.view_as, "flatten": shapes.flatten,
    "contiguous": shapes.contiguous, "size": shapes.size_of, "unflatten": shapes.unflatten,
    "rsqrt": _pointwise(lambda value: polynomials.power(value, -0.5)),
    "sqrt": _pointwise(lambda value: polynomials.power(value, 0.5)),
    "reciprocal": _pointwise(lambda value: polynomials.power(value, -1.0)),
    "neg": _pointwise(operator.neg),
}  # fmt: skip


def is_dtype(value: Any) -> bool:
    """Whether a value is a torch.dtype."""
    return isinstance(value, torch.dtype)
