"""Cross-entropy of logits that a product has written: loss, log-probability, entropy, and the gradient in their place.

The letters: ``M`` rows (tokens), ``V`` columns (the vocabulary), ``K`` the inner dimension of the product.
"""

from .losses import LossArithmetic, gradient, losses
from .scaling import scaled

__all__ = ["LossArithmetic", "gradient", "losses", "scaled"]
