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
    def clamped(self) -> bool:
        """Whether limit or offset has an effect."""
        return self.limit is not None or self.offset != 0

    @property
    def limits(self) -> tuple[float, float] | None:
        """``numbers`` if ``clamped``, else None."""
        return self.numbers if self.clamped else None

    @property
    def numbers(self) -> tuple[float, float]:
        """(limit, offset) as kernels take them."""
        return math.inf if self.limit is None else self.limit, self.offset

    @property
    def constants(self) -> tuple[str, str, str, bool]:
        """(activation, accuracy, input precision, clamped) as kernels take them: one compile-time argument."""
        return self.activation, self.accuracy, self.input_precision, self.clamped
