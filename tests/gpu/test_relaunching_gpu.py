"""Launches of one kernel with other numbers, on a GPU: each runs what was compiled for such numbers."""

from __future__ import annotations

import pytest
import torch

from fusedlayers.kernels.device import tl, triton
from fusedlayers.kernels.launching import Launch, launch
from tests.support.operands import DEVICE

# Triton takes 1 for a constant, and multiples of 16 for aligned, in tuples that are not to be specialised, too.
NUMBERS = [(1, 16), (2, 3), (1, 3), (32, 1), (2**40, 5), (7, 16)]


@triton.jit(do_not_specialize=["alone", "numbers"])
def _numbers_kernel(out_ptr, alone, numbers):  # noqa: ANN001, ANN202  device code has no types
    tl.store(out_ptr, alone + numbers[0] * 1000 + numbers[1])


@pytest.mark.parametrize("prepared", [False, True])
def test_free_numbers_in_tuples_may_change_with_every_call(prepared: bool) -> None:
    for numbers in NUMBERS * 2:
        for alone in (1, 2):
            out = torch.zeros(1, dtype=torch.int64, device=DEVICE)
            free = (alone, numbers)
            if prepared:
                Launch(_numbers_kernel, 1, (), free, ())((out,))
            else:
                launch(_numbers_kernel, 1, (out,), (), free, ())
            assert out.item() == alone + numbers[0] * 1000 + numbers[1]
