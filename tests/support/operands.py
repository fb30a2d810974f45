"""Inputs for the tests of the operations, the device and dtypes of the kernels here, and the choice of a path."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fusedlayers import planning, reference
from fusedlayers.closeness import compare_draws
from fusedlayers.devices import describe
from fusedlayers.functional import dispatch, operation
from fusedlayers.functional.ffn import FFN
from fusedlayers.functional.recalling import ModuleCalls, Recalled
from fusedlayers.kernels.device import interpreted
from fusedlayers.kernels.dropout import draw_seed

# A CUDA device where kernels reach it; else the CPU, on which the interpreter runs them.
DEVICE = torch.device("cuda" if torch.cuda.is_available() and not interpreted() else "cpu")
ON_GPU = DEVICE.type == "cuda"
# The interpreter is wrong for bfloat16.
DTYPES = [torch.float32, torch.float16, *([torch.bfloat16] if ON_GPU else [])]
needs_kernels = pytest.mark.skipif(not describe(DEVICE).triton, reason="no GPU, and Triton's interpreter is off")
# NumPy, which computes under the interpreter, warns where IEEE arithmetic overflows on the way to a right result.
infinities = pytest.mark.filterwarnings("ignore:(overflow|invalid value|divide by zero) encountered:RuntimeWarning")
PATHS = [pytest.param("kernels", marks=needs_kernels), "chunked", "torch"]
EPILOGUE = pytest.param("epilogue", marks=needs_kernels)
# The criterion's sizes; a GPU is quick enough for the larger ones.
SIZES = [0, 1, 2, 3, 15, 16, 17, 31, 33, 63, 65, *([127, 129, 431, 767] if ON_GPU else [])]
# Rows of a chunk on the chunked path: no test's row count is a multiple of it.
CHUNK_ROWS = 7

LOSSES = ("linear_cross_entropy", "linear_log_probs")
BIASES = ("b_up", "b_down", "b_gate")
Tensors = Mapping[str, Tensor | None]


@contextmanager
def on_path(
    path: str,
    chunk_rows: int | None = CHUNK_ROWS,
    recompute: bool = False,
    torch_multiplies: bool = False,
    **facts: Any,
) -> Iterator[dict[str, Any]]:
    """Sends every call to one path, and yields the options of ``ffn`` that this takes. A call elsewhere fails.

    The epilogue path takes what no fused kernel can hold: here everything, so that small tensors reach it, too; its
    products are those of its kernels, or where ``torch_multiplies`` those of torch. The reassociated path takes what
    it can, whatever the sizes and the dtype.
    ``recompute`` keeps the kernels from storing what is hidden in their backward pass. ``facts`` change what the
    planner knows of the device: its SMs, whether sm90 kernels run on it.
    """

    fused, in_triton = path.replace("kernels", "fused"), path in ("kernels", "epilogue")

    def plan(problem: planning.Problem, device: planning.Device, wish: str) -> planning.Plan:
        # What failed the self-test on this machine is not what a test means to leave out.
        made = planning.plan(problem, replace(device, **{"avoided": frozenset(), **facts}), wish)
        # The loss of a whole model has paths of its own.
        taken = (made.path != "torch") is in_triton if problem.operation in LOSSES else made.path == fused
        assert problem.empty or taken, made
        return made

    with pytest.MonkeyPatch.context() as patch:
        backend = "auto" if path == "reassociated" else "triton" if in_triton else "torch"
        patch.setenv("FUSEDLAYERS_BACKEND", backend)
        if path == "reassociated":
            patch.setattr(planning.reassociating, "why_not", lambda *given: None)
        if path == "epilogue":
            patch.setattr(planning.gemm_gemm, "why_unsupported", lambda problem, device: "too wide")
            for name in ("torch_multiplies_hidden", "torch_multiplies_gradient"):
                patch.setattr(planning.ffn_epilogue, name, lambda problem, device: torch_multiplies)
        # Without the caches: no plan made here outlives the test, and none made before or under another patch is used.
        patch.setattr(dispatch, "_cached_plan", plan)
        recall_nothing(patch)
        if chunk_rows is not None:
            patch.setattr(planning.ffn_chunked, "plan", lambda problem, *rest: small_chunks(problem, chunk_rows))
        yield {"recompute": recompute or path == "chunked"}


def patch_ffn(patch: pytest.MonkeyPatch, function: Callable[..., Any]) -> None:
    """From here on ``function`` gets every call of ``functional.ffn``, by name, those of modules too.

    Inside of it ``functional.ffn`` is what it was. So are calls that a module would rather compute itself than let
    torch run them.
    """
    own = FFN.call
    names = (*FFN.tensor_names, *FFN.option_names)
    inside: list[bool] = []

    def call(tensors: Any, options: tuple[Any, ...], **how: Any) -> Any:
        if inside:
            return own(tensors, options, **how)
        inside.append(True)
        try:
            return function(**dict(zip(names, (*tensors, *options), strict=True)))
        finally:
            inside.clear()

    patch.setattr(FFN, "call", call)
    patch.setattr(ModuleCalls, "recall", lambda *given: None)


def recall_nothing(patch: pytest.MonkeyPatch) -> None:
    """From here on every call is checked and planned anew, and no later test finds one of these calls."""
    patch.setattr(Recalled, "find", lambda *given: None)
    patch.setattr(Recalled, "add", lambda *given: None)
    patch.setattr(ModuleCalls, "recall", lambda *given: None)


def forget_calls() -> None:
    """Forgets all calls that were prepared."""
    operation.CALLS.clear()


def small_chunks(
    problem: planning.Problem, rows: int, columns: int | None = None, hidden_columns: int | None = None
) -> planning.ChunkPlan:
    """Chunks of ``rows`` tokens, and groups of ``columns`` hidden units, or of two thirds of them.

    The hidden of ``hidden_columns`` of them at a time, or of as many as fit, lies in dx, if it can; else that of all.
    """
    if not problem.training:
        return planning.ChunkPlan(rows, 0, 0, False, 0, 0)
    columns = columns or -(-2 * problem.N // 3)
    hidden_columns = min(columns, hidden_columns or problem.K)
    hidden_in_dx = problem.needs_data_gradient and problem.element_bytes == 2 and hidden_columns <= problem.K
    return planning.ChunkPlan(rows, columns, hidden_columns if hidden_in_dx else columns, hidden_in_dx, rows, 0)


def ffn_inputs(
    leading: tuple[int, ...] | int,
    K: int,
    N: int,
    O: int,
    dtype: torch.dtype = torch.float32,
    *,
    gated: bool = False,
    biases: tuple[str, ...] = BIASES,
    residual: bool = False,
    device: torch.device = DEVICE,
    draw: Callable[..., Tensor] = torch.randn,
) -> dict[str, Tensor | None]:
    """The tensors of one ``ffn`` call by name: x ~ N(0, 1) and weights / √fan_in, unless ``draw`` gives integers."""
    leading = (leading,) if isinstance(leading, int) else leading

    def tensor(*shape: int, fan_in: int = 1) -> Tensor:
        values = draw(*shape, dtype=torch.float64)
        values = values / max(fan_in, 1) ** 0.5 if draw is torch.randn else values
        return values.to(device, dtype)

    return {
        "x": tensor(*leading, K),
        "w_up": tensor(N, K, fan_in=K),
        "w_down": tensor(O, N, fan_in=N),
        "b_up": tensor(N) if "b_up" in biases else None,
        "b_down": tensor(O) if "b_down" in biases else None,
        "w_gate": tensor(N, K, fan_in=K) if gated else None,
        "b_gate": tensor(N) if gated and "b_gate" in biases else None,
        "residual": tensor(*leading, O) if residual else None,
    }


def integers(density: float) -> Callable[..., Tensor]:
    """A ``draw`` of integers from -2 to 2, a share of ``1 - density`` of them replaced by 0."""

    def draw(*shape: int, dtype: torch.dtype) -> Tensor:
        return (torch.randint(-2, 3, shape) * (torch.rand(shape) < density)).to(dtype)

    return draw


# Sums of products of these stay exact: up to 2^24, 2^11 and 2^8 in the three dtypes.
INTEGERS = {torch.float32: integers(1.0), torch.float16: integers(0.5), torch.bfloat16: integers(0.15)}


def in_eighths(deviation: float) -> Callable[..., Tensor]:
    """Draws normal numbers rounded to eighths, with a standard deviation of so many.

    Sums of their products are exact in every dtype as long as they are small. Where a derivative jumps, at the limit of
    a clamp or between two values of which one is the largest, no rounding error decides which side it is.
    """

    def draw(*shape: int, dtype: torch.dtype) -> Tensor:
        return torch.randn(*shape, dtype=dtype).mul(deviation).round().div(8)

    return draw


def like_result(inputs: Tensors, draw: Callable[..., Tensor] = torch.randn) -> Tensor:
    """A random upstream gradient for the result of ``ffn(**inputs)``."""
    x, w_down = inputs["x"], inputs["w_down"]
    assert x is not None
    assert w_down is not None
    return draw(*x.shape[:-1], w_down.shape[0], dtype=torch.float64).to(x.device, x.dtype)


def in_float64(tensors: Tensors) -> dict[str, Tensor | None]:
    return {name: None if tensor is None else tensor.double() for name, tensor in tensors.items()}


def leaves(tensors: Tensors, frozen: tuple[str, ...] = ()) -> dict[str, Tensor | None]:
    """The same memory as leaves of a new graph that require a gradient, but for the frozen ones."""
    return {
        name: None if tensor is None else tensor.detach().requires_grad_(name not in frozen)
        for name, tensor in tensors.items()
    }


def results(
    call: Callable[..., Tensor], tensors: Tensors, dy: Tensor, frozen: tuple[str, ...] = (), **options: Any
) -> dict[str, Tensor | None]:
    """y, and the gradient of every tensor that is not frozen, as ``dx``, ``dw_up`` ..., for the gradient dy of y."""
    inputs = leaves(tensors, frozen)
    y = call(**inputs, **options)
    y.backward(dy)
    gradients = {f"d{name}": tensor.grad for name, tensor in inputs.items() if tensor is not None}
    return {"y": y.detach()} | gradients


def seed_after(manual_seed: int) -> Tensor:
    """The dropout seed that the next call draws after ``torch.manual_seed``, which is called."""
    torch.manual_seed(manual_seed)
    seed = draw_seed(DEVICE)
    torch.manual_seed(manual_seed)
    return seed


def assert_equal(ours: Tensors, theirs: Tensors) -> None:
    """The same names, None at the same ones, and the same values bit for bit (0 and -0 are one)."""
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        other = theirs[name]
        assert (tensor is None) == (other is None), name
        if tensor is not None and other is not None:
            assert (tensor.shape, tensor.dtype) == (other.shape, other.dtype), name
            different = int((tensor != other).sum())
            assert not different, f"{name}: {different} of {tensor.numel()} elements differ"


def assert_ffn_close(
    call: Callable[..., Tensor],
    *draws: Tensors,
    options: Mapping[str, Any],
    frozen: tuple[str, ...] = (),
    manual_seed: int | None = None,
    **arithmetic: Any,
) -> None:
    """y and all gradients of ``call`` pass the closeness rule; ``options`` are for the call alone.

    Several draws of inputs of one size are judged together: in a few elements of a single draw torch's own error may
    happen to be far below what it usually is. What fails is judged again by as many other draws. ``manual_seed`` goes
    to torch before each call, and the references replay the mask that follows from it.
    """

    def compared(inputs: Tensors) -> tuple[Tensors, Tensors, Tensors]:
        dy = like_result(inputs)
        replay = {} if manual_seed is None else {"seed": seed_after(manual_seed)}
        ours = results(call, inputs, dy, frozen, **arithmetic, **options)
        theirs = results(reference.ffn, inputs, dy, frozen, **arithmetic, **replay)
        return ours, theirs, results(reference.ffn, in_float64(inputs), dy.double(), frozen, **arithmetic, **replay)

    x, w_up = draws[0]["x"], draws[0]["w_up"]
    assert x is not None
    assert w_up is not None
    # What is dropped has no error.
    hidden = x.shape[:-1].numel() * w_up.shape[0] * (1 - arithmetic.get("dropout_p", 0.0))
    found = [compared(inputs) for inputs in draws]
    assert_draws_close(found, independent=round(hidden), again=(compared(mixed(inputs)) for inputs in draws))


def mixed(tensors: Tensors) -> dict[str, Tensor | None]:
    """Another draw of the same distributions: each tensor's numbers in other places."""

    def mixed(tensor: Tensor) -> Tensor:
        places = torch.randperm(tensor.numel()).to(tensor.device)
        return tensor.detach().flatten()[places].view(tensor.shape)

    return {name: None if tensor is None else mixed(tensor) for name, tensor in tensors.items()}


