"""The faults that are planted in the kernels for experts, and in what calls them: see ``planted_faults.py``."""

from __future__ import annotations

from tests.support.planting import Fault
from tests.support.planting import fault as _fault

_SORTING, _MOVING = "kernels/grouped_gemm/sorting.py", "kernels/grouped_gemm/moving.py"

EXPERTS: tuple[Fault, ...] = (
    _fault(
        "rows of the next expert in a chunk's place", _SORTING,
        "position[:, None] > position[None, :]", "position[:, None] >= position[None, :]",
        "kernels/test_grouped_gemm_sorting random_routing",
    ),
    _fault(
        "padding that nobody marks", _SORTING,
        "mask=(rows >= filled) & (owner < E)", "mask=(rows > filled) & (owner < E)",
        "kernels/test_grouped_gemm_sorting random_routing",
    ),
    _fault(
        "padding of a tile left as it was", _MOVING,
        "empty = tl.load(slots_ptr + rows) < 0", "empty = tl.load(slots_ptr + rows) < -1",
        "functional/test_moe_ffn nobody_writes",
    ),
    _fault(
        "tokens' weights left out of dx", "kernels/matmul/generic/hidden_gradient.py",
        "        scaled = d_hidden * weights\n", "        scaled = d_hidden\n",
        "functional/test_moe_ffn any_routing",
    ),
    _fault(
        "columns behind the hidden units in the sums for tokens' weights", "kernels/tiles.py",
        "values = tl.where(tl.expand_dims(cols < N, 0), values, 0.0)", "values = values",
        "functional/test_moe_ffn behind_the_hidden_units",
    ),
    _fault(
        "limit's slope outside of the limit", "kernels/activations.py",
        "tl.where(free, value, 0.0)", "value",
        "functional/test_moe_ffn every_layout",
    ),
    _fault(
        "gate and up of merged weights swapped", "fusedlayers/functional/moe_ffn/experts.py",
        "return merged[:, 1::2], merged[:, ::2]", "return merged[:, ::2], merged[:, 1::2]",
        "functional/test_moe_ffn every_layout",
    ),
    _fault(
        "pre-activations overwritten although they are kept", "fusedlayers/functional/moe_ffn/__init__.py",
        "return epilogue.gradients(call, operands, made, wanted, upstream[0])\n",
        "return epilogue.gradients(call, operands, made, wanted, upstream[0], in_place=True)\n",
        "functional/test_autograd_contract_values graphs_that_are_kept",
    ),
)  # fmt: skip
