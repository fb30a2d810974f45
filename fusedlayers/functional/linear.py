"""The linear layer whose products may split the axis they sum over: the public function, and its operation."""

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import reference
from ..kernels import split_k as kernels
from ..kernels.activations import ACTIVATIONS, canonical_activation
from ..kernels.column_sums import column_sums
from ..kernels.tuning import COLUMN_SUM_TILES
from ..planning import Float8LinearProblem, LinearPlan, LinearProblem, ProductPlan
from .call import call_facts, traced, wants_gradient
from .custom_ops import Result, Results
from .float8 import Float8Operation, product, quantised, quantised_transpose, quantised_weight, weight_gradients
from .gradients import planned_weight_gradient
from .operands import rows, without_autocast
from .operation import Operation, Tensors, formula
from .options import checked_choice
from .precision import Float8, precision_word
from .prepared import Prepared
from .shapes import Shapes

REDUCTIONS = ("workspace", "atomic")


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: str | None = None,
    split_k: int | str = "auto",
    reduction: str = "workspace",
    precision: str | Float8 | None = None,
) -> Tensor:
    """``act(x Wᵀ + b)``; the inner axis is split where few rows and columns would leave most of a GPU idle.

    The partial sums ``x[:, s] W[:, s]ᵀ`` of the ranges s are float32; they are added in a fixed order, bias and
    activation are applied once, and the result is rounded once. The data gradient ``dx = dz W`` sums over N, the
    weight gradient ``dW = dzᵀ x`` over the rows: each has a split of its own.

    Args:
        x: ``[*B, M, K]`` or ``[K]``: any leading dims, any strides.
        weight: ``[N, K]``, ``nn.Linear``'s layout.
        bias: ``[N]`` or None.
        activation: a name of ``fusedlayers.kernels.activations.ACTIVATIONS``, Hugging Face's name of one, or None.
        split_k: "auto" lets each of the three products take the split, or the torch path, that was measured fastest.
            An int from 1 on asks for kernels, and cuts the axis that each product sums over into that many ranges, or
            fewer: no range is empty, and the partial sums stay within 128 MiB.
        reduction: "workspace" keeps the partial sums apart and adds them in a fixed order: the same bits every time.
            "atomic" asks for kernels that add them up in memory, in float32 but in no fixed order.
        precision: None, or "fp8" or a :class:`fusedlayers.Float8`: the product and the data gradient run in 8 bits
            where they can and where that is faster, else as with None; ``explain`` says which.

    Returns:
        ``[*B, M, N]`` in the dtype of x (under autocast: in autocast's dtype). float16, bfloat16 and float32 can run in
        Triton kernels; every floating dtype runs through torch.

    Raises:
        TypeError: an argument of the wrong type, a dtype that is not real floating or differs from that of x.
        ValueError: shapes that do not fit together, tensors on different devices, an unknown activation,
            ``reduction`` or ``precision``, a ``split_k`` below 1.
        RuntimeError: ``reduction="atomic"`` under ``torch.use_deterministic_algorithms(True)``, or
            ``FUSEDLAYERS_BACKEND=triton`` or ``FUSEDLAYERS_STRICT=1`` where the kernels cannot run.
    """
    return LINEAR.call((x, weight, bias), (activation, split_k, reduction, precision))


def check_split_k(split_k: int | str) -> None:
    """Checks for ``"auto"`` or an int from 1 on; the plan lowers it where ranges would be empty."""
    if split_k == "auto":
        return
    if type(split_k) is not int:
        raise TypeError(f'split_k must be "auto" or an int from 1 on, got {split_k!r} ({type(split_k).__name__})')
    if split_k < 1:
        raise ValueError(f'split_k must be "auto" or an int from 1 on, got {split_k}')


def check_reduction(reduction: str) -> None:
    """Checks for ``"workspace"`` or ``"atomic"``."""
    checked_choice("reduction", reduction, REDUCTIONS)


