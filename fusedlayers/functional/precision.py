"""The precision that products of a layer run in: that of their operands, or 8 bits by a recipe."""

from __future__ import annotations

from dataclasses import dataclass

RECIPES = ("rowwise",)
WEIGHT_GRADIENTS = ("bf16",)
# What ``precision="fp8"`` means, and how the default recipe is passed on.
WORD = "fp8"


@dataclass(frozen=True)
class Float8:
    """How products run in 8 bits (e4m3), as a layer's ``precision``.

    Args:
        recipe: "rowwise": every row of an operand has a scale, which is its own absolute maximum divided by 448. No
            state is kept between calls.
        weight_gradient: "bf16": weight and bias gradients are computed from operands in 16 bits, as without
            ``precision``. This is torchao's ``rowwise_with_gw_hp``.

    Raises:
        ValueError: a recipe or a format that is not built; the message names those that are.
    """

    recipe: str = "rowwise"
    weight_gradient: str = "bf16"

    def __post_init__(self) -> None:
        for name, value, known in (
            ("recipe", self.recipe, RECIPES),
            ("weight_gradient", self.weight_gradient, WEIGHT_GRADIENTS),
        ):
            if not isinstance(value, str) or value not in known:
                raise ValueError(f"{name} must be one of {', '.join(map(repr, known))}, got {value!r}")


def precision_word(precision: str | Float8 | None) -> str | None:
    """A ``precision`` as operations pass it on: None, or the recipe in a word.

    Raises:
        TypeError: it is neither None, a str nor a Float8.
        ValueError: an unknown word.
    """
    if precision is None or isinstance(precision, Float8):
        # There is one recipe.
        return None if precision is None else WORD
    expected = f'precision must be None, "{WORD}" or a fusedlayers.Float8'
    if not isinstance(precision, str):
        raise TypeError(f"{expected}, got {precision!r} ({type(precision).__name__})")
    if precision != WORD:
        raise ValueError(f"{expected}, got {precision!r}")
    return WORD
