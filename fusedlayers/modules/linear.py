"""`SplitKLinear`, a linear layer whose products may split the axis they sum over."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling

from .. import functional
from ..functional import dispatch
from ..functional.linear import LINEAR, check_reduction, check_split_k
from ..functional.precision import Float8, precision_word
from ..functional.recalling import ModuleCalls
from .guarding import KEPT
from .parts import Parts, parts_of
from .traced import outside_of_traces

_operation = LINEAR.composite.operation


class SplitKLinear(nn.Linear):
    """``nn.Linear``, x ``[*B, M, K]`` -> ``[*B, M, N]``, for few rows or columns and a long inner axis.

    Parameters, their initial values, ``state_dict`` and the arguments up to ``dtype`` are those of ``nn.Linear``; the
    letters: K is in_features, N is out_features. The forward product, the data gradient and the weight gradient choose
    their own splits, as in :func:`fusedlayers.functional.linear`.

    Args:
        in_features: width of the input, K.
        out_features: width of the output, N.
        bias: whether a bias ``[N]`` is added.
        device, dtype: of the parameters, as in ``nn.Linear``.
        split_k: "auto", or into how many ranges each product cuts the axis that it sums over.
        reduction: "workspace" (deterministic) or "atomic".
        precision: "fp8" or a :class:`fusedlayers.Float8`: products run in 8 bits where they can and where that is
            faster (see ``functional.linear``); None: in the dtype of the parameters.

    Raises:
        TypeError, ValueError: ``split_k``, ``reduction`` or ``precision`` is not what is described here; the message
            names it.
    """

    # What forward calls, for ``explain``.
    function = staticmethod(functional.linear)
    # Modules that were pickled without it have none of their own.
    precision: str | None = None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
        *,
        split_k: int | str = "auto",
        reduction: str = "workspace",
        precision: str | Float8 | None = None,
    ) -> None:
        check_split_k(split_k)
        check_reduction(reduction)
        super().__init__(in_features, out_features, bias, device, dtype)
        self.split_k = split_k
        self.reduction = reduction
        self.precision = precision_word(precision)

    def call_arguments(self, x: Tensor) -> dict[str, Any]:
        """The arguments that ``forward(x)`` gives to ``functional.linear``, by name."""
        parts = self._parts(x, self.weight, self.bias)
        x, weight, bias = (x, self.weight, self.bias) if parts is None else parts.operands
        options = {"split_k": self.split_k, "reduction": self.reduction, "precision": self.precision}
        return {"x": x, "weight": weight, "bias": bias, **options}

    def forward(self, x: Tensor) -> Tensor:
        """``x Wᵀ + b`` of x ``[*B, M, K]``: ``[*B, M, N]``.

        Raises:
            TypeError, ValueError: x does not fit the weight; the message names it.
        """
        if is_dynamo_compiling():
            return self._traced(x)
        own = self.__dict__
        held = own["_parameters"]
        try:
            # Faster than attributes.
            weight, bias = held["weight"], held["bias"]
        except KeyError:
            weight, bias = self.weight, self.bias
        tensors, options = (x, weight, bias), (None, self.split_k, self.reduction, self.precision)
        if self.precision is not None and (parts := self._parts(x, weight, bias)) is not None:
            return parts.joined(LINEAR.call(parts.operands, options))
        calls: ModuleCalls | None = own.get(KEPT)
        if calls is None:
            calls = own[KEPT] = ModuleCalls(inputs=(0,))
        call = calls.recall(tensors, options)
        if call is not None:
            # The shortest way where torch runs the call: it must not cost more than nn.Linear.
            direct = call.direct and dispatch.counted is None
            return F.linear(x, weight, bias) if direct else call.operation.run(call, tensors)
        # Nested tensors, and Proxies of torch.fx, whose attributes are Proxies.
        if getattr(x, "is_nested", False) is not False:
            return F.linear(x, weight, bias)
        return LINEAR.call(tensors, options, module_calls=calls)

    def _traced(self, x: Tensor) -> Tensor:
        """Everything is read as torch's own forward reads it, so that Dynamo guards hardly more than there."""
        if getattr(x, "is_nested", False) is not False:
            return F.linear(x, self.weight, self.bias)
        # A Float8 that was assigned: the graph takes its word.
        precision = getattr(self.precision, "word", self.precision)
        parts = self._parts(x, self.weight, self.bias)
        operands = (x, self.weight, self.bias) if parts is None else parts.operands
        found: list[Tensor] = _operation(
            *operands, None, f"{self.split_k}", self.reduction, precision, self.traced_switches()
        )
        return found[0] if parts is None else parts.joined(found[0])

    def _parts(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Parts | None:
        """The parts that products in 8 bits run on where the layer was split; in 16 bits torch runs all of it."""
        if self.precision is None or type(weight) is nn.Parameter:
            return None
        return parts_of(x, weight, bias)

    @outside_of_traces
    def traced_switches(self) -> str:
        """The user's switches, a constant while Dynamo traces."""
        return LINEAR.composite.switches()

    def extra_repr(self) -> str:
        options = f"{super().extra_repr()}, split_k={self.split_k!r}, reduction={self.reduction!r}"
        return options if self.precision is None else f"{options}, precision={self.precision!r}"
