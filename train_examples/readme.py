"""What is written into the README from records: tables, and the part of it between two comments."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple


class Section(NamedTuple):
    """The part of a README between two comments, each a line with its end."""

    start: str
    end: str

    def shown(self, readme: str) -> str:
        """What the README has between the two comments."""
        return readme.partition(self.start)[2].partition(self.end)[0].strip("\n") + "\n"

    def written(self, readme: str, content: str) -> str:
        """The README with this content.

        Raises:
            ValueError: it lacks one of the comments.
        """
        if self.start not in readme or self.end not in readme:
            raise ValueError(f"README.md: expected the lines {self.start.strip()!r} and {self.end.strip()!r}")
        before, _, rest = readme.partition(self.start)
        return f"{before}{self.start}\n{content}\n{self.end}{rest.partition(self.end)[2]}"


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table in markdown, without an end of its last line."""
    return "\n".join(f"| {' | '.join(line)} |" for line in (columns, ("---",) * len(columns), *rows))
