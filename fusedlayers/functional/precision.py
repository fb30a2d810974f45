"""The precision that products of a layer run in: that of their operands, or 8 bits by a recipe."""

from __future__ import annotations

from dataclasses import dataclass

from ..planning.float8 import AUTO, ROWWISE, ROWWISE_BF16
from .options import checked_patterns

# What ``precision="fp8"`` means: the default recipe, in a word.
WORD = AUTO
RECIPES = (ROWWISE, ROWWISE_BF16)
# How operations pass a recipe on, by the format of weight gradients.
WORDS = {"auto": AUTO, "fp8": ROWWISE, "bf16": ROWWISE_BF16}


@dataclass(frozen=True)
class Float8:
    """How products run in 8 bits (e4m3), as a layer's ``precision``.

    Args:
        recipe: "rowwise": every row of an operand has a scale of its own, the least power of two from its absolute
            maximum / 448 on. No state is kept between calls. "rowwise_with_gw_hp" is torchao's name of the same with
            ``weight_gradient="bf16"``.
        weight_gradient: "fp8": weight gradients are products of 8-bit operands, too, which are transposed for it.
            "bf16": they are computed from operands in 16 bits, as without ``precision``. "auto": in 8 bits if the
            layer is so wide that this is faster. Bias gradients are sums in 16 bits. Experts have weight gradients in
            16 bits if a width is no multiple of 64.
        skip: patterns of paths in the model that `replace` is given, as in a shell (``"*.layers.0"``): what they match
            stays in 16 bits, with all that is inside of it. An FFN stays if any of its linear layers does. A layer or a
            function that is given a ``skip`` raises ValueError.

    Raises:
        TypeError: ``skip`` is neither a str nor a tuple of str.
        ValueError: a recipe or a format that is not built, or two that contradict each other; the message names those
            that are.
    """

    recipe: str = ROWWISE
    weight_gradient: str = "auto"
    skip: str | tuple[str, ...] = ()

    def __post_init__(self) -> None:
        formats = tuple(WORDS)
        for name, value, known in (
            ("recipe", self.recipe, RECIPES),
            ("weight_gradient", self.weight_gradient, formats),
        ):
            if value not in known:
                raise ValueError(f"{name} must be one of {', '.join(map(repr, known))}, got {value!r}")
        if self.weight_gradient == "fp8" and self.recipe == ROWWISE_BF16:
            raise ValueError(f'weight_gradient must be "auto" or "bf16" with the recipe {self.recipe!r}, got "fp8"')
        checked_patterns("skip", self.skip)

    @property
    def patterns(self) -> tuple[str, ...]:
        """``skip`` as a tuple."""
        return checked_patterns("skip", self.skip)

    @property
    def word(self) -> str:
        """The recipe in a word, with the format of weight gradients."""
        return ROWWISE_BF16 if self.recipe == ROWWISE_BF16 else WORDS[self.weight_gradient]


def precision_word(precision: str | Float8 | None) -> str | None:
    """The ``precision`` of a layer as operations pass it on: None, or the recipe in a word.

    Raises:
        TypeError: it is neither None, a str nor a Float8.
        ValueError: an unknown word, or a Float8 that skips paths, which only a model has.
    """
    if precision is None:
        return None
    if isinstance(precision, Float8):
        if precision.skip != ():
            raise ValueError(f"precision: expected no skip, whose paths only replace knows, got {precision.skip!r}")
        return precision.word
    expected = f"precision must be None, {', '.join(map(repr, WORDS.values()))} or a fusedlayers.Float8"
    if not isinstance(precision, str):
        raise TypeError(f"{expected}, got {precision!r} ({type(precision).__name__})")
    if precision not in WORDS.values():
        raise ValueError(f"{expected}, got {precision!r}")
    return precision
