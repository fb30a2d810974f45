"""Which modules of a model are asked to run in 8 bits: by a ``precision``, but for those that its ``skip`` names."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from ..functional.operation import Operation
from ..functional.precision import Float8, precision_word
from ..planning import Device
from .saving import precision_in_words

SKIPPED = "the precision's skip names it"


class Wish:
    """A ``precision`` for the modules of a model; ``word`` is None if it asks for nothing.

    Raises:
        TypeError, ValueError: an unknown precision, or a pattern of ``skip`` that no path matches.
    """

    def __init__(self, model: nn.Module, precision: str | Float8 | None) -> None:
        self.word = precision.word if isinstance(precision, Float8) else precision_word(precision)
        self._skipped: set[nn.Module] = set()
        modules = list(model.named_modules(remove_duplicate=False))
        for pattern in precision.patterns if isinstance(precision, Float8) else ():
            named = [module for path, module in modules if fnmatchcase(path, pattern)]
            if not named:
                raise ValueError(f"precision: skip has {pattern!r}: expected a pattern that some module's path matches")
            for module in named:
                self._skipped.update(module.modules())

    def of(self, *modules: nn.Module) -> str | None:
        """The word for what consists of these modules; None if any of them is skipped."""
        return self.word if self._skipped.isdisjoint(modules) else None

    def in_words(self, operation: Operation, on: Device | None, **arguments: Any) -> str:
        """Whether a call that was asked to run in 8 bits does; empty where nothing was asked."""
        if self.word is None:
            return ""
        if arguments["precision"] is None:
            return f"; not in 8 bits: {SKIPPED}"
        return precision_in_words(operation, on, **arguments)
