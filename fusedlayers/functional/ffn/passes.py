"""The forward and the backward pass of an FFN: what every path takes, saves and returns."""

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from torch import Tensor

from ...kernels.column_sums import column_sums
from ...kernels.tuning import COLUMN_SUM_TILES
from ...planning import KERNEL_PATHS, ffn_epilogue
from ...planning.float8 import IN_8_BITS
from .. import dispatch
from ..custom_ops import Result, Results
from ..operands import rows, with_leading_dims, without_autocast
from ..operation import Operation, Tensors
from ..prepared import Prepared
from ..recalling import pick
from ..sums import summed_rows
from . import chunked, epilogue, float8, fused
from .adapters import Adapted

# Positions of operands.
B_UP, B_DOWN, B_GATE, RESIDUAL = 3, 4, 6, 7
# Operands whose gradients, if they have any, do not need the hidden.
_BESIDE_HIDDEN = ("b_down", "residual", "seed", "adapter_seed")


class FFNOperation(Operation):
    """An FFN of x ``[*B, M, K]``, whose linear layers may have adapters.

    It saves only its inputs, and recomputes the hidden in the backward pass; some paths save the pre-activations, too,
    and with adapters their products with A.
    """

    operands = "x w_up w_down b_up? b_down? w_gate? b_gate? residual? seed?"
    row_operands = ("x",)
    # With the biases of up and gate, of which tables are made: see ``functional.float8``.
    weight_positions: ClassVar[tuple[int, ...]] = (1, 2, 3, 5, 6)
    # The adapters among the operands of a prepared call; None: there are none.
    adapted: Callable[[Prepared, Tensors], Adapted] | None = None

    def __init__(self, function: Callable[..., Any], variant: str = "") -> None:
        super().__init__(function, variant)
        names = [name.rstrip("?") for name in self.operands.split()]
        through = [place for place, name in enumerate(names) if name not in _BESIDE_HIDDEN]
        self._places_through_hidden, self._those_through_hidden = frozenset(through), pick(through)
        self._read = tuple(place not in (B_DOWN, RESIDUAL) for place in range(len(names)))

    def reference(self, **arguments: Any) -> Tensor:
        return super().reference(**arguments, seed=arguments["dropout_seed"])

    def kept(self, wanted: Sequence[bool]) -> tuple[bool, ...]:
        # Without a gradient through the hidden nothing is recomputed.
        return self._read if self._through_hidden(wanted) else (False,) * len(self._read)

    def unread(self, call: Prepared, wanted: Sequence[bool]) -> Sequence[int]:
        # The saved pre-activations include these biases.
        return (B_UP, B_GATE) if _saves_pre_activations(call.plan.path) and self._through_hidden(wanted) else ()

    def forward(self, call: Prepared, operands: Tensors, wanted: Sequence[bool]) -> tuple[Tensors, Tensors]:
        path, keep = call.plan.path, bool(wanted) and self._through_hidden(wanted)
        made: Tensors = (None, None)
        adapted = None if self.adapted is None else self.adapted(call, operands)
        if path == "epilogue":
            y, made = epilogue.forward(call, operands, keep, adapted)
        elif path == "chunked":
            y = chunked.forward(call, operands)
        elif path == IN_8_BITS:
            y, made = float8.forward(call, operands, keep, adapted)
        else:
            y = fused.forward(call, operands)
        return (with_leading_dims(y, operands[0]),), made

    def backward(
        self, call: Prepared, operands: Tensors, made: Tensors, wanted: Sequence[bool], upstream: Tensors
    ) -> Tensors:
        return self._gradients(call, operands, made, wanted, upstream, False)

    def last_backward(
        self, call: Prepared, operands: Tensors, made: Tensors, wanted: Sequence[bool], upstream: Tensors
    ) -> Tensors:
        return self._gradients(call, operands, made, wanted, upstream, True)

    def _gradients(
        self,
        call: Prepared,
        operands: Tensors,
        made: Tensors,
        wanted: Sequence[bool],
        upstream: Tensors,
        in_place: bool,
    ) -> Tensors:
        [dy], path = upstream, call.plan.path
        dy_rows = rows(dy)
        found: list[Tensor | None] = [None] * len(wanted)
        through_hidden = self._through_hidden(wanted)
        if through_hidden:
            adapted = None if self.adapted is None else self.adapted(call, operands)
            if path == "epilogue":
                found = epilogue.gradients(call, operands, made, wanted, dy_rows, in_place, adapted)
            elif path == "chunked":
                found[:7] = chunked.gradients(call, operands, wanted, dy_rows)
            elif path == IN_8_BITS:
                found = float8.gradients(call, operands, made, wanted, dy_rows, adapted)
            else:
                found[:7] = fused.gradients(call, operands, wanted, dy_rows)
            x = operands[0]
            if found[0] is not None and x.dim() != 2:
                found[0] = found[0].view(x.shape)
        if wanted[B_DOWN] and found[B_DOWN] is None:
            launches = path == IN_8_BITS or (
                through_hidden and (path in KERNEL_PATHS or call.plan.epilogue is not None)
            )
            summed = column_sums(dy_rows, COLUMN_SUM_TILES, call.ready) if launches else summed_rows(dy_rows)
            found[B_DOWN] = summed.to(dy.dtype)
        if wanted[RESIDUAL]:
            found[RESIDUAL] = dy
        return found

    def differentiable_gradients(
        self, call: Prepared, operands: Tensors, wanted: Sequence[bool], upstream: Tensors
    ) -> Tensors:
        [dy] = upstream
        through = [want and place in self._places_through_hidden for place, want in enumerate(wanted)]
        found: list[Tensor | None] = [None] * len(wanted)
        if any(through):
            found = list(super().differentiable_gradients(call, operands, through, upstream))
        # b_down and the residual are not saved, nor needed for their gradients.
        if wanted[B_DOWN]:
            with without_autocast(dy.device):
                found[B_DOWN] = dy.sum(tuple(range(dy.dim() - 1))) if dy.dim() > 1 else dy
        if wanted[RESIDUAL]:
            found[RESIDUAL] = dy
        return found

    def results(self, operands: Tensors, problem: Any, path: str, extras: dict[str, Any], saving: bool) -> Results:
        # A backward pass for b_down alone has no other operand.
        first = next(operand for operand in operands if operand is not None)
        leading = (problem.M,) if operands[0] is None else operands[0].shape[:-1]
        kept = None
        if problem.training and _saves_pre_activations(path):
            device = dispatch.describe(first.device)
            columns = problem.N if path == IN_8_BITS else ffn_epilogue.kept_columns(problem, device)
            kept = Result((problem.M, columns), first.dtype)
        return [Result((*leading, problem.O), first.dtype)], [kept, kept if problem.gated else None]

    def _through_hidden(self, wanted: Sequence[bool]) -> bool:
        """Whether any wanted gradient needs the hidden."""
        return any(self._those_through_hidden(wanted))


def _saves_pre_activations(path: str) -> bool:
    return path in ("epilogue", IN_8_BITS)
