"""The loss head: losses, log-probabilities and entropies, and their gradients, against float64 and against torch."""

from __future__ import annotations

from typing import Any

import hypothesis
import pytest
import torch
import torch.nn.functional as F
from hypothesis import strategies
from torch import Tensor

from fusedlayers import functional, reference
from fusedlayers.closeness import assert_all_close
from tests.support.loss_operands import (
    CHUNK_ROWS,
    EVERY_KERNEL,
    EVERY_PATH,
    IGNORED,
    KERNELS,
    OPTIONS,
    PATHS,
    REDUCTIONS,
    assert_loss_close,
    frozen_on,
    in_float64,
    loss_inputs,
    on_path,
    results,
)
from tests.support.operands import DEVICE, DTYPES, ON_GPU, Tensors, infinities
from tests.support.selection import draws

pytestmark = infinities


@pytest.mark.sampled
@pytest.mark.parametrize("path", EVERY_KERNEL)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("extras", [(), ("bias",), ("weight",), ("bias", "weight")], ids=str)
def test_every_option(
    dtype: torch.dtype, reduction: str, options: dict[str, Any], extras: tuple[str, ...], path: str
) -> None:
    given = [loss_inputs((3, 7), 24, 150, dtype, **dict.fromkeys(extras, True)) for _ in range(4)]
    assert_loss_close(*given, path=path, reduction=reduction, **options)


def by_torch(
    *, input: Tensor, linear_weight: Tensor, target: Tensor, linear_bias: Any = None, **options: Any
) -> Tensor:
    """What the documentation promises, in other words than the reference: tokens in the first dimension alone."""
    softcap, scale, z_loss = (options.pop(name, None) for name in ("softcap", "logit_scale", "z_loss"))
    logits = (input.flatten(0, -2) @ linear_weight.T + (0 if linear_bias is None else linear_bias)) * (scale or 1.0)
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    target, kind = target.flatten(), options.pop("reduction", "mean")
    losses = F.cross_entropy(logits, target, reduction="none", **options)
    if z_loss:
        losses = losses + torch.where(target == IGNORED, 0.0, z_loss * logits.exp().sum(1).log() ** 2)
    if kind == "none":
        return losses.view(input.shape[:-1])
    weight = torch.ones_like(logits[0]) if options.get("weight") is None else options["weight"]
    return losses.sum() if kind == "sum" else losses.sum() / weight[target[target != IGNORED]].sum()


@pytest.mark.sampled(together=2)
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("weight", [False, True])
def test_the_reference_is_cross_entropy(reduction: str, options: dict[str, Any], weight: bool) -> None:
    inputs = in_float64(loss_inputs((3, 7), 5, 11, bias=True, weight=weight, ignored=4))
    options = options | {"reduction": reduction}
    ours, theirs = results(reference.linear_cross_entropy, inputs, **options), results(by_torch, inputs, **options)
    torch.testing.assert_close(ours, theirs)
    with on_path("torch"):
        torch.testing.assert_close(results(functional.linear_cross_entropy, inputs, **options), theirs)


