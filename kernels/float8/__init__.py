"""8-bit values (e4m3) of a matrix and one float32 scale for each of its rows, or for each row of its transpose.

The scale of a row ``x`` is the smallest power of two that is not below m / 448, with the row's absolute maximum m, and
``values = x / scale``: 448 is the largest number of e4m3. Powers of two are exact factors, so a row can be given
another scale later without a second rounding. A row that holds NaN or an infinity has the scale NaN or infinity, so
that every product with it is NaN.

A weight gradient sums over rows, whose scales differ: :func:`transposed_pair` moves the scales of both operands into
the values of the left one, relative to the largest of their products, while it transposes both.

Values are rounded to nearest even and saturate. They are written as integers of 8 bits: a conversion to e4m3 whose
result changes its layout afterwards was miscompiled on Hopper (triton#11111).
"""

from ..hopper import Scaled
from .pairs import transposed_pair
from .quantising import E4M3, LARGEST, SMALLEST, column_programs, quantise_rows, quantise_transposed, scales_of

__all__ = [
    "E4M3",
    "LARGEST",
    "SMALLEST",
    "Scaled",
    "column_programs",
    "quantise_rows",
    "quantise_transposed",
    "scales_of",
    "transposed_pair",
]
