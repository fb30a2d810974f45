"""What every process of a group checks of the recipe for torchtitan."""

from __future__ import annotations

from functools import partial
from typing import Any

import spmd_types
import torch
import torchtitan.distributed.parallel_dims as meshes
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torchtitan.distributed.utils import set_spmd_backend
from torchtitan.models.common.config_utils import make_ffn_config
from torchtitan.models.common.decoder_sharding import dense_activation_placement, set_dense_ffn_sharding

from fusedlayers.functional.dispatch import decisions
from train_examples.recipes.torchtitan_override import fused_feed_forward

# torchtitan names a GPU where there is none.
meshes.device_type = "cuda" if torch.cuda.is_available() else "cpu"


def block_config() -> Any:
    """A block of torchtitan with the shardings that its models give to it."""
    initial = {"weight": partial(nn.init.normal_, std=0.2)}
    config = make_ffn_config(dim=16, hidden_dim=32, w1_param_init=initial, w2w3_param_init=initial)
    set_dense_ffn_sharding(config, attn_x_layout=dense_activation_placement(tp=spmd_types.I), enable_sp=False)
    return config


def whole(tensor: Tensor | None) -> Tensor:
    assert tensor is not None
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def check_parallel(backend: str, tensor_parallel: int, fsdp: bool) -> None:
    """A fused block is sharded as torchtitan's, computes the same, and is fused unless its weights are in parts."""
    set_spmd_backend(backend)
    dims = meshes.ParallelDims(
        dp_replicate=1, dp_shard=2 // tensor_parallel, cp=1, tp=tensor_parallel, pp=1, ep=1, world_size=2,
        spmd_backend=backend,
    )  # fmt: skip
    dims.build_mesh()
    found = []
    for config in (block_config(), fused_feed_forward(block_config())):
        torch.manual_seed(1)
        block = config.build()
        block.init_states()
        if tensor_parallel > 1 or backend == "spmd_types":
            block.parallelize(dims)
        if fsdp:
            fully_shard(block, mesh=dims.get_mesh(["fsdp"]))
        x = torch.randn(2, 3, 16, requires_grad=True)
        with decisions() as paths:
            y = whole(block(x))
            y.square().sum().backward()
        gradients = {name: whole(weight.grad) for name, weight in block.named_parameters()}
        kinds = [(type(weight), getattr(weight, "placements", None)) for weight in block.parameters()]
        found.append((dict(paths), y, x.grad, gradients, kinds))
    (no_paths, *plain, plain_kinds), (paths, *fused, fused_kinds) = found
    assert not no_paths
    assert sum(paths.values()) == (tensor_parallel == 1)
    assert plain_kinds == fused_kinds
    torch.testing.assert_close(fused, plain)
