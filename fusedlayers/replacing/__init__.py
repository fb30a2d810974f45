"""`replace` and `restore`: existing FFN blocks run through `functional.ffn`, and everything else about them stays.

A replaced block is the same module object with another class: a subclass of its own, whose forward hands the weights of
plain children to ``functional.ffn`` and otherwise runs the original forward. So parameters, names, hooks, buffers, tied
weights, the training flag and references held elsewhere stay by construction, nothing is remembered beside the class,
and ``restore`` sets the class back. ``torch.nn.utils.parametrize`` and FSDP2 change classes the same way. No class of
torch or of the user is edited. Whether the children are plain is asked at every call: LoRA or a hook may arrive later.

Checkpoints do not notice any of this. A pickled module names the new class, so loading it needs this library; and
``torch.jit.script`` wants the original: restore before either where that matters.
"""

from __future__ import annotations

import inspect
import logging
import warnings
from collections.abc import Sequence
from typing import cast

from torch import nn

from ..modules import FFNPieces, FusedFFN, class_name
from .blocks import (
    FusedBlock,
    FusedByRule,
    FusedSequentialFFN,
    FusedTransformerDecoderLayer,
    FusedTransformerEncoderLayer,
    FusedTransformerLayer,
    class_by_rule,
)
from .finding import FFNRule, find_runs, torch_module_activation, widths
from .report import Entry, Report

__all__ = ["Entry", "FFNRule", "Report", "replace", "restore", "torch_module_activation"]

_log = logging.getLogger(__name__)

_Patterns = dict[type[nn.Module], type[FusedBlock]]

_BUILT_IN: _Patterns = {
    nn.Sequential: FusedSequentialFFN,
    nn.TransformerEncoderLayer: FusedTransformerEncoderLayer,
    nn.TransformerDecoderLayer: FusedTransformerDecoderLayer,
}


def replace(model: nn.Module, *, rules: Sequence[FFNRule] = (), strict: bool = False, dry_run: bool = False) -> Report:
    """Let the FFN blocks of ``model`` run through ``functional.ffn``, in place; ``restore`` undoes it exactly.

    Blocks are: every ``Linear, activation, [Dropout,] Linear`` in a row in an ``nn.Sequential`` (from the left, where
    two overlap); the feed-forward half of ``nn.TransformerEncoderLayer`` and ``nn.TransformerDecoderLayer``; instances
    of the classes named in ``rules``. Only exact classes with plain children count. Dropout follows the block's own
    modules at every call, but on a GPU its random numbers are not those of ``nn.Dropout``. A call with more than one
    tensor, with a tensor that is not plain, or after a child ceased to be plain runs the original forward.
    A block that sits in the tree twice is replaced once; a second `replace` finds nothing new. Replace first, then
    ``torch.compile`` or shard (``fully_shard`` changes classes itself, and replaced blocks work inside it).

    Args:
        model: any module; it may be a block itself.
        rules: what the classes of other blocks compute.
        strict: raise where nothing in the model is fused, instead of warning.
        dry_run: report and change nothing.

    Returns:
        What was replaced, and what was skipped and why; also logged once at INFO.

    Raises:
        TypeError: ``model`` is no module, or ``rules`` is no tuple or list of rules.
        ValueError: two rules for one class, a rule for a class that needs none, or nothing fused under ``strict``.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be an nn.Module, got {model!r}")
    patterns = _patterns(rules)
    replaced: list[Entry] = []
    skipped: list[Entry] = []
    changes: list[tuple[nn.Module, type[FusedBlock]]] = []
    for path, module in model.named_modules():
        name, fused = type(module).__name__, patterns.get(type(module))
        reason = _why_left(module, patterns) if fused is None else _why_class_stays(module, fused)
        if reason is not None:
            skipped.append(Entry(path, name, None, reason))
        if reason is not None or fused is None:
            continue
        found = fused.find_ffn_pieces(module)
        for linears, pieces in found.items():
            if isinstance(pieces, str):
                skipped.append(Entry(path, name, None, f"{linears}: {pieces}"))
            else:
                replaced.append(Entry(path, name, fused.__name__, f"{linears}: {_description(pieces)}"))
        if any(isinstance(pieces, FFNPieces) for pieces in found.values()):
            changes.append((module, fused))
        elif not found and sum(widths(child) is not None for child in module.children()) > 1:
            skipped.append(
                Entry(path, name, None, "no two of its linears have just an activation and a dropout between")
            )
    classes = {type(module) for module in model.modules()}
    for rule in rules:
        if not classes & {rule.module_class, class_by_rule(rule)}:
            skipped.append(Entry("(rules)", rule.module_class.__name__, None, "no module is exactly of this class"))
    report = Report(tuple(replaced), tuple(skipped), dry_run)
    if not changes and not any(issubclass(kind, (FusedBlock, FusedFFN)) for kind in classes):
        if strict:
            raise ValueError(f"model: nothing in it can be replaced\n{report}")
        warnings.warn(f"nothing was replaced\n{report}", stacklevel=2)
    if not dry_run:
        for module, fused in changes:
            _set_class(module, fused)
    _log.info("%s", report)
    return report


def restore(model: nn.Module) -> None:
    """Undo `replace`: every replaced block in ``model`` gets its own class back, and so its own forward.

    Raises:
        TypeError: ``model`` is no module.
        ValueError: something (FSDP2, parametrize) has changed the class of a replaced block since; nothing is undone.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be an nn.Module, got {model!r}")
    blocks = [(path, module) for path, module in model.named_modules() if isinstance(module, FusedBlock)]
    for path, module in blocks:
        if "fused_from" not in vars(type(module)):
            raise ValueError(
                f"model: {path or 'it'} became a {class_name(module)} since it was replaced; undo that first"
            )
    for _, module in blocks:
        _set_class(module, module.fused_from)


