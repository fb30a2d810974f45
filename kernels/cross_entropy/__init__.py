"""Cross-entropy of logits: loss, log-probability, entropy, and the gradient, which may overwrite the logits.

``losses`` takes stored logits; ``losses_of_product`` computes them tile by tile and stores none.
``gradient`` and ``gradient_of_product`` are their backward passes.

The letters: ``M`` rows (tokens), ``V`` columns (the vocabulary), ``K`` the inner dimension of the product.
"""

from .elements import LossArithmetic
from .losses import gradient, losses
from .product_gradient import gradient_of_product, row_factors
from .scaling import scaled
from .statistics import losses_of_product

__all__ = [
    "LossArithmetic",
    "gradient",
    "gradient_of_product",
    "losses",
    "losses_of_product",
    "row_factors",
    "scaled",
]
