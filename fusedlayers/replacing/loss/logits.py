"""Logits that nobody has computed yet: what the last linear layer of a model returns while its loss needs none."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_map_only

from ...functional.linear_log_probs import LINEAR_LOG_PROBS

# torch.is_autocast_enabled raises for these, and no release's Dynamo traces torch.amp.is_autocast_available.
_WITHOUT_AUTOCAST = ("meta", "lazy", "vulkan")
# (softcap or None, scale).
_Arithmetic = tuple["float | None", float]
# (name, number or dtype).
_Step = tuple[str, Any]
TO_FLOAT: _Step = ("to", torch.float32)
_NONE: _Step = ("none", None)
# Names of functions and methods.
_PRODUCTS = ("mul", "multiply", "__mul__", "__rmul__")
_QUOTIENTS = ("div", "divide", "true_divide", "__truediv__")


class Logits:
    """The output of a linear layer for x, and the steps applied to it since.

    Steps that ``linear_cross_entropy`` can apply itself leave it uncomputed: factors, the tanh of a softcap, a cast to
    float32. It is not a tensor: any other use as one computes it, once, under the modes of its creation.
    """

    def __init__(self, x: Tensor, weight: Tensor, bias: Tensor | None, steps: tuple[_Step, ...] = ()) -> None:
        self._x, self._weight, self._bias, self._steps = x, weight, bias, steps
        self._modes = self._modes_now()
        self._values: Tensor | None = None
        # None where Dynamo traces: tensors have no version counters there.
        self._versions = None if torch.compiler.is_compiling() else self._versions_now()

    def _modes_now(self) -> tuple[bool, torch.dtype | None]:
        """(grad mode, autocast's dtype or None), in calls that Dynamo can trace."""
        kind = self._x.device.type
        autocast = kind not in _WITHOUT_AUTOCAST and torch.is_autocast_enabled(kind)
        return torch.is_grad_enabled(), torch.get_autocast_dtype(kind) if autocast else None

    def _autocast(self) -> AbstractContextManager[object]:
        """Autocast as it was when the logits were created."""
        dtype = self._modes[1]
        if self._modes_now()[1] == dtype:
            return nullcontext()
        return torch.autocast(self._x.device.type, dtype, enabled=dtype is not None)

    def _versions_now(self) -> tuple[tuple[int, bool], ...]:
        """(version counter, whether the memory is there) of each tensor: FSDP2 frees that of a weight."""
        tensors = [each for each in (self._x, self._weight, self._bias) if each is not None]
        return tuple((each._version, bool(each.untyped_storage().nbytes())) for each in tensors)

    def _check_unchanged(self, use: str) -> None:
        """Raise an error if it is too late to compute them for this ``use``."""
        if torch.compiler.is_compiling():
            return
        if self._versions is None:
            raise RuntimeError(NO_LOGITS.why)
        if self._versions != self._versions_now():
            raise RuntimeError(
                f"the logits were not computed with the loss, and now it is too late ({use}): the weight of their "
                "linear layer, or its input, was written into or freed since, as an optimizer's step does. Read them "
                "earlier, or replace the model with loss=False"
            )

    def _tensor(self, use: str) -> Tensor:
        """The tensor, computed because of this ``use``."""
        if self._values is None:
            self._check_unchanged(use)
            off = not (torch.is_grad_enabled() or torch._C._is_fwd_grad_enabled() or torch.is_inference_mode_enabled())
            if self._modes[0] and off:
                # Both modes are off in the forward pass of an autograd Function, which does not see this object as a
                # tensor.
                raise RuntimeError(
                    f"a torch.autograd.Function was given the logits ({use}), whose gradient would be lost: replace "
                    "the model with loss=False"
                )
            with torch.set_grad_enabled(self._modes[0]), self._autocast():
                self._values = self._computed_from(self._x, self._weight, self._bias, self._steps)
        return self._values

    def _computed_from(self, x: Tensor, weight: Tensor, bias: Tensor | None, steps: tuple[_Step, ...]) -> Tensor:
        if self._modes[1] is not None:
            # Explicit casts, because autocast does not act below autograd, where LazyLogits may compute.
            dtype = self._dtype_after(())
            x, weight, bias = x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
        values = F.linear(x, weight, bias)
        for step, value in steps:
            if step == "mul":
                values = values * value
            elif step == "div":
                values = values / value
            else:
                values = values.tanh() if step == "tanh" else values.to(value)
        return values

    def _gradient_before_steps(self, dy: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """The gradient of the linear layer's output, given the gradient of the logits."""
        for place, (step, value) in reversed(tuple(enumerate(self._steps))):
            if step == "mul":
                dy = dy * value
            elif step == "div":
                dy = dy / value
            elif step == "to":
                dy = dy.to(self._dtype_after(self._steps[:place]))
            else:
                y = self._computed_from(x, weight, bias, self._steps[: place + 1])
                dy = dy * (1 - y * y)
        return dy

    def _without_gradient(self, use: str) -> Tensor:
        """The tensor, computed because of this ``use``, without a graph: for callers with a backward pass of their
        own."""
        if self._values is None:
            self._check_unchanged(use)
            with torch.no_grad(), self._autocast():
                self._values = self._computed_from(self._x, self._weight, self._bias, self._steps)
        return self._values

    def _argmax(self) -> Tensor | None:
        """The arg-max of every token in kernels, which leave the logits uncomputed; None where these do not run."""
        arithmetic = None if self._values is not None else self._arithmetic()
        if arithmetic is None:
            return None
        self._check_unchanged("in argmax")
        softcap, scale = arithmetic
        with torch.no_grad(), self._autocast():
            target = self._x.new_zeros(self._x.shape[:-1], dtype=torch.int64)
            tensors, options = LINEAR_LOG_PROBS.bound(
                self._x, self._weight, target, linear_bias=self._bias, softcap=softcap, logit_scale=scale,
                return_argmax=True,
            )  # fmt: skip
            found = LINEAR_LOG_PROBS.call(tensors, options, in_kernels=True)
        return None if found is None else found[1]

    def _operated(self, name: str, others: tuple[Any, ...]) -> Logits | None:
        """The logits after an operator, a method or a function that leaves them uncomputed; None for any other."""
        if self._values is not None:
            return None
        step = _step_of(name, others)
        if step == _NONE or (step == TO_FLOAT and self._dtype_after(self._steps) is torch.float32):
            return self
        return None if step is None or torch.is_grad_enabled() is not self._modes[0] else self._after(step)

    def _after(self, *steps: _Step) -> Logits:
        """The logits after these further steps, still uncomputed."""
        after = Logits(self._x, self._weight, self._bias, (*self._steps, *steps))
        # As at creation: autocast may be off when somebody casts the result.
        after._modes, after._versions = self._modes, self._versions
        return after

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if args and not kwargs and isinstance(args[0], Logits):
            after = args[0]._operated(getattr(function, "__name__", ""), args[1:])
            if after is not None:
                return after
        args, options = computed((args, kwargs or {}), f"in {getattr(function, '__name__', function)}")
        return function(*args, **options)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        if self._values is None and name == "shape":
            return torch.Size((*self._x.shape[:-1], self._weight.shape[0]))
        if self._values is None and name == "dtype":
            return self._dtype_after(self._steps)
        if name == "device":
            return self._x.device
        return getattr(self._tensor(f"its {name}"), name)

    def _dtype_after(self, steps: tuple[_Step, ...]) -> torch.dtype:
        """The dtype after these steps; autocast leaves float64 as it is."""
        dtype = self._x.dtype if self._x.dtype is torch.float64 else self._modes[1] or self._x.dtype
        for step, value in steps:
            if step == "to":
                dtype = value
        return dtype

    def _arithmetic(self) -> _Arithmetic | None:
        """The softcap and the scale of ``linear_cross_entropy`` that equal the steps; None if there are none."""
        factor, divisor, cap, cap_divisor, capped = 1.0, 1.0, 1.0, 1.0, False
        for step, value in self._steps:
            if step == "tanh":
                if capped:
                    return None
                capped = True
            elif step == "mul":
                factor, cap = (factor, cap * value) if capped else (factor * value, cap)
            elif step == "div":
                divisor, cap_divisor = (divisor, cap_divisor * value) if capped else (divisor * value, cap_divisor)
            elif value is not torch.float32:
                return None
        if not divisor or not cap_divisor:
            return None
        # Multiply before dividing, so that a number over itself gives exactly 1.
        softcap = cap / cap_divisor
        scale = factor * softcap / divisor if capped else factor / divisor
        # scale - scale is NaN for infinities and NaN.
        if scale - scale != 0 or not 0 < softcap < float("inf"):
            return None
        return (softcap if capped else None), scale


def _step_of(name: str, others: tuple[Any, ...]) -> _Step | None:
    """The step that an operation is, given its other arguments; None if it is none that stays uncomputed."""
    if name in ("tanh", "contiguous", "float"):
        steps = {"tanh": ("tanh", None), "contiguous": _NONE, "float": TO_FLOAT}
        return None if others else steps[name]
    if len(others) != 1:
        return None
    if name == "to":
        return TO_FLOAT if others[0] is torch.float32 else None
    if type(others[0]) not in (int, float):
        return None
    if name in _PRODUCTS:
        return "mul", others[0]
    return ("div", others[0]) if name in _QUOTIENTS else None


def _operator(name: str) -> Callable[..., Any]:
    def operator(self: Logits, *others: Any, **options: Any) -> Any:
        if not options and (found := self._operated(name, others)) is not None:
            return found
        others, options = computed((others, options), f"in {name}")
        return getattr(self._tensor(f"in {name}"), name)(*others, **options)

    return operator


# Python looks operators up on the class.
_NUMERIC = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and", "or", "xor")
_OTHERS = ("neg", "pos", "abs", "invert", "lt", "le", "gt", "ge", "eq", "ne", "bool", "float", "int")
_ITEMS = ("getitem", "setitem", "len", "iter", "contains")
for _name in (*(side + name for name in _NUMERIC for side in ("", "r", "i")), *_OTHERS, *_ITEMS):
    setattr(Logits, f"__{_name}__", _operator(f"__{_name}__"))
for _name in ("tanh", "contiguous", "float", "to"):
    setattr(Logits, _name, _operator(_name))


def computed(values: Any, use: str) -> Any:
    """``values``, however nested, with uncomputed logits replaced by tensors."""
    if isinstance(values, Tensor):
        return values
    return tree_map_only(Logits, lambda each: each._tensor(use), values)


class NoLogits:
    """Stands in for the logits of a compiled model: every use is an error that says why."""

    why = (
        "the logits were not computed: a compiled model in training computes the loss alone. Replace the model with "
        "loss=False to have both"
    )

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise RuntimeError(cls.why)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(self.why)

    def __getitem__(self, key: Any) -> Any:
        raise RuntimeError(self.why)

    def __repr__(self) -> str:
        return f"<no logits: {self.why}>"


NO_LOGITS = NoLogits()
