"""`FusedMoE` is the mixture of transformers' models: names, state, numbers, and every gradient."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fusedlayers as fl
from fusedlayers import FusedMoE
from fusedlayers.closeness import compare_draws
from fusedlayers.functional.dispatch import decisions
from fusedlayers.kernels.activations import ACTIVATIONS
from tests.models.small import InFloat64
from tests.support.compiled_cases import nothing_compiled  # noqa: F401
from tests.support.moe_operands import PATHS
from tests.support.operands import DEVICE, Tensors, on_path


def filled(module: nn.Module, x: Tensor) -> dict[str, Tensor]:
    """The result, and the gradients of the input and of parameters by name."""
    module.zero_grad()
    leaf = x.detach().requires_grad_()
    y = module(leaf)
    y.square().sum().backward()
    assert leaf.grad is not None
    gradients = {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
    return {"y": y.detach(), "x": leaf.grad} | gradients


Draw = tuple[Tensors, Tensors, Tensors]


def assert_close_by_rows(compared: Callable[[Tensor], Draw]) -> None:
    """All that a row adds shares its errors: of 18 tokens with two of five experts each, about seven rows an expert.

    Three draws of x are judged together, and what fails in them again by three others.
    """

    def red(first: Sequence[Draw], again: Sequence[Draw] = ()) -> list[str]:
        found = []
        for of_experts, independent in ((False, 18 * 2), (True, 18 * 2 // 5)):
            chosen = [name for name in first[0][0] if name.startswith("experts.") == of_experts]
            parts: Any = [
                [tuple({name: each[name] for name in chosen} for each in draw) for draw in draws]
                for draws in (first, again)
            ]
            verdicts = compare_draws(parts[0], again=parts[1], independent=independent)
            found += [verdict.message for verdict in verdicts.values() if not verdict.ok]
        return found

    def draws() -> list[Draw]:
        return [compared(x) for x in torch.randn(3, 2, 9, 24, device=DEVICE)]

    first = draws()
    if red(first):
        still = red(first, draws())
        assert not still, "\n".join(still)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("normalize", [True, False])
def test_it_is_the_mixture_of_transformers(path: str, normalize: bool) -> None:
    qwen = pytest.importorskip("transformers.models.qwen3_moe.modeling_qwen3_moe")
    config = qwen.Qwen3MoeConfig(
        hidden_size=24, moe_intermediate_size=20, num_experts=5, num_experts_per_tok=2, norm_topk_prob=normalize
    )
    config._experts_implementation = "eager"
    theirs = qwen.Qwen3MoeSparseMoeBlock(config)
    for parameter in theirs.parameters():
        nn.init.normal_(parameter, std=0.2)
    ours = FusedMoE(24, 20, 5, 2, normalize=normalize)
    ours.load_state_dict(theirs.state_dict(), strict=True)
    theirs.load_state_dict(ours.state_dict(), strict=True)
    ours.to(DEVICE), theirs.to(DEVICE)
    exact = copy.deepcopy(theirs).double()

    def compared(x: Tensor) -> Draw:
        with on_path(path):
            found = filled(ours, x)
        with InFloat64():
            truth = filled(exact, x.double())
        return found, filled(theirs, x), truth

    assert_close_by_rows(compared)


@pytest.mark.parametrize(
    ("x", "error", "message"),
    [
        (torch.zeros(3, 23), ValueError, r"x of shape \[3, 23\] .*: expected .*, 24\].* as d_model is 24"),
        (torch.zeros(()), ValueError, r"x of shape \[\] .*: expected .*, 24\].* as d_model is 24"),
        (
            torch.zeros(3, 24).half(),
            TypeError,
            "x of shape .*: expected the dtype of experts.gate_up_proj",
        ),
        (torch.zeros(3, 24).long(), TypeError, "x of shape .*: expected a real floating-point dtype"),
        ([0.0] * 24, TypeError, "x must be a torch.Tensor, got list"),
        (None, TypeError, "x must be a torch.Tensor, got None"),
    ],
)
def test_an_error_of_the_input_names_it(x: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        FusedMoE(24, 20, 5, 2)(x)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    "options",
    [
        {"scores": "sigmoid", "shared_d_ff": 28},
        {"gated": False, "bias": True, "activation": "relu2", "recompute": True},
        {"bias": True, "normalize": False, "shared_d_ff": 12},
    ],
    ids=str,
)
def test_every_option(path: str, options: dict[str, Any]) -> None:
    """Expert by expert, token by token."""
    torch.manual_seed(4)
    module = FusedMoE(24, 20, 5, 2, device=DEVICE, **options)

    def expert(module: FusedMoE, number: int, token: Tensor) -> Tensor:
        given = module.experts.arguments()
        up = given["w_up"][number] @ token + (0 if given["b_up"] is None else given["b_up"][number])
        act = ACTIVATIONS[module.activation].torch
        hidden = act(up[:20]) * up[20:] if options.get("gated", True) else act(up)
        return given["w_down"][number] @ hidden + (0 if given["b_down"] is None else given["b_down"][number])

    def mixture(module: FusedMoE, x: Tensor) -> Tensor:
        rows = []
        for token in x.reshape(-1, 24):
            logits = module.gate(token)
            scores = logits.sigmoid() if options.get("scores") == "sigmoid" else logits.softmax(-1)
            weights, chosen = scores.topk(2)
            if options.get("normalize", True):
                weights = weights / weights.sum()
            mixed = sum(w * expert(module, int(e), token) for w, e in zip(weights, chosen, strict=True))
            rows.append(mixed if module.shared_expert is None else mixed + module.shared_expert(token[None])[0])
        return torch.stack(rows).view(x.shape)

    def results(module: FusedMoE, x: Tensor) -> dict[str, Tensor]:
        leaf = x.detach().requires_grad_()
        y = mixture(module, leaf)
        parameters = dict(module.named_parameters())
        gradients = torch.autograd.grad(y.square().sum(), [leaf, *parameters.values()])
        return {"y": y.detach()} | dict(zip(("x", *parameters), gradients, strict=True))

    exact = copy.deepcopy(module).double()

    def compared(x: Tensor) -> Draw:
        with on_path(path):
            found = filled(module, x)
        return found, results(module, x), results(exact, x.double())

    assert_close_by_rows(compared)


def test_copies_pickles_and_draws() -> None:
    torch.manual_seed(1)
    module = FusedMoE(24, 20, 5, 2, bias=True, shared_d_ff=8)
    x = torch.randn(3, 24)
    expected = module(x)
    for twin in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert torch.equal(twin(x), expected)
    torch.manual_seed(1)
    again = FusedMoE(24, 20, 5, 2, bias=True, shared_d_ff=8)
    assert all(torch.equal(*pair) for pair in zip(module.parameters(), again.parameters(), strict=True))
    again.reset_parameters()
    assert not torch.equal(module.experts.down_proj, again.experts.down_proj)
    bound = 20**-0.5
    assert 0.9 * bound < float(module.experts.down_proj.detach().abs().max()) <= bound
    assert "num_experts=5, top_k=2" in repr(module)


def test_compiled_and_explained() -> None:
    module, x = FusedMoE(24, 20, 5, 2), torch.randn(2, 9, 24)
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(filled(compiled, x).popitem()[1], filled(module, x).popitem()[1])
    with decisions() as paths:
        text = fl.explain(module, x, details=True)
    assert not paths
    assert "M=18 (tokens) K=24 N=20 E=5 (experts) k=2, float32, forward and backward" in text
    assert fl.verify(module, x).ok


class Quantised(nn.Module):
    """As torch's quantised linear layers: the weight is a method."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.kept = linear

    def weight(self) -> Tensor:
        return self.kept.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.kept(x)


def test_a_quantised_router_is_called() -> None:
    mixture = FusedMoE(16, 32, 4, 2, device=DEVICE)
    x = torch.randn(5, 16, device=DEVICE)
    expected = mixture(x)
    mixture.gate = Quantised(mixture.gate)
    assert torch.equal(mixture(x), expected)
    assert fl.explain(mixture, x).path
