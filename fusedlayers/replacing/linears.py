"""Linears outside of FFNs that become a :class:`SplitKLinear`: those that a rule takes, and those in 8 bits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from ..functional.linear import LINEAR
from ..functional.switches import backend
from ..modules import SplitKLinear, is_adapted, say_once, why_not_plain, why_patched
from ..planning import Device
from ..planning.float8 import why_narrow, why_uneven
from .loss import heads_of
from .report import ALREADY_FUSED, Changes, Entry
from .rules import LinearRule
from .saving import of_tokens, planned
from .swapping import OWN_FORWARD, ReplacedModule, fused_class, restored_method
from .wish import SKIPPED, Wish


class FusedSplitKLinear(ReplacedModule, SplitKLinear):
    """An ``nn.Linear`` that computes as :class:`SplitKLinear`, with options as class attributes."""

    fused_from = nn.Linear
    split_k = "auto"
    reduction = "workspace"

    def forward(self, input: Tensor) -> Tensor:
        if not isinstance(self, FusedSplitKLinear):
            return restored_method(self, "forward")(input)
        if reason := why_patched(nn.Linear):
            say_once(self, reason, OWN_FORWARD)
            return nn.Linear.forward(self, input)
        return super().forward(input)

    def why_called(self, *tensors: Tensor | None) -> str | None:
        """Why a call would run the forward of ``nn.Linear``, or None if it would run ``functional.linear``."""
        return why_patched(nn.Linear)


def replace_linears(
    model: nn.Module, rules: Sequence[LinearRule], in_ffns: set[nn.Module], wish: Wish, changes: Changes
) -> None:
    """Find the linears that match a rule, or can run in 8 bits; ``in_ffns`` are those of FFNs."""
    idle = list(rules)
    stay = {} if wish.word is None else _in_16_bits(model, wish)
    for path, module in model.named_modules():
        if not isinstance(module, nn.Linear):
            continue
        given = next((rule for rule in rules if rule.takes(path, module)), None)
        precision = None if module in stay else wish.word
        if given is None and isinstance(module, FusedSplitKLinear) and module.precision != precision:
            text = f"{ALREADY_FUSED}, with precision={module.precision!r}; restore it first to change that"
            changes.skip(path, module, text)
        # Subclasses, SplitKLinear among them, are left alone.
        if given is None and (wish.word is None or type(module) is not nn.Linear or module in in_ffns):
            continue
        idle = [rule for rule in idle if rule is not given]
        reason = _why_left(module, in_ffns) if given else _why_not_in_8_bits(module, stay.get(module))
        if reason is not None:
            changes.skip(path, module, reason)
            continue
        rule = given or LinearRule()
        text = "" if given is None else f"split_k={rule.split_k!r}, {rule.reduction}, "
        text += f"{module.in_features} -> {module.out_features}"
        options: dict[str, Any] = {"split_k": rule.split_k, "reduction": rule.reduction, "precision": precision}
        if module in stay:
            text += f"; not in 8 bits: {stay[module]}"
        else:
            text += wish.in_words(LINEAR, changes.on, weight=module.weight, bias=module.bias, **options)
        fused = fused_class(FusedSplitKLinear, nn.Linear, **options)
        changes.change(path, module, fused, text, None, _why_no_kernels(module, rule, changes.on))
    changes.skipped += [Entry("(rules)", "Linear", None, f"no linear meets the conditions of {rule}") for rule in idle]


def _why_left(linear: nn.Linear, in_ffns: set[nn.Module]) -> str | None:
    """Why a linear stays as it is although a rule takes it, or None."""
    if linear in in_ffns:
        return "is part of a fused FFN"
    return ALREADY_FUSED if isinstance(linear, SplitKLinear) else why_not_plain(linear)


def _in_16_bits(model: nn.Module, wish: Wish) -> dict[nn.Module, str]:
    """The modules whose linears stay in 16 bits although they could run in 8, and why."""
    wrappers: Any = [module for module in model.modules() if is_adapted(module)]
    stay = {
        linear: "it is part of an adapter"
        for each in wrappers
        for linear in (*each.lora_A.values(), *each.lora_B.values())
    }
    stay |= dict.fromkeys(heads_of(model), "it is the head of the model")
    return stay | {module: SKIPPED for module in model.modules() if wish.of(module) is None}


def _why_not_in_8_bits(linear: nn.Linear, reason: str | None) -> str | None:
    sizes = linear.in_features, linear.out_features
    reason = reason or why_uneven(sizes) or why_narrow(sizes) or why_not_plain(linear)
    return None if reason is None else f"not in 8 bits: {reason}"


def _why_no_kernels(linear: nn.Linear, rule: LinearRule, on: Device | None) -> str | None:
    """Why no kernel runs a linear that ``rule`` takes, or None."""
    weight = linear.weight
    found = planned(
        LINEAR, on, weight.device, of_tokens(linear.in_features, weight.dtype, requires_grad=False), weight,
        linear.bias, split_k=rule.split_k, reduction=rule.reduction,
    )  # fmt: skip
    # A rule with a number of splits, or with atomic addition, asks for kernels.
    asks = found.plan.problem.asks_for_kernels and backend() == "auto"
    return found.why_no_kernels("triton" if asks else backend())
