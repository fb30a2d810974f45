"""The experts in the order of their rows, those with the most first, so that long tiles are not left for the end."""

import torch

from ..device import tl, triton
from ..launching import launch

_EXPERTS = 16  # of one program


@triton.jit
def _order_kernel(starts_ptr, order_ptr, E, ALL: tl.constexpr, EXPERTS: tl.constexpr):
    own = tl.program_id(0) * EXPERTS + tl.arange(0, EXPERTS)
    every = tl.arange(0, ALL)
    rows = tl.load(starts_ptr + own + 1, mask=own < E, other=0) - tl.load(starts_ptr + own, mask=own < E, other=0)
    others = tl.load(starts_ptr + every + 1, mask=every < E, other=-1)
    others -= tl.load(starts_ptr + every, mask=every < E, other=0)
    earlier = (others[None, :] == rows[:, None]) & (every[None, :] < own[:, None])
    place = tl.sum((earlier | (others[None, :] > rows[:, None])).to(tl.int32), 1)
    tl.store(order_ptr + place, own, mask=own < E)


def longest_first(starts: torch.Tensor) -> torch.Tensor:
    """The experts ``[E]``, int32, by how many rows they have from ``starts`` ``[E + 1]`` on; equals in their order."""
    experts = starts.shape[0] - 1
    order = torch.empty_like(starts[1:])
    every = max(_EXPERTS, 1 << (experts - 1).bit_length())
    launch(_order_kernel, -(-experts // _EXPERTS), (starts, order), (experts,), (), (every, _EXPERTS))
    return order
