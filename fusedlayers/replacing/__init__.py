"""`replace` and `restore`: run FFNs, experts, losses and norms fused; leave everything else as it is.

A replaced block is the same module object with another class: a generated subclass of its own class (``swapping``). Its
forward hands the weights of plain children to ``functional.ffn``, and otherwise runs the original forward. So
parameters, names, hooks, buffers, tied weights, the training flag and references held elsewhere stay by construction,
all state is on the class, and ``restore`` sets the old class back. ``torch.nn.utils.parametrize`` and FSDP2 change
classes the same way. No class of torch or of the user is edited. Whether the children are plain is checked at every
call: LoRA or a hook may be added later.

How a module is found, in the order in which to read the files:

1. ``reading`` executes the source of a method on symbols. What a tensor holds is a polynomial in normal form, so two
   ways to write one formula are equal.
2. ``ffn``, ``experts``, ``norms`` and ``loss`` compare what was read with the formulas that the library runs.
3. ``conditions``: a reading holds while the attributes, methods and functions that it depends on stay as they were.
4. An FFN in the middle of a method becomes one call: ``reading.rewriting`` edits the tree of the method.
5. The loss of a language model needs no logits: ``loss`` hands out logits that are computed when they are first read.
6. ``rules`` are what a user says of a class instead; ``saving`` and ``report`` say what was done.

Checkpoints are unaffected. A pickled module names the new class, so loading it needs this library, and
``torch.jit.script`` needs the original class: call restore before either where that matters.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Sequence
from typing import Literal

from torch import nn

from ..functional.ffn.arguments import check_recompute
from ..functional.float8 import forget_weights
from ..functional.options import checked_flag
from ..functional.precision import Float8
from ..modules import FusedFFN, SplitKLinear, class_name, class_path, forget
from ..planning import card
from .activations import torch_module_activation
from .experts import replace_experts
from .experts.interface import register_experts
from .ffn import replace_ffns
from .ffn.blocks import FusedSequentialFFN
from .ffn.choosing import Chooser
from .linears import replace_linears
from .loss import replace_heads
from .norms import replace_norms
from .report import ALREADY_FUSED, Changes, Entry, Report
from .rules import FFNRule, LinearRule
from .swapping import ReplacedModule
from .wish import Wish

__all__ = [
    "Entry",
    "FFNRule",
    "FusedSequentialFFN",
    "LinearRule",
    "Report",
    "register_experts",
    "replace",
    "restore",
    "torch_module_activation",
]

_log = logging.getLogger(__name__)


def replace(
    model: nn.Module,
    *,
    rules: Sequence[FFNRule | LinearRule] = (),
    recompute: Literal["auto"] | bool | int = "auto",
    loss: bool = True,
    norm: bool = True,
    precision: str | Float8 | None = None,
    strict: bool = False,
    dry_run: bool = False,
    on: str | None = None,
) -> Report:
    """Run the FFN blocks of ``model`` through ``functional.ffn``, experts through ``functional.moe_ffn``, norms through
    torch's fused ones, and the loss of a language model through ``functional.linear_cross_entropy``, in place;
    ``restore`` undoes it exactly.

    Blocks are: every ``Linear, activation, [Dropout,] Linear`` in a row in an ``nn.Sequential`` (from the left, where
    two overlap); the feed-forward half of ``nn.TransformerEncoderLayer`` and ``nn.TransformerDecoderLayer``; instances
    of the classes named in ``rules``; and every other module whose forward, or part of a method, computes an FFN
    according to its source: the source is read as a formula, which must be that of an FFN for every input. No code of
    the model is run for that. Only plain children are fused, and those that peft wraps with adapters, which run through
    ``functional.lora_ffn``. Dropout follows the block's own modules at every call, but the mask of the hidden is not
    the one that ``nn.Dropout`` would draw. A call with more than one tensor, with a tensor that is not plain, or after
    a child has ceased to be plain runs the original forward.

    Experts are the modules with the interface of transformers' experts; their forward is read in the same way. Norms
    are the modules that compute an RMSNorm or a LayerNorm in several operations, for every input: they run torch's
    fused one, which computes in float32 and rounds once. The loss is that of transformers' causal models, whose forward
    calls its last linear layer and then ``self.loss_function``: called with labels, the model computes no logits unless
    somebody reads them from its result.

    A block that is in the tree twice is replaced once; a second `replace` finds nothing new. Replace first, then
    ``torch.compile`` or shard (``fully_shard`` changes classes itself, and replaced blocks work inside it). Code that
    selects layers by class name must be given the new name, ``Fused`` plus the old one.

    Args:
        model: any module; it may be a block itself.
        rules: what other classes compute, checked against their source unless a rule is ``trusted``; and which linears
            outside of FFNs become :class:`SplitKLinear` (none without a rule).
        recompute: as in ``functional.ffn``, for every block: True never allocates a hidden, forward or backward.
        loss: whether to replace the loss of a language model, too.
        norm: whether to replace norms, too. Results change by a rounding, as an FFN's do.
        precision: "fp8" or a :class:`Float8`: FFNs and experts run in 8 bits where they can and where that is faster,
            and so does every other plain ``nn.Linear`` that is wide enough, except the head of a language model: it
            becomes a :class:`SplitKLinear`. Adapters and what ``Float8.skip`` names stay in 16 bits. The report says
            what does not run in 8 bits, and why. None: nothing does.
        strict: raise if an FFN, or a module that looks like one, would stay as it is, or if nothing in the model is
            fused (instead of warning). Nothing is changed then.
        dry_run: report and change nothing.
        on: with ``dry_run`` the name of a GPU, "H100" or "H200": the report gives paths and bytes for that GPU,
            wherever the model is (``meta`` needs no memory). None, the default, is the device of the model.

    Returns:
        What was replaced, and what was skipped and why; also logged once at INFO.

    Raises:
        TypeError: ``model`` is not a module, ``rules`` is not a tuple or list of rules, or ``loss`` or ``norm`` is not
            a bool.
        ValueError: two rules for one class, a rule for a class that needs none, an unknown ``recompute`` or
            ``precision``, an FFN that stays under ``strict``, or ``on`` without ``dry_run`` or with an unknown name.
    """
    _check_model(model)
    check_recompute(recompute)
    wish = Wish(model, precision)
    for name, value in (("loss", loss), ("norm", norm)):
        checked_flag(name, value)
    ffn_rules, linear_rules = _checked(rules)
    if on is not None and not dry_run:
        raise ValueError(f"on={on!r} tells what another GPU would do: expected dry_run=True with it")
    changes = Changes(None if on is None else card(on))
    in_ffns = replace_ffns(model, Chooser(ffn_rules, recompute, wish), changes)
    replace_experts(model, recompute, wish, changes)
    replace_linears(model, linear_rules, in_ffns, wish, changes)
    if loss:
        replace_heads(model, changes)
    if norm:
        replace_norms(model, changes)
    classes = {type(module) for module in model.modules()}
    paths = {class_path(getattr(kind, "fused_from", kind)) for kind in classes}
    for rule in ffn_rules:
        if rule.class_path not in paths:
            name = rule.class_path.rpartition(".")[2]
            changes.skipped.append(Entry("(rules)", name, None, "no module is exactly of this class"))
    report = Report(tuple(changes.replaced), tuple(changes.skipped), dry_run, on)
    fused_before = any(issubclass(kind, (ReplacedModule, FusedFFN, SplitKLinear)) for kind in classes)
    # Experts with experts_implementation="fusedlayers" are fused, but keep their own class.
    fused_before = fused_before or any(entry.reason == ALREADY_FUSED for entry in changes.skipped)
    if not changes.classes and not fused_before:
        if strict:
            raise ValueError(f"model: nothing in it can be replaced\n{report}")
        warnings.warn(f"nothing was replaced\n{report}", stacklevel=2)
    if strict and any(entry.is_ffn_left for entry in changes.skipped):
        raise ValueError(f"model: FFNs of it would not be fused\n{report}")
    if not dry_run:
        for module, fused in changes.classes.items():
            _set_class(module, fused)
    _log.info("%s", report)
    return report


def restore(model: nn.Module) -> None:
    """Undo `replace`: every replaced block in ``model`` gets its own class back, and so its own forward.

    Weights that are kept in 8 bits are dropped, those of other models, too.

    Raises:
        TypeError: ``model`` is not a module.
        ValueError: something (FSDP2, parametrize) has changed the class of a replaced block since; nothing is undone.
    """
    _check_model(model)
    blocks = [(path, module) for path, module in model.named_modules() if isinstance(module, ReplacedModule)]
    for path, module in blocks:
        if "fused_from" not in vars(type(module)):
            raise ValueError(
                f"model: {path or 'it'} became a {class_name(module)} since it was replaced; undo that first"
            )
    for _, module in blocks:
        _set_class(module, module.fused_from)
        forget(module)
    forget_weights()


def _set_class(module: nn.Module, kind: type) -> None:
    # Bypass the module's own __setattr__, which may be the user's.
    object.__setattr__(module, "__class__", kind)


def _check_model(model: nn.Module) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be an nn.Module, got {model!r}")


def _checked(rules: Sequence[FFNRule | LinearRule]) -> tuple[list[FFNRule], list[LinearRule]]:
    """(FFN rules, linear rules)."""
    if not isinstance(rules, (tuple, list)):
        raise TypeError(f"rules must be a tuple or list of FFNRule and LinearRule, got {rules!r}")
    for rule in rules:
        if not isinstance(rule, (FFNRule, LinearRule)):
            raise TypeError(f"rules must hold FFNRule and LinearRule objects, got {rule!r}")
    return (
        [rule for rule in rules if isinstance(rule, FFNRule)],
        [rule for rule in rules if isinstance(rule, LinearRule)],
    )
