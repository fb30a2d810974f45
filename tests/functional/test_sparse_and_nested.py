"""Sparse and nested tensors: an error that names the argument, or what torch's own expression computes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import fusedlayers as fl
from fusedlayers import functional, reference
from tests.support.operands import needs_kernels

pytestmark = [
    pytest.mark.filterwarnings("ignore:Sparse .* tensor support"),
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning"),
]


def drawn(*shape: int) -> Tensor:
    return torch.randint(-2, 3, shape).float()


# The public functions, with every tensor that they take.
CALLS: dict[str, tuple[str, Callable[[], dict[str, Tensor]]]] = {
    "ffn": (
        "ffn",
        lambda: {
            "x": drawn(4, 6), "w_up": drawn(8, 6), "w_down": drawn(6, 8), "b_up": drawn(8), "b_down": drawn(6),
            "w_gate": drawn(8, 6), "b_gate": drawn(8), "residual": drawn(4, 6), "dropout_seed": torch.tensor([5]),
        },
    ),
    "gemm_gemm": ("gemm_gemm", lambda: {"a": drawn(4, 6), "b": drawn(6, 5), "c": drawn(5, 3)}),
    "batched gemm_gemm": ("gemm_gemm", lambda: {"a": drawn(2, 4, 6), "b": drawn(2, 6, 5), "c": drawn(2, 5, 3)}),
    "gemm_reduce": (
        "gemm_reduce",
        lambda: {
            "a": drawn(4, 6), "b": drawn(6, 5), "bias": drawn(5), "mask": torch.ones(4, dtype=torch.bool),
            "lengths": torch.tensor(3),
        },
    ),
    "maxsim": (
        "maxsim",
        lambda: {
            "queries": drawn(2, 3, 6), "documents": drawn(2, 5, 6),
            "query_mask": torch.ones(2, 3, dtype=torch.bool), "document_mask": torch.ones(2, 5, dtype=torch.bool),
        },
    ),
    "packed maxsim": (
        "maxsim",
        lambda: {
            "queries": drawn(6, 6), "documents": drawn(10, 6),
            "cu_seqlens_queries": torch.tensor([0, 6]), "cu_seqlens_documents": torch.tensor([0, 10]),
        },
    ),
    "linear_cross_entropy": (
        "linear_cross_entropy",
        lambda: {
            "input": drawn(4, 6), "linear_weight": drawn(5, 6), "target": torch.arange(4), "linear_bias": drawn(5),
            "weight": torch.ones(5),
        },
    ),
    "linear_log_probs": (
        "linear_log_probs",
        lambda: {
            "input": drawn(4, 6), "linear_weight": drawn(5, 6), "target": torch.arange(4), "linear_bias": drawn(5),
        },
    ),
    "lora_ffn": (
        "lora_ffn",
        lambda: {
            "x": drawn(4, 6), "w_up": drawn(8, 6), "w_down": drawn(6, 8), "up_a": drawn(2, 6), "up_b": drawn(8, 2),
        },
    ),
    "linear": ("linear", lambda: {"x": drawn(4, 6), "weight": drawn(8, 6), "bias": drawn(8)}),
    "weight_gradient": ("weight_gradient", lambda: {"dy": drawn(4, 6), "x": drawn(4, 5)}),
    "hidden_gradient": (
        "hidden_gradient",
        lambda: {"dy": drawn(4, 6), "w_down": drawn(6, 8), "z": drawn(4, 8), "z_gate": drawn(4, 8)},
    ),
}  # fmt: skip
# What torch's own expressions take, in compressed rows.
WORKING = {
    *(("ffn", name) for name in ("x", "w_up", "w_down", "w_gate", "residual")),
    *(("gemm_gemm", name) for name in "abc"),
    *(("gemm_reduce", name) for name in "ab"),
    *(("linear", name) for name in ("x", "weight")),
    *(("linear_cross_entropy", name) for name in ("input", "linear_weight")),
    *(("linear_log_probs", name) for name in ("input", "linear_weight")),
    *(("lora_ffn", name) for name in ("x", "w_up", "w_down")),
    ("weight_gradient", "x"),
    *(("hidden_gradient", name) for name in ("dy", "w_down")),
}
# What is computed of a sparse x: the operations, and the name that it has there.
OF_X = {
    "ffn": "x", "linear": "x", "lora_ffn": "x", "weight_gradient": "x", "linear_cross_entropy": "input",
    "linear_log_probs": "input", "gemm_gemm": "a", "gemm_reduce": "a",
}  # fmt: skip
EVERY = [(name, tensor) for name, (_, make) in CALLS.items() for tensor in make()]


def call(name: str, changed: dict[str, Tensor], module: object = functional) -> object:
    function = CALLS[name][0]
    options = {"activation": "relu"} if function == "hidden_gradient" else {}
    if module is reference:
        changed = {key: tensor for key, tensor in changed.items() if key != "dropout_seed"}
    return getattr(module, function)(**changed, **options)


def flat(found: object) -> list[Tensor]:
    return [tensor for tensor in (found if isinstance(found, tuple) else (found,)) if tensor is not None]


@pytest.mark.parametrize("layout", ["jagged", "strided"])
@pytest.mark.parametrize(("name", "role"), EVERY)
def test_nested_tensors_are_refused_by_name(name: str, role: str, layout: str) -> None:
    """Also where a plain call is on record, which torch's own comparison would end the process for."""
    tensors = CALLS[name][1]()
    for _ in range(3):
        call(name, tensors)
    parts = [tensors[role].new_ones(3, 6), tensors[role].new_ones(5, 6)]
    tensors[role] = torch.nested.nested_tensor(parts, layout=getattr(torch, layout))
    with pytest.raises(TypeError, match=rf"^{role} is a nested tensor \(torch.{layout}\): expected a plain tensor"):
        call(name, tensors)


