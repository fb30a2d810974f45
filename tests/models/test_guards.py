"""A replaced model under torch.compile costs no more than the model without this library: guards, graphs, results."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch._dynamo
import torch.nn.functional as F
from functorch.compile import make_boxed_func
from torch import Tensor, nn
from torch._dynamo import guards as dynamo_guards
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.testing import CompileCounter

from fusedlayers import FusedFFN, SplitKLinear, replace, restore
from fusedlayers.replacing.ffn.blocks import FusedBlock
from fusedlayers.replacing.loss import FusedLossHead
from tests.support.ffn_blocks import mlp

transformers = pytest.importorskip("transformers")

# How many guards more a block may cost than without this library.
MORE = 10


class WrittenFFN(nn.Module):
    """What :class:`FusedFFN` computes, as one would write it."""

    def __init__(self) -> None:
        super().__init__()
        self.up_proj, self.down_proj = nn.Linear(6, 10), nn.Linear(10, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.gelu(self.up_proj(x)))


def text_model(name: str, config: str, **options: Any) -> nn.Module:
    model: nn.Module = getattr(transformers, name)(
        getattr(transformers, config)(vocab_size=31, attn_implementation="eager", use_cache=False, **options)
    )
    return model


def bert(layers: int = 2) -> nn.Module:
    sizes = {"hidden_size": 12, "num_attention_heads": 2, "intermediate_size": 20}
    return text_model("BertModel", "BertConfig", num_hidden_layers=layers, **sizes)


def llama(layers: int = 2) -> nn.Module:
    sizes = {"hidden_size": 12, "num_attention_heads": 2, "intermediate_size": 20, "num_hidden_layers": layers}
    return text_model("LlamaForCausalLM", "LlamaConfig", num_key_value_heads=2, **sizes)


def gpt2(layers: int = 2) -> nn.Module:
    # Its own activation is written out in Python; here one operation of torch stands for it, which rounds otherwise.
    return text_model("GPT2Model", "GPT2Config", n_embd=12, n_head=2, n_layer=layers, activation_function="gelu")


def encoder(layers: int = 2) -> nn.Module:
    layer = nn.TransformerEncoderLayer(6, 2, 10, batch_first=True)
    return nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)


# For a number of layers.
MODELS: dict[str, Callable[[int], nn.Module]] = {
    "bert": bert,
    "llama": llama,
    "gpt2": gpt2,
    "encoder": encoder,
    "sequence": lambda layers: mlp(p=0.1),
}

# The first linear of a block of each.
UPS = {
    "bert": "encoder.layer.0.intermediate.dense",
    "llama": "model.layers.0.mlp.up_proj",
    "gpt2": "h.0.mlp.c_fc",
    "encoder": "layers.0.linear1",
    "sequence": "0",
}


def few(*chosen: str) -> list[object]:
    """The names of all models, most of them for `make test-full`: compiling takes long."""
    return [name if name in chosen else pytest.param(name, marks=pytest.mark.full) for name in MODELS]


# A model of transposed weights and a plain sequence; tests/models/test_transformed.py compiles blocks of linears.
FEW = few("gpt2", "sequence")


def input_of(model: nn.Module) -> Tensor:
    embedded = any(isinstance(module, nn.Embedding) for module in model.modules())
    return torch.arange(14).view(2, 7) if embedded else torch.linspace(-1, 1, 84).view(2, 7, 6)


def result_of(model: Callable[[Tensor], Any], x: Tensor) -> Tensor:
    found = model(x)
    return found if isinstance(found, Tensor) else found[0]


def pair(name: str) -> tuple[nn.Module, nn.Module]:
    """A model of one layer, and the same one replaced."""
    torch.manual_seed(0)
    model = MODELS[name](1)
    replaced = copy.deepcopy(model)
    replace(replaced)
    return model, replaced


def blocks_of(model: nn.Module) -> int:
    kinds = (FusedBlock, FusedFFN, FusedLossHead, SplitKLinear)
    return sum(isinstance(module, kinds) for module in model.modules())


@contextmanager
def counted_guards() -> Iterator[list[int]]:
    """How many guards each graph has that is compiled meanwhile."""
    counts: list[int] = []
    original = dynamo_guards.CheckFunctionManager.__init__

    def leaves(manager: Any) -> int:
        # Those of a dictionary have their children in pairs besides.
        pairs = manager.get_key_value_managers().values() if hasattr(manager, "get_key_value_managers") else ()
        children = [*manager.get_child_managers(), *(child for pair in pairs for child in pair if child is not None)]
        return len(manager.get_leaf_guards()) + sum(map(leaves, children))

    def counting(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        counts.append(leaves(self.guard_manager.root))

    dynamo_guards.CheckFunctionManager.__init__ = counting  # type: ignore[method-assign]
    try:
        yield counts
    finally:
        dynamo_guards.CheckFunctionManager.__init__ = original  # type: ignore[method-assign]


def guards_of(model: nn.Module, backend: str = "eager") -> int:
    torch._dynamo.reset()
    with counted_guards() as counts:
        torch.compile(model, backend=backend, fullgraph=True)(input_of(model))
    [count] = counts
    return count


def operations_of(model: nn.Module) -> Counter[str]:
    """The operations of the forward and the backward graph of a compiled training step."""
    found: Counter[str] = Counter()

    def counting(graph: torch.fx.GraphModule, example_inputs: object) -> Any:
        found.update(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return make_boxed_func(graph.forward)

    torch._dynamo.reset()
    compiled = torch.compile(model, backend=aot_autograd(fw_compiler=counting, bw_compiler=counting), fullgraph=True)
    result_of(compiled, input_of(model)).sum().backward()
    return found


@pytest.mark.sampled
@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("name", few("bert", "gpt2", "sequence"))
def test_a_replaced_model_has_hardly_more_guards(name: str, train: bool) -> None:
    # Methods of a class are guarded once, for all of its blocks; a real model has more than two.
    model = MODELS[name]({"bert": 6, "encoder": 4}.get(name, 2))
    without = guards_of(model.train(train))
    replace(model)
    assert guards_of(model) <= without + MORE * blocks_of(model)


@pytest.mark.full
def test_more_layers_add_fewer_guards_than_the_bound() -> None:
    models = [bert(1), bert(2)]
    without = [guards_of(model.eval()) for model in models]
    for model in models:
        replace(model)
    one, two = (guards_of(model) - count for model, count in zip(models, without, strict=True))
    assert two - one <= MORE


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_modules_have_hardly_more_guards(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    without = guards_of(WrittenFFN())
    monkeypatch.setenv("FUSEDLAYERS_BACKEND", backend)
    assert guards_of(FusedFFN(6, 10)) <= without + MORE


def test_a_split_k_linear_has_hardly_more_guards() -> None:
    assert guards_of(SplitKLinear(6, 6)) <= guards_of(nn.Linear(6, 6)) + MORE


def without_dropout_of_the_hidden(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoderLayer):
            module.dropout.p = 0.0
        elif isinstance(module, nn.Sequential):
            module[2].p = 0.0


@pytest.mark.sampled
@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("name", FEW)
def test_the_compiler_sees_the_same_operations(name: str, train: bool) -> None:
    model, replaced = pair(name)
    for each in (model, replaced):
        # What the dropout of a fused hidden runs are not torch's operations.
        without_dropout_of_the_hidden(each)
    theirs, ours = operations_of(model.train(train)), operations_of(replaced.train(train))
    # Less: the copies that idle dropouts make. More: weights laid out [in, out] are seen transposed, twice, for free.
    assert set(theirs - ours) <= {"aten.clone.default"}
    assert set(ours - theirs) <= ({"aten.t.default"} if name == "gpt2" else set())


@pytest.mark.parametrize("name", FEW)
def test_changes_compile_anew(name: str) -> None:
    _, model = pair(name)
    model.eval()
    counter, x = CompileCounter(), input_of(model)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    for _ in range(2):
        result_of(compiled, x)
    assert counter.frame_count == 1
    model.train()
    result_of(compiled, x)
    assert counter.frame_count == 2
    model.eval()
    result_of(compiled, x)
    assert counter.frame_count == 2
    holder, _, last = UPS[name].rpartition(".")
    old = model.get_submodule(UPS[name])
    setattr(model.get_submodule(holder), last, Tripled(old))
    y = result_of(compiled, x)
    assert counter.frame_count == 3
    restore(model)
    torch.testing.assert_close(y, result_of(model, x))


class Tripled(nn.Linear):
    """A linear that is more than one, as LoRA's are."""

    def __init__(self, like: nn.Module) -> None:
        rows, columns = like.weight.shape if isinstance(like, nn.Linear) else like.weight.shape[::-1]
        super().__init__(columns, rows)

    def forward(self, x: Tensor) -> Tensor:
        return 3 * super().forward(x)


