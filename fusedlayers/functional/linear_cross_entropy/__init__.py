"""The loss head: cross-entropy of a linear layer's outputs, whose logits are in memory in chunks only, or never."""

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from ... import reference
from ...kernels import cross_entropy as kernels
from ...kernels.cross_entropy import LossArithmetic
from ...planning.linear_cross_entropy import LossPlan, LossProblem
from ...planning.linear_cross_entropy_chunks import wide_gradients
from ..custom_ops import Result, Results
from ..operands import rows
from ..operation import Operation, Tensors
from ..prepared import Prepared
from . import chunked, fused
from .arguments import check_loss, checked_options, loss_problem
from .head import Head


def linear_cross_entropy(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    linear_bias: Tensor | None = None,
    weight: Tensor | None = None,
    reduction: str = "mean",
    ignore_index: int | None = None,
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    z_loss: float = 0.0,
    recompute: bool = False,
) -> Tensor:
    """``cross_entropy(input linear_weightᵀ + linear_bias, target)`` without all logits in memory.

    Names and meaning are those of ``torch.nn.functional.linear_cross_entropy`` and ``cross_entropy``; the last four
    arguments go beyond them. The gradients of a mean or a sum are computed in the forward pass, while a chunk of logits
    is in memory, unless ``recompute`` says otherwise. Without a reduction no logits are written at all. The loss has
    the same bits whether gradients are wanted or not.

    Args:
        input: ``[*B, K]`` or ``[K]``, any strides.
        linear_weight: ``[V, K]``, ``nn.Linear``'s layout: a row for every class. Or ``[V, *D, K]``: a token has a loss
            at each of ΠD positions, through torch's operations; target, linear_bias and losses have the dims ``*D``,
            too, after the tokens or the classes.
        target: int64 or uint8 classes ``[*B]``, or probabilities ``[*B, V]`` of all classes, which torch's operations
            take.
        linear_bias: ``[V]`` or None.
        weight: ``[V]`` or None: factors of the losses of each class's tokens. It has no gradient.
        reduction: "mean" over the tokens that count, weighted by ``weight``, "sum", or "none".
        ignore_index: tokens with this target do not count; None is -100. Among probabilities it must be None.
        label_smoothing: the share of the target that is spread evenly over all classes, 0 to 1.
        softcap: c of ``c · tanh(logits / c)`` (Gemma 2), or None.
        logit_scale: factor of the logits before the softcap (Cohere; Granite divides).
        z_loss: ``z_loss · logsumexp(logits)²`` is added to the loss of every token that counts (PaLM, ST-MoE). A mean
            divides it as it divides the rest.
        recompute: write no logits with a reduction, either. The forward pass saves only the input and two numbers per
            token, and the backward pass recomputes the logits, some columns at a time. Beside the gradients it takes a
            float32 sum for that of the input, and 64 MiB (or ``FUSEDLAYERS_WORKSPACE_MIB`` for both) as long as 256
            columns fit. One product in three is computed twice. Without a reduction this is always so, with 512 MiB
            instead of 64. Without kernels it changes nothing.

    Returns:
        The loss, a scalar, or ``[*B]`` without a reduction, in float32 for operands of 16 bits (torch's own has their
        dtype, in which a loss near 10 has steps of 1/16). The mean of no tokens is NaN with gradients of 0, as torch's.
        In kernels a target that is neither a class nor ignored makes the loss NaN; torch's operations raise.

    Raises:
        TypeError: an argument of the wrong type, a dtype that is not real floating or differs from that of input, a
            target that is neither int64, uint8 nor floating.
        ValueError: shapes that do not fit together, tensors on different devices, an unknown ``reduction``, a number
            outside of its range, a ``weight`` that requires a gradient, an ``ignore_index`` beside probabilities.
        RuntimeError: ``FUSEDLAYERS_BACKEND=triton`` or ``FUSEDLAYERS_STRICT=1`` where the kernels cannot run.
    """
    options = reduction, ignore_index, label_smoothing, softcap, logit_scale, z_loss, recompute
    return LINEAR_CROSS_ENTROPY.call((input, linear_weight, target, linear_bias, weight), options)


