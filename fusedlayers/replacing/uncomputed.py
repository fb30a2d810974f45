"""What stands for a tensor that nobody has computed yet, while a method of a module runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

# torch.is_autocast_enabled raises for these, and no release's Dynamo traces torch.amp.is_autocast_available.
_WITHOUT_AUTOCAST = ("meta", "lazy", "vulkan")


class Uncomputed:
    """A tensor that follows from x, and that nobody has computed yet.

    It is no tensor. Every use of it as one computes it, under the modes in which it came to be, and then it is computed
    once. A subclass says how, and which uses leave it uncomputed.
    """

    # What it is, and what to do about a use that is an error.
    _named: ClassVar[str]
    _advice: ClassVar[str]

    def __init__(self, x: Tensor) -> None:
        self._x = x
        self._modes = self._modes_now()
        self._values: Tensor | None = None

    def _modes_now(self) -> tuple[bool, torch.dtype | None]:
        """Whether gradients are wanted, and autocast's dtype where it is on, in calls that Dynamo can trace."""
        kind = self._x.device.type
        autocast = kind not in _WITHOUT_AUTOCAST and torch.is_autocast_enabled(kind)
        return torch.is_grad_enabled(), torch.get_autocast_dtype(kind) if autocast else None

    def _before(self, use: str) -> None:
        """Raises an error where it cannot be computed any more, for this ``use``."""

    def _compute(self, use: str) -> Tensor:
        """The tensor, in the modes of the beginning."""
        raise NotImplementedError

    def _operated(self, name: str, others: tuple[Any, ...]) -> Any:
        """What an operator gives that leaves it uncomputed, by the name of its method; None for any other."""
        return None

    def _tensor(self, use: str) -> Tensor:
        """The tensor, computed because of this ``use``."""
        if self._values is None:
            self._before(use)
            off = not (torch.is_grad_enabled() or torch._C._is_fwd_grad_enabled() or torch.is_inference_mode_enabled())
            if self._modes[0] and off:
                # Both are off in the forward pass of an autograd Function, which took this for no tensor.
                raise RuntimeError(
                    f"a torch.autograd.Function was given {self._named} ({use}), whose gradient would be lost: "
                    f"{self._advice}"
                )
            with torch.set_grad_enabled(self._modes[0]), self._autocast():
                self._values = self._compute(use)
        return self._values

    def _autocast(self) -> AbstractContextManager[object]:
        """Autocast as it was at the beginning."""
        dtype = self._modes[1]
        if self._modes_now()[1] == dtype:
            return nullcontext()
        return torch.autocast(self._x.device.type, dtype, enabled=dtype is not None)

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        use = f"in {getattr(function, '__name__', function)}"
        args, options = computed((args, kwargs or {}), use)
        return function(*args, **options)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._tensor(f"its {name}"), name)


def _operator(name: str) -> Callable[..., Any]:
    def operator(self: Uncomputed, *others: Any) -> Any:
        if (found := self._operated(name, others)) is not None:
            return found
        return getattr(self._tensor(f"in {name}"), name)(*computed(others, f"in {name}"))

    return operator


# Python looks these up on the class.
_NUMERIC = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and", "or", "xor")
_OTHERS = ("neg", "pos", "abs", "invert", "lt", "le", "gt", "ge", "eq", "ne", "bool", "float", "int")
_ITEMS = ("getitem", "setitem", "len", "iter", "contains")
for _name in (*(side + name for name in _NUMERIC for side in ("", "r", "i")), *_OTHERS, *_ITEMS):
    setattr(Uncomputed, f"__{_name}__", _operator(f"__{_name}__"))


def computed(values: Any, use: str) -> Any:
    """``values``, however nested, with tensors in the place of what is not computed yet."""
    if isinstance(values, Tensor):
        return values
    return tree_map_only(Uncomputed, lambda each: each._tensor(use), values)
