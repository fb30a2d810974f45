"""What can be benchmarked: a new operation is one more file with its ``Case``, and its name here.

Everything else in this package works on any case.
"""

from .case import DTYPES, INITS, Case, Grid, Inputs, Operand, Options, Results, Shape, as_tuple, draw
from .ffn import FFN
from .gemm_gemm import GEMM_GEMM
from .gemm_reduce import GEMM_REDUCE
from .maxsim import MAXSIM
from .split_k import SPLIT_K
from .weight_gradient import WEIGHT_GRADIENT

CASES: dict[str, Case] = {case.name: case for case in (GEMM_GEMM, GEMM_REDUCE, MAXSIM, FFN, WEIGHT_GRADIENT, SPLIT_K)}

__all__ = [
    "CASES",
    "DTYPES",
    "INITS",
    "Case",
    "Grid",
    "Inputs",
    "Operand",
    "Options",
    "Results",
    "Shape",
    "as_tuple",
    "draw",
]