_LINEAR_BIAS = 3  # position among the operands


class LossHead(Operation):
    """What losses and log-probabilities of a linear layer's classes have in common."""

    problem_type = LossProblem
    operands = "input linear_weight target linear_bias? weight?"
    row_operands = ("input",)
    torch_takes_cast = True
    # The function of ``reference`` that takes the arguments of the public one.
    oracle: ClassVar[Callable[..., Any]]

    def details(self, plan: LossPlan, extras: dict[str, Any]) -> LossArithmetic:
        return LossArithmetic(accuracy=plan.accuracy, **extras)

    def cast(self, call: Prepared, tensors: Tensors) -> Tensors:
        input, linear_weight, target, linear_bias, *rest = tensors
        # Neither targets, which may be probabilities, nor class weights are operands of the product.
        input, linear_weight, linear_bias = super().cast(call, (input, linear_weight, linear_bias))
        return [input, linear_weight, target, linear_bias, *rest]

    def through_torch(self, call: Prepared, tensors: Tensors) -> Any:
        input, linear_weight, target, linear_bias, *rest = tensors
        names, values = (*self.tensor_names[3:], *self.option_names), (linear_bias, *rest, *call.options)
        options = dict(zip(names, values, strict=True))
        options.pop("recompute", None)
        return self.oracle(input, linear_weight, target, **options)

    def flattened(self, call: Prepared, tensors: Tensors) -> Tensors:
        input, linear_weight, target, linear_bias, *rest = tensors
        weight = rest[0] if rest else None
        return rows(input), linear_weight, target.reshape(-1).to(torch.int64), linear_bias, weight


