"""Several processes under torchrun: what ``parallel=none|ddp|fsdp|tp`` changes in a run.

All processes draw the same global batch, whatever their number: with ddp and fsdp each computes its rows of it, with tp
its share of every layer. So a run follows the same curve on any number of processes, up to the order of sums.
"""

from __future__ import annotations

import os
from functools import partial
from typing import Any, cast

import torch
from lightning.fabric import Fabric
from lightning.fabric.strategies import DDPStrategy, ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, distribute_module
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from fusedlayers import FusedFFN, LinearCrossEntropyLoss
from fusedlayers.parallel import FusedFFNParallel, LinearCrossEntropyLossParallel
from train_examples.rules import SettingsError
from train_examples.settings import RunSettings

KINDS = ("none", "ddp", "fsdp", "tp")


class Processes:
    """The processes of one run, started by torchrun or just this one, and how they share the work (``kind``).

    Raises:
        SettingsError: the kind is unknown, or does not fit the number of processes, the batch or the precision.
    """

    def __init__(self, kind: str, run: RunSettings, precision: Any) -> None:
        count = int(os.environ.get("WORLD_SIZE") or "1")
        check_parallel(kind, run, precision, count)
        here = int(os.environ.get("LOCAL_WORLD_SIZE") or "1")
        self.kind = kind
        strategy: Any = "auto"
        if kind == "ddp":
            # The only buffers are the tables of rotary positions, equal in all processes.
            strategy = DDPStrategy(broadcast_buffers=False, gradient_as_bucket_view=True)
        elif kind == "fsdp":
            shard = partial(shard_parameters, half=precision == "bf16-mixed")
            strategy = ModelParallelStrategy(shard, data_parallel_size=count, tensor_parallel_size=1)
            # fully_shard's mixed-precision policy casts already; autocast would cast again.
            precision = "32-true"
        elif kind == "tp":
            strategy = ModelParallelStrategy(split_layers, data_parallel_size=1, tensor_parallel_size=count)
        self.fabric = Fabric(
            accelerator=run.accelerator, devices=here, num_nodes=count // here, precision=precision, strategy=strategy
        )
        self.fabric.launch()

    @property
    def split_batches(self) -> bool:
        """Whether each process computes different rows of a batch."""
        return self.kind in ("ddp", "fsdp")

    def share(self, batch: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """This process's share of the global batch, on its device."""
        if self.split_batches:
            batch = tuple(tensor.chunk(self.fabric.world_size)[self.fabric.global_rank] for tensor in batch)
        if self.fabric.device.type == "cuda":
            # A copy from pageable memory would wait for the GPU to finish the previous step, and the GPU then for the
            # host.
            batch = tuple(tensor.pin_memory() for tensor in batch)
        return self.fabric.to_device(batch)

    def mean(self, loss: Tensor) -> float:
        """The mean over the whole batch, given the mean over each share."""
        return cast(Tensor, self.fabric.all_reduce(loss, reduce_op="mean") if self.split_batches else loss).item()

    def part_generators(self, seed: int) -> None:
        """Seed dropout differently in each process that computes different rows; the first one draws as a single
        process does."""
        if self.split_batches and self.fabric.global_rank:
            # Wraps around after the largest seed.
            torch.manual_seed((seed + self.fabric.global_rank) % 2**64)


def check_parallel(kind: str, run: RunSettings, precision: Any, count: int) -> None:
    """Check that the kind exists and fits the number of processes, the batch and the precision."""
    if kind not in KINDS:
        raise SettingsError(f"parallel.kind is {kind!r}; expected {', '.join(KINDS[:-1])} or {KINDS[-1]}")
    if kind == "none" and count > 1:
        raise SettingsError(f"parallel.kind is none, but torchrun started {count} processes; expected ddp, fsdp or tp")
    if kind in ("ddp", "fsdp") and run.batch_size % count:
        raise SettingsError(f"run.batch_size is {run.batch_size}; expected a multiple of the {count} processes")
    if kind == "fsdp" and precision not in ("32-true", "bf16-mixed"):
        raise SettingsError(f"run.precision is {precision!r}; expected 32-true or bf16-mixed with parallel=fsdp")
    if kind in ("fsdp", "tp") and run.compile:
        raise SettingsError(f"run.compile is true; expected false with parallel={kind}, or parallel=none or ddp")


def shard_parameters(model: nn.Module, mesh: DeviceMesh, half: bool) -> nn.Module:
    """FSDP2: each block is gathered when it is computed, in bfloat16 if ``half``; gradients are reduced in float32."""
    model.to(mesh.device_type)
    # Inputs are not cast: the tables of rotary positions need float32.
    dtypes = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32} if half else {}
    options: dict[str, Any] = {"mesh": mesh["data_parallel"]}
    for block in cast(nn.ModuleList, model.blocks):
        fully_shard(block, mp_policy=MixedPrecisionPolicy(**dtypes, cast_forward_inputs=False), **options)
    whole = MixedPrecisionPolicy(**dtypes, output_dtype=torch.float32, cast_forward_inputs=False)
    fully_shard(model, mp_policy=whole, **options)
    return model


def split_layers(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Tensor parallelism of a language model: every matrix is split; the activations between them are replicated.

    Raises:
        SettingsError: a size is not a multiple of the number of processes, or torch's dropout would drop equal columns
            in all.
    """
    model.to(mesh.device_type)
    mesh = mesh["tensor_parallel"]
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and (module.in_features % mesh.size() or module.out_features % mesh.size()):
            raise SettingsError(
                f"{name} is {module.in_features} x {module.out_features}; "
                f"expected multiples of the {mesh.size()} processes with parallel=tp"
            )
    plan: dict[str, ParallelStyle] = {
        "embedding": RowwiseParallel(input_layouts=Replicate()),
        "blocks.*.attention.qkv_proj": ColwiseParallel(output_layouts=Replicate()),
        "blocks.*.attention.out_proj": RowwiseParallel(input_layouts=Replicate()),
    }
    blocks, head = cast(Any, model).blocks, cast(Any, model).head
    if type(head) is LinearCrossEntropyLoss:
        plan["head"] = LinearCrossEntropyLossParallel()
    else:
        plan["head.linear"] = ColwiseParallel(output_layouts=Replicate())
    if type(blocks[0].feed_forward) is FusedFFN:
        plan["blocks.*.feed_forward"] = FusedFFNParallel()
    else:
        if blocks[0].feed_forward.dropout.p:
            raise SettingsError(
                "model.dropout is above 0; with parallel=tp expected layers=fused, "
                "which alone drops other columns in every process"
            )
        for child, _ in blocks[0].feed_forward.named_children():
            if child.endswith("_proj"):
                style = RowwiseParallel() if child == "down_proj" else ColwiseParallel()
                plan[f"blocks.*.feed_forward.{child}"] = style
    parallelize_module(model, mesh, plan)
    for module in model.modules():
        if isinstance(module, nn.LayerNorm):
            # Replicated, but as a DTensor: gradients are clipped by the norm over all parameters together.
            distribute_module(module, mesh, input_fn=cast(Any, _enter), output_fn=cast(Any, _leave))
    return model


def _enter(module: nn.Module, inputs: tuple[Tensor, ...], mesh: DeviceMesh) -> tuple[DTensor, ...]:
    return tuple(DTensor.from_local(tensor, mesh, [Replicate()], run_check=False) for tensor in inputs)


def _leave(module: nn.Module, output: DTensor, mesh: DeviceMesh) -> Tensor:
    return output.to_local()
