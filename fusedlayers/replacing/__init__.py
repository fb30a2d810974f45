"""`replace` and `restore`: run FFNs, experts, losses and norms fused; leave everything else as it is.

A replaced block is the same module object with another class: a generated subclass of its own class. Its forward hands
the weights of plain children to ``functional.ffn``, and otherwise runs the original forward. So parameters, names,
hooks, buffers, tied weights, the training flag and references held elsewhere stay by construction, all state is on the
class, and ``restore`` sets the old class back. ``torch.nn.utils.parametrize`` and FSDP2 change classes the same way. No
class of torch or of the user is edited. Whether the children are plain is checked at every call: LoRA or a hook may be
added later.

Checkpoints are unaffected. A pickled module names the new class, so loading it needs this library, and
``torch.jit.script`` needs the original class: call restore before either where that matters.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Hashable, Sequence
from typing import Any, Literal

from torch import nn

from ..functional.ffn.arguments import check_recompute
from ..functional.options import checked_flag
from ..functional.precision import Float8, precision_word
from ..modules import (
    FFNPieces,
    FusedFFN,
    SplitKLinear,
    base_linear,
    class_name,
    class_path,
    forget,
    linear_weight,
    why_not_plain,
)
from ..planning import Device, card
from .activations import torch_module_activation
from .blocks import FusedBlock, FusedSequentialFFN
from .expert_ffns import ExpertsFFN, find_experts, implementation, is_experts
from .experts import FusedExperts, experts_class, why_class_stays
from .experts_interface import IMPLEMENTATION, register_experts
from .finding import autocast_on_its_device
from .float8 import in_bits, linear_in_8_bits, why_not_in_8_bits
from .heads import FusedLossHead, find_head, head_class, heads_of, why_head_left
from .heads import why_class_stays as why_model_stays
from .linears import FusedSplitKLinear
from .norms import FusedNorm, why_norm_left
from .patterns import ALREADY_FUSED, Patterns
from .reading.sizes import widths
from .recognising_norms import Norm, may_be_norm, recognise_norm
from .report import Entry, Report
from .rules import FFNRule, LinearRule
from .saving import facts_of_experts, facts_of_ffn, facts_of_head, facts_of_norm, why_no_kernels_for_linear
from .signatures import signature
from .swapping import ReplacedModule, fused_class

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


class _Found:
    """What `replace` has collected so far: the entries of its report, and the new class of each module."""

    def __init__(self, on: Device | None) -> None:
        self.on = on  # the GPU that the report is for; None: the model's own device
        self.replaced: list[Entry] = []
        self.skipped: list[Entry] = []
        self.changes: dict[nn.Module, type[ReplacedModule]] = {}

    def change(self, path: str, module: nn.Module, fused: type[ReplacedModule], *facts: Any, became: str = "") -> None:
        """Give the module the class ``fused``; ``facts`` are the fields of its `Entry` from ``reason`` on."""
        self.replaced.append(Entry(path, type(module).__name__, became or fused.__name__, *facts))
        self.changes[module] = fused

    def skip(self, path: str, module: nn.Module, reason: str, *, is_ffn_left: bool = False) -> None:
        """Leave the module as it is."""
        self.skipped.append(Entry(path, type(module).__name__, None, reason, is_ffn_left=is_ffn_left))


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
        precision: "fp8" or a :class:`Float8`: FFNs run in 8 bits where they can and where that is faster, and so does
            every other plain ``nn.Linear`` that is wide enough, except the head of a language model: it becomes a
            :class:`SplitKLinear`. Blocks with adapters and experts stay in 16 bits. The report says what does not run
            in 8 bits, and why. None: nothing does.
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
    precision = precision_word(precision)
    for name, value in (("loss", loss), ("norm", norm)):
        checked_flag(name, value)
    ffn_rules, linear_rules = _checked(rules)
    if on is not None and not dry_run:
        raise ValueError(f"on={on!r} tells what another GPU would do: expected dry_run=True with it")
    found = _Found(None if on is None else card(on))
    parts = _replace_ffns(model, Patterns(ffn_rules, recompute, precision), found)
    _replace_experts(model, recompute, found)
    _replace_linears(model, linear_rules, parts, precision, found)
    if loss:
        _replace_heads(model, found)
    if norm:
        _replace_norms(model, found)
    classes = {type(module) for module in model.modules()}
    paths = {class_path(getattr(kind, "fused_from", kind)) for kind in classes}
    for rule in ffn_rules:
        if rule.class_path not in paths:
            name = rule.class_path.rpartition(".")[2]
            found.skipped.append(Entry("(rules)", name, None, "no module is exactly of this class"))
    report = Report(tuple(found.replaced), tuple(found.skipped), dry_run, on)
    fused_before = any(issubclass(kind, (ReplacedModule, FusedFFN, SplitKLinear)) for kind in classes)
    # Experts with experts_implementation="fusedlayers" are fused, but keep their own class.
    fused_before = fused_before or any(entry.reason == ALREADY_FUSED for entry in found.skipped)
    if not found.changes and not fused_before:
        if strict:
            raise ValueError(f"model: nothing in it can be replaced\n{report}")
        warnings.warn(f"nothing was replaced\n{report}", stacklevel=2)
    if strict and any(entry.is_ffn_left for entry in found.skipped):
        raise ValueError(f"model: FFNs of it would not be fused\n{report}")
    if not dry_run:
        for module, fused in found.changes.items():
            _set_class(module, fused)
    _log.info("%s", report)
    return report


def restore(model: nn.Module) -> None:
    """Undo `replace`: every replaced block in ``model`` gets its own class back, and so its own forward.

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


