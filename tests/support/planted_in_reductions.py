"""The faults that are planted in the kernels of GEMM-reduce and MaxSim: see ``planted_faults.py``."""

from __future__ import annotations

from tests.support.planting import Fault
from tests.support.planting import fault as _fault

_REDUCE, _BOTH = "kernels/gemm_reduce/reduction.py", "kernels/gemm_reduce/one_pass.py"

REDUCTIONS: tuple[Fault, ...] = (
    _fault(
        "exponentials without their maximum", _REDUCE,
        "shift = finite(best)\n            if ACC", "shift = best * 0.0\n            if ACC",
        "kernels/test_gemm_reduce_kernels special_values",
    ),
    _fault(
        "last of equal values found", _REDUCE,
        "return (value > best) |", "return (value >= best) |",
        "functional/test_gemm_reduce indices",
    ),
    _fault(
        "masked columns included", _REDUCE,
        "c = tl.where(tl.expand_dims(included, 0), c", "c = tl.where(tl.expand_dims(included | True, 0), c",
        "kernels/test_gemm_reduce_kernels masks_and_lengths",
    ),
    _fault(
        "masked rows in both gradients", _BOTH,
        "included[:, None] & (rows < P)[None, :]", "inside[:, None] & (rows < P)[None, :]",
        "kernels/test_gemm_reduce_kernels both_gradients_at_once",
    ),
    _fault(
        "vectors read where there are none", "kernels/launching.py",
        "return 1 if any(size % unit for size in sizes) else unit", "return unit",
        "kernels/test_gemm_reduce_kernels both_gradients_at_once",
    ),
    _fault(
        "columns of the next entry in the place of padding", "kernels/hopper.py",
        "return self if ends else", "return self if ends or True else",
        "kernels/test_hopper padded_columns",
    ),
    _fault(
        "one prepared launch for the gradients of both sides", "kernels/gemm_reduce/backward.py",
        '("weighted", of_kept, matrix, bias)', '("weighted", matrix, bias)',
        "functional/test_autograd_contract_values repeated_call",
    ),
    _fault(
        "tokens of the next query counted", "kernels/maxsim/forward.py",
        "active = tokens < length", "active = tokens < length + 1",
        "functional/test_maxsim ragged_lengths",
    ),
)  # fmt: skip
