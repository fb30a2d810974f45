"""The chunked path of the loss head: the logits of some tokens at a time, which their gradient overwrites.

Everything is a matrix of rows here: input ``[M, K]``, linear_weight ``[V, K]``, logits of a chunk ``[m, V]``. Products
have ``P`` columns: V, or more where the weight is copied with rows of zeros at its end.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ...kernels import cross_entropy as kernels
from ...planning.linear_cross_entropy import ALIGNED_COLUMNS
from ..operation import Tensors
from ..sums import accumulated, add_product, summed_rows
from .head import Head


def for_each_chunk(head: Head, visit: Callable[[slice, Tensor], None]) -> None:
    """Calls ``visit(rows, logits)`` for every chunk, all in one buffer.

    The first chunk is the shortest. Logits ``[m, P]`` are those of the products; columns from V on are padding, but
    not NaN.
    """
    input, weight, bias, plan = head.input, head.linear_weight, head.linear_bias, head.plan
    tokens, columns = input.shape[0], weight.shape[0]
    buffer = input.new_empty(plan.rows, plan.problem.padded_columns)
    # No product writes the padding of the rows, but the kernel reads it.
    buffer[:, columns:].zero_()
    for stop in range((tokens - 1) % plan.rows + 1, tokens + 1, plan.rows):
        rows = slice(max(0, stop - plan.rows), stop)
        logits = buffer[: rows.stop - rows.start, :columns]
        if bias is None:
            torch.mm(input[rows], weight.T, out=logits)
        else:
            torch.addmm(bias, input[rows], weight.T, out=logits)
        visit(rows, logits)


class Sums:
    """Accumulators of the wanted gradients of input, linear_weight and linear_bias over the chunks.

    They are float32 where planned, and have no padding: the first ``whole`` rows of dW come from a product of aligned
    size, the others from a padded one.
    """

    def __init__(self, head: Head, wanted: Sequence[bool]) -> None:
        self.head, plan = head, head.plan
        input, weight, bias = head.input, head.linear_weight, head.linear_bias
        self.of_input = self.of_weight = self.of_bias = self.last_rows = None
        columns = weight.shape[0]
        # With a vocabulary over several processes V counts one more class for theirs, which the weight does not have.
        classes = min(head.classes, columns)
        self.whole = classes if columns == classes else classes // ALIGNED_COLUMNS * ALIGNED_COLUMNS
        if wanted[0]:
            dtype = torch.float32 if plan.wide_data_gradient else input.dtype
            self.of_input = torch.empty(input.shape, dtype=dtype, device=input.device)
        if wanted[1]:
            dtype = torch.float32 if plan.wide_sum else weight.dtype
            # The first chunk overwrites it, but there may be no chunk.
            made = torch.empty if len(input) else torch.zeros
            self.of_weight = made((classes, weight.shape[1]), dtype=dtype, device=weight.device)
            if self.whole < classes:
                self.last_rows = made((columns - self.whole, weight.shape[1]), dtype=dtype, device=weight.device)
        if wanted[3] and bias is not None:
            self.of_bias = torch.zeros(classes, dtype=accumulated(bias.dtype), device=bias.device)

    def add(self, rows: slice, gradient: Tensor) -> None:
        """Adds what follows from the gradient ``[m, P]`` of a chunk's logits, which is 0 from column V on."""
        input, weight = self.head.input, self.head.linear_weight
        if self.of_input is not None:
            add_product(self.of_input[rows], gradient.T, weight, first=True)
        if self.of_weight is not None:
            add_product(self.of_weight[: self.whole], gradient[:, : self.whole], input[rows], first=not rows.start)
        if self.last_rows is not None:
            add_product(self.last_rows, gradient[:, self.whole :], input[rows], first=not rows.start)
        if self.of_bias is not None:
            self.of_bias += summed_rows(gradient)[: self.of_bias.shape[0]]

    def unrounded(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """The gradients of input, linear_weight and linear_bias in their accumulation dtypes."""
        if self.of_weight is not None and self.last_rows is not None:
            self.of_weight[self.whole :] = self.last_rows[: self.of_weight.shape[0] - self.whole]
        return self.of_input, self.of_weight, self.of_bias

    def gradients(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """The gradients in the dtype of their operands."""
        dx, dw, db = (None if each is None else each.to(self.head.input.dtype) for each in self.unrounded())
        return dx, dw, db


def reduced(head: Head, wanted: Sequence[bool]) -> tuple[Tensor, Tensors]:
    """The sum or the mean of the losses; where wanted its gradients, and a factor that they still lack."""
    problem = head.plan.problem
    mean = problem.reduction == "mean"
    counted = head.counted() if mean else None
    factor = None if counted is None else counted.reciprocal()
    # The same kernel runs with and without gradients, as another one might round differently.
    early = None if problem.format.small_range else factor
    sums = Sums(head, wanted) if any(wanted) else None
    losses = head.input.new_empty(head.input.shape[0], dtype=torch.float32)

    def visit(rows: slice, logits: Tensor) -> None:
        kernels.losses(
            logits[:, : head.classes], *head.of_rows(rows), loss=losses[rows], gradient=sums is not None, factor=early
        )
        if sums is not None:
            sums.add(rows, logits)

    for_each_chunk(head, visit)
    loss = losses.sum()
    if counted is not None:
        loss = loss / counted
    if sums is None:
        return loss, (None,) * 4
    late = None
    if problem.deferred and factor is not None:
        # Gradients are 0 where no token counts, and NaN where some do, but their class weights add up to 0.
        late = factor.masked_fill((head.target == head.arithmetic.ignore_index).all(), 0.0)
    return loss, (*sums.unrounded(), late)
