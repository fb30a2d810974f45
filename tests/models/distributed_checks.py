"""What both processes do with models of transformers: DDP and FSDP2 of replaced ones against those of torch's own."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import fusedlayers as fl
from fusedlayers.closeness import assert_all_close
from fusedlayers.functional.dispatch import decisions
from fusedlayers.replacing.loss.lazy_logits import LazyLogits
from tests.models import expert_families
from tests.models.loss_heads import losses
from tests.models.small import FAMILIES, HIDDEN, LAYERS, Family, InFloat64, Inputs, Results, blocks
from tests.support.parallel_checks import counted, device, full, gathered, mesh, mine

STEPS = 2
# Checkpointing is for training, and the masks of a whole batch are not those of its two halves.
WITHOUT_DROPOUT: dict[str, dict[str, Any]] = {
    "GPT-2": {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    "BERT": {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
}


def parallel(model: nn.Module, engine: str, mixed: bool) -> nn.Module:
    """The model under DDP, or under FSDP2: every layer by itself, then the rest."""
    if engine == "ddp":
        return DistributedDataParallel(model)
    policy = MixedPrecisionPolicy(torch.bfloat16) if mixed else MixedPrecisionPolicy()
    layers = [layer for layers in model.modules() if isinstance(layers, nn.ModuleList) for layer in layers]
    assert len(layers) == LAYERS
    for module in (*layers, model):
        fully_shard(module, mesh=mesh(), mp_policy=policy)
        assert isinstance(module, FSDPModule)
    return model


def parameters(model: nn.Module) -> dict[str, Tensor]:
    """Copies of the whole parameters, by the keys of a checkpoint."""
    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    return {name: tensor.detach().clone() for name, tensor in state.items()}


def trained(model: nn.Module, family: Family, batches: list[Inputs], autocast: bool = False) -> Results:
    """Loss and gradients of every step, and what all steps together changed in the parameters."""
    before = parameters(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    found: Results = {}
    for step, batch in enumerate(batches):
        optimizer.zero_grad()
        with torch.autocast(device().type, torch.bfloat16, enabled=autocast):
            _, loss = family.run(model, batch)
        loss.backward()
        found[f"loss {step}"] = gathered(loss.detach().reshape(1)).mean()
        for name, parameter in model.named_parameters():
            found[f"d{name.removeprefix('module.')} {step}"] = full(parameter.grad)
        optimizer.step()
    return found | {f"change of {name}": tensor - before[name] for name, tensor in parameters(model).items()}


def check_training(engine: str, name: str, path: str, precision: str, checkpointed: bool = False) -> None:
    """Two steps of a replaced model are those of the model as it was, under the same engine; its blocks stay fused.

    "mixed" is bfloat16 by autocast under DDP, and by the policy of FSDP2 under FSDP2.
    """
    family, mixed = FAMILIES[name], precision == "mixed"
    # Equal in both processes, as the inputs are: these start from the same seed.
    original = family.build(**WITHOUT_DROPOUT.get(name, {})).to(device()).train()
    if mixed:
        # Float64 is to start from the numbers that are computed with.
        with torch.no_grad():
            for parameter in original.parameters():
                parameter.copy_(parameter.bfloat16())
    pairs = [(family.inputs(), family.inputs()) for _ in range(STEPS)]
    batches = [{key: torch.cat([one[key], other[key]]).to(device()) for key in one} for one, other in pairs]
    parts = [{key: mine(tensor) for key, tensor in batch.items()} for batch in batches]

    with InFloat64():
        truth = trained(deepcopy(original).double(), family, batches)
    if checkpointed:
        # Not for the truth, whose backward pass would compute again outside of its mode. The newer name of the method,
        # where there is one: the older one warns there.
        enable = getattr(original, "activation_checkpointing_enable", original.gradient_checkpointing_enable)
        enable({"use_reentrant": False})
    wrapped: dict[str, nn.Module] = {}
    for kind in ("torch", "replaced", "restored"):
        model = deepcopy(original)
        if kind != "torch":
            report = fl.replace(model)
            assert len(blocks(report.replaced)) == family.count
            assert not report.skipped
        if kind == "restored":
            fl.restore(model)
        wrapped[kind] = parallel(model, engine, mixed)
    # A checkpoint of either is one of the other, and of the model in one process.
    assert list(parameters(wrapped["replaced"])) == list(parameters(wrapped["torch"])) == list(original.state_dict())

    autocast = mixed and engine == "ddp"
    with counted(path) as calls:
        with torch.no_grad(), torch.autocast(device().type, torch.bfloat16, enabled=autocast):
            logits = [family.run(wrapped[kind], parts[0])[0] for kind in ("torch", "restored")]
        assert torch.equal(*logits)
        theirs = trained(wrapped["torch"], family, parts, autocast)
        assert calls == []
        ours = trained(wrapped["replaced"], family, parts, autocast)
    # Of the whole hidden, and once more where the forward pass is computed again.
    assert calls == [HIDDEN] * (family.count * STEPS * (2 if checkpointed else 1))
    assert_all_close(ours, theirs, truth, computed_in=torch.bfloat16 if mixed else None)


def check_loss(engine: str) -> None:
    """The loss of a replaced model needs no logits under the engine either, and who reads them in time gets them."""
    family = FAMILIES["Llama"]
    original = family.build().to(device()).train()
    inputs = {key: tensor.to(device()) for key, tensor in family.inputs().items()}
    with InFloat64():
        truth = family.results(deepcopy(original).double(), inputs)
    plain, ours = deepcopy(original), deepcopy(original)
    assert "FusedLossHead" in [entry.became for entry in fl.replace(ours).replaced]
    options = {"find_unused_parameters": True} if engine == "ddp, unused" else {}
    wrapped = [
        parallel(model, "fsdp", False) if engine == "fsdp" else DistributedDataParallel(model, **options)
        for model in (plain, ours)
    ]
    theirs, found = wrapped
    outputs = theirs(**inputs)
    outputs.loss.backward()
    logits = outputs.logits
    with counted("kernels"), decisions() as paths:
        outputs = found(**inputs)
        late = found(**inputs)
        assert losses(paths) == 2
        assert type(outputs.logits) is LazyLogits
        assert outputs.logits._logits._values is None
        torch.testing.assert_close(torch.clone(outputs.logits), logits)
        outputs.loss.backward()
    expected, results = (
        {f"d{name.removeprefix('module.')}": full(parameter.grad) for name, parameter in model.named_parameters()}
        for model in wrapped
    )
    # All processes have the same batch, so that the mean of their gradients is that of one.
    assert_all_close(results, expected, {name: truth[name] for name in expected})
    if engine == "fsdp":
        with pytest.raises(RuntimeError, match="now it is too late"):
            late.logits.argmax(-1)


def check_experts(engine: str, name: str) -> None:
    """Replaced experts stay fused under the engine, and gradients are those of one process with all texts."""
    original = expert_families.build(name).to(device())
    inputs = {key: tensor.to(device()) for key, tensor in expert_families.text().items()}
    truth = expert_families.truth(deepcopy(original), inputs)
    plain, ours = deepcopy(original), deepcopy(original)
    assert len(expert_families.replaced(ours)) == expert_families.LAYERS
    part = {key: mine(tensor) for key, tensor in inputs.items()}
    found: list[Results] = []
    for model in (plain, ours):
        wrapped = parallel(model, engine, False)
        with decisions() as paths:
            wrapped(**part).loss.backward()
        assert sum(count for path, count in paths.items() if path.startswith("moe_ffn ")) == (
            expert_families.LAYERS if model is ours else 0
        )
        gradients = {f"d {name}": full(parameter.grad) for name, parameter in model.named_parameters()}
        found.append(gradients)
    theirs, results = found
    assert_all_close(results, theirs, {name: truth[name] for name in theirs})
