"""Every activation on the device: value and slope are torch's, from the smallest numbers to the infinite ones."""

import math

import pytest
import torch
from torch import Tensor

from fusedlayers.closeness import assert_close
from fusedlayers.kernels.activations import (
    ACCURACIES,
    ACTIVATIONS,
    ALIASES,
    activate,
    activation_unit,
    canonical_activation,
)
from fusedlayers.kernels.device import tl, triton
from tests.support.operands import DEVICE, infinities, needs_kernels

SPECIAL = [0.0, -0.0, 1e4, -1e4, math.inf, -math.inf, math.nan]


@triton.jit
def _activate_kernel(z_ptr, value_ptr, slope_ptr, count, ACTIVATION: tl.constexpr, ACCURACY: tl.constexpr):  # noqa: ANN001, ANN202
    index = tl.program_id(0) * 128 + tl.arange(0, 128)
    value, slope = activate(tl.load(z_ptr + index, mask=index < count, other=0.0), ACTIVATION, ACCURACY)
    unit = activation_unit(ACTIVATION, ACCURACY)
    tl.store(value_ptr + index, value * unit, mask=index < count)
    tl.store(slope_ptr + index, slope * unit, mask=index < count)


def on_device(z: Tensor, activation: str, accuracy: str = "exact") -> tuple[Tensor, Tensor]:
    """Value and slope by the device function, for float32 z on the kernels' device."""
    value, slope = torch.full_like(z, math.nan), torch.full_like(z, math.nan)
    _activate_kernel[(triton.cdiv(z.numel(), 128),)](
        z, value, slope, z.numel(), ACTIVATION=activation, ACCURACY=accuracy
    )
    return value, slope


