"""The faults that are planted in the kernels of GEMM-reduce and MaxSim: see ``planted_faults.py``."""

from __future__ import annotations

from tests.support.planting import Fault
from tests.support.planting import fault as _fault

_REDUCE, _BOTH = "kernels/gemm_reduce/forward.py", "kernels/gemm_reduce/one_pass.py"

REDUCTIONS: tuple[Fault, ...] = (
    _fault(
        "exponentials without their maximum", _REDUCE,
        "shift = _finite(larger)\n                exponentials", "shift = larger * 0.0\n                exponentials",
        "kernels/test_gemm_reduce_kernels special_values",
    ),
    _fault(
        "last of equal values found", _REDUCE,
        "return (value > best) |", "return (value >= best) |",
        "functional/test_gemm_reduce indices",
    ),
    _fault(
        "masked columns taking part", _REDUCE,
        "c = tl.where(taking[None, :], c, 0.0 if SUMMED", "c = tl.where(taking[None, :] | True, c, 0.0 if SUMMED",
        "kernels/test_gemm_reduce_kernels masks_and_lengths",
    ),
    _fault(
        "masked rows in both gradients", _BOTH,
        "taking[:, None] & (rows < P)[None, :]", "(cols < taking_rows)[:, None] & (rows < P)[None, :]",
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
        "kernels/test_prepared_reductions reductions",
    ),
    _fault(
        "tokens of the next query counted", "kernels/maxsim/scores.py",
        "taking = tokens < length", "taking = tokens < length + 1",
        "functional/test_maxsim ragged_lengths",
    ),
)  # fmt: skip
