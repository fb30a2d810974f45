"""The FFN blocks of a model: what becomes of each, and what the report says of it."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from ...kernels.activations import ACTIVATIONS, canonical_activation
from ...modules import FFNPieces, FusedFFN, linear_weight
from ...planning import Device
from ...planning.costs import SAVED_FOR_SLOPE, mask_bytes
from ..activations import torch_module_activation
from ..experts.formula import is_experts
from ..reading.sizes import widths
from ..report import Changes
from ..saving import TOKENS, Facts, kept_by, of_tokens, planned
from ..wish import Wish
from .blocks import FusedBlock
from .by_rule import FusedInside
from .choosing import Chooser, linears_of

_LISTS = (nn.ModuleList, nn.ModuleDict)


def replace_ffns(model: nn.Module, chooser: Chooser, changes: Changes) -> set[nn.Module]:
    """Decide what becomes of every block with an FFN; returns the linears of all FFNs, fused or not."""
    # Innermost modules first. Lists of modules last: their owner may call them.
    modules = dict(model.named_modules())
    inwards = list(modules.items())[::-1]
    for path, module in sorted(inwards, key=lambda each: isinstance(each[1], _LISTS)):
        if not is_experts(module):
            _replace(path, module, _owner(modules, path), chooser, changes)
    # The report lists them in the order of the model.
    order = {path: -place for place, (path, _) in enumerate(inwards)}
    for entries in (changes.replaced, changes.skipped):
        entries.sort(key=lambda entry: order[entry.path])
    return chooser.taken


def _owner(modules: dict[str, nn.Module], path: str) -> nn.Module | None:
    """The module whose methods may run the list of modules at this path; None if there is no list."""
    if not isinstance(modules[path], _LISTS):
        return None
    while path and isinstance(modules[path], _LISTS):
        path = path.rpartition(".")[0]
    return modules[path]


def _replace(path: str, module: nn.Module, owner: nn.Module | None, chooser: Chooser, changes: Changes) -> None:
    try:
        fused = chooser.fused_class(module, chooser.wish.of(module))
    except Exception as error:  # a metaclass may refuse with any exception
        changes.skip(path, module, f"no class can be derived from its own: {error}", is_ffn_left=True)
        return
    if isinstance(module, FusedBlock):
        chooser.taken |= linears_of(module.find_ffn_pieces(module))
    elif isinstance(module, FusedFFN):
        chooser.taken |= set(module.children())
    reason = chooser.why_left(module, owner) if fused is None else chooser.why_class_stays(module, fused)
    if reason is not None:
        changes.skip(path, module, reason, is_ffn_left=not isinstance(module, (FusedBlock, FusedFFN)))
    if reason is not None or fused is None:
        return
    ffns = fused.find_ffn_pieces(module)
    if any(isinstance(pieces, str) for pieces in ffns.values()):
        # float32 adapters beside 16-bit weights are fused only under autocast, which only a training step enters.
        with _autocast(module):
            ffns = fused.find_ffn_pieces(module)
    fused_linears = linears_of(ffns)
    precision = chooser.wish.of(module, *fused_linears)
    if precision != fused.fused_precision:
        fused = chooser.fused_class(module, precision)
        assert fused is not None
    rule = chooser.rule_of_user(module)
    trusted = ", as a trusted rule says" if rule is not None and rule.trusted else ""
    for linears, pieces in ffns.items():
        if isinstance(pieces, str):
            changes.skip(path, module, f"{linears}: {pieces}", is_ffn_left=True)
        else:
            text = f"{linears}: {_description(pieces)}{_precision(pieces, fused, chooser.wish, changes.on)}{trusted}"
            changes.change(path, module, fused, text, *_facts(pieces, fused, changes.on))
    chooser.taken |= fused_linears
    if fused_linears and issubclass(fused, FusedInside) and (reason := chooser.why_another_left(module)):
        changes.skip(path, module, reason, is_ffn_left=True)
    if not ffns and sum(widths(child) is not None for child in module.children()) > 1:
        changes.skip(path, module, "no two of its linears have just an activation and a dropout between")


def _autocast(module: nn.Module) -> AbstractContextManager[Any]:
    """Autocast for the device of a module's parameters, if that device has it."""
    device = next((parameter.device.type for parameter in module.parameters()), "meta")
    return torch.autocast(device) if torch.amp.is_autocast_available(device) else nullcontext()


def _description(pieces: FFNPieces) -> str:
    up, down = linear_weight(pieces.up), linear_weight(pieces.down)
    gated = "" if pieces.gate is None and pieces.gate_rows is None else "gated "
    adapted = ", with adapters" if pieces.operation.name == "lora_ffn" else ""
    adapted += f" and a dropout of {pieces.adapter_dropout_p} in them" if pieces.adapter_dropout_p else ""
    adapted += ", under autocast alone" if pieces.why_not_plain() else ""
    return f"{gated}{pieces.activation}, {up.shape[1]} -> {down.shape[1]} -> {down.shape[0]}{adapted}"


def _precision(pieces: FFNPieces, fused: type[FusedBlock], wish: Wish, on: Device | None) -> str:
    """Whether an FFN that was asked to run in 8 bits does; empty where nothing was asked."""
    given = pieces.arguments(linear_weight(pieces.up), None, fused.fused_recompute, fused.fused_precision)
    del given["x"]
    return wish.in_words(pieces.operation, on, **given)


@torch.enable_grad()
def _facts(pieces: FFNPieces, fused: type[FusedBlock], on: Device | None) -> Facts:
    """What the report says of an FFN: its bytes are those of the FFN with its input, and of the dropout of its result,
    which torch applies in both."""
    up, down = linear_weight(pieces.up), linear_weight(pieces.down)
    x = of_tokens(up.shape[1], up.dtype)
    given = pieces.arguments(x, None, fused.fused_recompute, fused.fused_precision)
    found = planned(pieces.operation, on, up.device, **given)
    problem = found.plan.problem
    theirs, ours = problem.kept_by_torch(found.device) // TOKENS, found.plan.saved_bytes // TOKENS
    result = 0
    if problem.training:
        # A GLU is no function of one tensor.
        activation = pieces.activation if torch_module_activation(pieces.original) is None else pieces.original
        beyond = _kept_for_slope(activation) - SAVED_FOR_SLOPE.get(pieces.activation, 0)
        theirs += beyond * problem.element_bytes * problem.N
        if pieces.output_dropout_p:
            result = mask_bytes(problem, found.device) * down.shape[0]
    return found.facts((theirs + result, ours + result))


def _kept_for_slope(activation: object) -> int:
    """The number of tensors of its input's size that an activation saves beside its value, counted: some are Python
    code."""
    run = ACTIVATIONS[canonical_activation(activation)].torch if isinstance(activation, str) else activation
    assert callable(run)
    # x + 0, because a leaf must not be changed in place.
    kept, value = kept_by(lambda x: run(x + 0), torch.zeros(64, requires_grad=True, device="cpu"))
    return sum(tensor.numel() == value.numel() for tensor in kept)
