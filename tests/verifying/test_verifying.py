"""`verify`: a right module is green, every kind of wrong one is red, and nothing of the user's is touched."""

from __future__ import annotations

import copy
import functools
from collections import Counter
from dataclasses import replace
from importlib import import_module
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fusedlayers as fl
from fusedlayers import functional, verifying
from fusedlayers.bench.cases import ALL, Case, Draw
from fusedlayers.functional.operation import OPERATIONS
from fusedlayers.kernels import gemm_gemm
from fusedlayers.replacing import FFNRule
from tests.support.ffn_blocks import BLOCKS, GatedBlock, mlp, rule_for
from tests.support.operands import DEVICE, infinities, needs_kernels


def normal(*shape: int, **options: Any) -> Tensor:
    return torch.randn(*shape, **options)


TORCH_ALONE = "This call runs torch's own operations, so nothing of this library's kernels was proven."
each_case = pytest.mark.parametrize("case", ALL.values(), ids=lambda case: case.name)


def verified(case: Case, dtype: torch.dtype) -> tuple[verifying.Verification, dict[str, Tensor]]:
    """The operation of a benchmark case on the inputs of its first trial."""
    trial = case.few_trials[0]
    inputs = case.inputs(trial.shape, trial.options, Draw(dtype, torch.device(DEVICE)))
    for tensor in inputs.values():
        tensor.requires_grad_(tensor.is_floating_point())
    return fl.verify(getattr(functional, case.operation), **inputs, **case.our_keywords(trial.options)), inputs


@each_case
def test_every_operation_is_green_on_the_inputs_of_its_benchmark_case(case: Case) -> None:
    """Its results and the gradients of all of its operands."""
    found, inputs = verified(case, torch.float32)
    assert found.ok, found
    names = {verdict.name for verdict in found.verdicts}
    operands = {f"d {name}" for name, tensor in inputs.items() if tensor.is_floating_point()}
    assert {name for name in names if name.startswith("d ")} == operands
    assert names - operands
    assert sum(found.paths.values()) == 1


def test_every_public_function_is_an_operation_with_a_benchmark_case() -> None:
    assert set(OPERATIONS) == set(functional.__all__) == {case.operation for case in ALL.values()}


