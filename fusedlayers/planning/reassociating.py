"""When a GEMM-GEMM without an activation is computed as ``A (B C)``.

    y = A (B C)    dA = dy (B C)ᵀ    dB = (Aᵀ dy) Cᵀ    dC = Bᵀ (Aᵀ dy)

``B C`` and ``Aᵀ dy`` are K × O, where ``A B`` and its gradient are M × N: with small K and O there is less to compute
and less to write. Where no times are on record, arithmetic decides between both orders of torch's products.
"""

from typing import Any

from .call import CLEARLY_FEWER
from .choosing import Choice
from .costs import products
from .devices import Device
from .record import TORCH

REASON = "without an activation (A B) C is A (B C), which is clearly cheaper"


def why_not(problem: Any, device: Device, backend: str) -> str | None:
    """Why ``problem`` cannot be computed as ``A (B C)``, or None."""
    if problem.activation != "identity":
        return f"{problem.activation} stands between the products"
    if backend != "auto":
        return f"the backend is set to {backend}"
    if problem.why_as_written is not None:
        return str(problem.why_as_written)
    if problem.format.small_range:
        # Users scale gradients until torch's products just fit, and to look for overflow the host would have to wait.
        return f"{problem.dtype}: B C and its gradient may overflow where A B and the gradient of that do not"
    if problem.shared_hidden:
        return "several entries of C multiply one A B"
    share = share_of_time(problem, device)
    return None if share < 1 else f"A (B C) computes and moves {share:.2f} times as much"


def choose(problem: Any, device: Device, choice: Choice) -> Choice:
    """The cheaper order of torch's products, in place of a ``choice`` that knew neither."""
    share = share_of_time(problem, device)
    by = "by floating-point operations and bytes"
    others = {path: why for path, why in choice.against.items() if path != "reassociated"}
    if share < CLEARLY_FEWER:
        return Choice("reassociated", {**others, TORCH: f"A (B C) is cheaper: about {share:.2f} of the time, {by}"})
    more = f"A (B C) is not clearly cheaper: about {share:.2f} times as long, {by}"
    return Choice(TORCH, {**others, "reassociated": more})


def share_of_time(problem: Any, device: Device) -> float:
    """How long ``A (B C)`` takes beside ``(A B) C``, at the peak rates of the device's architecture."""
    costs = device.tile_costs
    rate = 2 * costs.clock * costs.products_per_cycle * costs.share_of_peak * device.sms

    def seconds(path: str) -> float:
        forward, backward = products(problem, path)
        return sum(
            max(
                2 * rows * inner * columns / rate,
                problem.element_bytes * (rows * inner + inner * columns + rows * columns) / costs.bytes_per_second,
            )
            for rows, inner, columns in forward + backward
        )

    return seconds("reassociated") / seconds(TORCH)
