"""The class that `replace` gives to norms: the original class, with a forward that runs torch's fused norm.

Torch's fused norms save the input and one or two numbers per row for the backward pass, read the input once and write
the result once. Written as several operations, as in most models, a norm in 16 bits moves about five times the bytes
and saves three times as many. A compiled model runs the original forward: the compiler fuses it with its surroundings.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling

from ..modules import class_name, is_plain_now, say_once, why_not_now
from .recognising_norms import DTYPES, WHY_NOT_FLOAT32, Norm
from .swapping import OWN_FORWARD, ReplacedModule


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
