"""A call of a public function as a checked problem, and what it computes in one line."""

import inspect
from collections.abc import Callable
from typing import Any

from .. import functional
from ..functional.arguments import (
    check_dropout_seed,
    check_ffn,
    check_gemm_gemm,
    check_hidden_gradient,
    check_maxsim,
    check_weight_gradient,
)
from ..functional.dispatch import (
    ffn_problem,
    gemm_gemm_problem,
    hidden_gradient_problem,
    maxsim_problem,
    weight_gradient_problem,
)
from ..functional.linear_arguments import check_linear, linear_problem
from ..functional.reduce_arguments import check_gemm_reduce, gemm_reduce_problem
from ..kernels.activations import ACTIVATIONS, canonical_activation
from ..planning import Call

Arguments = dict[str, Any]


def bound(function: Callable[..., Any], *inputs: Any, **options: Any) -> Arguments:
    """The arguments of ``function(*inputs, **options)`` by name, defaults included."""
    arguments = inspect.signature(function).bind(*inputs, **options)
    arguments.apply_defaults()
    return dict(arguments.arguments)


def problem_and_title(function: Callable[..., Any], arguments: Arguments) -> tuple[Call, str]:
    """The planning problem of a public function's call, and a line that says what it computes."""
    return CALLS[function](arguments)


def _formula(activation: str) -> str:
    return f"{activation}: {ACTIVATIONS[activation].formula}"


def _without(arguments: Arguments, *names: str) -> Arguments:
    return {name: value for name, value in arguments.items() if name not in names}


def _ffn(arguments: Arguments) -> tuple[Call, str]:
    activation = canonical_activation(arguments["activation"])
    check_dropout_seed(arguments["x"], arguments["dropout_seed"])
    arguments = _without(arguments, "activation", "dropout_seed")
    check_ffn(**arguments)
    problem = ffn_problem(**arguments, activation=activation)
    gate = "act(x W_gateᵀ) ⊙ (x W_upᵀ)" if problem.gated else "act(x W_upᵀ)"
    return problem, f"ffn: {gate} W_downᵀ, act = {_formula(activation)}"


def _gemm_gemm(arguments: Arguments) -> tuple[Call, str]:
    activation = canonical_activation(arguments["activation"])
    check_gemm_gemm(**_without(arguments, "activation"))
    problem = gemm_gemm_problem(**_without(arguments, "activation"), activation=activation)
    return problem, f"gemm_gemm: act(a @ b) @ c, act = {_formula(activation)}"


def _gemm_reduce(arguments: Arguments) -> tuple[Call, str]:
    activation = canonical_activation(arguments["activation"])
    check_gemm_reduce(**_without(arguments, "activation"))
    problem = gemm_reduce_problem(**_without(arguments, "activation"), activation=activation)
    act = "" if activation == "identity" else f", act = {_formula(activation)}"
    inner = "a @ b" if activation == "identity" else "act(a @ b)"
    axis = "M" if arguments["dim"] == -2 else "N"
    return problem, f"gemm_reduce: {arguments['op']} of {inner} over {axis}{act}"


def _maxsim(arguments: Arguments) -> tuple[Call, str]:
    check_maxsim(**arguments)
    return maxsim_problem(**arguments), "maxsim: scores[q, e] = Σ_i max_j queries[q, i] · documents[e, j]"


def _linear(arguments: Arguments) -> tuple[Call, str]:
    activation = canonical_activation(arguments["activation"])
    check_linear(**_without(arguments, "activation"))
    problem = linear_problem(**_without(arguments, "activation"), activation=activation)
    product = "x Wᵀ + b" if problem.bias else "x Wᵀ"
    act = "" if activation == "identity" else f", act = {_formula(activation)}"
    return problem, f"linear: {product if not act else f'act({product})'}{act}"


def _weight_gradient(arguments: Arguments) -> tuple[Call, str]:
    check_weight_gradient(**arguments)
    problem = weight_gradient_problem(**arguments)
    return problem, "weight_gradient: dW = dyᵀ x" + (", db = Σ dy" if problem.bias else "")


def _hidden_gradient(arguments: Arguments) -> tuple[Call, str]:
    activation = canonical_activation(arguments["activation"])
    check_hidden_gradient(**_without(arguments, "activation"))
    problem = hidden_gradient_problem(**_without(arguments, "activation"), activation=activation)
    gate = "dH ⊙ act(z_gate), dH ⊙ z ⊙ act'(z_gate)" if problem.gated else "dH ⊙ act'(z)"
    return problem, f"hidden_gradient: {gate}, dH = dy W_down, act = {_formula(activation)}"


CALLS: dict[Callable[..., Any], Callable[[Arguments], tuple[Call, str]]] = {
    functional.ffn: _ffn,
    functional.gemm_gemm: _gemm_gemm,
    functional.gemm_reduce: _gemm_reduce,
    functional.maxsim: _maxsim,
    functional.linear: _linear,
    functional.weight_gradient: _weight_gradient,
    functional.hidden_gradient: _hidden_gradient,
}
