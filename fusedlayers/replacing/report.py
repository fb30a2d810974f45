"""What `replace` did and what it left, as a table."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Entry:
    """One block: its path in the model ("": the model itself), its class, the class it became or None, what or why."""

    path: str
    module: str
    became: str | None
    reason: str


@dataclass(frozen=True, repr=False)
class Report:
    """What `replace` did, or with ``dry_run`` would do: entries of replaced and skipped blocks. Prints as a table."""

    replaced: tuple[Entry, ...]
    skipped: tuple[Entry, ...]
    dry_run: bool = False

    def __str__(self) -> str:
        dry_run = " (dry run: nothing changed)" if self.dry_run else ""
        title = f"fusedlayers.replace: {len(self.replaced)} replaced, {len(self.skipped)} skipped{dry_run}"
        rows = [
            (
                "skipped" if entry.became is None else "replaced",
                entry.path or "(model)",
                entry.module if entry.became is None else f"{entry.module} -> {entry.became}",
                entry.reason,
            )
            for entry in (*self.replaced, *self.skipped)
        ]
        widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
        return "\n".join([title, *(f"  {line.rstrip()}" for line in lines)])

    __repr__ = __str__
