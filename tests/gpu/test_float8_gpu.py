"""FFNs and linear layers in 8 bits on a GPU: exact numbers, noise, graphs, compilers, what stays in 16 bits."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import fusedlayers as fl
from fusedlayers import reference
from fusedlayers.closeness.noise import OF_LAYER, OF_PRODUCT, OF_WEIGHT_GRADIENT, sqnr
from fusedlayers.devices import describe
from fusedlayers.functional import float8
from fusedlayers.functional.dispatch import decisions
from fusedlayers.functional.switches import switched
from tests.support.operands import DEVICE, forget_calls

BFLOAT16, FLOAT16 = torch.bfloat16, torch.float16
GATED = pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
# Tokens, d_model, d_ff: whole tiles, and tails of everything.
SIZES = [(1024, 1024, 2048), (1001, 1040, 1488)]

pytestmark = [
    pytest.mark.skipif(describe(DEVICE).backend != "sm90", reason="no Hopper GPU with Gluon"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning:torch"),
]


@pytest.fixture(autouse=True)
def wherever_it_can() -> Iterator[None]:
    """Sizes at which auto mode would not take 8 bits."""
    float8.forget_weights()
    with switched({"FUSEDLAYERS_BACKEND": "triton"}):
        yield
    forget_calls()


def operands(size: tuple[int, int, int], gated: bool, bias: bool = True, dtype: torch.dtype = BFLOAT16) -> Any:
    M, K, N = size
    shapes: dict[str, tuple[int, ...]] = {"x": (M, K), "w_up": (N, K), "w_down": (K, N)}
    shapes |= {"b_up": (N,), "b_down": (K,)} if bias else {}
    shapes |= {"w_gate": (N, K)} if gated else {}
    shapes |= {"b_gate": (N,)} if gated and bias else {}
    scale = {name: shape[1] ** -0.5 if name.startswith("w") else 1.0 for name, shape in shapes.items()}
    drawn = {name: torch.randn(shape, device=DEVICE) * scale[name] for name, shape in shapes.items()}
    return {name: each.to(dtype).requires_grad_() for name, each in drawn.items()}


def gradients(y: Tensor, given: dict[str, Tensor], dy: Tensor) -> dict[str, Tensor]:
    return dict(zip(given, torch.autograd.grad(y, list(given.values()), dy), strict=True))


def ffn(given: dict[str, Tensor], precision: str = "rowwise", **options: Any) -> Tensor:
    return fl.functional.ffn(**given, precision=precision, **options)


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert [name for name, value in expected.items() if not torch.equal(found[name], value)] == []


def powers(*shape: int) -> Tensor:
    """0, ±1 and ±2."""
    return torch.randint(-1, 2, shape, device=DEVICE) * torch.randint(1, 3, shape, device=DEVICE).float()


def permutation(size: int) -> Tensor:
    """One power of two in every row and column."""
    found = torch.zeros(size, size, device=DEVICE)
    found[torch.arange(size), torch.randperm(size)] = torch.randint(1, 3, (size,), device=DEVICE).float()
    return found


@GATED
@pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT16], ids=str)
def test_powers_of_two_are_exact(gated: bool, dtype: torch.dtype) -> None:
    """Each operand and result is a power of two or a sum of two, which neither format rounds: every scale shows."""
    M, size = 600, 1024
    for _ in range(3):
        given = {"x": powers(M, size), "w_up": permutation(size), "w_down": permutation(size)}
        given |= {"w_gate": permutation(size)} if gated else {}
        leaves = {name: each.to(dtype).requires_grad_() for name, each in given.items()}
        exact = {name: each.double().requires_grad_() for name, each in given.items()}
        dy = powers(M, size)
        y, truth = ffn(leaves, activation="identity"), reference.ffn(**exact, activation="identity")
        assert torch.equal(y, truth.to(dtype))
        expected = gradients(truth, exact, dy.double())
        assert_same(gradients(y, leaves, dy.to(dtype)), {name: each.to(dtype) for name, each in expected.items()})


@GATED
@pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT16], ids=str)
@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize(
    ("activation", "precision"), [("gelu_tanh", "rowwise"), ("silu", "rowwise_with_gw_hp"), ("relu2", "rowwise")]
)
def test_noise(size: tuple[int, int, int], gated: bool, activation: str, precision: str, dtype: torch.dtype) -> None:
    given = operands(size, gated, dtype=dtype)
    exact = {name: each.detach().double().requires_grad_() for name, each in given.items()}
    dy = torch.randn(size[:2], device=DEVICE)
    with decisions() as taken:
        y = ffn(given, precision, activation=activation)
    assert taken == {"ffn float8": 1}
    truth = reference.ffn(**exact, activation=activation)
    assert sqnr(y, truth) >= OF_LAYER
    expected = gradients(truth, exact, dy.double())
    for name, value in gradients(y, given, dy.to(dtype)).items():
        assert sqnr(value, expected[name]) >= (OF_LAYER if name == "x" else OF_WEIGHT_GRADIENT), name


@pytest.mark.parametrize("shape", [(4096, 1024, 1024), (1000, 1040, 2000), (512, 14_336, 1024), (256, 1024, 28_672)])
def test_noise_of_a_product(shape: tuple[int, int, int]) -> None:
    M, K, N = shape
    given = {
        "x": torch.randn(M, K, device=DEVICE, dtype=BFLOAT16, requires_grad=True),
        "weight": (torch.randn(N, K, device=DEVICE) / K**0.5).to(BFLOAT16).requires_grad_(),
        "bias": torch.randn(N, device=DEVICE, dtype=BFLOAT16, requires_grad=True),
    }
    exact = {name: each.detach().double().requires_grad_() for name, each in given.items()}
    dy = torch.randn(M, N, device=DEVICE, dtype=BFLOAT16)
    with decisions() as taken:
        y = fl.functional.linear(**given, precision="rowwise")
    assert taken == {"linear float8": 1}
    truth = reference.linear(**exact)
    assert sqnr(y, truth) >= OF_PRODUCT
    expected = gradients(truth, exact, dy.double())
    for name, value in gradients(y, given, dy).items():
        assert sqnr(value, expected[name]) >= OF_PRODUCT, name


@GATED
@pytest.mark.parametrize("options", [{}, {"dropout_p": 0.2}], ids=str)
def test_the_same_bits_every_time_and_in_any_grad_mode(gated: bool, options: dict[str, Any]) -> None:
    given = operands(SIZES[1], gated)
    seed = {"dropout_seed": torch.tensor([5], device=DEVICE)}
    dy = torch.randn(SIZES[1][:2], device=DEVICE, dtype=BFLOAT16)
    y = ffn(given, **seed, **options)
    expected = gradients(y, given, dy)
    for _ in range(3):
        float8.forget_weights()
        with torch.no_grad():
            assert torch.equal(ffn(given, **seed, **options), y)
        again = ffn(given, **seed, **options)
        assert torch.equal(again, y)
        assert_same(gradients(again, given, dy), expected)
    checkpointed = checkpoint(
        lambda *each: ffn(dict(zip(given, each, strict=True)), **seed, **options),
        *given.values(), use_reentrant=False,
    )  # fmt: skip
    assert torch.equal(checkpointed, y)
    assert_same(gradients(checkpointed, given, dy), expected)


@GATED
def test_upstream_gradients_of_any_layout(gated: bool) -> None:
    given = operands(SIZES[0], gated)
    dy = torch.randn(SIZES[0][:2], device=DEVICE, dtype=BFLOAT16)
    expected = gradients(ffn(given), given, dy)
    assert_same(gradients(ffn(given), given, dy.T.contiguous().T), expected)
    ones = gradients(ffn(given), given, torch.ones_like(dy))
    assert_same(gradients(ffn(given).sum(), given, torch.ones((), device=DEVICE, dtype=BFLOAT16)), ones)


@GATED
def test_each_frozen_subset(gated: bool) -> None:
    given = operands(SIZES[1], gated)
    dy = torch.randn(SIZES[1][:2], device=DEVICE, dtype=BFLOAT16)
    expected = gradients(ffn(given), given, dy)
    for name in given:
        alone = {other: each.detach().requires_grad_(other == name) for other, each in given.items()}
        [found] = torch.autograd.grad(ffn(alone), [alone[name]], dy)
        # w_down alone has a gradient in 16 bits.
        assert sqnr(found, expected[name]) > 20 if name == "w_down" else torch.equal(found, expected[name]), name


def test_what_is_not_finite_stays_in_its_row() -> None:
    given = operands(SIZES[0], True, bias=False)
    with torch.no_grad():
        clean = ffn(given, activation="silu")
        for row, value in ((3, float("inf")), (700, float("nan"))):
            given["x"][row, 5] = value
        y = ffn(given, activation="silu")
    touched = torch.zeros(len(y), dtype=torch.bool, device=DEVICE)
    touched[[3, 700]] = True
    assert y[touched].isnan().all()
    assert torch.equal(y[~touched], clean[~touched])


def test_weights_that_change_between_replays() -> None:
    given = operands(SIZES[0], True)
    dy = torch.randn(SIZES[0][:2], device=DEVICE, dtype=BFLOAT16)

    def step() -> tuple[Tensor, ...]:
        y = ffn(given, activation="silu")
        return y, *gradients(y, given, dy).values()

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replayed = step()
    for _ in range(3):
        with torch.no_grad():
            for each in given.values():
                each.copy_(torch.randn_like(each) / each.shape[-1] ** 0.5)
        graph.replay()
        now = [each.clone() for each in replayed]
        for found, launched in zip(now, step(), strict=True):
            assert torch.equal(found, launched)


def test_a_training_step_in_a_graph_with_its_optimizer() -> None:
    """What is launched after replays sees the weights that they have changed."""
    block = fl.FusedFFN(1024, 2048, gated=True, activation="silu", device=DEVICE, dtype=BFLOAT16, precision="rowwise")
    optimizer = torch.optim.SGD(block.parameters(), lr=1.0)
    x = torch.randn(512, 1024, device=DEVICE, dtype=BFLOAT16)

    def step() -> None:
        block(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for _ in range(2):
        before = block(x)
        graph.replay()
        after = block(x)
        fresh = fl.FusedFFN(
            1024, 2048, gated=True, activation="silu", device=DEVICE, dtype=BFLOAT16, precision="rowwise"
        )
        fresh.load_state_dict(block.state_dict())
        assert not torch.equal(after, before)
        assert torch.equal(after, fresh(x))
    # Other tests keep what is quantised.
    float8._steps_in_graphs = False


@GATED
def test_compiled(gated: bool) -> None:
    torch._dynamo.reset()
    given = operands(SIZES[1], gated)
    dy = torch.randn(SIZES[1][:2], device=DEVICE, dtype=BFLOAT16)
    y = ffn(given)
    expected = gradients(y, given, dy)
    for mode in ("default", "reduce-overhead"):
        compiled = torch.compile(lambda given: ffn(given), fullgraph=True, mode=mode)
        for _ in range(3):
            torch.compiler.cudagraph_mark_step_begin()
            found = compiled(given)
            assert torch.equal(found, y)
            assert_same(gradients(found, given, dy), expected)
        with torch.no_grad():
            given["w_up"].mul_(0.5)
        y = ffn(given)
        expected = gradients(y, given, dy)
        torch.compiler.cudagraph_mark_step_begin()
        assert torch.equal(compiled(given), y)
    torch._dynamo.reset()


def test_micro_batches_quantise_weights_once(monkeypatch: pytest.MonkeyPatch) -> None:
    block = fl.FusedFFN(1024, 2048, device=DEVICE, dtype=BFLOAT16, precision="rowwise")
    count = []
    for name in ("quantise_rows", "quantise_transposed"):
        made = getattr(float8, name)
        monkeypatch.setattr(
            float8, name, lambda x, *more, made=made, **given: (count.append(x.shape), made(x, *more, **given))[1]
        )
    optimizer = torch.optim.AdamW(block.parameters(), lr=1e-3)
    of_weights = {tuple(block.up_proj.weight.shape), tuple(block.down_proj.weight.shape)}
    for _ in range(2):
        count.clear()
        for _ in range(3):
            block(torch.randn(500, 1024, device=DEVICE, dtype=BFLOAT16)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        assert sum(tuple(shape) in of_weights for shape in count) == 3


def test_what_stays_in_16_bits() -> None:
    """Sizes, dtypes and wishes that 8 bits do not serve run as without a precision, with the same bits."""
    cases: list[tuple[tuple[int, int, int], torch.dtype, dict[str, Any]]] = [
        ((512, 1032, 2048), BFLOAT16, {}),
        ((512, 1024, 2056), BFLOAT16, {}),
        ((512, 1024, 2048), torch.float32, {}),
        ((512, 1024, 2048), BFLOAT16, {"recompute": True}),
        ((0, 1024, 2048), BFLOAT16, {}),
    ]
    for size, dtype, options in cases:
        given = operands(size, True, dtype=dtype)
        with decisions() as taken:
            y = ffn(given, **options)
        assert not any("float8" in name for name in taken)
        assert torch.equal(y, fl.functional.ffn(**given, **options))


@pytest.mark.parametrize("rows", [16_384, 64])
def test_auto_mode_takes_8_bits_for_large_calls_alone(rows: int) -> None:
    block = fl.FusedFFN(2048, 8192, device=DEVICE, dtype=BFLOAT16, precision="fp8")
    linear = fl.SplitKLinear(2048, 8192, device=DEVICE, dtype=BFLOAT16, precision="fp8")
    x = torch.randn(rows, 2048, device=DEVICE, dtype=BFLOAT16)
    with switched({"FUSEDLAYERS_BACKEND": "auto"}):
        for _ in range(4):
            with decisions() as taken:
                block(x)
                linear(x)
            assert (set(taken) == {"ffn float8", "linear float8"}) == (rows > 64), taken


def test_under_autocast() -> None:
    block = fl.FusedFFN(1024, 2048, device=DEVICE, precision="fp8")
    x = torch.randn(512, 1024, device=DEVICE, requires_grad=True)
    with torch.autocast("cuda", BFLOAT16), decisions() as taken:
        y = block(x)
    assert taken == {"ffn float8": 1}
    assert y.dtype == BFLOAT16
    y.float().square().mean().backward()
    truth = reference.ffn(
        x.detach().double(), *(each.double() for each in (block.up_proj.weight, block.down_proj.weight)),
        *(each.double() for each in (block.up_proj.bias, block.down_proj.bias)), activation="gelu",
    )  # fmt: skip
    assert sqnr(y, truth) >= OF_LAYER
    assert x.grad is not None
    assert block.up_proj.weight.grad is not None
    assert block.up_proj.weight.grad.dtype == torch.float32


def test_training_and_evaluation_in_turn() -> None:
    """A module alternates between training and evaluation, and keeps its values."""
    block = fl.FusedFFN(1024, 2048, gated=True, activation="silu", device=DEVICE, dtype=BFLOAT16, precision="fp8")
    x = torch.randn(2, 300, 1024, device=DEVICE, dtype=BFLOAT16)
    expected = block(x).detach()
    for _ in range(4):
        assert torch.equal(block(x), expected)
        with torch.no_grad():
            assert torch.equal(block(x), expected)
        with torch.inference_mode():
            assert torch.equal(block(x), expected)


def test_a_long_row_is_read_twice() -> None:
    """Rows of more than one block: d_ff above 16,384, and two of them side by side in the backward pass."""
    given = operands((256, 1024, 20_480), True, bias=False)
    exact = {name: each.detach().double().requires_grad_() for name, each in given.items()}
    dy = torch.randn(256, 1024, device=DEVICE)
    y, truth = ffn(given, activation="silu"), reference.ffn(**exact, activation="silu")
    assert sqnr(y, truth) >= OF_LAYER
    expected = gradients(truth, exact, dy.double())
    for name, value in gradients(y, given, dy.to(BFLOAT16)).items():
        assert sqnr(value, expected[name]) >= (OF_LAYER if name == "x" else OF_WEIGHT_GRADIENT), name


def test_a_model_of_transformers() -> None:
    """Its FFNs and wide projections run in 8 bits, its loss and gradients stay close, and restore is exact."""
    transformers = pytest.importorskip("transformers")
    configuration = transformers.LlamaConfig(
        hidden_size=1024, intermediate_size=2048, num_hidden_layers=2, num_attention_heads=8, num_key_value_heads=2,
        vocab_size=2048,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(configuration).to(DEVICE, BFLOAT16)
    tokens = torch.randint(2048, (2, 256), device=DEVICE)

    def step() -> tuple[Tensor, list[Tensor]]:
        loss = model(input_ids=tokens, labels=tokens).loss
        return loss.detach(), list(torch.autograd.grad(loss, list(model.parameters())))

    with torch.no_grad():
        logits = model(input_ids=tokens).logits
    loss, expected = step()
    report = fl.replace(model, precision="fp8", norm=False, loss=False)
    assert sum(entry.reason.endswith("; fp8") for entry in report.replaced) == 6
    with decisions() as taken:
        in_8_bits, found = step()
    assert taken == {"ffn float8": 2, "linear float8": 4}
    assert abs(float(in_8_bits / loss) - 1) < 0.01
    noise = [sqnr(one, other) for one, other in zip(found, expected, strict=True)]
    assert min(noise) >= 10, noise
    with torch.no_grad():
        assert sqnr(model(input_ids=tokens).logits, logits) >= OF_LAYER
    fl.restore(model)
    with torch.no_grad():
        assert torch.equal(model(input_ids=tokens).logits, logits)