def _replace_ffns(model: nn.Module, patterns: Patterns, found: _Found) -> set[nn.Module]:
    """Decide what becomes of every block with an FFN; returns the linears that are part of an FFN."""
    parts = patterns.taken
    # Innermost modules first; the report goes the other way. Lists of modules last: their owner may call them.
    inwards = list(model.named_modules())[::-1]
    order = {path: -place for place, (path, _) in enumerate(inwards)}
    for path, module in sorted(inwards, key=lambda each: isinstance(each[1], (nn.ModuleList, nn.ModuleDict))):
        if is_experts(module):
            continue
        try:
            fused = patterns.fused_class(module)
        except Exception as error:  # a metaclass may refuse with any exception
            underivable = f"no class can be derived from its own: {error}"
            found.skip(path, module, underivable, is_ffn_left=True)
            continue
        reason = patterns.why_left(module) if fused is None else patterns.why_class_stays(module, fused)
        if reason is not None:
            found.skip(path, module, reason, is_ffn_left=not isinstance(module, (FusedBlock, FusedFFN)))
        if isinstance(module, FusedBlock):
            parts |= _linears(module.find_ffn_pieces(module))
        if isinstance(module, FusedFFN):
            parts |= set(module.children())
        if reason is not None or fused is None:
            continue
        ffns, rule = fused.find_ffn_pieces(module), patterns.rule_of_user(module)
        if any(isinstance(pieces, str) for pieces in ffns.values()):
            # float32 adapters beside 16-bit weights are fused only under autocast, which only a training step enters.
            with autocast_on_its_device(module):
                ffns = fused.find_ffn_pieces(module)
        for linears, pieces in ffns.items():
            if isinstance(pieces, str):
                found.skip(path, module, f"{linears}: {pieces}", is_ffn_left=True)
            else:
                facts = facts_of_ffn(pieces, patterns.recompute, found.on, patterns.precision)
                bits = in_bits(pieces, patterns.recompute, patterns.precision, found.on)
                trusted = ", as a trusted rule says" if rule is not None and rule.trusted else ""
                found.change(path, module, fused, f"{linears}: {_description(pieces)}{bits}{trusted}", *facts)
        parts |= _linears(ffns)
        if not ffns and sum(widths(child) is not None for child in module.children()) > 1:
            found.skip(path, module, "no two of its linears have just an activation and a dropout between")
    for entries in (found.replaced, found.skipped):
        entries.reverse()
        entries.sort(key=lambda entry: order[entry.path])
    return parts


def _linears(found: dict[str, FFNPieces | str]) -> set[nn.Module]:
    """The linears of these FFNs, and those that adapters wrap."""
    pieces = [ffn for ffn in found.values() if isinstance(ffn, FFNPieces)]
    linears = {linear for ffn in pieces for linear in (ffn.up, ffn.gate, ffn.down) if linear is not None}
    return linears | {base_linear(linear) for linear in linears}


def _replace_experts(model: nn.Module, recompute: Literal["auto"] | bool | int, found: _Found) -> None:
    """Find mixture-of-experts modules, whose weights are stacked."""
    alike: dict[Hashable, ExpertsFFN | str] = {}
    for path, module in model.named_modules():
        if not is_experts(module):
            continue
        if isinstance(module, FusedExperts) or implementation(module) == IMPLEMENTATION:
            found.skip(path, module, ALREADY_FUSED)
            continue
        ffn: ExpertsFFN | str | None = why_class_stays(module)
        if ffn is None:
            key = signature(module, set())
            ffn = alike[key] = alike.get(key) or find_experts(module)
        if isinstance(ffn, str):
            found.skip(path, module, f"experts of a mixture: {ffn}", is_ffn_left=True)
            continue
        fused, facts = experts_class(type(module), ffn, recompute), facts_of_experts(module, ffn, recompute, found.on)
        found.change(path, module, fused, ffn.described(module), *facts)