class _Linear(Operation):
    """``x Wᵀ + b`` for x ``[M, K]`` and W ``[N, K]``, and its gradients, each product as planned.

    While gradients are wanted the activation is torch's own: it saves its argument ``[M, N]``, as small as the result,
    and has derivatives of any order.
    """

    problem_type = LinearProblem
    shapes = Shapes("x: *B M? K, weight: N K, bias?: N", sparse="x weight")
    operands = "x weight bias?"
    row_operands = ("x",)

    def check(self, tensors: Tensors, options: tuple[Any, ...]) -> tuple[Any, ...]:
        activation, split_k, reduction, precision = options
        activation = canonical_activation(activation)
        precision = precision_word(precision)
        self.shapes.check(*tensors)
        check_split_k(split_k)
        check_reduction(reduction)
        if reduction == "atomic" and torch.are_deterministic_algorithms_enabled():
            raise RuntimeError(
                'linear with reduction="atomic" adds in no fixed order, and torch.use_deterministic_algorithms(True) '
                'is set; reduction="workspace" is deterministic'
            )
        return activation, split_k, reduction, precision

    def variant(self, options: tuple[Any, ...]) -> Operation:
        return self if options[3] is None else FLOAT8_LINEAR

    def may_be_repeated(self, options: tuple[Any, ...]) -> bool:
        # torch.use_deterministic_algorithms, which forbids atomic addition, may change between calls.
        return options[2] != "atomic"

    def problem(self, tensors: Tensors, options: tuple[Any, ...]) -> LinearProblem:
        (x, weight, bias), (activation, split_k, reduction, _) = tensors, options
        return LinearProblem(
            M=math.prod(x.shape[:-1]),
            N=weight.shape[0],
            K=x.shape[-1],
            activation=activation,
            bias=bias is not None,
            needs_data_gradient=wants_gradient(x),
            needs_weight_gradient=wants_gradient(weight),
            needs_bias_gradient=wants_gradient(bias),
            split_k=0 if isinstance(split_k, str) else split_k,
            atomic=reduction == "atomic",
            compiled=traced(),
            **call_facts(x, weight, bias),
        )

    def title(self, problem: LinearProblem, tensors: Tensors, options: tuple[Any, ...]) -> str:
        product = "x Wᵀ + b" if problem.bias else "x Wᵀ"
        if problem.activation == "identity":
            return f"linear: {product}"
        return f"linear: act({product}), act = {formula(problem.activation)}"

    def runs_eager(self, call: Prepared) -> bool:
        # torch's own backward pass would not compute dx before dW, as :meth:`backward` does.
        return super().runs_eager(call) and (call.observed or not call.plan.data_gradient_first)

    def through_torch(self, call: Prepared, tensors: Tensors) -> Tensor:
        x, weight, bias = tensors
        if call.problem.activation == "identity":
            return F.linear(x, weight, bias)
        return reference.linear(x, weight, bias, activation=call.problem.activation)

    def flattened(self, call: Prepared, tensors: Tensors) -> Tensors:
        x, weight, bias = tensors
        return rows(x), weight, bias

    def finished(self, call: Prepared, tensors: Tensors, results: Tensor) -> Tensor:
        x, y = tensors[0], results
        if call.details != call.problem.activation:
            with without_autocast(x.device):
                y = ACTIVATIONS[call.problem.activation].torch(y)
        return y if x.dim() == 2 else y.view(*x.shape[:-1], y.shape[-1])

    def details(self, plan: Any, extras: dict[str, Any]) -> str:
        """The activation of the kernels; after the identity torch applies that of the problem."""
        return "identity" if plan.problem.training else plan.problem.activation

    def forward(self, call: Prepared, operands: Tensors, wanted: Sequence[bool]) -> tuple[Tensors, Tensors]:
        x, weight, bias = operands
        return (_product("forward", call, x, weight, bias, call.plan.forward, call.details),), ()

    def kept(self, wanted: Sequence[bool]) -> tuple[bool, ...]:
        # Each operand is needed for the gradient of the other one.
        return wanted[1], wanted[0], False

    def backward(
        self, call: Prepared, operands: Tensors, made: Tensors, wanted: Sequence[bool], upstream: Tensors
    ) -> Tensors:
        (x, weight, _), [dy], plan = operands, upstream, call.plan
        if plan.padded_columns:
            return padded_gradients(x, weight, dy, wanted, plan.padded_columns)
        dx = None
        if wanted[0]:
            product = plan.data_gradient
            dx = (
                dy @ weight
                if product is None
                else _product("data gradient", call, dy, weight.T, None, product, "identity")
            )
        dw, db = self._weight_gradients(call, dy, x, wanted)
        return dx, dw, db

    def _weight_gradients(self, call: Prepared, dy: Tensor, x: Tensor, wanted: Sequence[bool]) -> Tensors:
        """The wanted ones of dW and db, as planned."""
        if wanted[1] and call.plan.weight_gradient is not None:
            return planned_weight_gradient(dy, x, call.plan.weight_gradient, call.ready)
        if wanted[1]:
            return reference.weight_gradient(dy, x, bias=wanted[2])
        return None, dy.sum(0) if wanted[2] else None

    def differentiable_gradients(
        self, call: Prepared, operands: Tensors, wanted: Sequence[bool], upstream: Tensors
    ) -> Tensors:
        (x, weight, _), [dy] = operands, upstream
        with without_autocast(dy.device):
            dx = dy @ weight if wanted[0] else None
            dw = dy.mT @ x if wanted[1] else None
            return dx, dw, dy.sum(0) if wanted[2] else None

    def results(self, operands: Tensors, problem: Any, path: str, extras: dict[str, Any], saving: bool) -> Results:
        # In a backward pass an operand that no gradient needs is None.
        dtype = next(operand.dtype for operand in operands if operand is not None)
        return [Result((problem.M, problem.N), dtype)], []


