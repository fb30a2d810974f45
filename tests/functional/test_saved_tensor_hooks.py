"""What hooks give back for a backward pass must be of the kind that was saved."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fusedlayers import functional
from tests.support.operands import on_path


@pytest.mark.parametrize("change", ["dtype", "shape"])
def test_what_comes_back_is_what_was_saved(change: str) -> None:
    """The launches of a backward pass are those of the call before, and read tensors of the same kind."""

    def change_it(tensor: Tensor) -> Tensor:
        return tensor.half() if change == "dtype" else tensor[:-1]

    queries, documents = torch.randn(2, 5, 8, requires_grad=True), torch.randn(3, 4, 8, requires_grad=True)
    with on_path("kernels"):
        functional.maxsim(queries, documents).sum().backward()
        with torch.autograd.graph.saved_tensors_hooks(change_it, lambda tensor: tensor):
            scores = functional.maxsim(queries, documents)
        with pytest.raises(RuntimeError, match=r"maxsim saved torch.float32 \[2, 5, 8\] .* and got .* back"):
            scores.sum().backward()
