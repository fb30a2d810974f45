"""What each path of a GEMM-GEMM or an FFN costs: products, and bytes kept for the backward pass."""

import math
from typing import Any

from . import ffn_epilogue
from .devices import Device

# Hidden-sized tensors that torch keeps for the slope of an activation, besides its value.
SAVED_FOR_SLOPE = {"relu2": 1, "leaky_relu": 1, "gelu": 1, "gelu_tanh": 1, "silu": 1, "quick_gelu": 2}
# Activations whose slope torch takes from their value: dropout makes another tensor of that, and both are kept.
SLOPE_FROM_VALUE = ("relu", "tanh", "sigmoid")

# Rows, inner length and columns of a product.
Product = tuple[int, int, int]


def products(problem: Any, path: str) -> tuple[list[Product], list[Product]]:
    """The products of each entry of a GEMM-GEMM without kernels, of the forward and of the backward pass.

    On the "reassociated" path they are those of ``A (B C)``.
    """
    M, K, N, O = problem.M, problem.K, problem.N, problem.O
    data, weights = problem.needs_data_gradient, problem.needs_weight_gradient
    if path == "reassociated":
        return [(K, N, O), (M, K, O)], [(M, O, K)] * data + [(K, M, O), (K, O, N), (N, K, O)] * weights
    backward = [(M, O, N)] * problem.training + [(M, N, K)] * data + [(K, M, N), (N, M, O)] * weights
    return [(M, K, N), (M, N, O)], backward


def gemm_units(problem: Any, path: str, passes: int = 1, stored: bool = False) -> tuple[float, float]:
    """GEMM units of forward and backward: a unit is one product of tokens × K × N.

    ``passes`` is the number of launches that share out the weight gradients on the fused path; ``stored`` says that its
    backward pass stores what is hidden.
    """
    if path == "reassociated":
        unit = problem.M * problem.K * problem.N
        of_forward, of_backward = (sum(map(math.prod, found)) / unit for found in products(problem, path))
        return of_forward, of_backward
    first = 2.0 if problem.gated else 1.0  # products with x
    second = problem.O / problem.K if problem.K else 0.0  # one product with O columns, in units
    forward = first + second
    data = (first if problem.needs_data_gradient else 0.0) + (second if problem.training else 0.0)
    weights = first + second if problem.needs_weight_gradient else 0.0
    if path in ("torch", "epilogue"):
        return forward, data + weights
    if stored:
        return forward, first + data + weights
    if path == "chunked":
        return forward, (first if problem.training else 0.0) + data + weights
    data = 2 * first + second if problem.needs_data_gradient else 0.0
    # The first pass recomputes the pre-activations; each further one does so again, and dH from the second on.
    weights = {1: 2 * first + 2 * second, 2: 3 * first + 2 * second, 3: 4 * first + 3 * second}[passes]
    return forward, data + (weights if problem.needs_weight_gradient else 0.0)


def saved_bytes(problem: Any, path: str, device: Device) -> int:
    """What a path keeps for the backward pass beside the weights of an FFN: x or all operands, and what is hidden.

    Where only some weights are frozen, torch may keep less.
    """
    p = problem
    if not p.training:
        return 0
    batched = p.operation == "gemm_gemm"  # whose B and C are no weights of a layer
    if path == "reassociated":
        # B C for the gradient of A, and all operands for the others.
        operands = p.batch * p.M * p.K + p.weight_elements
        elements = operands * p.needs_weight_gradient + p.batch * p.K * p.O * p.needs_data_gradient
    elif path != "torch":
        elements = p.batch * p.M * p.K + p.weight_elements * batched
        if path == "epilogue":
            elements += (2 if p.gated else 1) * p.M * ffn_epilogue.kept_columns(p, device)
    else:
        reads_x, reads_hidden = p.read_by_torch
        copies = hidden_copies(p, reads_hidden, p.dropout) + (p.dropout and keeps_mask(p, device))
        operands = p.M * p.K * reads_x + p.N * (p.K * p.needs_data_gradient + p.O) * batched
        elements = p.batch * (operands + copies * p.M * p.N)
    kept: int = p.element_bytes * elements
    return kept


def hidden_copies(problem: Any, reads_hidden: bool, dropout: bool = False) -> int:
    """The hidden-sized tensors that torch keeps between the products of an FFN, masks of a dropout aside.

    ``reads_hidden``: the backward pass reads what the last product takes, which is no other tensor than the value of
    the activation unless a gate or a dropout comes between.
    """
    value = problem.activation in SLOPE_FROM_VALUE and not problem.gated
    # Both factors of a gate.
    copies = SAVED_FOR_SLOPE.get(problem.activation, 0) + (2 if problem.gated else value)
    return copies + (reads_hidden and (dropout or not value))


def kept_by_torch(problem: Any, device: Device) -> int:
    """What torch's own layers keep, ``nn.Dropout`` among them: it keeps its mask, which this library draws again."""
    kept = saved_bytes(problem, "torch", device)
    if problem.training and problem.dropout:
        beyond = mask_bytes(problem, device) - problem.element_bytes * keeps_mask(problem, device)
        kept += beyond * problem.batch * problem.M * problem.N
    return kept


def mask_bytes(problem: Any, device: Device) -> int:
    """Bytes for each element of the mask of ``nn.Dropout``: booleans on a GPU, elsewhere numbers of its dtype."""
    return 1 if device.kind == "cuda" else int(problem.element_bytes)


def keeps_mask(problem: Any, device: Device) -> bool:
    """Whether torch's path keeps the mask of a dropout, as large as the hidden: one kernel draws it again."""
    return not (device.kind == "cuda" and device.triton and problem.format.backends)