def by_torch(z: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    """Value and slope by the torch twin and autograd, in the dtype of z."""
    z = z.clone().requires_grad_()
    value = ACTIVATIONS[activation].torch(z)
    (slope,) = torch.autograd.grad(value.sum(), z)
    return value.detach(), slope


def grid() -> Tensor:
    """Both signs of every magnitude from 1e-30 to 1e4, the region around 0 and the tails densely."""
    magnitudes = torch.logspace(-30, 4, 300, dtype=torch.float64)
    dense = torch.linspace(-12, 12, 2001, dtype=torch.float64)
    return torch.cat((magnitudes, -magnitudes, dense)).float().to(DEVICE)


@needs_kernels
@infinities
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_value_and_slope_are_within_torchs_own_error(activation: str) -> None:
    z = grid()
    ours, theirs, truth = on_device(z, activation), by_torch(z, activation), by_torch(z.double(), activation)
    # Values in groups of one magnitude each: an error near 0 would drown among large values.
    for part in z.abs().argsort().split(128):
        assert_close(
            *(pair[0][part] for pair in (ours, theirs, truth)), name=f"value around z = {z[part[0]].item():.3g}"
        )
    # Slopes only ever scale gradients that are summed, so that the error counts beside the slopes of all usual z.
    z = torch.linspace(-12, 12, 64 * 64, device=DEVICE)[torch.randperm(64 * 64, device=DEVICE)]
    slopes = [pair[1].view(64, 64) for pair in (on_device(z, activation), by_torch(z, activation))]
    assert_close(*slopes, by_torch(z.double(), activation)[1].view(64, 64), name="slope")


@needs_kernels
@infinities
@pytest.mark.parametrize("accuracy", ["exact", "half", pytest.param("coarse", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_special_values_are_torchs(activation: str, accuracy: str) -> None:
    """The expectation is float64's: the float32 gelu of torch's CPU has no value at +inf."""
    z = torch.tensor(SPECIAL, device=DEVICE)
    for ours, truth in zip(on_device(z, activation, accuracy), by_torch(z.double(), activation), strict=True):
        assert torch.equal(ours.isnan(), truth.isnan())
        assert torch.equal(ours.nan_to_num(), truth.float().nan_to_num()), (ours, truth)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_the_gradient_is_autograds(activation: str, dtype: torch.dtype) -> None:
    """Bit for bit, with and without a graph, and so are its derivatives, but for their rounding."""
    act = ACTIVATIONS[activation]
    z = torch.cat((torch.tensor(SPECIAL), 4 * torch.randn(500))).to(DEVICE, dtype).requires_grad_()
    g = torch.randn(z.shape, device=DEVICE).to(dtype).requires_grad_()
    (theirs,) = torch.autograd.grad(act.torch(z), z, g, create_graph=True)
    ours = act.gradient(g, z)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)
    (theirs_alone,) = torch.autograd.grad(act.torch(z), z, g)
    with torch.no_grad():
        torch.testing.assert_close(act.gradient(g, z), theirs_alone, rtol=0, atol=0, equal_nan=True)
    for tensor in (z, g):
        one, other = (
            torch.autograd.grad(found[len(SPECIAL) :].square().sum(), tensor, retain_graph=True, allow_unused=True)[0]
            for found in (ours, theirs)
        )
        assert (one is None) == (other is None)
        assert one is None or torch.allclose(one, other, equal_nan=True)


HUGE = [sign * size for size in (1e4, 65504.0, 1e10, 1e13, 1e15, 1e19, 3e19, 1e30, 3e38) for sign in (1, -1)]


@needs_kernels
@infinities
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("accuracy", ["exact", "half", pytest.param("coarse", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_huge_values_are_torchs(activation: str, accuracy: str, dtype: torch.dtype) -> None:
    """Of every dtype's range: where autograd has a number for the slope, so has the device; both are the true one."""
    rounded = torch.tensor(HUGE, device=DEVICE).to(dtype)
    z = rounded[rounded.isfinite()]
    theirs, truth = by_torch(z, activation), by_torch(z.double(), activation)
    ours = on_device(z.float(), activation, accuracy)
    for one, other, true in zip(ours, theirs, truth, strict=True):
        # The slope of gelu_tanh has a square that torch overflows, too.
        known = ~other.isnan()
        torch.testing.assert_close(one[known], true.float()[known], rtol=1e-6, atol=1e-12)
        assert bool(known.all()) or (activation == "gelu_tanh" and dtype != torch.float16)


@needs_kernels
@infinities
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_half_accuracy_is_under_the_rounding_of_float16(activation: str) -> None:
    z = torch.randn(64, 256, device=DEVICE).mul(2).half().float()
    ours, truth = on_device(z.flatten(), activation, "half"), by_torch(z.double(), activation)
    for name, our, exact in zip(("value", "slope"), ours, truth, strict=True):
        # What the kernels do with both: round to float16 for the next product.
        assert_close(our.view_as(z).half(), exact.half(), exact, name)


@needs_kernels
@pytest.mark.parametrize("accuracy", ["half", pytest.param("coarse", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_the_faster_forms_keep_the_error_they_state(activation: str, accuracy: str) -> None:
    z = torch.linspace(-8, 8, 4097, device=DEVICE)
    for ours, truth in zip(on_device(z, activation, accuracy), by_torch(z.double(), activation), strict=True):
        # relative to what is large: relu2 reaches 64 and rounds in float32
        allowed = ACCURACIES[accuracy] * truth.abs().clamp(min=1.0)
        assert torch.all((ours - truth).abs() <= allowed)


def test_names_lead_to_the_ten_activations() -> None:
    named = "identity relu relu2 gelu gelu_tanh silu quick_gelu tanh sigmoid leaky_relu"
    assert list(ACTIVATIONS) == named.split()
    for name in ACTIVATIONS:
        assert canonical_activation(name) == name == ACTIVATIONS[name].name
    for alias, name in ALIASES.items():
        assert canonical_activation(alias) == name
    assert canonical_activation(None) == "identity"


@pytest.mark.parametrize(
    ("alias", "theirs"),
    [
        ("linear", torch.nn.Identity()),
        ("relu_squared", lambda z: torch.relu(z) ** 2),
        ("gelu_python", torch.nn.GELU()),
        ("gelu_new", lambda z: 0.5 * z * (1 + torch.tanh(math.sqrt(2 / math.pi) * (z + 0.044715 * z**3)))),
        ("gelu_fast", lambda z: 0.5 * z * (1 + torch.tanh(z * 0.7978845608 * (1 + 0.044715 * z * z)))),
        ("gelu_pytorch_tanh", torch.nn.GELU("tanh")),
        ("swish", torch.nn.SiLU()),
        ("quick_gelu", lambda z: z * torch.sigmoid(1.702 * z)),
        ("leaky_relu", torch.nn.LeakyReLU()),
        ("sigmoid", torch.nn.Sigmoid()),
        ("tanh", torch.nn.Tanh()),
    ],
)
def test_a_foreign_name_means_the_foreign_function(alias: str, theirs: torch.nn.Module) -> None:
    z = torch.linspace(-5, 5, 101, dtype=torch.float64)
    torch.testing.assert_close(ACTIVATIONS[canonical_activation(alias)].torch(z), theirs(z))
