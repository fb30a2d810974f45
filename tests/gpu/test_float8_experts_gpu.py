"""Experts in 8 bits on a GPU: exact integers of each kernel, noise, routings, layouts, graphs, compilers, models."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import fusedlayers as fl
from fusedlayers import reference
from fusedlayers.closeness.noise import OF_LAYER, OF_WEIGHT_GRADIENT, sqnr
from fusedlayers.functional import float8
from fusedlayers.functional.dispatch import decisions
from fusedlayers.functional.moe_ffn import float8 as experts8
from fusedlayers.functional.moe_ffn import moe_ffn
from fusedlayers.functional.switches import switched
from fusedlayers.kernels import grouped_gemm as kernels
from fusedlayers.kernels.float8 import quantise_rows, quantise_transposed, transposed_pair
from fusedlayers.kernels.grouped_gemm import Arithmetic, SortedRows
from fusedlayers.kernels.hopper import Scaled
from fusedlayers.kernels.tuning import EPILOGUE_PIPELINES
from fusedlayers.kernels.tuning.grouped_gemm import grouped_tiles
from fusedlayers.kernels.tuning.grouped_gemm_pipelines import SCALED_WEIGHT_GRADIENT
from fusedlayers.reference.float8 import dequantised
from tests.gpu.test_float8_gpu import BFLOAT16, FLOAT16, GATED, pytestmark, wherever_it_can
from tests.gpu.test_grouped_gemm_gpu import E, assert_rows, by_expert, integers, laid_out, routed
from tests.support.float8_twins import in_8_bits
from tests.support.moe_operands import CLAMPED, LAYOUTS, assert_same, how, in_8, like_x, moe_inputs, results, wide
from tests.support.operands import DEVICE

__all__ = ["pytestmark", "wherever_it_can"]

DTYPE = pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT16], ids=str)
IDENTITY = Arithmetic("identity", "coarse")
# Of kernels that are not to run.
TILES = grouped_tiles("sm_90", 16, "product", 128)
# Tokens, d_model, d_ff, experts, experts of a token: whole tiles, and tails of everything.
SIZES = [(1024, 512, 256, 8, 2), (1061, 336, 208, 7, 3)]
# In dB: of results and gradients beside the model of the recipe.
MODEL = {"y": 23.0, "dx": 27.0}
OF_PARAMETER = 21.0


def scaled(values: Tensor) -> Scaled:
    """Integers in 8 bits, as they are, with a power of two as the scale of each row."""
    scale = torch.randint(-1, 2, values.shape[:-1], device=DEVICE).float().exp2()
    return Scaled(values.to(torch.float8_e4m3fn), scale)


def sorted_rows(rows: SortedRows, columns: int, most: int) -> Scaled:
    """The same for sorted rows: zeros in padding, and NaN behind the rows in use, which nobody reads."""
    values = integers(torch.float32, most, rows.capacity, columns) * (rows.slots[:, None] >= 0)
    values[int(rows.starts[-1]) :] = torch.nan
    return scaled(values)


def exact(operand: Scaled) -> Tensor:
    return operand.values.double() * operand.scale.double().unsqueeze(-1)


@pytest.mark.parametrize("routing", ["even", "skewed", "one", "few"])
@pytest.mark.parametrize("layout", ["separate", "concatenated", "interleaved"])
@pytest.mark.parametrize(("K", "N"), [(512, 768), (208, 144)])
@DTYPE
def test_products_of_integers(K: int, N: int, layout: str, routing: str, dtype: torch.dtype) -> None:
    """Both kernels of the forward pass, and the gradient of x, again and again: every scale shows."""
    rows = routed(routing)
    x, w_up, w_gate = sorted_rows(rows, K, 2), *(scaled(integers(torch.float32, 1, E, N, K)) for _ in range(2))
    z, g = (by_expert(exact(x), exact(each), rows) for each in (w_up, w_gate))
    b_up, b_gate, b_down = integers(dtype, 8, E, N), integers(dtype, 8, E, N), integers(dtype, 8, E, K)
    expert = torch.repeat_interleave(torch.arange(E, device=DEVICE), rows.starts.diff())
    z[: len(expert)] += b_up.double()[expert]
    g[: len(expert)] += b_gate.double()[expert]
    in_memory = laid_out(layout, w_up.values.view(torch.int8), w_gate.values.view(torch.int8))
    up, gate = (each.view(torch.float8_e4m3fn) for each in in_memory)
    up, gate = Scaled(up, w_up.scale), Scaled(gate, w_gate.scale)
    h, w_down = sorted_rows(rows, N, 2), scaled(integers(torch.float32, 1, E, K, N))
    y = by_expert(exact(h), exact(w_down), rows)
    y[: len(expert)] += b_down.double()[expert]
    for _ in range(3):
        for gated in (False, True):
            found = kernels.hidden(
                x, up, gate if gated else None, b_up, b_gate if gated else None, rows, True, IDENTITY, gathered=True,
                tiles=TILES, pipeline=EPILOGUE_PIPELINES["scaled_hidden", gated], dtype=dtype,
            )  # fmt: skip
            assert_rows(found[0], z * g if gated else z, rows)
            assert_rows(found[1], z, rows)
            if gated:
                assert_rows(found[2], g, rows)
        pipeline = EPILOGUE_PIPELINES["scaled_product", False]
        product = kernels.product([(h, w_down)], b_down, rows, "ieee", tiles=TILES, pipeline=pipeline, dtype=dtype)
        assert_rows(product, y, rows)


@pytest.mark.parametrize("routing", ["even", "skewed", "one", "few"])
@pytest.mark.parametrize("in_place", [False, True])
@DTYPE
@GATED
def test_hidden_gradient_of_integers(in_place: bool, gated: bool, routing: str, dtype: torch.dtype) -> None:
    K, N = 208, 208
    rows = routed(routing)
    dy, down = sorted_rows(rows, K, 1), scaled(integers(torch.float32, 1, E, N, K))
    weights = torch.where(rows.slots >= 0, 2.0 ** torch.randint(-1, 2, (rows.capacity,), device=DEVICE), 0.0)
    d_hidden, by_row = by_expert(exact(dy), exact(down), rows), weights[:, None].double()
    for _ in range(3):
        z, g = integers(dtype, 2, rows.capacity, N), integers(dtype, 2, rows.capacity, N) if gated else None
        both = z.double(), torch.ones_like(z).double() if g is None else g.double()
        found = kernels.hidden_gradient(
            dy, Scaled(down.values.mT, down.scale), z, g, weights, rows, True, True, IDENTITY, in_place=in_place,
            tiles=TILES, pipeline=EPILOGUE_PIPELINES["scaled_hidden_gradient", gated],
        )  # fmt: skip
        assert (found.dz is z) == in_place
        assert_rows(found.dz, d_hidden * by_row * both[1], rows, padding=True)
        if gated:
            assert_rows(found.dg, d_hidden * by_row * both[0], rows, padding=True)
        assert_rows(found.weighted_hidden, both[0] * both[1] * by_row, rows, padding=True)
        sums = (d_hidden * both[0] * both[1]).sum(1)
        assert_rows(found.partials.double().sum(0)[:, None], sums[:, None], rows)


@pytest.mark.parametrize("routing", ["even", "skewed", "one", "few"])
@pytest.mark.parametrize("layout", ["separate", "concatenated", "interleaved", "transposed", "columns"])
@pytest.mark.parametrize(("K", "N"), [(512, 768), (192, 64)])
@DTYPE
def test_weight_gradients_of_integers(K: int, N: int, layout: str, routing: str, dtype: torch.dtype) -> None:
    """Of every expert, into every layout of weights, in parts where its rows are many; again and again."""
    rows = routed(routing)
    left, right = sorted_rows(rows, N, 2), sorted_rows(rows, K, 2)
    if routing in ("skewed", "one"):
        # Between two parts a sum waits in bfloat16, which holds few terms of one scale.
        values = left.values.float().clamp(-1, 1) * (torch.rand(rows.capacity, 1, device=DEVICE) < 1 / 32)
        left = Scaled(values.to(torch.float8_e4m3fn), torch.full_like(left.scale, 4.0))
        right = Scaled(right.values, torch.full_like(left.scale, 0.5))
    expected = torch.zeros(E, N, K, device=DEVICE, dtype=torch.float64)
    for expert, (first, end) in enumerate(zip(rows.starts[:-1].tolist(), rows.starts[1:].tolist(), strict=True)):
        expected[expert] = exact(left)[first:end].T @ exact(right)[first:end]
    for _ in range(3):
        empty = [torch.full((E, N, K), torch.nan, device=DEVICE, dtype=dtype) for _ in range(2)]
        if layout == "columns":
            out, beside = torch.stack(empty, 3).unbind(3)
        else:
            out, beside = laid_out(layout, *empty)
        a, b = transposed_pair(left, right.values, right.scale, starts=rows.starts)
        kernels.scaled_weight_gradient(
            a, b, rows, out, pipeline=SCALED_WEIGHT_GRADIENT, order=kernels.longest_first(rows.starts)
        )  # fmt: skip
        assert torch.equal(out, expected.to(dtype))
        assert beside.isnan().all()


def test_each_matrix_of_a_batch_is_transposed() -> None:
    for shape in ((5, 768, 2048), (3, 200, 72)):
        both = [torch.randn(shape, device=DEVICE, dtype=BFLOAT16) for _ in range(2)]
        for x, other in (both, [each.mT.contiguous().mT for each in both], torch.cat(both, 1).chunk(2, 1)):
            found = quantise_transposed(x, other)
            for entry in range(shape[0]):
                expected = quantise_rows(torch.cat((x[entry], other[entry])).T.contiguous())
                assert torch.equal(found.scale[entry], expected.scale)
                assert torch.equal(found.values[entry].view(torch.int8), expected.values.view(torch.int8))


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("transposed", [False, True], ids=["", "transposed"])
@pytest.mark.parametrize("routing", ["random", "sentinels"])
@DTYPE
@GATED
def test_noise(gated: bool, dtype: torch.dtype, routing: str, transposed: bool, layout: str, size: Any) -> None:
    """Beside float64, and closer beside the model of the recipe."""
    shape: dict[str, Any] = {"gated": gated, "layout": layout, "transposed": transposed}
    tensors = moe_inputs(*size, dtype, routing=routing, **shape)
    dy = like_x(tensors)
    found = in_8(tensors, dy, **how(**shape))
    truth = results(reference.moe_ffn, wide(tensors), dy.double(), **how(**shape))
    with in_8_bits():
        model = in_8(tensors, dy, **how(**shape))
    for name, value in found.items():
        if value is not None:
            least = OF_LAYER if name in MODEL else OF_WEIGHT_GRADIENT
            assert sqnr(value, truth[name]) >= least, name
            assert sqnr(value, model[name].double()) >= MODEL.get(name, OF_PARAMETER), name


@pytest.mark.parametrize("activation", ["relu2", "gelu_tanh", "silu"])
@GATED
def test_activations_and_limits(gated: bool, activation: str) -> None:
    options = how(gated, activation=activation)
    limited = options | ({"limit": 0.7, "up_offset": 1.0} if gated else {})
    for named in (options, limited, *([how(**CLAMPED)] if gated else [])):
        tensors = moe_inputs(*SIZES[1], BFLOAT16, gated=gated)
        found = in_8(tensors, like_x(tensors), **named)
        truth = reference.moe_ffn(**wide(tensors), **named)
        assert sqnr(found["y"], truth) >= OF_LAYER


@GATED
def test_the_same_bits_every_time_and_in_any_grad_mode(gated: bool) -> None:
    tensors = moe_inputs(*SIZES[1], BFLOAT16, gated=gated)
    dy = like_x(tensors)
    expected = in_8(tensors, dy)
    for _ in range(3):
        float8.forget_weights()
        assert_same(in_8(tensors, dy), expected)
        assert_same(in_8(tensors, dy, recompute=True), expected)
        with torch.no_grad():
            assert torch.equal(moe_ffn(**tensors, precision="fp8"), expected["y"])

    def checkpointed(**given: Any) -> Tensor:
        return checkpoint(moe_ffn, **given, use_reentrant=False)

    assert_same(results(checkpointed, tensors, dy, precision="fp8"), expected)
    names = [name for name, each in tensors.items() if each is not None and each.is_floating_point()]
    for name in names:
        assert_same(in_8(tensors, dy, tuple(other for other in names if other != name)), expected)


@pytest.mark.parametrize("routing", ["one takes all", "nobody", "first and last"])
def test_experts_without_rows(routing: str) -> None:
    tensors = moe_inputs(*SIZES[1], BFLOAT16, routing=routing, bias=False)
    dy = like_x(tensors)
    found, truth = in_8(tensors, dy), results(reference.moe_ffn, wide(tensors), dy.double())
    for name, value in found.items():
        if value is not None and truth[name].count_nonzero():
            assert sqnr(value, truth[name]) >= OF_WEIGHT_GRADIENT, name
        elif value is not None:
            assert not value.any(), name


def test_what_is_not_finite_stays_in_its_token() -> None:
    tensors = moe_inputs(*SIZES[0], BFLOAT16, bias=False)
    with torch.no_grad():
        clean = moe_ffn(**tensors, precision="fp8")
        for row, value in ((3, float("inf")), (700, float("nan"))):
            tensors["x"][row, 5] = value
        y = moe_ffn(**tensors, precision="fp8")
    touched = torch.zeros(len(y), dtype=torch.bool, device=DEVICE)
    touched[[3, 700]] = True
    assert y[touched].isnan().all()
    assert torch.equal(y[~touched], clean[~touched])


def test_what_is_not_finite_spoils_the_gradients_of_its_experts_alone() -> None:
    tensors = moe_inputs(*SIZES[0], BFLOAT16, bias=False)
    dy = like_x(tensors)
    clean = in_8(tensors, dy, precision="rowwise")
    tensors["x"][3, 5] = float("nan")
    found = in_8(tensors, dy, precision="rowwise")
    touched = torch.zeros(SIZES[0][3], dtype=torch.bool, device=DEVICE)
    touched[tensors["top_k_index"][3]] = True
    for name in ("dw_up", "dw_gate", "dw_down"):
        assert found[name][touched].isnan().all(), name
        assert torch.equal(found[name][~touched], clean[name][~touched]), name


def test_weights_and_routing_that_change_between_replays() -> None:
    tensors = moe_inputs(*SIZES[0], BFLOAT16)
    dy = like_x(tensors)
    leaves = {name: t if t is None or name == "top_k_index" else t.requires_grad_() for name, t in tensors.items()}
    wanted = [each for each in leaves.values() if each is not None and each.requires_grad]

    def step() -> tuple[Tensor, ...]:
        y = moe_ffn(**leaves, precision="fp8")
        return y.detach(), *torch.autograd.grad(y, wanted, dy)

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
            for each in wanted:
                each.copy_(torch.randn_like(each) / each.shape[-1] ** 0.5)
            leaves["top_k_index"].copy_(torch.rand(1024, 8, device=DEVICE).argsort(1)[:, :2])
        graph.replay()
        now = [each.clone() for each in replayed]
        for found, launched in zip(now, step(), strict=True):
            assert torch.equal(found, launched)


@GATED
def test_compiled(gated: bool) -> None:
    torch._dynamo.reset()
    tensors = moe_inputs(*SIZES[1], BFLOAT16, gated=gated)
    dy = like_x(tensors)
    expected = in_8(tensors, dy)
    for mode in ("default", "reduce-overhead"):
        compiled = torch.compile(lambda **given: moe_ffn(**given, precision="fp8"), fullgraph=True, mode=mode)
        for _ in range(3):
            torch.compiler.cudagraph_mark_step_begin()
            assert_same(results(compiled, tensors, dy), expected)
    torch._dynamo.reset()


def test_micro_batches_quantise_weights_once(monkeypatch: pytest.MonkeyPatch) -> None:
    mixture = fl.FusedMoE(512, 256, 8, 2, device=DEVICE, dtype=BFLOAT16, precision="fp8")
    count = []
    for name in ("quantise_rows", "quantise_transposed"):
        made = getattr(experts8, name)
        monkeypatch.setattr(
            experts8, name, lambda *given, made=made, **named: (count.append(made), made(*given, **named))[1]
        )
    optimizer = torch.optim.AdamW(mixture.parameters(), lr=1e-3)
    for _ in range(2):
        count.clear()
        for _ in range(3):
            x = torch.randn(500, 512, device=DEVICE, dtype=BFLOAT16, requires_grad=True)
            mixture(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        # Up and gate, in one tensor, and down, each by rows and by the rows of its transpose.
        assert len(count) == 4


def test_under_autocast() -> None:
    mixture = fl.FusedMoE(512, 256, 8, 2, device=DEVICE, precision="fp8")
    x = torch.randn(512, 512, device=DEVICE, requires_grad=True)
    with torch.autocast("cuda", BFLOAT16), decisions() as taken:
        y = mixture(x)
    assert taken == {"moe_ffn float8": 1}
    y.float().square().mean().backward()
    assert mixture.experts.down_proj.grad is not None
    assert mixture.experts.down_proj.grad.dtype == torch.float32


@pytest.mark.parametrize("tokens", [16384, 64])
def test_auto_mode_takes_8_bits_for_many_rows_alone(tokens: int) -> None:
    mixture = fl.FusedMoE(2048, 4096, 4, 2, device=DEVICE, dtype=BFLOAT16, precision="fp8")
    x = torch.randn(tokens, 2048, device=DEVICE, dtype=BFLOAT16)
    with switched({"FUSEDLAYERS_BACKEND": "auto"}), decisions() as taken:
        mixture(x)
    assert (set(taken) == {"moe_ffn float8"}) == (tokens > 64), taken


def test_a_model_of_transformers() -> None:
    """Its experts run in 8 bits, its loss and gradients stay close, and restore is exact."""
    transformers = pytest.importorskip("transformers")
    configuration = transformers.MixtralConfig(
        hidden_size=512, intermediate_size=1024, num_hidden_layers=2, num_attention_heads=8, num_key_value_heads=2,
        num_local_experts=8, vocab_size=2048,
    )  # fmt: skip
    model = transformers.MixtralForCausalLM(configuration).to(DEVICE, BFLOAT16)
    tokens = torch.randint(2048, (2, 512), device=DEVICE)

    def step() -> tuple[Tensor, list[Tensor]]:
        loss = model(input_ids=tokens, labels=tokens).loss
        return loss.detach(), list(torch.autograd.grad(loss, list(model.parameters())))

    with torch.no_grad():
        logits = model(input_ids=tokens).logits
    loss, _ = step()
    report = fl.replace(model, precision="fp8", norm=False, loss=False)
    assert sum(entry.reason.endswith("; fp8") for entry in report.replaced if "experts" in entry.path) == 2
    with decisions() as taken:
        in_8_bits_, found = step()
    assert taken["moe_ffn float8"] == 2
    assert abs(float(in_8_bits_ / loss) - 1) < 0.01
    assert all(each.isfinite().all() for each in found)
    fl.restore(model)
    with torch.no_grad():
        assert torch.equal(model(input_ids=tokens).logits, logits)


def test_values_are_those_of_rows() -> None:
    """What is copied to experts is what was quantised as tokens."""
    x, rows = torch.randn(300, 208, device=DEVICE, dtype=BFLOAT16), routed("skewed", 300)
    values = quantise_rows(x)
    xs, _ = kernels.spread(values, None, rows)
    sorted_x, _ = kernels.spread(x, None, rows)
    used = slice(0, int(rows.starts[-1]))
    assert torch.equal(dequantised(xs)[used], dequantised(quantise_rows(sorted_x))[used])
