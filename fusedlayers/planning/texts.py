"""Words of plans, as ``explain`` prints them."""

from typing import Any


def tiles_text(size: str, tiles: Any) -> str:
    """The tiles of a generic kernel, whose ``size`` is in words."""
    return f"{size}, {tiles.num_warps} warps, {tiles.num_stages} stages"


def sm90_text(size: str, consumers: int, stages: int) -> str:
    """The tiles of an sm90 kernel, whose ``size`` is in words."""
    return f"sm90: {size}, consumers {consumers}, stages {stages}"


def in_words(seconds: float) -> str:
    """Seconds as people say them."""
    scaled, unit = (1e6 * seconds, "µs") if seconds < 1e-3 else (1e3 * seconds, "ms")
    return f"{scaled:.3g} {unit}" if scaled < 100 else f"{scaled:,.0f} {unit}"


def in_brackets(reason: str) -> str:
    """A reason that is to follow a colon: what follows a colon of its own goes into brackets."""
    head, colon, details = reason.partition(": ")
    return f"{head} ({details})" if colon else reason
