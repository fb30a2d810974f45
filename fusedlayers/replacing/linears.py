"""The class that `replace` gives to the linears that match a :class:`LinearRule`."""

from __future__ import annotations

from torch import Tensor, nn

from ..modules import SplitKLinear, say_once, why_patched
from .swapping import OWN_FORWARD, ReplacedModule, restored_method


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