def assert_draws_close(
    found: Sequence[tuple[Tensors, Tensors, Tensors]],
    independent: int | None = None,
    computed_in: torch.dtype | None = None,
    again: Iterable[tuple[Tensors, Tensors, Tensors]] = (),
) -> None:
    """Ours, torch's and the float64 results of several draws pass the closeness rule together.

    The draws ``again`` judge again what fails in these; an iterator of them is not run where nothing does.
    ``independent`` is that of one draw: see :func:`fusedlayers.closeness.compare`, as for ``computed_in``.
    """
    verdicts = compare_draws(found, independent=independent, computed_in=computed_in)
    if not all(verdict.ok for verdict in verdicts.values()):
        verdicts = compare_draws(found, again=again, independent=independent, computed_in=computed_in)
    red = [verdict.message for verdict in verdicts.values() if not verdict.ok]
    assert not red, "\n".join(red)


def assert_close_or_again(
    compared: Callable[[int], tuple[Tensors, Tensors, Tensors]], computed_in: torch.dtype | None = None
) -> None:
    """Ours, torch's and the float64 results of draw 0 pass the closeness rule, judged again by draw 1 if need be.

    For what takes long and has so many results that one of them may be over a limit by chance.
    """
    assert_draws_close([compared(0)], again=(compared(draw) for draw in (1,)), computed_in=computed_in)


def saved(call: Callable[[], object], *known: Tensor | None) -> list[Tensor]:
    """The tensors that autograd keeps for the backward pass of a call, but for those at the addresses of ``known``."""
    kept: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        return kept.setdefault(tensor.data_ptr(), tensor)

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        call()
    given = {tensor.data_ptr() for tensor in known if tensor is not None}
    return [tensor for place, tensor in kept.items() if place not in given]


class Allocations(TorchDispatchMode):
    """Records the element count of every tensor that torch operations return while it is entered.

    Also inside of our own operations, which other dispatch modes see as one.
    """

    def __init__(self) -> None:
        super().__init__()
        self.elements: list[int] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN204
        if func.namespace == "fusedlayers":
            name, _, direction = func._opname.rpartition("_")
            inside = operation.OPERATIONS[name].kernel_operation
            with self:
                return getattr(inside, f"_{direction}")(*args)
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(tensor, Tensor):
                self.elements.append(tensor.numel())
        return result