def padded_gradients(
    x: Tensor | None, weight: Tensor | None, dy: Tensor, wanted: Sequence[bool], padded: int
) -> Tensors:
    """The wanted ones of dx ``[M, K]``, dW ``[N, K]`` and db ``[N]``, by torch, with N padded to ``padded``."""
    columns = dy.shape[1]
    dx = dw = db = None
    padded_dy = F.pad(dy, (0, padded - columns))
    if wanted[0]:
        assert weight is not None
        dx = padded_dy @ F.pad(weight, (0, 0, 0, padded - columns))
    if wanted[1]:
        assert x is not None
        # A copy, as a view would keep the padding alive; cheaper than a product of some of the columns.
        dw = (padded_dy.T @ x)[:columns].clone()
    if wanted[2]:
        db = dy.sum(0)
    return dx, dw, db


def _product(
    name: str,
    call: Prepared,
    left: Tensor,
    right: Tensor,
    bias: Tensor | None,
    product: ProductPlan,
    activation: str,
) -> Tensor:
    """``act(left rightᵀ + bias)`` as planned; ``name`` tells the layer's products apart."""
    plan: LinearPlan = call.plan
    problem = plan.problem
    if product.tiles is None:
        return reference.linear(left, right, bias, activation=activation)
    return kernels.product(
        left,
        right,
        bias,
        product.splits,
        product.tiles,
        activation=activation,
        accuracy=plan.accuracy,
        input_precision=problem.input_precision,
        atomic=problem.atomic,
        dependent=plan.dependent,
        ready=call.ready.setdefault(name, {}),
    )


class _Float8Linear(Float8Operation, _Linear):
    """The linear layer in 8 bits.

    The activation is torch's own with and without gradients, so that both have the same value.
    """

    problem_type = Float8LinearProblem
    weight_positions = (1,)

    @property
    def plain(self) -> Operation:
        return LINEAR

    def runs_eager(self, call: Prepared) -> bool:
        return False

    def details(self, plan: Any, extras: dict[str, Any]) -> str:
        return "identity"

    def forward(self, call: Prepared, operands: Tensors, wanted: Sequence[bool]) -> tuple[Tensors, Tensors]:
        (x, weight, bias), ready = operands, call.ready
        right, values = quantised_weight(weight, call), quantised(x, ready)
        y = product(values, right, bias, call.plan.product_pipeline, x, ready.setdefault("forward", {}))
        saves = bool(wanted) and wanted[1] and call.problem.weight_gradient_in_8_bits
        return (y,), (values.scale if saves else None,)

    def backward(
        self, call: Prepared, operands: Tensors, made: Tensors, wanted: Sequence[bool], upstream: Tensors
    ) -> Tensors:
        (x, weight, _), [dy], [x_scale], ready = operands, upstream, made, call.ready
        pipeline = call.plan.product_pipeline
        in_8_bits = wanted[1] and x_scale is not None
        dx = None
        if wanted[0] or in_8_bits:
            dy_values = quantised(dy, ready)
        if wanted[0]:
            right = quantised_transpose((weight,), call)
            dx = product(dy_values, right, None, pipeline, dy, ready.setdefault("data gradient", {}))
        if not in_8_bits:
            return dx, *self._weight_gradients(call, dy, x, wanted)
        named = ready.setdefault("weight gradient", {})
        [dw] = weight_gradients(dy_values, x, x_scale, [True], pipeline, x.dtype, named)
        return dx, dw, column_sums(dy, COLUMN_SUM_TILES, ready) if wanted[2] else None

    def results(self, operands: Tensors, problem: Any, path: str, extras: dict[str, Any], saving: bool) -> Results:
        results, _ = super().results(operands, problem, path, extras, saving)
        saves = saving and problem.needs_weight_gradient and problem.weight_gradient_in_8_bits
        return results, [Result((problem.M,), torch.float32) if saves else None]


LINEAR = _Linear(linear)
FLOAT8_LINEAR = _Float8Linear(linear, "float8_")