def _replace_linears(
    model: nn.Module, rules: list[LinearRule], parts: set[nn.Module], precision: str | None, found: _Found
) -> None:
    """Find the linears that match a rule, or can run in 8 bits, and are not part of an FFN."""
    idle = list(rules)
    heads = set() if precision is None else heads_of(model)
    for path, module in model.named_modules():
        # Subclasses, SplitKLinear among them, are left alone.
        rule = next((rule for rule in rules if isinstance(module, nn.Linear) and rule.takes(path, module)), None)
        if rule is None:
            if precision is not None and type(module) is nn.Linear and module not in parts:
                if (reason := why_not_in_8_bits(module, module in heads)) is not None:
                    found.skip(path, module, f"not in 8 bits: {reason}")
                else:
                    found.change(path, module, *linear_in_8_bits(module, precision, found.on))
            continue
        idle = [other for other in idle if other is not rule]
        reason = ALREADY_FUSED if isinstance(module, SplitKLinear) else why_not_plain(module)
        if module in parts:
            reason = "is part of a fused FFN"
        if reason is not None:
            found.skip(path, module, reason)
            continue
        options = {"split_k": rule.split_k, "reduction": rule.reduction, "precision": precision}
        fused = fused_class(FusedSplitKLinear, nn.Linear, **options)
        text = f"split_k={rule.split_k!r}, {rule.reduction}, {module.in_features} -> {module.out_features}"
        found.change(path, module, fused, text, None, why_no_kernels_for_linear(module, rule, found.on))
    found.skipped += [Entry("(rules)", "Linear", None, f"no linear meets the conditions of {rule}") for rule in idle]


def _replace_heads(model: nn.Module, found: _Found) -> None:
    """Find the models whose loss can be computed without logits."""
    for path, module in model.named_modules():
        if isinstance(module, FusedLossHead):
            found.skip(path, module, ALREADY_FUSED)
        if isinstance(module, ReplacedModule) or module in found.changes or (name := find_head(module)) is None:
            continue
        reason = why_model_stays(module) or why_head_left(module, name)
        if getattr(module, name) in found.changes:
            reason = f"a rule takes {name}"
        if reason is not None:
            found.skip(path, module, f"its loss makes logits: {reason}")
            continue
        head = getattr(module, name)
        text = f"{name}, loss_function: {head.in_features} -> {head.out_features} classes, without logits"
        fused = head_class(type(module), name)
        found.change(path, module, fused, text, *facts_of_head(head, found.on), became=FusedLossHead.__name__)


def _replace_norms(model: nn.Module, found: _Found) -> None:
    """Find the norms that are written as several operations."""
    alike: dict[Hashable, Norm | str | None] = {}
    for path, module in model.named_modules():
        if isinstance(module, FusedNorm):
            found.skip(path, module, ALREADY_FUSED)
        if isinstance(module, ReplacedModule) or not may_be_norm(module):
            continue
        key = signature(module, set())
        if key not in alike:
            alike[key] = recognise_norm(module)
        norm = alike[key]
        if norm is None:
            continue
        if isinstance(norm, str):
            found.skip(path, module, f"it looks like a norm, but {norm}")
        elif (reason := why_norm_left(module, norm)) is not None:
            found.skip(path, module, f"it is a norm, but {reason}")
        else:
            fused = fused_class(FusedNorm, type(module), fused_norm=norm)
            found.change(path, module, fused, str(norm), *facts_of_norm(module, norm, found.on))


def _description(pieces: FFNPieces) -> str:
    up, down = linear_weight(pieces.up), linear_weight(pieces.down)
    gated = "" if pieces.gate is None and pieces.gate_rows is None else "gated "
    adapted = ", with adapters" if pieces.operation.name == "lora_ffn" else ""
    adapted += f" and a dropout of {pieces.adapter_dropout_p} in them" if pieces.adapter_dropout_p else ""
    adapted += ", under autocast alone" if pieces.why_not_plain() else ""
    return f"{gated}{pieces.activation}, {up.shape[1]} -> {down.shape[1]} -> {down.shape[0]}{adapted}"
