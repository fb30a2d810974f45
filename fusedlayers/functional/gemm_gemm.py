"""Batched GEMM-GEMM: the public function, and its operation."""

import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from .. import reference
from ..kernels import gemm_gemm as kernels
from ..kernels.activations import canonical_activation
from ..kernels.gemm_gemm import Arithmetic, Operands, WeightGradients
from ..planning import Plan, Problem
from .call import call_facts, wants_gradient
from .custom_ops import Result, Results
from .operands import flat_batch, leading_dims
from .operation import Operation, Tensors, formula
from .prepared import Prepared
from .shapes import Shapes


def gemm_gemm(a: Tensor, b: Tensor, c: Tensor, *, activation: str | None = None) -> Tensor:
    """Two batched products with an activation between them, ``act(a @ b) @ c``; ``a @ b`` is never written.

    Without an activation ``a @ (b @ c)`` is the same, and is what auto mode computes where that is clearly cheaper, as
    with small K and O; :func:`explain` says so. It rounds ``b @ c`` instead of ``a @ b``. Non-finite inputs reach the
    same elements in either order, but where one order gives infinity, the other may give NaN. In float16 the order is
    kept, because either product alone may overflow.

    Args:
        a: ``[*B, M, K]``, any strides.
        b: ``[*B, K, N]``.
        c: ``[*B, N, O]``. Leading dims broadcast as in ``torch.matmul``.
        activation: a name of ``fusedlayers.kernels.activations.ACTIVATIONS``, Hugging Face's name of one, or None.

    Returns:
        ``[*B, M, O]`` in the dtype of a (under autocast: in autocast's dtype). float16, bfloat16 and float32 can run in
        Triton kernels; every floating dtype runs through torch.

    Raises:
        TypeError: an argument that is no tensor, a dtype that is not real floating or differs from that of a.
        ValueError: shapes that do not fit together, tensors on different devices, an unknown activation.
        RuntimeError: ``FUSEDLAYERS_BACKEND=triton`` or ``FUSEDLAYERS_STRICT=1`` where the kernels cannot run.
    """
    return GEMM_GEMM.call((a, b, c), (activation,))


class _GemmGemm(Operation):
    """``act(a @ b) @ c`` on a ``[Z, M, K]``, b ``[Z, K, N]``, c ``[Z, N, O]``; backward recomputes ``a @ b``."""

    problem_type = Problem
    shapes = Shapes("a: ... M K, b: ... K N, c: ... N O", sparse="a b c")
    operands = "a b c"
    torch_paths = ("torch", "reassociated")

    def check(self, tensors: Tensors, options: tuple[Any, ...]) -> tuple[Any, ...]:
        activation = canonical_activation(options[0])
        self.shapes.check(*tensors)
        return (activation,)

    def problem(self, tensors: Tensors, options: tuple[Any, ...]) -> Problem:
        a, b, c = tensors
        return Problem(
            operation="gemm_gemm",
            batch=math.prod(leading_dims(a, b, c)),
            M=a.shape[-2],
            K=a.shape[-1],
            N=b.shape[-1],
            O=c.shape[-1],
            activation=options[0],
            needs_data_gradient=wants_gradient(a),
            needs_weight_gradient=wants_gradient(b, c),
            shared_hidden=math.prod(leading_dims(a, b)) != math.prod(leading_dims(a, b, c)),
            **call_facts(a, b, c),
        )

    def title(self, problem: Problem, tensors: Tensors, options: tuple[Any, ...]) -> str:
        return f"gemm_gemm: act(a @ b) @ c, act = {formula(problem.activation)}"

    def through_torch(self, call: Prepared, tensors: Tensors) -> Tensor:
        a, b, c = tensors
        if call.plan.path == "reassociated":
            return reference.gemm_gemm_reassociated(a, b, c)
        return reference.gemm_gemm(a, b, c, activation=call.problem.activation)

    def flattened(self, call: Prepared, tensors: Tensors) -> Tensors:
        batch = leading_dims(*tensors)
        return [flat_batch(tensor, batch) for tensor in tensors]

    def finished(self, call: Prepared, tensors: Tensors, results: Tensor) -> Tensor:
        batch = leading_dims(*tensors)
        if not batch:
            return results.squeeze(0)  # unlike a view, takes sparse upstream gradients, too
        return results if len(batch) == 1 else results.view(*batch, *results.shape[-2:])

    def details(self, plan: Plan, extras: dict[str, Any]) -> Arithmetic:
        problem = plan.problem
        return Arithmetic(problem.activation, 0.0, problem.input_precision, plan.accuracy)

    def forward(self, call: Prepared, operands: Tensors, wanted: Sequence[bool]) -> tuple[Tensors, Tensors]:
        return (kernels.forward(_operands(call, operands), None, None, call.plan.forward_tiles),), ()

    def backward(
        self, call: Prepared, operands: Tensors, made: Tensors, wanted: Sequence[bool], upstream: Tensors
    ) -> Tensors:
        plan, [de] = call.plan, upstream
        matrices = _operands(call, operands)
        da = kernels.data_gradient(matrices, de, plan.data_gradient_tiles)[0] if wanted[0] else None
        if not (wanted[1] or wanted[2]):
            return da, None, None
        asked = WeightGradients(up=wanted[1], down=wanted[2])
        found = kernels.weight_gradients(matrices, de, asked, plan.splits, plan.weight_gradient_tiles, transposed=True)
        return da, found.up, found.down

    def expression(self, call: Prepared, operands: Tensors) -> Tensors:
        a, b, c = operands
        return (reference.gemm_gemm(a, b, c, activation=call.problem.activation),)

    def results(self, operands: Tensors, problem: Any, path: str, extras: dict[str, Any], saving: bool) -> Results:
        a, _, c = operands
        return [Result((*a.shape[:-1], c.shape[-1]), a.dtype)], []


def _operands(call: Prepared, operands: Tensors) -> Operands:
    a, b, c = operands
    return Operands(a, b.transpose(1, 2), c.transpose(1, 2), None, None, None, None, call.details, call.ready)


GEMM_GEMM = _GemmGemm(gemm_gemm)