@pytest.mark.parametrize("layout", ["sparse_coo", "sparse_csr"])
@pytest.mark.parametrize(("name", "role"), EVERY)
def test_sparse_tensors_are_computed_with_or_refused_by_name(name: str, role: str, layout: str) -> None:
    """Also after a dense call of the same sizes, which is not taken for them."""
    tensors = CALLS[name][1]()
    for _ in range(3):
        expected = call(name, tensors)
    dense = tensors[role]
    if layout == "sparse_csr" and dense.dim() != 2:
        pytest.skip("compressed rows are rows of a matrix")
    tensors[role] = dense.to_sparse() if layout == "sparse_coo" else dense.to_sparse_csr()
    try:
        found = call(name, tensors)
    except TypeError as error:
        assert str(error).startswith(f"{role} of shape {list(dense.shape)}")  # noqa: PT017
        assert f"has the layout torch.{layout}: expected torch.strided" in str(error)  # noqa: PT017
        assert layout == "sparse_coo" or (name, role) not in WORKING
    else:
        for one, other in zip(flat(found), flat(expected), strict=True):
            torch.testing.assert_close(one.to_dense(), other)


@pytest.mark.parametrize("wanted", [False, True], ids=["x alone", "its gradient, too"])
@pytest.mark.parametrize("layout", ["sparse_coo", "sparse_csr", "sparse_csc"])
@pytest.mark.parametrize("name", OF_X)
def test_gradients_beside_a_sparse_x_are_those_of_a_dense_one(name: str, layout: str, wanted: bool) -> None:
    tensors, role = CALLS[name][1](), OF_X[name]
    dense = tensors.pop(role)
    # The weights of classes have no gradient.
    leaves = {key: t.requires_grad_() for key, t in tensors.items() if t.is_floating_point() and key != "weight"}
    found = []
    for x in (dense, dense.to_sparse(layout=getattr(torch, layout))):
        x = x.detach().clone().requires_grad_(wanted)
        given = [*leaves.values(), *([x] if wanted else [])]
        results = [result for result in flat(call(name, {**tensors, role: x})) if result.requires_grad]
        upstream = [torch.arange(result.numel(), dtype=result.dtype).reshape(result.shape) for result in results]
        gradients = torch.autograd.grad(results, given, upstream, allow_unused=True)
        found.append([None if each is None else each.to_dense() for each in gradients])
    torch.testing.assert_close(found[1], found[0])


@needs_kernels
def test_no_kernel_is_chosen_for_a_sparse_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSEDLAYERS_BACKEND", "triton")
    x, w_up, w_down = drawn(4, 6), drawn(8, 6), drawn(6, 8)
    functional.ffn(x, w_up, w_down)
    with pytest.raises(RuntimeError, match=r"an operand is a tensor of layout torch\.sparse_csr"):
        functional.ffn(x, w_up.to_sparse_csr(), w_down)


@pytest.mark.parametrize("make", [lambda: fl.FusedFFN(6, 8, gated=True), lambda: fl.SplitKLinear(6, 8)])
def test_modules_take_them(make: Callable[[], torch.nn.Module]) -> None:
    module = make()
    parts = [drawn(3, 6), drawn(5, 6)]
    for _ in range(3):
        dense = module(parts[0])
    for layout in (torch.jagged, torch.strided):
        found = module(torch.nested.nested_tensor(parts, layout=layout))
        for one, part in zip(found.unbind(), parts, strict=True):
            torch.testing.assert_close(one, module(part))
    torch.testing.assert_close(module(parts[0].to_sparse()), dense)
    linear = getattr(module, "up_proj", module)
    linear.weight = torch.nn.Parameter(linear.weight.detach().to_sparse_csr())
    torch.testing.assert_close(module(parts[0]), dense)


def test_late_interaction_names_its_argument() -> None:
    nested = torch.nested.nested_tensor([drawn(3, 6), drawn(5, 6)], layout=torch.jagged)
    with pytest.raises(TypeError, match=r"^documents is a nested tensor"):
        fl.MaxSim()(drawn(2, 3, 6), nested)
