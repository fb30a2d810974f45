"""What `replace` did and what it left as it was, as a table."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..planning import Device
from .swapping import ReplacedModule

# Why a module is skipped by a second `replace`.
ALREADY_FUSED = "already fused"


@dataclass(frozen=True)
class Entry:
    """One block: its path in the model ("" is the model itself), its class, its new class or None, and what runs or why
    not.

    ``saved_bytes`` are the bytes per token that (torch, this library) save for the backward pass of an FFN in a batch
    of 65,536 tokens, including its input and the mask of a dropout of its result: as planned, on the device and with
    the weights' dtype, without autocast. ``plan`` is the path on which such a batch runs, as ``explain`` calls it.
    ``why_no_kernels`` says why no call of the block, as it is now, can run in a kernel; None if some may.
    ``is_ffn_left`` marks a skipped module that is an FFN, or looks like one.
    """

    path: str
    module: str
    became: str | None
    reason: str
    saved_bytes: tuple[int, int] | None = None
    why_no_kernels: str | None = None
    plan: str | None = None
    is_ffn_left: bool = False

    def __str__(self) -> str:
        plan = "" if self.plan is None or self.why_no_kernels is not None else f", {self.plan} path"
        saved = "" if self.saved_bytes is None else f", {_saved(self.saved_bytes)}"
        return f"{self.reason}{plan}{saved}"


@dataclass(frozen=True, repr=False)
class Report:
    """What `replace` did, or with ``dry_run`` would do: entries of replaced and skipped blocks.

    Prints as a table with one line for all blocks that are alike and whose paths differ only in numbers, shown as
    ``*``.
    """

    replaced: tuple[Entry, ...]
    skipped: tuple[Entry, ...]
    dry_run: bool = False
    on: str | None = None  # the GPU of a dry run; None: the model's own device

    @property
    def saved_bytes(self) -> tuple[int, int]:
        """The sum of the entries' ``saved_bytes``."""
        known = [entry.saved_bytes for entry in self.replaced if entry.saved_bytes is not None]
        return sum(theirs for theirs, _ in known), sum(ours for _, ours in known)

    def __str__(self) -> str:
        where = "" if self.on is None else f", as on an {self.on}"
        dry_run = f" (dry run: nothing changed{where})" if self.dry_run else ""
        title = f"fusedlayers.replace: {len(self.replaced)} replaced, {len(self.skipped)} skipped{dry_run}"
        if self.saved_bytes[0]:
            title += f"; {_saved(self.saved_bytes)}"
        alike: dict[tuple[str, str, str, str], list[str]] = {}
        for entry in (*self.replaced, *self.skipped):
            status = "skipped" if entry.became is None else "replaced"
            module = entry.module if entry.became is None else f"{entry.module} -> {entry.became}"
            alike.setdefault((status, re.sub(r"\d+", "*", entry.path), module, str(entry)), []).append(entry.path)
        rows = [
            (status, pattern if len(paths) > 1 else paths[0] or "(model)", _times(paths, module), text)
            for (status, pattern, module, text), paths in alike.items()
        ]
        widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
        return "\n".join([title, *(f"  {line.rstrip()}" for line in lines), *self._closing()])

    __repr__ = __str__

    def _closing(self) -> list[str]:
        """A closing line if torch runs every replaced block at every call, as on a CPU."""
        reasons = [entry.why_no_kernels for entry in self.replaced]
        known = dict.fromkeys(reason for reason in reasons if reason is not None)
        if not reasons or None in reasons:
            return []
        return [f"As the model is now, torch runs every block and no kernel does: {'; '.join(known)}."]


def _times(paths: list[str], module: str) -> str:
    return module if len(paths) == 1 else f"{len(paths)} × {module}"


def _class_name(module: nn.Module) -> str:
    kind = type(module).__name__
    # torch.jit gives one class to all modules that it compiles.
    return getattr(module, "original_name", kind) if isinstance(module, torch.jit.ScriptModule) else kind


def _saved(saved_bytes: tuple[int, int]) -> str:
    theirs, ours = saved_bytes
    return f"keeps {ours:,} bytes a token for backward, torch {theirs:,}"


class Changes:
    """What `replace` has found so far: the entries of its report, and the new class of each module."""

    def __init__(self, on: Device | None) -> None:
        self.on = on  # the GPU that the report is for; None: the model's own device
        self.replaced: list[Entry] = []
        self.skipped: list[Entry] = []
        self.classes: dict[nn.Module, type[ReplacedModule]] = {}

    def change(self, path: str, module: nn.Module, fused: type[ReplacedModule], *facts: Any, became: str = "") -> None:
        """Give the module the class ``fused``; ``facts`` are the fields of its `Entry` from ``reason`` on."""
        self.replaced.append(Entry(path, _class_name(module), became or fused.__name__, *facts))
        self.classes[module] = fused

    def skip(self, path: str, module: nn.Module, reason: str, *, is_ffn_left: bool = False) -> None:
        """Leave the module as it is."""
        self.skipped.append(Entry(path, _class_name(module), None, reason, is_ffn_left=is_ffn_left))
