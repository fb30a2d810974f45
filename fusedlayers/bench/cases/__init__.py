"""What can be benchmarked and tested by the self-test: a new operation is one more file here, with its ``CASE``.

Everything else in this package works on any case.
"""

from importlib import import_module
from pkgutil import iter_modules

from .case import ALL, DTYPES, INITS, Case, Draw, Grid, Inputs, Operand, Options, Results, Shape, as_tuple, shape_text

# What the files of the cases share.
_SHARED = ("case", "trial")
_found = [import_module(f"{__name__}.{file.name}").CASE for file in iter_modules(__path__) if file.name not in _SHARED]
ALL.update({case.name: case for case in sorted(_found, key=lambda case: case.place)})
# Those that are benchmarked.
CASES: dict[str, Case] = {name: case for name, case in ALL.items() if case.grids}

__all__ = [
    "ALL",
    "CASES",
    "DTYPES",
    "INITS",
    "Case",
    "Draw",
    "Grid",
    "Inputs",
    "Operand",
    "Options",
    "Results",
    "Shape",
    "as_tuple",
    "shape_text",
]
