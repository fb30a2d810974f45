"""What both processes do with a mixture whose experts are spread over them, against one process with all experts."""

from __future__ import annotations

import io
import re
from copy import deepcopy
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import fusedlayers
from fusedlayers import FusedMoE
from fusedlayers.closeness import assert_all_close
from fusedlayers.functional.dispatch import decisions
from fusedlayers.parallel import ExpertParallel, ExpertParallelMoE, FusedFFNParallel, LinearCrossEntropyLossParallel
from tests.support.operands import ON_GPU
from tests.support.parallel_checks import device, full, gathered, mesh

WIDTH, HIDDEN, EXPERTS, TOP_K = 16, 12, 6, 3
TOKENS = 22
Found = dict[str, Tensor | None]


class Mixture(nn.Module):
    """A model around experts of transformers, with a router of its own."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        from transformers import GptOssConfig, MixtralConfig
        from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
        from transformers.models.mixtral.modeling_mixtral import MixtralExperts

        configured, made = {"Mixtral": (MixtralConfig, MixtralExperts), "gpt-oss": (GptOssConfig, GptOssExperts)}[kind]
        config: Any = configured(hidden_size=WIDTH, intermediate_size=HIDDEN, num_local_experts=EXPERTS)
        config._experts_implementation = "eager"
        self.router, self.experts = nn.Linear(WIDTH, EXPERTS), made(config)

    def forward(self, x: Tensor) -> Tensor:
        scores, index = self.router(x).softmax(-1).topk(TOP_K, -1)
        y: Tensor = self.experts(x.flatten(0, -2), index.flatten(0, -2), scores.flatten(0, -2))
        return y.view(x.shape)


def mixture(kind: str, dtype: torch.dtype, **options: Any) -> nn.Module:
    """The same in both processes."""
    torch.manual_seed(3)
    if kind == "FusedMoE":
        made: nn.Module = FusedMoE(WIDTH, HIDDEN, EXPERTS, TOP_K, **options)
    else:
        made = Mixture(kind)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.3)
    return made.to(device(), dtype)


def split(made: nn.Module) -> nn.Module:
    if isinstance(made, FusedMoE):
        return parallelize_module(made, mesh(), ExpertParallel())
    fusedlayers.replace(made)
    parallelize_module(made, mesh(), {"experts": ExpertParallel()})
    return made


def found(made: nn.Module, x: Tensor, dy: Tensor) -> Found:
    """The result, and the gradients of the input and of all parameters."""
    x = x.detach().requires_grad_()
    y = made(x)
    y.backward(dy.to(y.dtype))
    return {"y": y.detach(), "dx": x.grad} | {name: full(each.grad) for name, each in made.named_parameters()}


def batch(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    torch.manual_seed(4)
    x, dy = torch.randn(2, TOKENS, WIDTH, dtype=torch.float64)
    return x.to(device(), dtype), dy.to(device(), dtype)


def own(mine: tuple[int, int]) -> slice:
    """The tokens of this process; ``mine`` says how many each one has."""
    begin = sum(mine[: dist.get_rank()])
    return slice(begin, begin + mine[dist.get_rank()])


def check_experts_in_parts(
    kind: str, path: str, dtype: torch.dtype, mine: tuple[int, int], options: dict[str, Any]
) -> None:
    """The results and all gradients are those of one process; ``mine`` says how many tokens each process has."""
    whole = mixture(kind, dtype, **options)
    x, dy = batch(dtype)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FUSEDLAYERS_BACKEND", "torch")
        theirs = found(deepcopy(whole), x, dy)
        truth = found(deepcopy(whole).double(), x.double(), dy)
        keys = list(whole.state_dict())
        made = split(whole)
        assert list(made.state_dict()) == keys
        experts: Any = made.experts
        for name, parameter in experts.named_parameters():
            assert isinstance(parameter, DTensor), name
            assert parameter.to_local().shape[0] == EXPERTS // 2
        patch.setenv("FUSEDLAYERS_BACKEND", path)
        place = own(mine)
        with decisions() as paths:
            ours = found(made, x[place], dy[place])
    assert ("moe_ffn torch" in paths) == (path == "torch"), paths
    for name, parameter in made.named_parameters():
        if name.startswith("experts."):
            assert isinstance(parameter.grad, DTensor), name
            assert parameter.grad.placements == parameter.placements
        else:
            # The router, and the shared expert, are whole in every process, for its own tokens.
            gradient = ours[name]
            assert gradient is not None
            dist.all_reduce(gradient)
    for name in ("y", "dx"):
        part = ours[name]
        padded = torch.zeros(TOKENS, WIDTH, dtype=part.dtype, device=part.device)
        padded[place] = part
        dist.all_reduce(padded)
        ours[name] = padded
    assert_all_close(ours, theirs, truth, computed_in=dtype)


def check_autocast(kind: str, mine: tuple[int, int], options: dict[str, Any]) -> None:
    """The result has the dtype that it has in one process, where a process has no tokens, too."""
    whole, place = mixture(kind, torch.float32, **options), own(mine)
    x, dy = batch(torch.float32)
    truth = found(deepcopy(whole).double(), x.double(), dy)
    with torch.autocast(device().type, torch.bfloat16):
        theirs, ours = found(deepcopy(whole), x, dy), found(split(whole), x[place], dy[place])
    parts = [{name: each[name][place] for name in ("y", "dx")} for each in (theirs, truth)]  # type: ignore[index]
    assert_all_close({name: ours[name] for name in ("y", "dx")}, *parts, computed_in=torch.bfloat16)
    assert ours["y"].dtype == (torch.bfloat16 if kind == "FusedMoE" else torch.float32)


def check_no_tokens_anywhere() -> None:
    """Both take part, and every parameter has a gradient: nothing waits for a process that has none."""
    made = split(mixture("FusedMoE", torch.float32))
    x, dy = batch(torch.float32)
    ours = found(made, x[:0], dy[:0])
    for name, gradient in ours.items():
        assert gradient is not None, name
        assert not gradient.any()


def check_one_process_has_all_the_work() -> None:
    """All tokens of both processes go to experts of the first one, and gradients of the others are zero."""
    made: Any = mixture("FusedMoE", torch.float32)
    with torch.no_grad():
        made.gate.weight[EXPERTS // 2 :] = 0
        made.gate.weight[: EXPERTS // 2] = 1
    x, dy = batch(torch.float32)
    x = x.abs()
    theirs, truth = found(deepcopy(made), x, dy), found(deepcopy(made).double(), x.double(), dy)
    made = split(made)
    ours = found(made, x[: TOKENS // 2], dy[: TOKENS // 2]) if dist.get_rank() == 0 else found(
        made, x[TOKENS // 2 :], dy[TOKENS // 2 :]
    )  # fmt: skip
    names = ("y", "dx")
    joined = {name: gathered(tensor) for name in names if (tensor := ours[name]) is not None}
    weights = {name: ours[name] for name in ours if name not in names}
    dist.all_reduce(weights["gate.weight"])
    assert not weights["experts.down_proj"][EXPERTS // 2 :].any()  # type: ignore[index]
    assert_all_close(joined | weights, theirs, truth)


def check_the_same_bits_every_time() -> None:
    made = split(mixture("FusedMoE", torch.float32))
    x, dy = batch(torch.float32)
    first = found(made, x, dy)
    made.zero_grad()
    for name, tensor in found(made, x, dy).items():
        assert torch.equal(tensor, first[name]), name  # type: ignore[arg-type]


def check_frozen_experts() -> None:
    made = mixture("FusedMoE", torch.float32)
    made.experts.requires_grad_(False)  # type: ignore[union-attr, operator]
    x, dy = batch(torch.float32)
    expected = found(deepcopy(made), x, dy)
    half = own((TOKENS // 2, TOKENS // 2))
    ours = found(split(made), x[half], dy[half])
    assert ours["experts.down_proj"] is None
    torch.testing.assert_close(ours["dx"], expected["dx"][half])  # type: ignore[index]


def check_checkpoint(folder: str) -> None:
    """Shards that both write, one process with all experts reads."""
    made = mixture("FusedMoE", torch.float32)
    expected = {name: tensor.clone() for name, tensor in made.state_dict().items()}
    dcp.save(split(made).state_dict(), checkpoint_id=folder)
    state = {name: torch.zeros_like(tensor) for name, tensor in expected.items()}
    dcp.load(state, checkpoint_id=folder)
    for name, tensor in state.items():
        assert torch.equal(tensor, expected[name]), name


class Doubling(nn.Module):
    """Experts that nobody has fused: each multiplies with a vector of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.factors = nn.Parameter(torch.arange(1.0, EXPERTS + 1).outer(torch.ones(WIDTH)))

    def forward(self, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        known = index < len(self.factors)
        factors = self.factors[index.where(known, 0)] * (weights * known).unsqueeze(-1)
        return (factors * x.unsqueeze(1)).sum(1)


def routed() -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, their experts and the weights of these, of the dtype and in the order in which transformers has them."""
    x, _ = batch(torch.float32)
    weights, index = x[:, :EXPERTS].softmax(-1).topk(TOP_K, -1)
    return x, index, weights


def check_copies(kind: str) -> None:
    """A copy and a saved module have their part of the experts, and take part in the exchange."""
    if kind == "own":
        made: Any = parallelize_module(Doubling().to(device()), mesh(), ExpertParallel())
    else:
        made = split(mixture(kind, torch.float32))
        made = getattr(made, "experts", made) if isinstance(made, Mixture) else made
    given = routed() if kind != "FusedMoE" else routed()[:1]
    expected = made(*given)
    file = io.BytesIO()
    torch.save(made, file)
    file.seek(0)
    for copy in (deepcopy(made), torch.load(file, weights_only=False)):
        assert type(copy) is type(made)
        assert torch.equal(copy(*given), expected)


def check_explanation(kind: str) -> None:
    """``explain`` speaks of the experts here, and leaves all as it was."""
    made: Any = split(mixture(kind, torch.float32))
    if kind == "FusedMoE":
        text = fusedlayers.explain(made, *routed()[:1], details=True)
    else:
        text = fusedlayers.explain(made.experts, *routed(), details=True)
    assert f"M={TOKENS} (tokens)" in text
    assert f"E={EXPERTS // 2} (experts)" in text
    assert "DTensor" not in text
    assert all(isinstance(each, DTensor) for each in made.experts.parameters())


def check_keywords() -> None:
    """Arguments are told apart by their names, in any order; the names are those of the module's own forward."""
    made: Any = split(mixture("Mixtral", torch.float32)).experts
    x, index, weights = routed()
    expected = made(x, index, weights)
    assert torch.equal(made(x, top_k_weights=weights, top_k_index=index), expected)
    assert torch.equal(made(top_k_weights=weights, top_k_index=index, hidden_states=x), expected)
    with pytest.raises(TypeError, match="missing a required argument: 'top_k_weights'"):
        made(x, index)
    with pytest.raises(TypeError, match="unexpected keyword argument 'scores'"):
        made(x, index, weights, scores=weights)


def check_wrong_arguments() -> None:
    """Tokens get the errors that they get in one process."""
    whole = mixture("FusedMoE", torch.float32)
    made = split(deepcopy(whole))
    x, _ = batch(torch.float32)
    for given in (None, x[0], x[:, 1:], x.double(), x.long()):
        with pytest.raises((TypeError, ValueError)) as theirs:
            whole(given)
        with pytest.raises(theirs.type, match=f"^{re.escape(str(theirs.value))}$"):
            made(given)


def check_data_parallel() -> None:
    """DDP of a mixture: it averages the gradients of the router, and leaves experts alone that it is told to ignore."""
    made: Any = mixture("FusedMoE", torch.float32)
    x, dy = batch(torch.float32)
    theirs, truth = found(deepcopy(made), x, dy), found(deepcopy(made).double(), x.double(), dy)
    made = split(made)
    ignored = [name for name, each in made.named_parameters() if isinstance(each, DTensor)]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(made, ignored)
    model = DistributedDataParallel(made, device_ids=[device().index] if ON_GPU else None)
    half = own((TOKENS // 2, TOKENS // 2))
    ours = {name.removeprefix("module."): each for name, each in found(model, x[half], dy[half]).items()}
    ours["gate.weight"] *= 2  # type: ignore[operator]
    assert_all_close(*[{name: each[name] for name in ("gate.weight", *ignored)} for each in (ours, theirs, truth)])


def check_verify() -> None:
    """What lies in several processes has no twin in float64 here: an error says when to verify."""
    x = torch.randn(4, WIDTH, device=device())
    target = torch.zeros(4, dtype=torch.int64, device=device())
    cases: list[tuple[nn.Module, ParallelStyle, tuple[Tensor, ...]]] = [
        (mixture("FusedMoE", torch.float32), ExpertParallel(), (x,)),
        (fusedlayers.FusedFFN(WIDTH, HIDDEN, device=device()), FusedFFNParallel(), (x,)),
        (fusedlayers.LinearCrossEntropyLoss(WIDTH, 8, device=device()), LinearCrossEntropyLossParallel(), (x, target)),
    ]
    for module, style, given in cases:
        made = parallelize_module(module, mesh(), style)
        message = f"target: {type(made).__name__} .* is a DTensor.*verify it before sharding"
        with pytest.raises(TypeError, match=message):
            fusedlayers.verify(made, *given)


def check_refusals() -> None:
    """What cannot be split is refused, and stays as it is."""
    cases: list[tuple[nn.Module, type[Exception], str]] = [
        (nn.Linear(4, 4), TypeError, "module must be a FusedMoE, .*got a Linear"),
        (nn.LayerNorm(4), TypeError, "module must be a FusedMoE"),
        (FusedMoE(WIDTH, HIDDEN, 5, 2), ValueError, "5 experts over 2 processes"),
        (split(mixture("FusedMoE", torch.float32)), TypeError, "module must be a FusedMoE"),
    ]
    for module, error, message in cases:
        kind = type(module)
        with pytest.raises(error, match=message):
            parallelize_module(module, mesh(), ExpertParallel())
        assert type(module) is kind
    assert kind is ExpertParallelMoE
    assert repr(ExpertParallel()) == "ExpertParallel()"