@pytest.mark.parametrize("name", FEW)
def test_after_restore_the_original_is_compiled(name: str) -> None:
    model, replaced = pair(name)
    without = guards_of(model.eval())
    guards_of(replaced.eval())
    restore(replaced)
    assert guards_of(replaced) == without


def test_options_of_a_module_compile_anew() -> None:
    ffn, counter, x = FusedFFN(6, 10, dropout=0.5).eval(), CompileCounter(), torch.ones(2, 6)
    torch._dynamo.reset()
    compiled = torch.compile(ffn, backend=counter, fullgraph=True)
    compiled(x)
    ffn.activation = "relu"
    torch.testing.assert_close(compiled(x), ffn(x))
    ffn.recompute = True
    compiled(x)
    ffn.up_proj.weight = nn.Parameter(torch.ones(10, 6, dtype=torch.float32) / 3)
    torch.testing.assert_close(compiled(x), ffn(x))
    ffn.up_proj.forward = lambda x: F.linear(x, ffn.up_proj.weight) * 2  # type: ignore[method-assign]
    torch.testing.assert_close(compiled(x), ffn(x))
    assert counter.frame_count == 4
    ffn.train()
    compiled(x)
    assert counter.frame_count == 5


@pytest.mark.parametrize("activation", [nn.GELU(), nn.LeakyReLU()])
def test_options_of_an_activation_compile_anew(activation: nn.Module) -> None:
    model, x = mlp(activation), torch.linspace(-3, 3, 12).view(2, 6)
    replace(model)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    before = compiled(x)
    if isinstance(activation, nn.GELU):
        activation.approximate = "tanh"
    else:
        activation.negative_slope = 0.5
    after = compiled(x)
    assert not torch.equal(before, after)
    torch.testing.assert_close(after, model(x))