@pytest.mark.skipif(not hasattr(F, "linear_cross_entropy"), reason="this torch has no linear_cross_entropy")
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_names_and_meaning_are_those_of_torch(reduction: str, path: str) -> None:
    """Every argument of torch's function but its ``options``, which choose how it computes."""
    inputs = loss_inputs((13,), 24, 70, bias=True, weight=True, ignored=0)
    target = inputs["target"]
    target[3:5] = 7
    options = {"reduction": reduction, "ignore_index": 7, "label_smoothing": 0.3}
    with on_path(path):
        ours = results(functional.linear_cross_entropy, inputs, **options)
    torch.testing.assert_close(ours, results(F.linear_cross_entropy, inputs, **options), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("path", EVERY_PATH)
@pytest.mark.parametrize("leading", [(), (1,), (CHUNK_ROWS,), (CHUNK_ROWS + 1,), (2, 3, 4), (1, 1, 5)])
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_targets_of_any_shape(leading: tuple[int, ...], reduction: str, path: str) -> None:
    assert_loss_close(loss_inputs(leading, 24, 70, ignored=0), path=path, reduction=reduction)


@pytest.mark.sampled
@pytest.mark.parametrize("path", KERNELS)
@pytest.mark.parametrize("V", [1, 2, 63, 64, 65, 127, 128, 129, 255, 257, 1000, 4095, 4096, 4097, 8200])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_edges_of_rows(V: int, reduction: str, path: str) -> None:
    """Vocabularies around the padding, around a block of columns, and of several; targets at both ends."""
    inputs = loss_inputs((11,), 16, V, bias=True)
    target = inputs["target"]
    target[1:3], target[-2:] = 0, V - 1
    # The gradient of a single class is 0, an error of which nothing can be measured by.
    assert_loss_close(inputs, path=path, reduction=reduction, label_smoothing=0.1 if V > 1 else 0.0)


@pytest.mark.sampled(together=2)
@pytest.mark.parametrize("path", KERNELS)
@pytest.mark.parametrize("tokens", [1, 7, 8, 9, 15, 16, 17, 24, 33])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_edges_of_chunks(tokens: int, dtype: torch.dtype, path: str) -> None:
    """One chunk, two whose sum of dW is rounded, more whose sum is float32; whole and ragged ones."""
    given = [loss_inputs((tokens,), 24, 70, dtype, ignored=tokens // 4, bias=True) for _ in range(4)]
    assert_loss_close(*given, path=path)


@pytest.mark.sampled(together=2)
@pytest.mark.parametrize("path", KERNELS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("peak", [8.0, 64.0])
def test_peaked_logits(dtype: torch.dtype, reduction: str, peak: float, path: str) -> None:
    """Of most tokens one class has all but 1e-5 of the probability, of half of them the target."""
    # With few classes behind the last whole tile, the gradients of hardly any would decide.
    given = [loss_inputs((30,), 24, 120, dtype, peak=peak) for _ in range(8)]
    for inputs in given:
        logits = F.linear(inputs["input"], inputs["linear_weight"])  # type: ignore[arg-type]
        inputs["target"] = torch.where(torch.arange(30, device=DEVICE) % 2 == 0, logits.argmax(-1), inputs["target"])
    assert_loss_close(*given, path=path, reduction=reduction, again=4)


@pytest.mark.parametrize("path", KERNELS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_logits_far_below_zero(dtype: torch.dtype, path: str) -> None:
    """The largest of them is so far below that of what pads a row, 0, that their exponentials are infinite."""
    given = [loss_inputs((19,), 24, 70, dtype) for _ in range(4)]
    for inputs in given:
        inputs["input"][:, 0], inputs["linear_weight"][:, 0] = 1.0, -256.0  # type: ignore[index]
    assert_loss_close(*given, path=path)


@pytest.mark.sampled(together=2)
@pytest.mark.parametrize("path", KERNELS)
@pytest.mark.parametrize("reduction", ["sum", "mean"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_exact_integers(dtype: torch.dtype, reduction: str, path: str) -> None:
    """Probabilities of 0 and 1, or of 1/2 where two logits are equal: every number is exact, so are all sums."""
    tokens, K, V = 32, 16, 70
    for seed in range(5):
        torch.manual_seed(seed)
        input = torch.randint(-2, 3, (tokens, K), device=DEVICE).to(dtype)
        linear_weight = torch.randint(-2, 3, (V, K), device=DEVICE).to(dtype)
        # Rows of logits with at most two largest ones, which everybody agrees on.
        logits = input.double() @ linear_weight.double().T
        largest = (logits == logits.amax(1, keepdim=True)).sum(1)
        target = torch.where(largest <= 2, logits.argmax(1), IGNORED)
        target[::3] = torch.where(largest[::3] == 1, 5, IGNORED)
        counted = int((target != IGNORED).sum())
        # As many tokens count as a power of two says.
        target[(target != IGNORED).nonzero()[2 ** (counted.bit_length() - 1) :]] = IGNORED
        inputs = {"input": input, "linear_weight": linear_weight, "target": target}
        options = {"reduction": reduction, "logit_scale": 1024.0}
        upstream = torch.tensor(2.0**-8, device=DEVICE)
        with on_path(path):
            ours = results(functional.linear_cross_entropy, inputs, upstream=[upstream], **options)
        truth = results(reference.linear_cross_entropy, in_float64(inputs), upstream=[upstream.double()], **options)
        for name in ("dinput", "dlinear_weight"):
            mine, exact = ours[name], truth[name]
            assert torch.equal(mine.double(), exact), (seed, name, float((mine.double() - exact).abs().max()))
            assert exact.any()


@pytest.mark.sampled(together=2)
@pytest.mark.parametrize("path", EVERY_PATH)
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.1, "z_loss": 0.1}], ids=["plain", "smoothing and z"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_no_token_counts(reduction: str, options: dict[str, Any], dtype: torch.dtype, path: str) -> None:
    """The mean is NaN, as torch's, the others are 0, and so are all gradients."""
    inputs = loss_inputs((2, 9), 24, 70, dtype, bias=True, ignored=18)
    with on_path(path):
        found = results(functional.linear_cross_entropy, inputs, frozen_on(path), reduction=reduction, **options)
    loss, *gradients = found.values()
    assert loss.isnan().all() if reduction == "mean" else not loss.any()
    assert [each is not None and not each.any() for each in gradients] == [path != "fused"] * 3


@pytest.mark.sampled(together=2)
@pytest.mark.parametrize("path", EVERY_KERNEL)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("options", [OPTIONS[name] for name in ("plain", "softcap", "scale", "all")], ids=str)
@pytest.mark.parametrize("entropy", [False, True])
def test_log_probabilities(dtype: torch.dtype, options: dict[str, Any], entropy: bool, path: str) -> None:
    options = {name: options[name] for name in ("softcap", "logit_scale") if name in options}
    for peak in (1.0, 12.0):
        given = [loss_inputs((3, 7), 24, 150, dtype, bias=True, peak=peak) for _ in range(12)]
        assert_loss_close(*given, path=path, again=8, name="linear_log_probs", return_entropy=entropy, **options)


@pytest.mark.parametrize("path", KERNELS)
@pytest.mark.parametrize("wanted", [0, 1])
def test_one_of_log_probability_and_entropy_alone_is_differentiated(wanted: int, path: str) -> None:
    inputs = loss_inputs((21,), 24, 70)

    def one(call: Any) -> Any:
        return lambda **given: call(**given, return_entropy=True)[wanted]

    with on_path(path):
        ours = results(one(functional.linear_log_probs), inputs)
    theirs, truth = (results(one(reference.linear_log_probs), each) for each in (inputs, in_float64(inputs)))
    assert_all_close(ours, theirs, truth, independent=21)


def test_the_reference_of_log_probabilities() -> None:
    inputs = in_float64(loss_inputs((3, 7), 5, 11, bias=True, ignored=4))
    tensors = {name: tensor for name, tensor in inputs.items() if tensor is not None}
    log_probs, entropies = reference.linear_log_probs(**tensors, return_entropy=True, logit_scale=0.7)
    logits = 0.7 * F.linear(tensors["input"], tensors["linear_weight"], tensors["linear_bias"])
    distribution = torch.distributions.Categorical(logits=logits)
    counts = tensors["target"] != IGNORED
    expected = distribution.log_prob(tensors["target"].clamp(min=0))
    torch.testing.assert_close(log_probs, torch.where(counts, expected, 0.0))
    torch.testing.assert_close(entropies, torch.where(counts, distribution.entropy(), 0.0))


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("backend", ["auto", "torch"])
def test_probabilities_as_targets(reduction: str, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They run through torch, and have a gradient of their own."""
    monkeypatch.setenv("FUSEDLAYERS_BACKEND", backend)
    inputs = loss_inputs((2, 5), 8, 11, torch.float64, weight=True)
    target = torch.rand(2, 5, 11, dtype=torch.float64).softmax(-1)
    options = {"reduction": reduction, "label_smoothing": 0.1, "weight": inputs["weight"].double()}  # type: ignore[union-attr]
    found, leaves = [], []
    for call in (functional.linear_cross_entropy, F.linear_cross_entropy):
        leaf = target.clone().requires_grad_()
        flat = (inputs["input"].flatten(0, 1), leaf.flatten(0, 1))  # type: ignore[union-attr]
        given = (inputs["input"], leaf) if call is functional.linear_cross_entropy else flat
        loss = call(given[0], inputs["linear_weight"], given[1], **options)  # type: ignore[arg-type]
        loss.sum().backward()
        found.append(loss.flatten())
        leaves.append(leaf.grad)
    torch.testing.assert_close(found[0], found[1])
    torch.testing.assert_close(leaves[0], leaves[1])


@pytest.mark.parametrize("path", EVERY_KERNEL)
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_any_layout(reduction: str, path: str) -> None:
    """Transposed, sliced and expanded operands, and upstream gradients that are expanded and lie apart."""
    inputs = loss_inputs((2, 9), 24, 70, bias=True, weight=True)
    given = {name: tensor for name, tensor in inputs.items() if tensor is not None}
    plain: Tensors = given
    strided: Tensors = {
        "input": given["input"].transpose(0, 1).contiguous().transpose(0, 1),
        "linear_weight": given["linear_weight"].T.contiguous().T,
        "linear_bias": torch.stack([given["linear_bias"]] * 2, 1)[:, 0],
        "target": torch.stack([given["target"]] * 3, 2)[..., 1],
        "weight": torch.stack([given["weight"]] * 2, 1)[:, 1],
    }
    upstream = torch.randn(()).expand(2, 9) if reduction == "none" else torch.randn(3)[1]
    with on_path(path):
        ours, theirs = (
            results(functional.linear_cross_entropy, each, frozen_on(path), [upstream.to(DEVICE)], reduction=reduction)
            for each in (strided, plain)
        )
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("path", EVERY_KERNEL)
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_nothing_uninitialised_is_read(reduction: str, path: str) -> None:
    """Neither the columns between two rows of logits nor a sum before its first chunk."""
    given = loss_inputs((19,), 24, 70, bias=True, weight=True)
    assert_loss_close(given, path=path, reduction=reduction, label_smoothing=0.1)


@pytest.mark.parametrize("path", EVERY_KERNEL)
@hypothesis.settings(max_examples=60 if ON_GPU else draws(6, 20))
@hypothesis.given(
    sizes=strategies.tuples(*[strategies.integers(1, 40)] * 3),
    V=strategies.integers(1, 300),
    reduction=strategies.sampled_from(REDUCTIONS),
    options=strategies.sampled_from(list(OPTIONS.values())),
)
def test_random_sizes(sizes: tuple[int, int, int], V: int, reduction: str, options: dict[str, Any], path: str) -> None:
    tokens, K, rows = sizes
    inputs = loss_inputs((tokens,), K, V, ignored=tokens // 5)
    assert_loss_close(inputs, path=path, reduction=reduction, rows=rows, **options)
