"""The classes of modules that hold FFNs: what they share, and that of ``nn.Sequential``."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar, Literal, cast

from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling

from ...modules import (
    BlockGuard,
    FFNPieces,
    is_plain_now,
    keep,
    kept,
    linear_weight,
    outside_of_traces,
    say_once,
    traceable,
    traced_ffn,
    why_not_now,
)
from ..activations import functions_read, watched_options
from ..swapping import OWN_FORWARD, ReplacedModule, restored_method
from .finding import find_runs

_Sequential = nn.Sequential


class FusedBlock(ReplacedModule):
    """Mixin of the classes of modules that hold FFNs."""

    fused_recompute: ClassVar[Literal["auto"] | bool | int] = "auto"
    fused_precision: ClassVar[str | None] = None

    @classmethod
    def find_ffn_pieces(cls, module: nn.Module) -> dict[str, FFNPieces | str]:
        """Every FFN of ``module``: names of its linears -> the parts that the next call reads, or why it is not
        fused."""
        raise NotImplementedError

    def why_called(self, *tensors: Tensor | None) -> str | None:
        """Why a call with these tensors would run the original forward, or None if it would run ``functional.ffn``."""
        if reason := self.why_fused_class_changed():
            return reason
        found = self.find_ffn_pieces(self)
        if any(isinstance(pieces, FFNPieces) for pieces in found.values()):
            return why_not_now(*tensors)
        return "; ".join(f"{linears}: {reason}" for linears, reason in found.items()) or "it holds no FFN any more"

    def call_arguments(self, x: Tensor) -> dict[str, Any]:
        """The arguments of ``functional.ffn`` by name, if the input of the FFN is x."""
        found = self.find_ffn_pieces(self)
        [pieces] = (pieces for pieces in found.values() if isinstance(pieces, FFNPieces))
        return pieces.arguments(x, None, self.fused_recompute, self.fused_precision)

    def keep_found(self, found: Any, names: Iterable[str], pieces: Sequence[FFNPieces], *, whole: bool) -> None:
        """Cache ``found`` through ``modules.keep``, until a method of the original class changes, too."""
        if all(each.may_be_kept for each in pieces):
            methods = [(self.fused_from, name) for name in self.fused_methods]
            methods += [(owner, name) for owner, name, _ in self.fused_functions]
            for each in pieces:
                methods += functions_read(each.original, linear_weight(each.up).shape[0])
            keep(self, BlockGuard(self, found, names, methods, whole=whole))


def try_fused(block: FusedBlock, found: FFNPieces | str, x: Tensor) -> Tensor | None:
    """The FFN of x, or None if the original forward must run."""
    if isinstance(found, str):
        say_once(block, found)
    elif not is_plain_now(x) and (reason := why_not_now(x)):
        say_once(block, reason)
    else:
        y = found.run_instead(x, block.fused_recompute, block.fused_precision)
        if y is None and found.gate_rows is None and (reason := found.why_not_plain()):
            say_once(block, reason)
        return y
    return None


class FusedSequentialFFN(FusedBlock, nn.Sequential):
    """An ``nn.Sequential`` in which every run of linear, activation, [dropout,] linear is one FFN."""

    fused_from = nn.Sequential
    fused_methods: ClassVar = {"forward": nn.Sequential.forward}

    @classmethod
    def find_ffn_pieces(cls, module: nn.Module) -> dict[str, FFNPieces | str]:
        names = list(module._modules)
        runs = find_runs(list(cast(nn.Sequential, module)))
        return {f"{names[start]}..{names[stop - 1]}": found for start, stop, found in runs}

    @functools.wraps(nn.Sequential.forward)
    def forward(self, *args: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        if not isinstance(self, FusedSequentialFFN):
            return restored_method(self, "forward")(*args, **kwargs)
        runs = self.traceable_runs() if is_dynamo_compiling() else self.find_kept_runs()
        # Dynamo guards what it reads, so it notices a patch, too; forward is never None.
        if runs is None or _Sequential.forward is None:
            return super().forward(*args, **kwargs)
        return self.run_with_fused_ffns(runs, *args, **kwargs)

    def run_with_fused_ffns(self, runs: tuple[tuple[int, Any], ...], input: Tensor) -> Tensor:
        """Run all modules in order, and each FFN among them as one operation."""
        position = free = 0
        for module in self:
            if position >= free:
                stop, found = runs[position]
                y = None
                if found is not None:
                    tracing = is_dynamo_compiling()
                    y = traced_ffn(self, found, input, None, None) if tracing else try_fused(self, found, input)
                input, free = (module(input), position) if y is None else (y, stop)
            # Not enumerate: as a global name it would cost a guard.
            position += 1  # noqa: SIM113
        return input

    def find_kept_runs(self) -> tuple[tuple[int, FFNPieces | str | None], ...] | None:
        """For every position, where the run that starts there stops and its FFN; None if the class has changed."""
        runs: tuple[tuple[int, FFNPieces | str | None], ...] | None = kept(self)
        if runs is not None:
            return runs
        if reason := self.why_fused_class_changed():
            say_once(self, reason, OWN_FORWARD)
            return None
        found = {start: (stop, pieces) for start, stop, pieces in find_runs(list(self))}
        pieces = [each for _, each in found.values() if isinstance(each, FFNPieces)]
        runs = tuple(found.get(position, (position + 1, None)) for position in range(len(self)))
        # Not cached otherwise: a run that is not plain may become so without a change to what the cache watches.
        if len(pieces) == len(found):
            names = list(self._modules)
            parts = [name for start, (stop, _) in found.items() for name in names[start:stop]]
            for (start, _), each in zip(found.items(), pieces, strict=True):
                options = watched_options(each.original)
                parts += [f"{names[start + 1]}.{name}" for name in options]
            self.keep_found(runs, parts, pieces, whole=True)
        return runs

    @outside_of_traces
    def traceable_runs(self) -> tuple[tuple[int, tuple[Any, ...] | None], ...] | None:
        """:meth:`find_kept_runs` for a traced call: with its constants in place of the FFNs' parts."""
        if self.why_fused_class_changed():
            return None
        names = list(self._modules)
        found: dict[int, tuple[int, tuple[Any, ...] | None]] = {}
        for start, stop, pieces in find_runs(list(self)):
            up, activation, *dropout, down = names[start:stop]
            found[start] = stop, traceable(
                self, pieces, up=up, down=down, gate=None, activation=activation,
                dropout=dropout[0] if dropout else None, recompute=self.fused_recompute,
                precision=self.fused_precision,
            )  # fmt: skip
        return tuple(found.get(position, (position + 1, None)) for position in range(len(names)))
