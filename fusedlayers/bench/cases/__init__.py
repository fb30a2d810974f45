"""What can be benchmarked: a new operation is one more file with its ``Case``, and its name here.

Everything else in this package works on any case.
"""

from .case import DTYPES, INITS, Case, Grid, Inputs, Operand, Options, Shape, draw
from .ffn import FFN
from .gemm_gemm import GEMM_GEMM
from .gemm_reduce import GEMM_REDUCE
from .maxsim import MAXSIM

CASES: dict[str, Case] = {case.name: case for case in (GEMM_GEMM, GEMM_REDUCE, MAXSIM, FFN)}

__all__ = ["CASES", "DTYPES", "INITS", "Case", "Grid", "Inputs", "Operand", "Options", "Shape", "draw"]
