"""The loss head without gradients on a GPU: no logits in memory, in the warp-specialised kernel and in the generic."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fusedlayers import functional, reference
from fusedlayers.closeness import assert_all_close
from fusedlayers.devices import assumed
from tests.gpu.graphs import assert_replays_like_launched
from tests.support.loss_operands import FLOATING, in_float64, loss_inputs, on_path, results
from tests.support.operands import DEVICE

BFLOAT16, FLOAT16, FLOAT32 = torch.bfloat16, torch.float16, torch.float32
MIB = 2**20
# As many SMs as there are, and few, each of which computes many tiles of several groups of bands.
MACHINES: dict[str, dict[str, Any]] = {"all": {}, "few": {"sms": 7}, "generic": {"backend": "generic"}}


@pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT16, FLOAT32], ids=str)
@pytest.mark.parametrize("machine", MACHINES.values(), ids=MACHINES)
@pytest.mark.parametrize(
    ("sizes", "options"),
    [
        ((2048, 768, 32000), {}),
        ((1500, 776, 50257), {"label_smoothing": 0.1, "z_loss": 1e-4}),
        ((1003, 320, 5003), {"softcap": 30.0, "logit_scale": 0.25}),
        ((130, 16, 257), {}),
        ((64, 4096, 32000), {"weight": True, "label_smoothing": 0.1}),
    ],
    ids=str,
)
def test_losses(
    sizes: tuple[int, int, int], options: dict[str, Any], machine: dict[str, Any], dtype: torch.dtype
) -> None:
    tokens, K, V = sizes
    given = {name: value for name, value in options.items() if name != "weight"}
    inputs = loss_inputs((tokens,), K, V, dtype, bias=True, weight="weight" in options, ignored=tokens // 9, peak=5.0)
    with on_path("fused"), assumed(**machine):
        ours = results(functional.linear_cross_entropy, inputs, FLOATING, reduction="none", **given)
    theirs, truth = (
        results(reference.linear_cross_entropy, each, FLOATING, reduction="none", **given)
        for each in (inputs, in_float64(inputs))
    )
    assert_all_close(ours, theirs, truth, independent=tokens)


@pytest.mark.parametrize("machine", MACHINES.values(), ids=MACHINES)
def test_log_probabilities_and_entropies(machine: dict[str, Any]) -> None:
    inputs = loss_inputs((2048,), 512, 32001, BFLOAT16, peak=8.0)
    with on_path("fused"), assumed(**machine):
        ours = results(functional.linear_log_probs, inputs, FLOATING, return_entropy=True)
    theirs, truth = (
        results(reference.linear_log_probs, each, FLOATING, return_entropy=True)
        for each in (inputs, in_float64(inputs))
    )
    assert_all_close(ours, theirs, truth, independent=2048)


@pytest.mark.parametrize("machine", MACHINES.values(), ids=MACHINES)
@pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT16], ids=str)
@pytest.mark.parametrize("K", [8, 64, 192, 256, 320, 2048])
def test_exact_integers(K: int, dtype: torch.dtype, machine: dict[str, Any]) -> None:
    """Fewer steps of the inner axis than stages, as many, and more; repeatedly, as a race need not show at once."""
    torch.manual_seed(K)
    input = torch.randint(-2, 3, (1100, K), device=DEVICE).to(dtype)
    weight = torch.randint(-2, 3, (3000, K), device=DEVICE).to(dtype)
    logits = 1024 * (input.double() @ weight.double().T)
    target = torch.randint(3000, (1100,), device=DEVICE)
    best = torch.arange(1100, device=DEVICE) % 2 == 0
    target[best] = logits[best].argmax(1)
    top = logits.amax(1)
    count = (logits == top[:, None]).sum(1)
    expected = (logits.gather(1, target[:, None])[:, 0] - top - count.log()).float()
    with on_path("fused"), assumed(**machine):
        for _ in range(20):
            found: Tensor = functional.linear_log_probs(input, weight, target, logit_scale=1024.0)
            torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
            # A single largest logit has all of the probability, and nothing is rounded.
            alone = count == 1
            assert torch.equal(found[alone], expected[alone])


@pytest.mark.parametrize("machine", MACHINES.values(), ids=MACHINES)
@pytest.mark.parametrize("sizes", [(1100, 192, 3000), (4096, 320, 50257), (130, 16, 257)], ids=str)
def test_the_likeliest_class(sizes: tuple[int, int, int], machine: dict[str, Any]) -> None:
    """The first of equal logits, of integers, and of NaN; all other results have the same bits without it."""
    tokens, K, V = sizes
    torch.manual_seed(V)
    input = torch.randint(-2, 3, (tokens, K), device=DEVICE).to(BFLOAT16)
    weight = torch.randint(-2, 3, (V, K), device=DEVICE).to(BFLOAT16)
    target = torch.randint(V, (tokens,), device=DEVICE)
    # Exact in float32; of equal values torch.argmax gives any on a GPU.
    truth = (input.float() @ weight.float().T).cpu().argmax(1)
    bias = torch.zeros(V, device=DEVICE, dtype=BFLOAT16)
    with on_path("fused"), assumed(**machine):
        expected = functional.linear_log_probs(input, weight, target, return_entropy=True)
        for _ in range(20):
            *both, found = functional.linear_log_probs(input, weight, target, return_entropy=True, return_argmax=True)
            assert torch.equal(found.cpu(), truth)
            assert all(torch.equal(*pair) for pair in zip(both, expected, strict=True))
        _, found = functional.linear_log_probs(input, weight, target, return_argmax=True)
        assert torch.equal(found.cpu(), truth)
        for place, value in ((V - 1, torch.inf), (V // 2, torch.nan), (V // 3, torch.nan), (0, -torch.inf)):
            bias[place] = value
            _, found = functional.linear_log_probs(input, weight, target, linear_bias=bias, return_argmax=True)
            assert (found == (bias.cpu().argmax() if value != -torch.inf else V // 3)).all(), place
        _, found = functional.linear_log_probs(
            input, weight, target, linear_bias=torch.full_like(bias, -torch.inf), return_argmax=True
        )
        assert not found.any()


@pytest.mark.parametrize("name", ["linear_cross_entropy", "linear_log_probs"])
def test_the_same_bits_every_time(name: str) -> None:
    inputs = loss_inputs((4096,), 768, 50257, BFLOAT16, bias=True)
    both = {"return_entropy": True, "return_argmax": True}
    options = {"reduction": "none"} if name == "linear_cross_entropy" else both
    with on_path("fused"):
        first = results(getattr(functional, name), inputs, FLOATING, **options)
        for _ in range(20):
            again = results(getattr(functional, name), inputs, FLOATING, **options)
            for key, tensor in first.items():
                other = again[key]
                assert tensor is None or (other is not None and torch.equal(tensor, other)), key


def test_a_graph_replays_what_is_launched() -> None:
    inputs = {name: each for name, each in loss_inputs((1024,), 256, 32000, BFLOAT16).items() if each is not None}

    def step() -> tuple[Tensor, ...]:
        with torch.no_grad():
            return (functional.linear_cross_entropy(**inputs), functional.linear_log_probs(**inputs))

    with on_path("fused"):
        assert_replays_like_launched(step, [inputs["input"], inputs["linear_weight"]], replays=20)


def test_memory_of_a_large_vocabulary() -> None:
    tokens, K, V = 8192, 4096, 128256
    input = torch.randn(tokens, K, device=DEVICE, dtype=BFLOAT16)
    weight = torch.randn(V, K, device=DEVICE, dtype=BFLOAT16)
    target = torch.randint(V, (tokens,), device=DEVICE)
    with on_path("fused"):
        for more in (False, True):
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            functional.linear_log_probs(input, weight, target, return_entropy=more, return_argmax=more)
            peak = (torch.cuda.max_memory_allocated() - before) / MIB
            assert peak <= 10, f"{peak:.0f} MiB"


@pytest.mark.parametrize("machine", [MACHINES["all"], MACHINES["generic"]], ids=["all", "generic"])
def test_more_than_two_to_the_31_logits(machine: dict[str, Any]) -> None:
    tokens, K, V = 18432, 64, 131072
    inputs = {name: each for name, each in loss_inputs((tokens,), K, V, BFLOAT16).items() if each is not None}
    assert tokens * V > 2**31
    with on_path("fused"), assumed(**machine):
        found: Tensor = functional.linear_cross_entropy(**inputs, reduction="none")
        last = inputs | {name: inputs[name][-300:].clone() for name in ("input", "target")}
        part: Tensor = functional.linear_cross_entropy(**last, reduction="none")
    torch.testing.assert_close(found[-300:], part, rtol=1e-5, atol=1e-5)
    truth = reference.linear_cross_entropy(**in_float64(last), reduction="none")
    torch.testing.assert_close(part.double(), truth, rtol=1e-4, atol=1e-4)
