"""What `replace` did and what it left, as a table."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Entry:
    """One block: its path in the model ("": the model itself), its class, the class it became or None, what or why.

    ``saved_bytes`` is what (torch, this library) keep per token for the backward pass of an FFN in a batch of 65,536
    tokens, its input and the mask of a dropout of its result included: as planned, on the device and with the weights'
    dtype, without autocast. ``why_no_kernels`` is why no call of the block can run in a kernel as the block is now,
    None where some may.
    """

    path: str
    module: str
    became: str | None
    reason: str
    saved_bytes: tuple[int, int] | None = None
    why_no_kernels: str | None = None

    def __str__(self) -> str:
        return self.reason if self.saved_bytes is None else f"{self.reason}, {_saved(self.saved_bytes)}"


@dataclass(frozen=True, repr=False)
class Report:
    """What `replace` did, or with ``dry_run`` would do: entries of replaced and skipped blocks. Prints as a table."""

    replaced: tuple[Entry, ...]
    skipped: tuple[Entry, ...]
    dry_run: bool = False

    @property
    def saved_bytes(self) -> tuple[int, int]:
        """The sum of the entries' ``saved_bytes``."""
        known = [entry.saved_bytes for entry in self.replaced if entry.saved_bytes is not None]
        return sum(theirs for theirs, _ in known), sum(ours for _, ours in known)

    def __str__(self) -> str:
        dry_run = " (dry run: nothing changed)" if self.dry_run else ""
        title = f"fusedlayers.replace: {len(self.replaced)} replaced, {len(self.skipped)} skipped{dry_run}"
        if self.saved_bytes[0]:
            title += f"; {_saved(self.saved_bytes)}"
        rows = [
            (
                "skipped" if entry.became is None else "replaced",
                entry.path or "(model)",
                entry.module if entry.became is None else f"{entry.module} -> {entry.became}",
                str(entry),
            )
            for entry in (*self.replaced, *self.skipped)
        ]
        widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
        return "\n".join([title, *(f"  {line.rstrip()}" for line in lines), *self._closing()])

    __repr__ = __str__

    def _closing(self) -> list[str]:
        """A line where everything that was replaced runs through torch whatever the call, as on a CPU."""
        reasons = [entry.why_no_kernels for entry in self.replaced]
        known = dict.fromkeys(reason for reason in reasons if reason is not None)
        if not reasons or None in reasons:
            return []
        return [f"As the model is now, torch runs every block and no kernel does: {'; '.join(known)}."]


def _saved(saved_bytes: tuple[int, int]) -> str:
    theirs, ours = saved_bytes
    return f"keeps {ours:,} bytes a token for backward, torch {theirs:,}"