class _LinearCrossEntropy(LossHead):
    """The losses of tokens, or their mean or sum, on the chunked path together with its gradients."""

    oracle = staticmethod(reference.linear_cross_entropy)

    def check(self, tensors: Tensors, options: tuple[Any, ...]) -> tuple[Any, ...]:
        named = dict(zip(self.option_names, options, strict=True))
        check_loss(tensors, named["ignore_index"])
        return tuple(checked_options(named).values())

    def problem(self, tensors: Tensors, options: tuple[Any, ...]) -> LossProblem:
        reduction, _, _, softcap, _, z_loss, recompute = options
        return loss_problem(
            *tensors, reduction=reduction, capped=softcap is not None, squared=z_loss > 0, recompute=recompute
        )

    def title(self, problem: LossProblem, tensors: Tensors, options: tuple[Any, ...]) -> str:
        reduction, *_, z_loss, _ = options
        total = {"none": "", "sum": "Σ ", "mean": "mean of "}[reduction]
        square = f" + {z_loss:g} · logsumexp(logits)²" if z_loss else ""
        return f"linear_cross_entropy: {total}cross_entropy(logits){square}, {logits_formula(problem, options[3:5])}"

    def extras(self, options: tuple[Any, ...]) -> dict[str, Any]:
        names = ("ignore_index", "label_smoothing", "softcap", "logit_scale", "z_loss")
        return dict(zip(names, options[1:-1], strict=True))

    def unread(self, call: Prepared, wanted: Sequence[bool]) -> Sequence[int]:
        # Gradients from the forward pass need no logits, and so no bias.
        return (_LINEAR_BIAS,) if call.problem.early else ()

    def forward(self, call: Prepared, operands: Tensors, wanted: Sequence[bool]) -> tuple[Tensors, Tensors]:
        head = Head.of(operands, call.plan, call.details)
        if call.problem.reduction == "none":
            losses, _, _, statistics = fused.losses(head, any(wanted))
            return (losses,), (statistics, None)
        if call.plan.path == "fused":
            loss, made = fused.reduced(head, any(wanted))
        else:
            loss, made = chunked.reduced(head, wanted)
        return (loss,), made

    def backward(
        self, call: Prepared, operands: Tensors, made: Tensors, wanted: Sequence[bool], upstream: Tensors
    ) -> Tensors:
        if call.problem.early:
            return self._scaled(operands, made, wanted, upstream, False)
        head = Head.of(operands, call.plan, call.details)
        statistics, factor = made
        of_losses = upstream[0] if factor is None else upstream[0] * factor
        dx, dw, db = fused.gradients(head, wanted, statistics, of_losses.expand(len(head.target)).contiguous())
        return dx, dw, None, db, None

    def last_backward(
        self, call: Prepared, operands: Tensors, made: Tensors, wanted: Sequence[bool], upstream: Tensors
    ) -> Tensors:
        if not call.problem.early:
            return self.backward(call, operands, made, wanted, upstream)
        return self._scaled(operands, made, wanted, upstream, True)

    def _scaled(
        self, operands: Tensors, made: Tensors, wanted: Sequence[bool], upstream: Tensors, in_place: bool
    ) -> Tensors:
        """The forward pass's gradients times the loss's upstream gradient; ``in_place`` if no cast is needed."""
        *gradients, late = made
        factor = upstream[0] if late is None else upstream[0] * late
        dx, dw, db = (
            kernels.scaled(gradient, factor, operands[0].dtype, in_place=in_place)
            if want and gradient is not None
            else None
            for gradient, want in zip(gradients, (wanted[0], wanted[1], wanted[3]), strict=True)
        )
        return dx, dw, None, db, None

    def expression(self, call: Prepared, operands: Tensors) -> Tensors:
        input, linear_weight, target, linear_bias, weight = operands
        return (
            reference.linear_cross_entropy(
                input, linear_weight, target, linear_bias=linear_bias, weight=weight, reduction=call.problem.reduction,
                **call.extras,
            ),
        )  # fmt: skip

    def results(self, operands: Tensors, problem: Any, path: str, extras: dict[str, Any], saving: bool) -> Results:
        statistics = Result((2, problem.M), torch.float32) if saving else None
        if problem.reduction == "none":
            return [Result((problem.M,), torch.float32)], [statistics, None]
        if path == "fused":
            factor = Result((), torch.float32) if saving and problem.reduction == "mean" else None
            return [Result((), torch.float32)], [statistics, factor]
        gradients: list[Result | None] = [None] * 3
        late = None
        if saving:
            dtype = operands[0].dtype
            shapes = (problem.M, problem.K), (problem.V, problem.K), (problem.V,)
            needs = (problem.needs_data_gradient, problem.needs_weight_gradient, problem.needs_bias_gradient)
            gradients = [
                Result(shape, torch.float32 if wide else dtype) if need else None
                for shape, need, wide in zip(shapes, needs, wide_gradients(problem), strict=True)
            ]
            late = Result((), torch.float32) if problem.deferred and problem.reduction == "mean" else None
        return [Result((), torch.float32)], [*gradients, late]

    def finished(self, call: Prepared, tensors: Tensors, results: Tensor) -> Tensor:
        return results.view(tensors[0].shape[:-1]) if call.problem.reduction == "none" else results


def logits_formula(problem: LossProblem, options: tuple[Any, ...]) -> str:
    """The logits as titles name them; ``options``: softcap and logit_scale."""
    softcap, logit_scale = options
    product = "input linear_weightᵀ" + (" + linear_bias" if problem.biased else "")
    if logit_scale != 1:
        product = f"{logit_scale:g} ({product})" if problem.biased else f"{logit_scale:g} {product}"
    return f"logits = {product}" if softcap is None else f"logits = {softcap:g} tanh(({product}) / {softcap:g})"


LINEAR_CROSS_ENTROPY = _LinearCrossEntropy(linear_cross_entropy)
