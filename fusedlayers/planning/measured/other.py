"""GPUs without a file of their own: no thresholds, so that auto mode takes torch, and the costs of one that has some.

By these costs tiles are chosen, on whatever GPU.
"""

from . import Figures, sm_90

FIGURES = Figures(tile_costs=sm_90.FIGURES.tile_costs)