def _set_class(module: nn.Module, kind: type) -> None:
    # Past the module's own __setattr__, which may be the user's.
    object.__setattr__(module, "__class__", kind)


def _patterns(rules: Sequence[FFNRule]) -> _Patterns:
    """The class to give to modules of each class: the built-in patterns and the rules."""
    if not isinstance(rules, (tuple, list)):
        raise TypeError(f"rules must be a tuple or list of FFNRule, got {rules!r}")
    patterns = dict(_BUILT_IN)
    for rule in rules:
        if not isinstance(rule, FFNRule):
            raise TypeError(f"rules must hold FFNRule objects, got {rule!r}")
        if rule.module_class in patterns or issubclass(rule.module_class, (FusedBlock, FusedFFN)):
            raise ValueError(f"rules: {rule.module_class.__qualname__} needs no rule, or has one already")
        patterns[rule.module_class] = class_by_rule(rule)
    return patterns


def _why_class_stays(block: nn.Module, fused: type[FusedBlock]) -> str | None:
    """What in the block itself, not in its children, keeps it from getting the class ``fused``; or None."""
    methods = ["forward", "_ff_block"] if issubclass(fused, FusedTransformerLayer) else ["forward"]
    for method in methods:
        if method in vars(block):
            return f"has a {method} of its own, set on the instance"
    if issubclass(fused, FusedByRule):
        _, *parameters = inspect.signature(type(block).forward).parameters.values()
        required = [parameter.kind for parameter in parameters if parameter.default is parameter.empty]
        if required != [inspect.Parameter.POSITIONAL_OR_KEYWORD]:
            return "has a forward that does not take exactly one tensor"
    return None


def _why_left(module: nn.Module, patterns: _Patterns) -> str | None:
    """Why a module whose class has no pattern deserves a line in the report, or None."""
    if isinstance(module, (FusedBlock, FusedFFN)):
        return "already fused"
    for pattern in patterns:
        if isinstance(module, pattern) and (pattern is not nn.Sequential or any(find_runs(list(module.children())))):
            return f"is a subclass of {pattern.__name__} and may compute something else; name it in an FFNRule"
    linears = [(name, *pair) for name, child in module.named_children() if (pair := widths(child))]
    for up, width, hidden in linears:
        for down, inner, outer in linears:
            if (inner, outer) == (hidden, width) and hidden > width:
                return f"looks like an FFN ({up}, {down}: {width} -> {hidden} -> {width}); name it in an FFNRule"
    return None


def _description(pieces: FFNPieces) -> str:
    up, down = cast(nn.Linear, pieces.up).weight, cast(nn.Linear, pieces.down).weight
    gated = "" if pieces.gate is None else "gated "
    return f"{gated}{pieces.activation}, {up.shape[1]} -> {up.shape[0]} -> {down.shape[0]}"
