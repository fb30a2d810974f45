"""The linear layer whose products may split the axis they sum over: the public function."""

from torch import Tensor

from .. import reference
from ..kernels.activations import canonical_activation
from .linear_arguments import check_linear


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: str | None = None,
    split_k: int | str = "auto",
    reduction: str = "workspace",
) -> Tensor:
    """``act(x Wᵀ + b)``, its inner axis split where few rows and columns would leave most of a GPU idle.

    The partial sums ``x[:, s] W[:, s]ᵀ`` of the ranges s are float32; they are added in a fixed order, bias and
    activation are applied once, and the result is rounded once. The data gradient ``dx = dz W`` sums over N, the
    weight gradient ``dW = dzᵀ x`` over the rows: each has a split of its own.

    Args:
        x: ``[*B, M, K]`` or ``[K]``: any leading dims, any strides.
        weight: ``[N, K]``, ``nn.Linear``'s layout.
        bias: ``[N]`` or None.
        activation: a name of ``fusedlayers.kernels.activations.ACTIVATIONS``, Hugging Face's name of one, or None.
        split_k: "auto" lets each of the three products take the split, or the torch path, that was measured fastest.
            An int from 1 on asks for kernels, and cuts the axis that each product sums over into that many ranges, or
            fewer: no range is empty, and the partial sums stay within 128 MiB.
        reduction: "workspace" keeps the partial sums apart and adds them in a fixed order: the same bits every time.
            "atomic" asks for kernels that add them up in memory, in float32 but in no fixed order.

    Returns:
        ``[*B, M, N]`` in the dtype of x (under autocast: in autocast's dtype). float16, bfloat16 and float32 can run in
        Triton kernels; every floating dtype runs through torch.

    Raises:
        TypeError: an argument of the wrong type, a dtype that is not real floating or differs from that of x.
        ValueError: shapes that do not fit together, tensors on different devices, an unknown activation or
            ``reduction``, a ``split_k`` below 1.
        RuntimeError: ``reduction="atomic"`` under ``torch.use_deterministic_algorithms(True)``.
    """
    activation = canonical_activation(activation)
    check_linear(x, weight, bias, split_k, reduction)
    return reference.linear(x, weight, bias, activation=activation)
