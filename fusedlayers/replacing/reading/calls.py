"""The results of calls: of parts of the module, functions of torch, and the user's methods and functions."""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from ...modules import why_called_otherwise
from . import operations
from .activation_modules import known_activation
from .attributes import Attributes
from .polynomials import atom, function, linear_result, linears_in
from .sizes import linears, sizes_of_linear
from .state import LinearCall
from .values import ABSENT, Formula, Known, Method, NotUnderstood, Part, Unknown, Weight

# Operations whose result may share memory with their input.
_VIEWS = frozenset(
    ("chunk", "split", "unflatten", "view", "reshape", "view_as", "reshape_as", "flatten", "contiguous", "to", "float",
     "type_as", "dropout", "unbind", "clamp")
)  # fmt: skip
_CASTS = frozenset(("to", "float", "type_as"))
# The most children that a part may have for a lenient reading to read its forward.
_MOST_CHILDREN = 8


class Calls(Attributes):
    """The part of the reader that follows calls."""

    def call(self, called: Any, args: Sequence[Any], options: dict[str, Any]) -> Any:
        """The result of a call."""
        if isinstance(called, Part):
            return self._call_part(called, args, options)
        if isinstance(called, Method):
            if isinstance(called.owner, Formula):
                return self._operation(called.name, None, (called.owner, *args), options)
            return self._call_method(called, args, options)
        if not isinstance(called, Known):
            raise NotUnderstood("calls what is not known")
        target = called.value
        if operations.is_known(target):
            result = self._operation(getattr(target, "__name__", ""), target, args, options)
            return self._noted(called.path or "", args, result)
        if isinstance(target, types.FunctionType):
            if target is typing.cast:
                return args[-1]
            return self._noted(called.path, args, self.inlined(target, args, options))
        if isinstance(target, types.MethodType) and target.__self__ is self.block and called.path is not None:
            # A method of the block's class; the attribute that holds it is watched, so it stays that function.
            result = self.inlined(target.__func__, (Part("", self.block), *args), options)
            return self._noted(called.path, args, result)
        if callable(target) and not isinstance(target, type) and called.path is not None and len(args) == 1:
            name = known_activation(target)
            if name is not None and isinstance(args[0], Formula) and not options:
                return self._noted(called.path, args, args[0].with_value(function(name, args[0].value)))
        return self._call_builtin(target, args, options)

    def _noted(self, path: str | None, args: Sequence[Any], result: Any) -> Any:
        if path is not None and args and isinstance(args[0], Formula) and isinstance(result, Formula):
            self.activations.append((path, args[0].value, result.value))
        return result

    def _operation(self, name: str, target: Any, args: Sequence[Any], options: dict[str, Any]) -> Any:
        """Calls a function of torch, or a method of a tensor, in place or not."""
        flag = options.get("inplace", Known(False))
        if not isinstance(flag, Known) or type(flag.value) is not bool:
            raise NotUnderstood("decides inplace at every call")
        inplace = flag.value or (name.endswith("_") and not name.endswith("__"))
        options = {option: value for option, value in options.items() if option != "inplace"}
        x = next((each for each in (*args, options.get("input")) if isinstance(each, Formula)), None)
        if target is None:
            result = operations.method(args[0], name.removesuffix("_"), args[1:], options)
        else:
            result = operations.call(target, args, options)
        if name in ("rms_norm", "layer_norm"):
            self.norms.append(all(each.wide for each in (*args, *options.values()) if isinstance(each, Formula)))
        if name in _CASTS and x is not None and not linears_in(x.value):
            self.casts = True
        if inplace and x is not None:
            self._overwrite(x, result)
        elif name.removesuffix("_") in _VIEWS and x is not None:
            self._viewed.append(x)
            if isinstance(result, Formula):
                return dataclasses.replace(result, borrowed=True)
            if isinstance(result, tuple):
                return tuple(dataclasses.replace(each, borrowed=True) for each in result)
        return result

    def _call_method(self, called: Method, args: Sequence[Any], options: dict[str, Any]) -> Any:
        owner = typing.cast(Part, called.owner)
        if called.name == "forward" and owner.path:
            return self._call_part(owner, args, options)
        self._note("methods", (type(owner.module), called.name), called.function)
        return self.inlined(typing.cast(Any, called.function), (owner, *args), options)

    def _call_part(self, part: Part, args: Sequence[Any], options: dict[str, Any]) -> Any:
        module = part.module
        if (reason := why_called_otherwise(type(module))) is not None:
            raise NotUnderstood(f"calls {part.path}, whose class {reason}")
        self.handed += [(part.path, each.value) for each in (*args, *options.values()) if isinstance(each, Formula)]
        [x] = (*args, *options.values()) if len(args) + len(options) == 1 else [None]
        if (sizes := sizes_of_linear(module)) is not None:
            return self._call_linear(part, sizes, x)
        if not isinstance(x, Formula):
            return self._inlined_part(part, args, options)
        if type(module) is nn.Dropout:
            self._viewed.append(x)
            dropped = x.with_value(atom("dropout", part.path, x.value))
            if module.inplace:
                raise NotUnderstood(f"calls {part.path}, which overwrites its input")
            return dataclasses.replace(dropped, borrowed=True)
        if type(module) is nn.Identity:
            # No rule names it, so no call checks it again.
            if "forward" in vars(module):
                raise NotUnderstood(f"calls {part.path}, whose forward was set on the instance")
            return x
        name = known_activation(module)
        if name is not None:
            result = x.with_value(function(name, x.value))
            if getattr(module, "inplace", False):
                self._overwrite(x, result)
            return self._noted(part.path, (x,), result)
        return self._noted(part.path, (x,), self._inlined_part(part, args, options))

    def _inlined_part(self, part: Part, args: Sequence[Any], options: dict[str, Any]) -> Any:
        if "forward" in vars(part.module) and not self.lenient:
            raise NotUnderstood(f"calls {part.path}, whose forward was set on the instance")
        if self.lenient and (
            any("." in path for path, _ in linears(part.module)) or len(part.module._modules) > _MOST_CHILDREN
        ):
            # It is a block in its own right.
            raise NotUnderstood(f"calls {part.path}")
        return self.inlined(type(part.module).forward, (part, *args), options)

    def _call_linear(self, part: Part, sizes: tuple[int, int], x: Any) -> Formula:
        given = x
        if isinstance(x, Unknown):
            x = Formula(atom("unknown", x.number), sizes[0])
        if not isinstance(x, Formula) or x.width not in (None, sizes[0]):
            raise NotUnderstood(f"calls {part.path} with something else than a tensor of {sizes[0]} columns")
        output = linear_result(part.path, x.value)
        self.linears.append(LinearCall(part.path, x.value, output, self._misses, given))
        return dataclasses.replace(x, value=output, width=sizes[1], wide=False, borrowed=False)

    def _call_builtin(self, target: Any, args: Sequence[Any], options: dict[str, Any]) -> Any:
        if options:
            raise NotUnderstood("calls what is not known")
        if target is isinstance and len(args) == 2:
            kinds = [getattr(each, "value", None) for each in (args[1] if isinstance(args[1], tuple) else (args[1],))]
            if isinstance(args[0], (Formula, Weight)) and kinds == [torch.Tensor]:
                return Known(True)
            # A block with an FFN inside a method cannot watch the classes of its children.
            if isinstance(args[0], Part) and not self.lenient and all(isinstance(kind, type) for kind in kinds):
                if args[0].path:
                    self._watch(args[0].inner("__class__"), type(args[0].module))
                return Known(isinstance(args[0].module, tuple(kinds)))
        if target is type and args == [Part("", self.block)]:
            self._look_at_class()
        if target is hasattr and len(args) == 2 and isinstance(args[0], Part) and isinstance(args[1], Known):
            found = hasattr(args[0].module, args[1].value)
            if found and self.lenient:
                raise NotUnderstood(f"asks whether there is {args[0].inner(args[1].value)}")
            path = args[0].inner(args[1].value)
            value = getattr(args[0].module, args[1].value) if found else ABSENT
            if isinstance(value, (nn.Module, torch.Tensor)):
                # It may be replaced by another of its class.
                path, value = f"{path}.__class__", type(value)
            self._watch(path, value)
            return Known(found)
        if target in (tuple, list, enumerate, zip, len) and args:
            items = [self._items(each) for each in args]
            if None not in items:
                found = typing.cast(Any, items)
                if target is len:
                    if isinstance(args[0], Part):
                        self._watch_length(args[0])
                    return Known(len(found[0]))
                if target is zip:
                    return tuple(zip(*found, strict=False))
                return (
                    found[0]
                    if target is not enumerate
                    else tuple((Known(place), each) for place, each in enumerate(found[0]))
                )
        numbers = [each.value for each in args if isinstance(each, Known) and type(each.value) in (int, float)]
        if len(numbers) == len(args) and (target in (int, float, min, max, abs, range) or _is_of_math(target)):
            try:
                return Known(target(*numbers))
            except (ArithmeticError, TypeError, ValueError):
                raise NotUnderstood(f"calls {target.__name__} of other numbers than it takes") from None
        raise NotUnderstood(f"calls {getattr(target, '__name__', 'what is not known')}")


def _is_of_math(target: Any) -> bool:
    return getattr(target, "__module__", None) == "math" and isinstance(target, types.BuiltinFunctionType)
