"""torchtitan's feed-forward blocks, fused. Copy this file to where torchtitan is started, and pass

    --override.imports torchtitan_override.fused_feed_forward

Parameters, their names, initial values, shardings and checkpoints stay those of torchtitan 0.3's ``FeedForward``.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from torch.distributed.tensor import DTensor
from torchtitan.config.override import derive, override
from torchtitan.distributed import ParallelDims
from torchtitan.models.common import Linear
from torchtitan.models.common.feed_forward import FeedForward

import fusedlayers as fl


class FusedFeedForward(FeedForward):
    """``w2(silu(w1(x)) * w3(x))`` in one operation, without calls of w1, w2 and w3, and so without hooks of these.

    With tensor parallelism they are called as before.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(FeedForward.Config):
        """The fields of the block that it replaces."""

    tensor_parallel = False

    def parallelize(self, parallel_dims: ParallelDims) -> None:
        """Shard as before; the calls of sharded linear layers communicate, so these must not be read past."""
        self.tensor_parallel = parallel_dims.tp > 1
        super().parallelize(parallel_dims)

    def forward(self, x: Tensor) -> Tensor:
        gate, up, down = self.w1, self.w3, self.w2
        if self.tensor_parallel or isinstance(x, DTensor) or isinstance(up.weight, DTensor):
            return super().forward(x)
        return fl.functional.ffn(
            x, up.weight, down.weight, up.bias, down.bias, gate.weight, gate.bias, activation="silu"
        )


@override(target=FeedForward.Config, exact=True, description="Feed-forward blocks of fusedlayers")
def fused_feed_forward(block: FeedForward.Config) -> FeedForward.Config:
    """The configuration of a fused block; that of a block with adapters or quantised layers stays as it is."""
    if any(type(linear) is not Linear.Config for linear in (block.w1, block.w2, block.w3)):
        return block
    return derive(block, FusedFeedForward.Config)
