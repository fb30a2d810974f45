"""Tables in markdown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table in markdown, without an end of its last line."""
    return "\n".join(f"| {' | '.join(line)} |" for line in (columns, ("---",) * len(columns), *rows))
