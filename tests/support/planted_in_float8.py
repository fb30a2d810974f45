"""Planted faults of products in 8 bits: see ``planted_faults.py``."""

from __future__ import annotations

from tests.support.planting import Fault
from tests.support.planting import fault as _fault

_KERNELS, _PAIRS, _BOUNDS, _WEIGHTS, _FFN, _EXPERTS = (
    "kernels/float8/quantising.py",
    "kernels/float8/pairs.py",
    "kernels/bounds.py",
    "fusedlayers/functional/float8.py",
    "fusedlayers/functional/ffn/float8.py",
    "fusedlayers/functional/moe_ffn/float8.py",
)

FLOAT8: tuple[Fault, ...] = (
    _fault(
        "scale of rows exchanged for its inverse", _KERNELS,
        "tl.store(scales_ptr + rows, scale, mask=rows < M)", "tl.store(scales_ptr + rows, factor, mask=rows < M)",
        "kernels/test_float8_kernels values_and_scales_of_rows",
    ),
    _fault(
        "maximum of the first block of a row alone", _KERNELS,
        "for first in tl.range(BLOCK, K, BLOCK):", "for first in tl.range(K, K, BLOCK):",
        "kernels/test_float8_kernels rows_longer_than_a_block",
    ),
    _fault(
        "scale of one of two transposes", _KERNELS,
        "largest = tl.maximum(largest, of_other)", "largest = tl.maximum(largest, largest)",
        "kernels/test_float8_kernels values_and_scales_of_the_transpose",
    ),
    _fault(
        "transpose with the scales of other columns", _KERNELS,
        "tl.store(scales_ptr + places, scale", "tl.store(scales_ptr + places, tl.flip(scale)",
        "kernels/test_float8_kernels values_and_scales_of_the_transpose",
    ),
    _fault(
        "gate left out of the numbers of channels", _BOUNDS,
        "squares += _squares(gate_ptr", "squares += 0 * _squares(gate_ptr",
        "kernels/test_bounds channels",
    ),
    _fault(
        "scales of one operand of a weight gradient forgotten", _PAIRS,
        "_NOT_FINITE, left + right)", "_NOT_FINITE, left + 127)",
        "kernels/test_float8_kernels transposes_for_a_weight_gradient",
    ),
    _fault(
        "scales of a weight gradient applied to both operands", _PAIRS,
        "factors, None if in_8_bits else right_scale,", "factors, factors,",
        "kernels/test_float8_kernels transposes_for_a_weight_gradient",
    ),
    _fault(
        "factors left out of the scales of a weight gradient", _PAIRS,
        "scales = largest * load_vector(", "scales = largest + 0 * load_vector(",
        "kernels/test_float8_kernels transposes_for_a_weight_gradient",
    ),
    _fault(
        "right's programs counted as left's", _PAIRS,
        "program -= of_right", "program -= 0",
        "kernels/test_float8_kernels transposes_for_a_weight_gradient",
    ),
    _fault(
        "transposed tile at another place", _PAIRS,
        "tl.trans(x), cols, rows, stride_values", "tl.trans(x), cols, rows ^ 1, stride_values",
        "kernels/test_float8_kernels transposes_for_a_weight_gradient",
    ),
    _fault(
        "inverses of the hidden's scales taken for them", _FFN,
        "(kept.hidden_rows[1], kept.units[5]) if bounded", "(kept.hidden_rows[2], kept.units[5]) if bounded",
        "functional/test_float8 ffn_close_to_float64",
    ),
    _fault(
        "norms of a unit's weights without the bias", _BOUNDS,
        "norms += tl.abs(load_vector(bias_ptr", "norms += 0 * tl.abs(load_vector(bias_ptr",
        "kernels/test_bounds units",
    ),
    _fault(
        "bound of a gated row without its second factor", _BOUNDS,
        "norms if gated else None, table", "None, table",
        "kernels/test_bounds rows",
    ),
    _fault(
        "units of the gate exchanged with those of up", _BOUNDS,
        "norms * load_vector(_row(units_ptr, 3, N)", "norms * load_vector(_row(units_ptr, 2, N)",
        "kernels/test_bounds units",
    ),
    _fault(
        "units not multiplied into the next weight", _WEIGHTS,
        "_quantised_rows(w_down, call.ready, factors=units[5])", "_quantised_rows(w_down, call.ready)",
        "functional/test_float8 ffn_close_to_float64",
    ),
    _fault(
        "units not multiplied into the weights of dx", _WEIGHTS,
        "call.ready, weights=factors)", "call.ready)",
        "functional/test_float8 ffn_close_to_float64",
    ),
    _fault(
        "norms of x that do not weigh its channels", _FFN,
        "ready, x_norms, channels)", "ready, x_norms)",
        "functional/test_float8_frozen channels_that",
    ),
    _fault(
        "prepared sums of another dtype", "kernels/column_sums.py",
        '("column sums", dy.dtype, *layout_of(dy))', '("column sums", *layout_of(dy))',
        "kernels/test_column_sums beside_another_dtype",
    ),
    _fault(
        "units left out of a weight gradient", _FFN,
        "named, (factors, None)", "named, (None, None)",
        "functional/test_float8 ffn_close_to_float64",
    ),
    _fault(
        "column factors left out of quantised rows", _KERNELS,
        "else x.to(tl.float32) * load_vector(factors", "else x.to(tl.float32) + 0 * load_vector(factors",
        "kernels/test_float8_kernels factors_and_norms",
    ),
    _fault(
        "row weights left out of a quantised transpose", _KERNELS,
        "else x.to(tl.float32) * load_vector(weights", "else x.to(tl.float32) + 0 * load_vector(weights",
        "kernels/test_float8_kernels factors_and_norms",
    ),
    _fault(
        "stale quantised weight", _WEIGHTS,
        "self.version == tensor._version and ", "",
        "functional/test_float8 quantised_once_until_they_change",
    ),
    _fault(
        "weights changed past their version", _WEIGHTS,
        "        else:\n            _kept.pop(key, None)", "        else:\n            pass",
        "functional/test_float8 numbers_are_those_of_the_changed_weight",
    ),
    _fault(
        "trainable weights kept like frozen ones", _WEIGHTS,
        "if _keeps_frozen and kept.is_frozen():", "if _keeps_frozen:",
        "functional/test_float8_frozen what_is_trained_is_never_kept_longer",
    ),
    _fault(
        "low-rank product left out of the result", _FFN,
        ', ready.setdefault("down", {}), low_rank)', ', ready.setdefault("down", {}))',
        "functional/test_float8_lora_ffn close_to_float64",
    ),
    _fault(
        "low-rank product left out of dx", _FFN,
        "plan.product_pipeline, x, named, low_rank)", "plan.product_pipeline, x, named)",
        "functional/test_float8_lora_ffn close_to_float64",
    ),
    _fault(
        "scales of a low-rank product exchanged", "kernels/matmul/low_rank.py",
        "_divided(self.left, left, 0), _divided(self.right, right, axis)",
        "_divided(self.left, left, 0), _divided(self.right, 1 / right, axis)",
        "functional/test_float8_lora_ffn divided_by_scales",
    ),
    _fault(
        "one part of a weight taken for another", _WEIGHTS,
        "(id(owner), source.storage_offset(), source.shape,", "(id(owner), source.shape,",
        "functional/test_float8 parts_of_one_weight",
    ),
    _fault(
        "quantised weight kept beside a graph", _WEIGHTS,
        "                _note_graph(owner)\n", "                pass\n",
        "functional/test_float8 nothing_is_kept_of_what_a_graph_used",
    ),
    _fault(
        "gradients of x with exchanged units", _WEIGHTS,
        "call.ready, weights=factors)", "call.ready, weights=factors.flip(0))",
        "functional/test_float8 ffn_close_to_float64",
    ),
    _fault(
        "gradients of x from the gate in the place of the up projection", _EXPERTS,
        "else halves(weight, layout)\n        return", "else halves(weight, layout)[::-1]\n        return",
        "functional/test_float8_experts every_layout",
    ),
    _fault(
        "the largest scale of another expert", _PAIRS,
        "tl.store(scales_ptr + program, largest)", "tl.store(scales_ptr + (program ^ 1), largest)",
        "kernels/test_float8_kernels gradients_of_experts",
    ),
    _fault(
        "scales of an expert's first rows alone", _PAIRS,
        "for first in tl.range(BLOCK, M - begin, BLOCK):", "for first in tl.range(M, M, BLOCK):",
        "kernels/test_float8_kernels gradients_of_experts",
    ),
    _fault(
        "gradients of up and gate exchanged", "fusedlayers/functional/moe_ffn/epilogue.py",
        "parts = [weights.w_up, weights.w_gate][", "parts = [weights.w_gate, weights.w_up][",
        "functional/test_float8_experts every_layout",
    ),
    _fault(
        "quantised experts of another layout", _EXPERTS,
        "name = kind, positions, layout, transposed", "name = kind, positions",
        "functional/test_float8_experts layouts_are_told_apart",
    ),
    _fault(
        "scales of padding that are not zero", "kernels/grouped_gemm/moving.py",
        "tl.store(scales_ptr + rows, tl.zeros([PADDING_ROWS], tl.float32), mask=empty)", "pass",
        "kernels/test_float8_kernels rows_for_experts",
    ),
    _fault(
        "cast weight that has changed since", _WEIGHTS,
        "if values is None or not values.stand(source) else source", "if values is None else source",
        "functional/test_float8 changes_between_both_passes",
    ),
    _fault(
        "another storage at the address of a weight", _WEIGHTS,
        " and self.storage.cdata == tensor.untyped_storage()._cdata", "",
        "functional/test_float8_changed_weights new_memory_at_the_address",
    ),
    _fault(
        "quantised buffer of a compiled graph", _WEIGHTS,
        "owner.requires_grad or isinstance(owner, Parameter)", "True",
        "functional/test_float8_changed_weights filled_again",
    ),
)  # fmt: skip
