"""Cross-entropy of logits: loss, log-probability, entropy, and the gradient in the place of logits in memory.

``losses`` takes logits that a product has written, ``losses_of_product`` computes them tile by tile and writes none.

The letters: ``M`` rows (tokens), ``V`` columns (the vocabulary), ``K`` the inner dimension of the product.
"""

from .losses import LossArithmetic, gradient, losses
from .scaling import scaled
from .statistics import losses_of_product

__all__ = ["LossArithmetic", "gradient", "losses", "losses_of_product", "scaled"]
