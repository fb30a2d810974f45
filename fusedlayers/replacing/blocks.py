"""The classes that `replace` gives to modules: the original class, with a forward that fuses what is plain."""

from __future__ import annotations

import copyreg
import functools
from typing import Any, ClassVar, cast

import torch.nn.functional as F
from torch import Tensor, nn

from .. import functional
from ..modules import FFNPieces, say_once, why_not_now
from .finding import FFNRule, find_by_rule, find_ffn, find_runs, output_dropout_p


class FusedBlock(nn.Module):
    """Mixin of every class that `replace` gives to a module. Its names are long: they join those of user classes."""

    fused_from: ClassVar[type[nn.Module]]

    def __init_subclass__(cls) -> None:
        """End here: a base class of the user that registers its subclasses must not see this one."""

    @classmethod
    def find_ffn_pieces(cls, module: nn.Module) -> dict[str, FFNPieces | str]:
        """Every FFN of ``module``: names of its linears -> what the next call reads, or why it cannot be fused."""
        raise NotImplementedError

    def why_called(self, *tensors: Tensor | None) -> str | None:
        """Why a call with these tensors would run the original forward, or None if it would run ``functional.ffn``."""
        found = self.find_ffn_pieces(self)
        if any(isinstance(pieces, FFNPieces) for pieces in found.values()):
            return why_not_now(*tensors)
        return "; ".join(f"{linears}: {reason}" for linears, reason in found.items()) or "it holds no FFN any more"

    def call_arguments(self, x: Tensor) -> dict[str, Any]:
        """The arguments of ``functional.ffn`` where the input of the FFN is x, by name."""
        found = self.find_ffn_pieces(self)
        [pieces] = (pieces for pieces in found.values() if isinstance(pieces, FFNPieces))
        return pieces.arguments(x)


def _try_fused(block: nn.Module, found: FFNPieces | str, x: Tensor) -> Tensor | None:
    """The FFN of x, or None where the original forward must run."""
    if isinstance(found, str):
        say_once(block, found)
    elif reason := why_not_now(x):
        say_once(block, reason)
    else:
        return functional.ffn(**found.arguments(x))
    return None


class FusedSequentialFFN(FusedBlock, nn.Sequential):
    """An ``nn.Sequential`` in which every run of linear, activation, [dropout,] linear is one FFN."""

    fused_from = nn.Sequential

    @classmethod
    def find_ffn_pieces(cls, module: nn.Module) -> dict[str, FFNPieces | str]:
        names = list(module._modules)
        runs = find_runs(list(cast(nn.Sequential, module)))
        return {f"{names[start]}..{names[stop - 1]}": found for start, stop, found in runs}

    def call_arguments(self, x: Tensor) -> dict[str, Any]:
        runs = [run for run in find_runs(list(self)) if isinstance(run[2], FFNPieces)]
        if len(runs) != 1 or runs[0][0] != 0:
            slices = ", ".join(f"[{start}:{stop}]" for start, stop, _ in runs)
            raise ValueError(f"the FFNs of this nn.Sequential are its slices {slices}: explain one with its own input")
        return super().call_arguments(x)

    def forward(self, input: Tensor) -> Tensor:
        modules = list(self)
        runs = {start: (stop, found) for start, stop, found in find_runs(modules)}
        position = 0
        while position < len(modules):
            stop, found = runs.get(position, (position + 1, None))
            y = None if found is None else _try_fused(self, found, input)
            if y is None:
                stop, y = position + 1, modules[position](input)
            position, input = stop, y
        return input


class FusedTransformerLayer(FusedBlock):
    """What both Transformer layers share."""

    @classmethod
    def find_ffn_pieces(cls, module: nn.Module) -> dict[str, FFNPieces | str]:
        layer = cast(nn.TransformerEncoderLayer, module)
        found = find_ffn(layer.linear1, layer.linear2, None, layer.activation, layer.dropout, layer.training)
        return {"linear1, linear2": found}


class FusedTransformerEncoderLayer(FusedTransformerLayer, nn.TransformerEncoderLayer):
    """An ``nn.TransformerEncoderLayer`` whose feed-forward block is one FFN.

    In evaluation without gradients torch runs the whole layer in an inference kernel of its own where it can, and the
    encoder packs padded batches for it. That stays; ``torch.backends.mha.set_fastpath_enabled`` switches it off.
    """

    fused_from = nn.TransformerEncoderLayer

    def _ff_block(self, x: Tensor) -> Tensor:
        [found] = self.find_ffn_pieces(self).values()
        y = _try_fused(self, found, x)
        return super()._ff_block(x) if y is None else self.dropout2(y)


class FusedTransformerDecoderLayer(FusedTransformerLayer, nn.TransformerDecoderLayer):
    """An ``nn.TransformerDecoderLayer`` whose feed-forward block is one FFN."""

    fused_from = nn.TransformerDecoderLayer

    def _ff_block(self, x: Tensor) -> Tensor:
        [found] = self.find_ffn_pieces(self).values()
        y = _try_fused(self, found, x)
        return super()._ff_block(x) if y is None else self.dropout3(y)


class FusedByRule(FusedBlock):
    """Mixin of the classes made for rules: ``class Fused<Name>(FusedByRule, <Name>)``."""

    fused_rule: ClassVar[FFNRule]

    @classmethod
    def find_ffn_pieces(cls, module: nn.Module) -> dict[str, FFNPieces | str]:
        rule = cls.fused_rule
        gated = rule.gate is not None and getattr(module, rule.gate, None) is not None
        return {
            f"{rule.up}, {rule.gate}, {rule.down}" if gated else f"{rule.up}, {rule.down}": find_by_rule(module, rule)
        }

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and not kwargs:
            y = _try_fused(self, find_by_rule(self, self.fused_rule), args[0])
            if y is not None:
                p = cast(float, output_dropout_p(self, self.fused_rule))
                return F.dropout(y, p) if p else y
        return super().forward(*args, **kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle and copy by the rule: the class can be made again from it, but not imported."""
        reduced = super().__reduce_ex__(max(protocol, 2))
        if isinstance(reduced, tuple) and reduced[0] is copyreg.__newobj__:  # type: ignore[attr-defined]
            return (_new_by_rule, (self.fused_rule, *reduced[1][1:]), *reduced[2:])
        return reduced


@functools.cache
def class_by_rule(rule: FFNRule) -> type[FusedBlock]:
    """The class that `replace` gives to the blocks of ``rule``; the same for equal rules."""
    original = rule.module_class
    names = {"fused_from": original, "fused_rule": rule, "__module__": __name__, "__doc__": original.__doc__}
    return type(f"Fused{original.__name__}", (FusedByRule, original), names)


def _new_by_rule(rule: FFNRule, *arguments: Any) -> nn.Module:
    fused = class_by_rule(rule)
    return fused.__new__(fused, *arguments)
