"""The arithmetic of a product with an activation: all that it depends on besides its tensors."""

import math
from typing import NamedTuple, Protocol


class Named(Protocol):
    """Anything that has these three names: :class:`Arithmetic`, or the details of a call."""

    @property
    def activation(self) -> str: ...

    @property
    def accuracy(self) -> str: ...

    @property
    def input_precision(self) -> str: ...


class Constants(NamedTuple):
    """The part of an :class:`Arithmetic` that kernels are compiled for; ``clamped``: it has a limit or an offset.

    Device code passes a name on through a compile-time variable: Triton 3.6 cannot pass a field that is a string.
    """

    activation: str
    accuracy: str
    input_precision: str = "ieee"
    clamped: bool = False


class Arithmetic(NamedTuple):
    """``accuracy`` is that of activations: see ``kernels.activations``.

    A gated hidden is ``act(g) ⊙ (z + offset)``, or with a limit
    ``act(min(g, limit)) ⊙ (clamp(z, -limit, limit) + offset)``.
    """

    activation: str
    accuracy: str
    input_precision: str = "ieee"
    limit: float | None = None
    offset: float = 0.0

    @classmethod
    def of(cls, named: Named) -> "Arithmetic":
        """The same names, without limit and offset."""
        return cls(named.activation, named.accuracy, named.input_precision)

    @property
    def numbers(self) -> tuple[float, float]:
        """(limit, offset) as kernels take them."""
        return math.inf if self.limit is None else self.limit, self.offset

    @property
    def constants(self) -> Constants:
        """What the generic kernels are compiled for."""
        clamped = self.limit is not None or self.offset != 0
        return Constants(self.activation, self.accuracy, self.input_precision, clamped)

    @property
    def sm90_constants(self) -> Constants:
        """The same for the sm90 kernels, whose products of narrow operands have a single input precision."""
        return self.constants._replace(input_precision="ieee")
