"""Norms: modules that compute an RMSNorm or a LayerNorm in several operations run torch's fused one.

They are found by their source and not by name. The forward is read as a polynomial, and the module is a norm if that
equals a norm's, with weight and bias: so it holds for every input, with the same gradients. In 16 bits a forward rounds
after some or all of its operations. Torch's fused norms compute in float32 and round once, so they are at least as
close to the formula.

Torch's fused norms save the input and one or two numbers per row for the backward pass, read the input once and write
the result once. Written as several operations, as in most models, a norm in 16 bits moves about five times the bytes
and saves three times as many. A compiled model runs the original forward: the compiler fuses it with its surroundings.
"""

from __future__ import annotations

import inspect
import itertools
import types
from collections.abc import Callable, Hashable, Iterator
from itertools import permutations
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling
from torch.nn.parameter import is_lazy

from ..modules import class_name, is_plain_now, say_once, why_not_now
from ..planning import Device
from .conditions import NONE, Conditions
from .reading.formulas import text
from .reading.operations import normalised
from .reading.polynomials import Polynomial, atom, number
from .reading.reader import Reader
from .reading.values import Formula, NotUnderstood
from .remembering import Remembered
from .report import ALREADY_FUSED, Changes
from .saving import kept_by
from .signatures import signature
from .swapping import OWN_FORWARD, ReplacedModule, fused_class

# Every norm takes a sum of squares and a root. The reasons against a module that calls a fused norm, or nothing of
# either kind, are not reported.
_BOTH = {"var", "var_mean", "std", "std_mean", "norm", "vector_norm"}
_SUMS = _BOTH | {"mean", "sum"}
_ROOTS = _BOTH | {"rsqrt", "sqrt", "pow"}
_FUSED = {"layer_norm", "rms_norm"}
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Measured on an H200: their gradient of x is off by up to four roundings, and two are the limit for "close". Under
# autocast, whose 16-bit products round 65,536 times as coarsely, that does not show.
WHY_NOT_FLOAT32 = "torch's fused norms round float32 more often than its own forward, and so run under autocast alone"
_LONGEST_FORMULA = 160


