"""Stand-ins for a block, and for what it holds, while a method of it runs with its FFN fused.

The method is the original one: only the parts of the FFN are others. ``up``, the activation and the dropout hand on
what they get, so that ``down`` gets the input of the FFN, and computes all of it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from .finding import attribute
from .rules import FFNRule


class StandIn:
    """A module as the method sees it: its attributes, but for ``others``; calls go to ``function``, with it as self."""

    def __init__(self, module: nn.Module, function: Callable[..., Any], others: dict[str, Any]) -> None:
        self.__dict__.update({"_fused_module": module, "_fused_function": function}, **others)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_fused_module"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.__dict__["_fused_module"], name, value)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._fused_function(self, *args, **kwargs)

    __call__ = forward


def stand_in(block: nn.Module, rule: FFNRule, ffn: Callable[[Tensor], Tensor]) -> StandIn:
    """The block as the method ``rule.inside`` is to see it; ``ffn`` computes the FFN that it holds."""
    others: dict[str, dict[str, Any]] = {name: {} for name in ("", *dict(rule.holders))}
    for name in rule.parts():
        holder, _, last = name.rpartition(".")
        part = attribute(block, name)
        if name == rule.down:
            others[holder][last] = StandIn(part, lambda _, hidden: ffn(hidden), {})
        elif isinstance(part, nn.Module):
            others[holder][last] = StandIn(part, lambda _, hidden: hidden, {})
        else:
            others[holder][last] = 0.0 if isinstance(part, (int, float)) else _same
    for name in sorted(others, key=len, reverse=True)[:-1]:
        holder, _, last = name.rpartition(".")
        child = attribute(block, name)
        others[holder][last] = StandIn(child, type(child).forward, others[name])
    return StandIn(block, type(block).forward, others[""])


def _same(hidden: Tensor) -> Tensor:
    return hidden
