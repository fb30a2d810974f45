"""When a GEMM-GEMM without an activation is computed as ``A (B C)``.

    y = A (B C)    dA = dy (B C)ᵀ    dB = (Aᵀ dy) Cᵀ    dC = Bᵀ (Aᵀ dy)

``B C`` and ``Aᵀ dy`` are K × O, where ``A B`` and its gradient are M × N: with small K and O there is less to compute
and less to write. Torch computes the products in either order, so that arithmetic alone decides between them; kernels,
which write no ``A B``, are compared by what they compute and move.
"""

from typing import Any

from .call import CLEARLY_FEWER
from .costs import gemm_units, products
from .devices import Device

REASON = "without an activation (A B) C is A (B C), which is clearly cheaper"

_BY = "by floating-point operations and bytes"


def why_not(problem: Any, device: Device, backend: str, other: str) -> str | None:
    """Why ``problem`` is not computed as ``A (B C)`` but on the ``other`` path; None where it is."""
    if problem.activation != "identity":
        return f"{problem.activation} stands between the products"
    if backend != "auto":
        return f"the backend is set to {backend}"
    if problem.subclass:
        return f"an operand is a {problem.subclass}: torch's plain expression leaves most to it"
    if problem.empty:
        return "there is nothing to compute"
    if problem.format.small_range:
        # Users scale gradients until torch's products just fit, and to look for overflow the host would have to wait.
        return f"{problem.dtype}: B C and its gradient may overflow where A B and the gradient of that do not"
    if problem.shared_hidden:
        return "several entries of C multiply one A B"
    share = share_of_time(problem, device, other)
    if share < CLEARLY_FEWER:
        return None
    return f"A (B C) is not clearly cheaper: about {share:.2f} times as long as the {other} path, {_BY}"


def why_better(problem: Any, device: Device, other: str) -> str:
    """Why the ``other`` path gives way to ``A (B C)``."""
    return f"A (B C) is cheaper: about {share_of_time(problem, device, other):.2f} of the time, {_BY}"


def share_of_time(problem: Any, device: Device, other: str) -> float:
    """How long ``A (B C)`` takes beside the ``other`` path, at the peak rates of the device's architecture."""
    M, K, N, O = problem.M, problem.K, problem.N, problem.O
    costs = device.figures.tile_costs
    rate = 2 * costs.clock * costs.products_per_cycle * costs.share_of_peak * device.sms

    def seconds(multiplied: float, elements: int) -> float:
        """Of a launch that multiplies so often for each batch entry, and reads and writes so many elements."""
        moved = problem.element_bytes * elements
        return problem.batch * max(2 * multiplied / rate, moved / costs.bytes_per_second)

    def of_products(path: str) -> float:
        forward, backward = products(problem, path)
        return sum(
            seconds(rows * inner * columns, rows * inner + inner * columns + rows * columns)
            for rows, inner, columns in forward + backward
        )

    if other == "torch":
        return of_products("reassociated") / of_products("torch")
    # Each kernel moves its operands and results once.
    forward, backward = (M * K * N * units for units in gemm_units(problem, other))
    of_rows, of_columns = M * (K + O), N * (K + O)
    data = (of_rows + of_columns + M * K) * problem.needs_data_gradient
    weights = (of_rows + 2 * of_columns) * problem.needs_weight_gradient
    return of_products("reassociated") / (seconds(forward, of_rows + of_columns) + seconds(backward, data + weights))