class Norm(NamedTuple):
    """A norm over the last dimension: ``operation`` of ``torch.nn.functional`` and its arguments.

    ``weight`` and ``bias`` are names of parameters; with ``one_plus`` the weight is 1 + parameter. ``width`` is the
    size of the last dimension, None if the forward takes any. Under ``conditions`` this is what the forward computes.
    ``dtypes`` are those in which the result has the input's dtype, ``others`` the rest, with reasons.
    """

    operation: str
    weight: str | None
    bias: str | None
    one_plus: bool
    eps: float
    width: int | None = None
    conditions: Conditions = NONE
    dtypes: tuple[torch.dtype, ...] = ()
    others: tuple[tuple[torch.dtype, str], ...] = ()

    def run(self, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        """The norm of x, in its dtype, by torch's fused operation."""
        # On a GPU the fused operations compute in float32 and round once; on a CPU they sum gradients in 16 bits, so
        # cast. And 1 + weight, rounded to 16 bits, would lose as much precision again as the result itself.
        if x.is_cuda and not self.one_plus:
            return self._fused(x, weight, bias)
        wide = torch.promote_types(x.dtype, torch.float32)
        if weight is not None:
            weight = weight.to(wide) + 1 if self.one_plus else weight.to(wide)
        return self._fused(x.to(wide), weight, None if bias is None else bias.to(wide)).to(x.dtype)

    def _fused(self, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        if self.operation == "rms_norm":
            return F.rms_norm(x, x.shape[-1:], weight, self.eps)
        return F.layer_norm(x, x.shape[-1:], weight, bias, self.eps)

    def of(self, module: nn.Module) -> tuple[Tensor | None, Tensor | None]:
        """The weight and bias of a module."""
        own = module._parameters
        return own.get(self.weight or ""), own.get(self.bias or "")

    def __str__(self) -> str:
        weight = "no weight" if self.weight is None else "weight + 1" if self.one_plus else "weight"
        width = "any number of" if self.width is None else self.width
        bias = "" if self.bias is None else " and bias"
        return f"{self.operation}, {weight}{bias}, eps={self.eps:g}, {width} columns"


def recognise_norm(module: nn.Module) -> Norm | str | None:
    """The norm that a module computes; why it is not fused although it looks like a norm; None if it is not a norm, or
    is torch's fused one already."""
    found: dict[torch.dtype, Norm] = {}
    others: list[tuple[torch.dtype, str]] = []
    for dtype in DTYPES:
        try:
            norm = _read(module, dtype)
        except NotUnderstood as reason:
            others.append((dtype, str(reason)))
            continue
        if norm is None:
            return None
        found[dtype] = norm
    if torch.float32 not in found:
        # Its own attributes may be named mean and std.
        names = _names_called(type(module)) - vars(module).keys()
        return others[0][1] if names & _SUMS and names & _ROOTS and not names & _FUSED else None
    first = found[torch.float32]
    for dtype, norm in list(found.items()):
        # The conditions may name different attributes for each dtype.
        if norm[:6] != first[:6]:
            others.append((dtype, "its own forward computes another norm"))
            del found[dtype]
    # Merge the conditions of all dtypes.
    kinds = zip(*(norm.conditions for norm in found.values()), strict=True)
    conditions = Conditions(*(tuple(dict.fromkeys(itertools.chain(*each))) for each in kinds))
    return first._replace(conditions=conditions, dtypes=tuple(found), others=tuple(others))


def may_be_norm(module: nn.Module) -> bool:
    """Whether a module has at most two parameters, vectors of one size, no children, and a forward that takes one
    tensor."""
    kind = type(module)
    own = [each for each in module._parameters.values() if each is not None]
    if isinstance(module, torch.jit.ScriptModule) or kind.__module__.startswith("torch.") or any(map(is_lazy, own)):
        return False
    if kind.forward is nn.Module.forward or module._modules or module._buffers or len(own) > 2:
        return False
    if any(each.dim() != 1 or each.shape != own[0].shape or not each.is_floating_point() for each in own):
        return False
    forward = inspect.unwrap(kind.forward)
    if not isinstance(forward, types.FunctionType) or forward.__defaults__ or forward.__kwdefaults__:
        return False
    code = forward.__code__
    several = code.co_flags & (inspect.CO_VARARGS | inspect.CO_VARKEYWORDS)
    return code.co_argcount == 2 and not code.co_kwonlyargcount and not several


def _names_called(kind: type[nn.Module]) -> set[str]:
    """The names in a class's forward, and in the methods of the class that it names, transitively; "sqrt" if it writes
    that as ``x**0.5``, or as its inverse."""
    names: set[str] = set()
    left = [inspect.unwrap(kind.forward)]
    while left:
        code = getattr(left.pop(), "__code__", None)
        new = set(code.co_names) - names if code is not None else set()
        names |= new
        if code is not None and not {0.5, -0.5}.isdisjoint(code.co_consts):
            names.add("sqrt")
        left += [inspect.unwrap(found) for found in (getattr(kind, name, None) for name in new) if callable(found)]
    return names


def _read(module: nn.Module, dtype: torch.dtype) -> Norm | None:
    """The norm that a module's forward computes in this dtype; None if it runs torch's fused one already.

    Raises:
        NotUnderstood: it is not a norm.
    """
    own = [each for each in module._parameters.values() if each is not None]
    reader = Reader(module, dtype=dtype)
    width = own[0].shape[0] if own else None
    result = reader.read(type(module).forward, reader.input(width))
    if not isinstance(result, Formula) or not result.shaped:
        raise NotUnderstood("does not give a tensor with the shape of its input")
    norm = next(_norms(result.value, reader.input(width).value), None)
    if norm is None:
        formula = text(result.value)
        short = formula if len(formula) <= _LONGEST_FORMULA else f"{formula[:_LONGEST_FORMULA]}..."
        raise NotUnderstood(f"computes {short}")
    if not all(reader.norms):
        return None
    if result.wide and dtype is not torch.float32:
        raise NotUnderstood(f"its own forward gives float32 for {str(dtype).removeprefix('torch.')}")
    return norm._replace(width=result.width, conditions=Conditions.of(reader))


def _norms(value: Polynomial, x: Polynomial) -> Iterator[Norm]:
    """The norm of x that equals a polynomial, if there is one."""
    atoms = list(value.atoms())
    names = [str(name) for kind, name, *_ in atoms if kind == "parameter"]
    bases = [base for kind, base, *exponent in atoms if kind == "power" and exponent == [-0.5]]
    # The constants added to the variance.
    epsilons = [base.terms.get(frozenset(), 0.0) for base in bases if isinstance(base, Polynomial)]
    for eps in epsilons if len(epsilons) == 1 and epsilons[0] > 0 else ():
        for operation in ("rms_norm", "layer_norm"):
            plain = normalised(x, operation, eps)
            if not names and plain == value:
                yield Norm(operation, None, None, False, eps)
            for weight, *others in permutations(names) if names else ():
                bias = others[0] if others else None
                shift = number(0.0) if bias is None else atom("parameter", bias)
                # torch has no fused rms_norm with a bias.
                if len(others) > 1 or (bias is not None and operation == "rms_norm"):
                    continue
                for one_plus in (False, True):
                    factor = atom("parameter", weight) + number(float(one_plus))
                    if plain * factor + shift == value:
                        yield Norm(operation, weight, bias, one_plus, eps)


class FusedNorm(ReplacedModule):
    """Mixin of the classes of norms: ``class Fused<Name>(FusedNorm, <Name>)``."""

    fused_norm: ClassVar[Norm]

    def why_called(self, *tensors: Tensor | None) -> str | None:
        """Why a call with these tensors would run the original forward, or None."""
        return "it takes one tensor" if len(tensors) != 1 else self.why_not_fused(tensors[0])

    def why_not_fused(self, x: Any) -> str | None:
        """Why the fused norm cannot run for x and the current parameters, or None."""
        norm = self.fused_norm
        if reason := self.why_fused_class_changed():
            return reason
        if not is_plain_now(x):
            return why_not_now(x) or f"an input is a {class_name(x)}, not a tensor"
        dtype = x.dtype
        if dtype not in norm.dtypes:
            return f"its result in {dtype} may differ"
        kind = x.device.type
        autocast = kind in ("cuda", "cpu") and torch.is_autocast_enabled(kind)
        if dtype is torch.float32:
            if x.is_cuda and not autocast:
                return WHY_NOT_FLOAT32
        elif autocast:
            return f"autocast may change its {dtype}"
        own = self._parameters
        for name in (norm.weight, norm.bias):
            if name is None:
                continue
            tensor = own.get(name)
            if type(tensor) is not nn.Parameter and type(tensor) is not Tensor:
                return f"its {name} is no plain parameter"
            if tensor.dtype is not dtype or tensor.shape != x.shape[-1:]:
                size = "another width" if tensor.shape != x.shape[-1:] else str(dtype)
                return f"its {name} is of {tensor.dtype} and {list(tensor.shape)}, its input of {size}"
        if norm.weight is None and (not x.dim() or norm.width not in (None, x.shape[-1])):
            return f"its input is of {list(x.shape)}, where its last dimension was to have {norm.width}"
        return norm.conditions.why_changed(self)

    def run_fused(self, method: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given = (*args, *kwargs.values())
        if is_dynamo_compiling() or len(given) != 1:
            return method(self, *args, **kwargs)
        if reason := self.why_not_fused(given[0]):
            say_once(self, reason, OWN_FORWARD)
            return method(self, *args, **kwargs)
        norm = self.fused_norm
        return norm.run(given[0], *norm.of(self))


def why_norm_left(module: nn.Module, norm: Norm) -> str | None:
    """Why a module that computes this norm stays as it is, given its parameters' dtypes; or None."""
    if "forward" in vars(module):
        return "has a forward of its own, set on the instance"
    own = {each.dtype for each in module.parameters()} or {torch.get_default_dtype()}
    reasons = [reason for dtype, reason in norm.others if dtype in own]
    unknown = [f"its own forward runs in {dtype}" for dtype in own.difference(DTYPES)]
    return next(iter((*reasons, *unknown)), None)


def facts_of_norm(module: nn.Module, norm: Norm, on: Device | None) -> tuple[tuple[int, int] | None, str | None]:
    """:func:`facts_of_ffn` for a norm, without the path: its kernels are torch's, which has them only for GPUs."""
    parameters = list(module.parameters())
    other = None if on else next((each.device.type for each in parameters if not each.is_cuda), None)
    if other is not None:
        return None, f"torch has no fused norms on {other}"
    kept = kept_by_norm(module, norm)
    if any(each.dtype is torch.float32 for each in parameters):
        return None if kept is None else (kept[0], kept[0]), WHY_NOT_FLOAT32
    return kept, None


def kept_by_norm(module: nn.Module, norm: Norm) -> tuple[int, int] | None:
    """Bytes per token of (the forward as written, torch's fused norm); the input counts only if it is saved.

    None if the forward takes any width.
    """
    if norm.width is None:
        return None
    dtype = next((each.dtype for each in module.parameters()), torch.get_default_dtype())
    theirs = _kept_by_forward.get(
        (type(module), type(module).forward, norm, dtype), lambda: _kept_by_row(module, norm.width or 0, dtype)
    )
    # The input, in float32 if the weight is 1 + parameter; and per row the factor and, of a layer norm, the mean.
    itemsize = max(4, dtype.itemsize) if norm.one_plus else dtype.itemsize
    return theirs, norm.width * itemsize + (4 if norm.operation == "rms_norm" else 8)


_kept_by_forward: Remembered[int] = Remembered()


def _kept_by_row(module: nn.Module, width: int, dtype: torch.dtype) -> int:
    """The bytes that the forward of a norm saves per row; it runs on the meta device."""
    twin = object.__new__(type(module))
    twin.__dict__ = vars(module) | {
        "_parameters": {
            name: None if each is None else nn.Parameter(torch.empty_like(each, device="meta"))
            for name, each in module._parameters.items()
        }
    }
    found = []
    for rows in (1, 3):
        x = torch.empty(rows, width, dtype=dtype, device="meta", requires_grad=True)
        kept, _ = kept_by(lambda x: type(module).forward(twin, x), x)
        found.append(sum(each.untyped_storage().nbytes() for each in kept))
    return (found[1] - found[0]) // 2


def replace_norms(model: nn.Module, changes: Changes) -> None:
    """Find the norms that are written as several operations."""
    alike: dict[Hashable, Norm | str | None] = {}
    for path, module in model.named_modules():
        if isinstance(module, FusedNorm):
            changes.skip(path, module, ALREADY_FUSED)
        if isinstance(module, ReplacedModule) or not may_be_norm(module):
            continue
        key = signature(module, set())
        if key not in alike:
            alike[key] = recognise_norm(module)
        norm = alike[key]
        if norm is None:
            continue
        if isinstance(norm, str):
            changes.skip(path, module, f"it looks like a norm, but {norm}")
        elif (reason := why_norm_left(module, norm)) is not None:
            changes.skip(path, module, f"it is a norm, but {reason}")
        else:
            fused = fused_class(FusedNorm, type(module), fused_norm=norm)
            changes.change(path, module, fused, str(norm), *facts_of_norm(module, norm, changes.on))
