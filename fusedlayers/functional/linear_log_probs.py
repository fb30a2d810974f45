"""Log-probabilities of classes under a linear layer, entropies and likeliest classes: the public function, and its
operation."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .. import reference
from ..planning.linear_cross_entropy import LossProblem
from .custom_ops import Result, Results
from .linear_cross_entropy import LossHead, fused, logits_formula
from .linear_cross_entropy.arguments import LOG_PROBS_SHAPES, checked_options, loss_problem
from .linear_cross_entropy.head import Head
from .operation import Tensors
from .prepared import Prepared


def linear_log_probs(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    linear_bias: Tensor | None = None,
    ignore_index: int | None = None,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    return_entropy: bool = False,
    return_argmax: bool = False,
    recompute: bool = False,
) -> Any:
    """``log_softmax(input linear_weightᵀ + linear_bias)`` at each token's target, without any logits in memory.

    For policy-gradient and preference losses of language models. Calls with and without gradients give the same bits,
    so that the ratio of both probabilities is exactly 1.

    Args:
        input: ``[*B, K]`` or ``[K]``, any strides.
        linear_weight: ``[V, K]``, ``nn.Linear``'s layout: a row for every class.
        target: int64 or uint8 classes ``[*B]``.
        linear_bias: ``[V]`` or None.
        ignore_index: a token with this target has log-probability and entropy 0, without a gradient; None is -100.
        softcap: c of ``c · tanh(logits / c)``, or None.
        logit_scale: factor of the logits before the softcap: the inverse of a temperature.
        return_entropy: return the entropy ``-Σ_c p_c log p_c`` of each token's distribution too.
        return_argmax: return each token's likeliest class too, whatever its target is: the prediction of an accuracy.
        recompute: in the backward pass, compute the logits' gradient in blocks of columns of 64 MiB instead of 512.

    Returns:
        The log-probabilities ``[*B]``, or a tuple of them and of the entropies and classes that were asked for.
        Log-probabilities and entropies are float32 for operands of 16 bits, and differentiable. A class of probability
        0 adds 0 to the entropy. In kernels a target that is neither a class nor ignored has the log-probability NaN;
        torch's operations raise. The likeliest class, int64, is the first one with the largest logit, or with NaN, as
        ``torch.argmax`` finds it on a CPU. Kernels compare logits in float32, torch's operations in the operands'
        dtype, to which they round them, so that more logits are equal there.

    Raises:
        TypeError: an argument of the wrong type, a dtype that is not real floating or differs from that of input, a
            target that is neither int64 nor uint8.
        ValueError: shapes that do not fit together, tensors on different devices, a number outside of its range.
        RuntimeError: ``FUSEDLAYERS_BACKEND=triton`` or ``FUSEDLAYERS_STRICT=1`` where the kernels cannot run.
    """
    options = ignore_index, softcap, logit_scale, return_entropy, return_argmax, recompute
    return LINEAR_LOG_PROBS.call((input, linear_weight, target, linear_bias), options)


class _LinearLogProbs(LossHead):
    """The negated losses of tokens, entropies and arg-max; the backward pass recomputes the logits."""

    oracle = staticmethod(reference.linear_log_probs)

    def check(self, tensors: Tensors, options: tuple[Any, ...]) -> tuple[Any, ...]:
        LOG_PROBS_SHAPES.check(*tensors)
        return tuple(checked_options(dict(zip(self.option_names, options, strict=True))).values())

    def problem(self, tensors: Tensors, options: tuple[Any, ...]) -> LossProblem:
        _, softcap, _, return_entropy, return_argmax, recompute = options
        return loss_problem(
            *tensors, operation=self.name, capped=softcap is not None, entropy=return_entropy, argmax=return_argmax,
            recompute=recompute,
        )  # fmt: skip

    def title(self, problem: LossProblem, tensors: Tensors, options: tuple[Any, ...]) -> str:
        more = (" and entropies" if problem.entropy else "") + (" and argmax(logits)" if problem.argmax else "")
        return f"linear_log_probs: log_softmax(logits)[target]{more}, {logits_formula(problem, options[1:3])}"

    def extras(self, options: tuple[Any, ...]) -> dict[str, Any]:
        return dict(zip(("ignore_index", "softcap", "logit_scale"), options, strict=False))

    def forward(self, call: Prepared, operands: Tensors, wanted: Sequence[bool]) -> tuple[Tensors, Tensors]:
        head = Head.of(operands, call.plan, call.details)
        losses, entropies, argmax, statistics = fused.losses(head, any(wanted))
        # A copy is saved, so that the result may be changed in place.
        kept = None if statistics is None or entropies is None else entropies.clone()
        # Not ``-losses``: the logarithm of 1 must be 0, not -0.
        return (0 - losses, entropies, argmax), (statistics, kept)

    def backward(
        self, call: Prepared, operands: Tensors, made: Tensors, wanted: Sequence[bool], upstream: Tensors
    ) -> Tensors:
        of_log_probs, of_entropies, _ = upstream
        statistics, entropies = made
        head = Head.of(operands, call.plan, call.details)
        # A loss is minus a log-probability.
        of_losses = torch.zeros_like(statistics[0]) if of_log_probs is None else (-of_log_probs).contiguous()
        of_entropies = None if of_entropies is None else of_entropies.contiguous()
        dx, dw, db = fused.gradients(head, wanted, statistics, of_losses, entropies, of_entropies)
        return dx, dw, None, db, None

    def expression(self, call: Prepared, operands: Tensors) -> Tensors:
        input, linear_weight, target, linear_bias, _ = operands
        found = reference.linear_log_probs(
            input, linear_weight, target, linear_bias=linear_bias, return_entropy=call.problem.entropy, **call.extras
        )
        log_probs, entropies = found if call.problem.entropy else (found, None)
        return log_probs, entropies, None

    def results(self, operands: Tensors, problem: Any, path: str, extras: dict[str, Any], saving: bool) -> Results:
        each = Result((problem.M,), torch.float32)
        entropy = each if problem.entropy else None
        argmax = Result((problem.M,), torch.int64) if problem.argmax else None
        return [each, entropy, argmax], [Result((2, problem.M), torch.float32), entropy] if saving else [None, None]

    def finished(self, call: Prepared, tensors: Tensors, results: Any) -> Any:
        found = tuple(each.view(tensors[0].shape[:-1]) for each in results if each is not None)
        return found if len(found) > 1 else found[0]


LINEAR_LOG_PROBS = _LinearLogProbs(linear_log_probs)
