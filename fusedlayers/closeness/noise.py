"""The rule for results of products in 8 bits: a least signal-to-noise ratio, and no common factor.

Quantising to e4m3 leaves a product about 30 dB above its noise, and less if a layer quantises its hidden, too. That is
more than a hundred times the error of a product in 16 bits, so torch's error is no yardstick.
"""

import math
from dataclasses import replace

from torch import Tensor

from . import TILE, Closeness

# The least signal-to-quantisation-noise ratio (SQNR), in dB, of a product, of a layer's result, and of a weight
# gradient, as in the tests of torchao and TransformerEngine.
OF_PRODUCT, OF_LAYER, OF_WEIGHT_GRADIENT = 25.0, 18.0, 17.0
# The most by which the factor between a result and the right one may differ from 1. Rounding to nearest has no such
# factor; in a tile of elements chance leaves a fifth of this limit, and a forgotten scale exceeds it by far.
_FACTOR = 0.03


def sqnr(found: Tensor, truth: Tensor) -> float:
    """The energy of ``truth`` over the energy of the error, in dB; infinite without an error, NaN if either has NaN."""
    found, truth = found.detach().double(), truth.detach().double()
    error, signal = float((found - truth).square().sum()), float(truth.square().sum())
    if error == 0:
        return math.inf
    return -math.inf if signal == 0 else math.nan if math.isnan(error) else 10 * math.log10(signal / error)


def judged_by_noise(verdict: Closeness, found: Tensor, truth: Tensor, least: float) -> Closeness:
    """The ``verdict`` by another rule: an SQNR of at least ``least`` dB and, with enough elements, no common factor."""
    noise = sqnr(found, truth)
    signal = float(truth.double().square().sum())
    factor = float((found.double() * truth).sum()) / signal if signal and found.numel() >= TILE * TILE else 1.0
    ok = noise >= least and abs(factor - 1) <= _FACTOR
    share = 0.0 if noise == math.inf else 10 ** ((least - noise) / 20)
    text = f"{verdict.name}: {'close' if ok else 'NOT close'}; SQNR {noise:.1f} dB, expected {least:g} or more"
    text += f", {factor:.3f} times the right numbers" if abs(factor - 1) > _FACTOR else ""
    return replace(verdict, ok=ok, worst_fraction=math.inf if math.isnan(share) else share, message=text)