@needs_kernels
@infinities
@each_case
def test_every_operation_is_green_in_its_kernels(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSEDLAYERS_BACKEND", "triton")
    found, _ = verified(case, torch.float16)
    assert found.ok, found
    [(path, count)] = found.paths.items()
    assert (path.split()[0], count) == (case.operation, 1)
    assert path != f"{case.operation} torch"
    assert f"{path} x 1" in str(found)
    assert TORCH_ALONE not in str(found)


def test_a_gradient_that_fails_is_judged_over_several_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where torch is right by chance in the first draw, others tell how large its errors usually are."""
    judged, seeds = verifying.compare_all, []
    upstream = verifying._upstream

    def with_luck(*results: Any, **options: Any) -> Any:
        found = judged(*results, **options)
        return found | {"d weight": replace(found["d weight"], ok=False, worst_fraction=1.06)}

    def noting(result: Tensor, seed: int) -> Tensor:
        seeds.append(seed)
        return upstream(result, seed)

    monkeypatch.setattr(verifying, "compare_all", with_luck)
    monkeypatch.setattr(verifying, "_upstream", noting)
    found = fl.verify(functional.linear, normal(40, 24), normal(33, 24))
    assert found.ok, found
    assert len(set(seeds)) == 8
    assert Counter(seeds) == dict.fromkeys(seeds, 3), "ours, torch's and the reference have the same"


@needs_kernels
@pytest.mark.parametrize("fault", ["y", "dx", "dw_up"])
def test_a_wrong_kernel_is_red_where_it_is_wrong(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    launchers = {"y": "forward", "dx": "data_gradient", "dw_up": "weight_gradients"}
    launched = getattr(gemm_gemm, launchers[fault])

    def wrong(*arguments: Any, **options: Any) -> Any:
        found = launched(*arguments, **options)
        tensor = {"y": lambda: found, "dx": lambda: found[0], "dw_up": lambda: found.up}[fault]()
        tensor[:3] *= 1.01
        return found

    monkeypatch.setattr(gemm_gemm, launchers[fault], wrong)
    monkeypatch.setenv("FUSEDLAYERS_BACKEND", "triton")
    layer = fl.FusedFFN(32, 64, device=DEVICE)
    found = fl.verify(layer, normal(80, 32, device=DEVICE))
    assert not found.ok
    name = {"y": "y", "dx": "d x", "dw_up": "d up_proj.weight"}[fault]
    assert [verdict.name for verdict in found.verdicts if not verdict.ok] == [name]
    text = str(found)
    assert "FusedFFN on" in text
    assert "1 of 6 tensors are NOT close" in text
    assert f"{name}: NOT close; max error" in text
    assert (", again in 7" in text) == (fault != "y"), "another upstream gradient may tell of a gradient alone"
    assert repr(found) == text


def test_a_rule_with_a_wrong_formula_is_red() -> None:
    """What a trusted rule says of a class is compared with what the class computes."""

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down, self.act = nn.Linear(16, 32), nn.Linear(32, 16), nn.ReLU()

        def forward(self, x: Tensor) -> Tensor:
            return self.down(self.act(self.up(x))) * 2

    model = nn.Sequential(Twice(), nn.LayerNorm(16))
    fl.replace(model, rules=[FFNRule(Twice, up="up", down="down", activation="act", trusted=True)])
    found = fl.verify(model[0], normal(70, 16))
    assert not found.ok
    assert all(not verdict.ok for verdict in found.verdicts)


@pytest.mark.parametrize("block", BLOCKS)
def test_replaced_blocks_are_green(block: str) -> None:
    model = BLOCKS[block][0]().eval()
    fl.replace(model, rules=[rule_for(GatedBlock)])
    found = fl.verify(model, normal(3, 5, 6))
    assert found.ok, found
    gradients = {verdict.name for verdict in found.verdicts} - {"y"}
    assert {name for name, _ in model.named_parameters()} <= {name.removeprefix("d ") for name in gradients}
    assert sum(found.paths.values()) == BLOCKS[block][1]


def test_it_says_when_nothing_of_the_kernels_was_proven(monkeypatch: pytest.MonkeyPatch) -> None:
    """Through torch, as a sum taken before the product, and in a module that calls nothing of this library."""
    monkeypatch.setenv("FUSEDLAYERS_BACKEND", "torch")
    layer, x = fl.FusedFFN(24, 40), normal(40, 24)
    for target, inputs in ((layer, (x,)), (nn.Linear(24, 33), (x,)), (functional.gemm_reduce, (x, x.T))):
        found = fl.verify(target, *inputs)
        assert found.ok
        assert str(found).splitlines()[2] == f"  {TORCH_ALONE}"
    monkeypatch.setenv("FUSEDLAYERS_BACKEND", "auto")
    assert fl.verify(functional.gemm_reduce, x, x.T).paths == {"gemm_reduce algebraic": 1}
    assert TORCH_ALONE in str(fl.verify(functional.gemm_reduce, x, x.T))
    layer.recompute = True
    assert TORCH_ALONE not in str(fl.verify(layer, x)), "chunks are this library's own backward pass"


def test_nothing_of_the_users_changes() -> None:
    model = nn.Sequential(*mlp(), nn.BatchNorm1d(6))
    fl.replace(model)
    x = normal(9, 6)
    model(x).sum().backward()
    classes = [type(module) for module in model.modules()]
    before = copy.deepcopy(model.state_dict())
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    values = {name: None if grad is None else grad.clone() for name, grad in gradients.items()}
    x_before, generator = x.clone(), torch.get_rng_state()
    with torch.no_grad():
        assert fl.verify(model, x).ok
    assert model.training
    assert [type(module) for module in model.modules()] == classes
    assert torch.equal(x, x_before)
    assert not x.requires_grad
    assert torch.equal(torch.get_rng_state(), generator)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name]), name
    for name, parameter in model.named_parameters():
        assert parameter.grad is gradients[name]
        assert parameter.grad is None or torch.equal(parameter.grad, values[name])


class Private(nn.Module):
    """Dropout with a generator that nobody sees."""

    count = 0

    def forward(self, x: Tensor) -> Tensor:
        Private.count += 1
        return x * (torch.rand(x.shape, generator=torch.Generator().manual_seed(Private.count)) < 0.9)


def test_torch_that_draws_for_itself_is_no_yardstick(monkeypatch: pytest.MonkeyPatch) -> None:
    found = fl.verify(Private(), normal(40, 24))
    assert not found.ok
    assert "y: NOT close; y differs between torch and float64 by" in str(found)
    assert "far beyond rounding: they do not compute the same" in str(found)
    expression = fl.reference.ffn

    @functools.wraps(expression)
    def drawing(*inputs: Any, seed: Tensor, **options: Any) -> Tensor:
        return expression(*inputs, seed=None, **options)

    inputs = normal(80, 24), normal(64, 24) / 5, normal(24, 64) / 8
    chunks = {"dropout_p": 0.1, "recompute": True, "dropout_seed": torch.tensor([7])}
    assert fl.verify(functional.ffn, *inputs, **chunks).ok
    monkeypatch.setattr(fl.reference, "ffn", drawing)
    found = fl.verify(functional.ffn, *inputs, **chunks)
    assert not found.ok
    assert all("torch's own computation draws random numbers" in verdict.message for verdict in found.verdicts)


def test_a_gradient_that_cancels_is_no_difference() -> None:
    class Keys(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bias = nn.Parameter(normal(40, 1))

        def forward(self, x: Tensor) -> Tensor:
            return (x + self.bias).softmax(-1)

    assert fl.verify(Keys(), normal(40, 24)).ok


def test_tensors_too_small_to_judge_are_named() -> None:
    """Of four numbers in 16 bits the rule believes anything."""
    x, weight = normal(2, 40).bfloat16(), normal(2, 40).bfloat16()
    found = fl.verify(functional.linear, x, weight)
    assert found.ok
    assert {verdict.name for verdict in found.verdicts if not verdict.judged} == {"y"}
    assert "1 of 3 tensors are too small to judge, and the others are close" in str(found)
    assert "y: not judged; 4 elements in torch.bfloat16 are too few: 1.1 times the right numbers" in str(found)
    alone = fl.verify(functional.linear, normal(2, 2).bfloat16(), normal(2, 2).bfloat16())
    assert not alone.ok
    assert "linear on cpu, bfloat16: no kernel of this library ran: nothing could be judged\n" in str(alone)
    assert fl.verify(functional.linear, normal(2, 2), normal(2, 2)).ok


def test_frozen_parameters_masks_and_nested_inputs_and_results() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = mlp()

        def forward(self, pair: tuple[Tensor, Tensor], *, scale: Tensor, count: int = 1) -> dict[str, Any]:
            y = self.block(pair[0]) * scale
            return {"loss": F.mse_loss(y, pair[1]), "values": [y, y.argmax(-1)], "count": count}

    model = Model()
    fl.replace(model)
    model.block[0].requires_grad_(False)
    found = fl.verify(model, (normal(9, 6), normal(9, 6)), scale=torch.tensor(2.0), count=3)
    assert found.ok, found
    down = {"d block.2.weight", "d block.2.bias"}
    assert {verdict.name for verdict in found.verdicts} == {
        "y['loss']",
        "y['values'][0]",
        "d pair[0]",
        "d pair[1]",
        *down,
    }
    scaled = fl.verify(model, (normal(9, 6), normal(9, 6)), scale=torch.tensor(2.0, requires_grad=True))
    assert "d scale" in {verdict.name for verdict in scaled.verdicts}


def test_a_parameter_with_the_name_of_an_input_keeps_its_row() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.x = nn.Parameter(torch.ones(6))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.x

    assert [verdict.name for verdict in fl.verify(Scaled(), normal(5, 6)).verdicts] == ["y", "d input x", "d x"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_and_16_bits_are_judged_by_their_own_rounding(dtype: torch.dtype) -> None:
    layer = fl.FusedFFN(32, 64, activation="silu", gated=True)
    with torch.autocast("cpu", dtype):
        found = fl.verify(layer, normal(80, 32))
    assert found.ok, found
    assert f"cpu, {str(dtype).removeprefix('torch.')}" in str(found)
    assert fl.verify(layer.to(dtype), normal(80, 32).to(dtype)).ok


def test_recompute_is_compared_with_a_computation_in_one_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = fl.FusedFFN(32, 64, recompute=True)
    found = fl.verify(layer, normal(80, 32))
    assert found.ok
    assert found.paths == {"ffn chunked": 1}
    assert layer.recompute is True
    chunks = import_module("fusedlayers.functional.ffn.chunked")
    forward = chunks.forward
    monkeypatch.setattr(chunks, "forward", lambda *arguments: forward(*arguments) * 1.001)
    assert not fl.verify(layer, normal(80, 32)).ok


def test_what_cannot_be_verified_is_said() -> None:
    with pytest.raises(TypeError, match=r"target must be an nn.Module or a function of fusedlayers.functional, got"):
        fl.verify(torch.relu, normal(3))
    with pytest.raises(TypeError, match="target: gemm_reduce returned no floating-point tensor"):
        fl.verify(functional.gemm_reduce, normal(4, 5), normal(5, 6), op="argmax")
    layer = fl.FusedFFN(6, 10)
    layer.extra = layer.up_proj.weight * 2  # no leaf, which torch does not copy
    with pytest.raises(TypeError, match="target: FusedFFN cannot be copied, which verify needs"):
        fl.verify(layer, normal(3, 6))
