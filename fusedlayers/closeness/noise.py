"""The ratio of signal to noise, by which products in 8 bits are judged."""

import math

from torch import Tensor

# The least SQNR, in dB, of a product, of a layer's result, and of a weight gradient, as torchao and TransformerEngine
# test theirs.
OF_PRODUCT, OF_LAYER, OF_WEIGHT_GRADIENT = 25.0, 18.0, 17.0


def sqnr(found: Tensor, truth: Tensor) -> float:
    """The energy of ``truth`` over that of the error, in dB; infinite where nothing differs, NaN where either is."""
    found, truth = found.detach().double(), truth.detach().double()
    error, signal = float((found - truth).square().sum()), float(truth.square().sum())
    return math.inf if error == 0 else 10 * math.log10(signal / error) if signal and not math.isnan(error) else math.nan
