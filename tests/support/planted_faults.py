"""Faults, each of which must turn the suite red: a test that none of them disturbs would be worth nothing.

    python -m tests.support.planted_faults              plant every fault in a copy of the package, one after the other
    python -m tests.support.planted_faults mask stride  only those whose name holds one of these words

For each fault the tests that should notice it run twice, through Triton's interpreter: on the package as it is, where
they must be green, and on the faulty copy. Exit status: 0 if every fault was noticed, else 1. No GPU is needed; all
take about ten minutes on one core.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from tests.support.planted_in_calls import CALLS
from tests.support.planted_in_chunks import CHUNKS
from tests.support.planted_in_experts import EXPERTS
from tests.support.planted_in_float8 import FLOAT8
from tests.support.planted_in_reductions import REDUCTIONS
from tests.support.planting import Fault, copied, noticed
from tests.support.planting import fault as _fault

_TILES, _PARTIALS, _DROPOUT = "kernels/tiles.py", "kernels/partials.py", "kernels/dropout.py"
_SPLIT = "kernels/split_k.py"
_FFN_FORWARD, _FFN_DATA = "kernels/gemm_gemm/forward.py", "kernels/gemm_gemm/data_gradient.py"
_FFN_WEIGHT = "kernels/gemm_gemm/weight_gradient.py"
_HIDDEN, _HIDDEN_GRADIENT = "kernels/gemm_epilogue/hidden.py", "kernels/matmul/generic/hidden_gradient.py"
_GENERIC_HIDDEN, _EPILOGUES = "kernels/matmul/generic/hidden.py", "kernels/matmul/generic/epilogues.py"
_LINEAR = "fusedlayers/functional/linear.py"
_LOSSES, _LOGITS = "kernels/cross_entropy/losses.py", "kernels/cross_entropy/elements.py"
_HEAD = "fusedlayers/functional/linear_cross_entropy/head.py"
_ADAPTERS = "fusedlayers/functional/ffn/adapters.py"

FAULTS: tuple[Fault, ...] = (
    # Tiles: what lies outside, and where.
    _fault(
        "tail of the inner axis dropped", _TILES,
        "return first, tl.minimum(first + size, inner)",
        "return first, tl.minimum(first + size, inner // BLOCK_INNER * BLOCK_INNER)",
        "functional/test_numbers sizes_one_at_a_time",
    ),
    _fault(
        "mask of a tile's columns missing", _TILES,
        "(cols < col_limit)[None, :]\n        return tl", "(cols < 2 * col_limit)[None, :]\n        return tl",
        "functional/test_numbers sizes_one_at_a_time",
    ),
    _fault(
        "row past the matrix written", _TILES,
        "(rows < row_limit)[:, None] & (cols < col_limit)[None, :]\n    tl.store",
        "(rows < row_limit + 1)[:, None] & (cols < col_limit)[None, :]\n    tl.store",
        "functional/test_ffn nothing_outside_of_the_outputs",
    ),
    _fault(
        "stride of a bias ignored", _TILES,
        "base_ptr + cols.to(tl.int64) * stride, mask", "base_ptr + cols.to(tl.int64), mask",
        "functional/test_numbers layouts_change_nothing",
    ),
    _fault(
        "rows that are no whole vectors told to be", "kernels/launching.py",
        "return 1 if any(size % unit for size in sizes) else unit", "return unit",
        "functional/test_numbers layouts_change_nothing",
    ),
    _fault(
        "columns of a transposed operand cut off", "kernels/launching.py",
        "return True, (tensor.shape[-2], *batch, column)", "return True, (*batch, column)",
        "kernels/test_vector_units lines",
    ),
    _fault(
        "offsets in 32 bits", _TILES,
        "offsets = rows.to(tl.int64)[:, None] * stride_row + cols.to(tl.int64)[None, :] * stride_col\n    if EVEN",
        "offsets = rows[:, None] * stride_row + cols[None, :] * stride_col\n    if EVEN",
        "kernels/test_code_generation_split_k products_on_every_target",
    ),
    # Partial sums, and what is done with them once.
    _fault(
        "last split left out", _PARTIALS,
        "inside = (split < splits)[:, None]", "inside = (split < tl.maximum(splits - 1, 1))[:, None]",
        "functional/test_linear exact_integers_for_any_number_of_splits",
    ),
    _fault(
        "partial sums rounded to 16 bits", _PARTIALS,
        "like.new_empty(splits * total, dtype=torch.float32)", "like.new_empty(splits * total)",
        "functional/test_ffn partial_sums_are_rounded_once",
    ),
    _fault(
        "bias added by every split", _PARTIALS,
        "total += load_vector(bias_ptr", "total += splits * load_vector(bias_ptr",
        "functional/test_linear activation_and_bias_are_applied_once",
    ),
    _fault(
        "activation before the bias", _EPILOGUES,
        "acc = activated(acc, ACTIVATION, ACCURACY)",
        "added = add_bias(acc * 0.0, bias, batch, cols)\n"
        "            acc = activated(acc - added, ACTIVATION, ACCURACY) + added",
        "functional/test_linear activation_and_bias_are_applied_once",
    ),
    _fault(
        "atomic sums onto a stale workspace", _SPLIT,
        "left.new_zeros if atomic", "left.new_ones if atomic",
        "functional/test_linear exact_integers_for_any_number_of_splits",
    ),
    _fault(
        "bias gradient of the first band alone", "kernels/column_sums.py",
        "reduce_partials(partials, [sums]", "reduce_partials(partials[:1], [sums]",
        "kernels/test_column_sums exact_integers",
    ),
    _fault(
        "bias gradient not summed over the rows", "kernels/matmul/generic/mainloop.py",
        "                sums += summed_tile.to(tl.float32)", "                sums = summed_tile.to(tl.float32)",
        "functional/test_weight_gradient exact_integers",
    ),
    _fault(
        "sums of a band in the place of another", _HIDDEN_GRADIENT,
        "partial = sums_ptr + band.to(tl.int64) * N", "partial = sums_ptr + (band // 2).to(tl.int64) * N",
        "functional/test_hidden_gradient exact_integers_for_any_number_of_row_tiles",
    ),
    _fault(
        "sums of what follows a product of torch end with the last tile", _HIDDEN_GRADIENT,
        "sums = totals[0] + _stored_and_summed(", "sums = _stored_and_summed(",
        "functional/test_hidden_gradient exact_integers_for_any_number_of_row_tiles",
    ),
    _fault(
        "kept pre-activations replaced after a product of torch", _HIDDEN,
        "if keep or width > columns else z", "if width > columns else z",
        "functional/test_ffn_epilogue rows_for_products_begin_with_a_sector",
    ),
    _fault(
        "pre-activations of torch read as rows of whole sectors", _GENERIC_HIDDEN,
        "z = load_tile(z_ptr, rows, cols, N, 1, M, N)", "z = load_tile(z_ptr, rows, cols, width, 1, M, N)",
        "functional/test_ffn_epilogue rows_for_products_begin_with_a_sector",
    ),
    # Which gradient is whose.
    _fault(
        "weight gradients transposed", _FFN_WEIGHT,
        "(1, hidden, 1, out_width) if transposed else (width, 1, hidden, 1)",
        "(1, hidden, 1, out_width) if transposed else (1, hidden, hidden, 1)",
        "functional/test_ffn exact_integers_for_every_subset_of_gradients",
    ),
    _fault(
        "gate and up swapped", _FFN_FORWARD,
        "hidden_and_slopes(z, z_gate, GATED", "hidden_and_slopes(z_gate, z, GATED",
        "functional/test_numbers activations",
    ),
    _fault(
        "gradients of gate and up swapped", "fusedlayers/functional/ffn/fused.py",
        "    found = kernels.weight_gradients(given, dy, asked, plan.splits, plan.weight_gradient_tiles)\n"
        "    return [dx, found.up, found.down, found.up_bias, db_down, found.gate, found.gate_bias]",
        "    found = kernels.weight_gradients(given, dy, asked, plan.splits, plan.weight_gradient_tiles)\n"
        "    up, gate = (found.up, None) if found.gate is None else (found.gate, found.up)\n"
        "    return [dx, up, found.down, found.up_bias, db_down, gate, found.gate_bias]",
        "functional/test_numbers activations",
    ),
    _fault(
        "pre-activation kept after the activation", _EPILOGUES,
        "store_tile(out.z_ptr, z, rows", "store_tile(out.z_ptr, tl.maximum(z, 0.0), rows",
        "functional/test_ffn_epilogue activations_without_biases",
    ),
    _fault(
        "memory behind the last hidden unit left as it was", _EPILOGUES,
        "store_tile(out.z_ptr, z, rows, cols, out.width, 1, out.row_limit, out.width)",
        "store_tile(out.z_ptr, z, rows, cols, out.width, 1, out.row_limit, out.width - 1)",
        "functional/test_ffn_epilogue nothing_outside_of_the_outputs",
    ),
    _fault(
        "compilers told of no memory behind the last hidden unit", "fusedlayers/functional/ffn/passes.py",
        "else ffn_epilogue.kept_columns(problem, device)", "else problem.N",
        "functional/test_compiled opcheck",
    ),
    # Activations and special values.
    _fault(
        "slope of an activation slightly wrong", "kernels/activations.py",
        "tl.constexpr(3 * 0.044715 *", "tl.constexpr(3 * 0.04471 *",
        "functional/test_numbers activations",
    ),
    _fault(
        "relu that swallows NaN", "kernels/activations.py",
        "return tl.where(z <= 0, 0.0, z), tl.where(z <= 0, 0.0, 1.0)",
        "return tl.where(z > 0, z, 0.0), tl.where(z <= 0, 0.0, 1.0)",
        "functional/test_numbers special_values",
    ),
    # Dropout.
    _fault(
        "generator with a round less", _DROPOUT,
        "ROUNDS = 7", "ROUNDS = 6",
        "kernels/test_dropout draws_from_philox",
    ),
    _fault(
        "scale of the dropout forgotten in dx", _FFN_DATA,
        "d_hidden * kept * keep_scale", "d_hidden * kept",
        "kernels/test_dropout the_scale_is_exact",
    ),
    _fault(
        "mask of the row below in the weight gradient", _FFN_WEIGHT,
        "keep(tl.load(seed_ptr), rows.to(tl.int64)[None, :]",
        "keep(tl.load(seed_ptr), (rows + 1).to(tl.int64)[None, :]",
        "kernels/test_dropout the_scale_is_exact",
    ),
    # What autograd and the caller see.
    _fault(
        "frozen weights' operand kept", _LINEAR,
        "return wanted[1], wanted[0], False", "return True, True, False",
        "functional/test_linear_autograd frozen_operands",
    ),
    _fault(
        "upstream gradient overwritten", _LINEAR,
        "        return dx, dw, db", "        dy.zero_()\n        return dx, dw, db",
        "functional/test_autograd_contract_values graphs_that_are_kept",
    ),
    _fault(
        "option missing in a call's key", "fusedlayers/functional/recalling.py",
        "shape, options, types", "shape, options[1:], types",
        "functional/test_recalled_calls",
    ),
    _fault(
        "plan of another dtype of autocast recalled", "fusedlayers/functional/recalling.py",
        "and (autocast_dtype(device) if any_autocast() else None) is dtype", "and True",
        "functional/test_recalling another_dtype_of_autocast",
    ),
    # The loss head.
    _fault(
        "padding of a row of logits counted", _LOSSES,
        "return tl.where(cols < row.V, value, -float(\"inf\")), slope", "return value, slope",
        "functional/test_linear_cross_entropy edges_of_rows",
    ),
    _fault(
        "sum of a lane not rescaled", _LOSSES,
        "tl.where(rises, total * share + 1.0, total + share)", "tl.where(rises, total + 1.0, total + share)",
        "functional/test_linear_cross_entropy edges_of_rows",
    ),
    _fault(
        "slope of the softcap forgotten", _LOGITS,
        "slope = tanh_slope * slope", "slope = slope * 1.0",
        "functional/test_linear_cross_entropy every_option",
    ),
    _fault(
        "ignored token counted", _LOSSES,
        "tl.store(loss_ptr + row, tl.where(counts, found, 0.0))", "tl.store(loss_ptr + row, found)",
        "functional/test_linear_cross_entropy no_token_counts",
    ),
    _fault(
        "target that is no class taken for one", _LOGITS,
        "weight = tl.where(known, 1.0, float(\"nan\"))", "weight = 1.0",
        "functional/test_linear_cross_entropy_calls no_class_shows",
    ),
    _fault(
        "sum of dW begun anew in every chunk", "fusedlayers/functional/linear_cross_entropy/chunked.py",
        "[:, : self.whole], input[rows], first=not rows.start)", "[:, : self.whole], input[rows], first=True)",
        "functional/test_linear_cross_entropy edges_of_chunks",
    ),
    _fault(
        "target of other tokens read", _HEAD,
        "target.contiguous()", "target",
        "functional/test_linear_cross_entropy any_layout",
    ),
    _fault(
        "sum not rescaled where a logit on chip is the largest", "kernels/cross_entropy/tile.py",
        "total * factor + tl.sum(shares, 1)", "total + tl.sum(shares, 1)",
        "functional/test_linear_cross_entropy_fused ranges_of_columns",
    ),
    _fault(
        "range of a logit on chip forgotten", "kernels/cross_entropy/statistics.py",
        "inside = (here < ranges)[:, None]", "inside = (here < ranges - ranges // 2)[:, None]",
        "functional/test_linear_cross_entropy_fused groups_of_bands",
    ),
    _fault(
        "last part of the vocabulary not padded with zeros", "kernels/cross_entropy/product_gradient.py",
        "gradient = tl.where((cols < V)[None, :], gradient, 0.0)", "gradient = gradient + 0.0",
        "functional/test_linear_cross_entropy far_below_zero",
    ),
    _fault(
        "target sought among the first columns of the vocabulary", "kernels/cross_entropy/tile.py",
        "other=-1) - given.start", "other=-1)",
        "functional/test_linear_cross_entropy targets_of_any_shape",
    ),
    _fault(
        "sum of dx begun anew for every part of the vocabulary", "fusedlayers/functional/linear_cross_entropy/fused.py",
        "first=not first)", "first=True)",
        "functional/test_linear_cross_entropy targets_of_any_shape",
    ),
    _fault(
        "recomputed entropy without its mean", "kernels/cross_entropy/product_gradient.py",
        "by_logarithm * (entropy - log_total)",
        "by_logarithm * entropy",
        "functional/test_linear_cross_entropy alone_is_differentiated",
    ),
    _fault(
        "mean recomputed as a sum", "fusedlayers/functional/linear_cross_entropy/__init__.py",
        "of_losses = upstream[0] if factor is None else upstream[0] * factor", "of_losses = upstream[0]",
        "functional/test_linear_cross_entropy targets_of_any_shape",
    ),
    _fault(
        "padding of the chunked path's weight counted on chip", "fusedlayers/planning/linear_cross_entropy.py",
        "return self.path == \"chunked\" and self.problem.pads_weight", "return self.problem.pads_weight",
        "functional/test_linear_cross_entropy log_probabilities",
    ),
    _fault(
        "upstream gradient of a mean ignored", "fusedlayers/functional/linear_cross_entropy/__init__.py",
        "factor = upstream[0] if late is None else upstream[0] * late",
        "factor = torch.ones_like(upstream[0]) if late is None else upstream[0] * late",
        "functional/test_linear_cross_entropy every_option",
    ),
    # Adapters of low rank.
    _fault(
        "scale of an adapter dropped", _ADAPTERS,
        "each.a.t(), beta=0, alpha=each.scale, out=part)", "each.a.t(), beta=0, out=part)",
        "functional/test_lora_ffn any_of_the_linears",
    ),
    _fault(
        "gate's adapter reads the columns of the other one", _ADAPTERS,
        "first=self._columns[-1].start", "first=0",
        "functional/test_lora_ffn any_of_the_linears",
    ),
    _fault(
        "adapter of the down projection left out of the hidden's gradient", _ADAPTERS,
        "return (None, None) if self._of_hidden is None else self._of_hidden.into_input_gradient(self._v_hidden)",
        "return None, None",
        "functional/test_lora_ffn any_of_the_linears",
    ),
    _fault(
        "adapters left out of the data gradient", _ADAPTERS,
        "return self._of_x.into_input_gradient(v) if dx and v is not None else (None, None)", "return None, None",
        "functional/test_lora_ffn any_of_the_linears",
    ),
    _fault(
        "zeros behind the rank of an adapter left unwritten", _ADAPTERS,
        "            matrix[:, gap] = 0\n", "            pass\n",
        "functional/test_lora_ffn ranks_whose_rows_are_padded",
    ),
    _fault(
        "adapters drop the same elements", "kernels/dropout.py",
        '"gate": (2**40, 0)', '"gate": (0, 0)',
        "functional/test_lora_ffn_dropout every_path_draws",
    ),
    _fault(
        "dropout of an adapter left out of the gradient of its input", _ADAPTERS,
        "            _dropped(added, each.dropout, added)\n", "",
        "functional/test_lora_ffn_dropout close_to_torch",
    ),
    _fault(
        "merged adapters added once more", "fusedlayers/modules/children.py",
        "linear.disable_adapters or linear.merged:", "linear.disable_adapters:",
        "replacing/test_adapters the_state_of_adapters",
    ),
    _fault(
        "bias of an adapter dropped", "fusedlayers/modules/adapters.py",
        "bias = added if bias is None else bias + added", "bias = bias",
        "replacing/test_adapters kinds_of_adapters",
    ),
    *CALLS,
    *CHUNKS,
    *EXPERTS,
    *FLOAT8,
    *REDUCTIONS,
)  # fmt: skip


def main(words: Sequence[str]) -> int:
    """Plant the faults whose names hold one of the words, or all of them; see the module."""
    chosen = [fault for fault in FAULTS if not words or any(word in fault.name for word in words)]
    missed = 0
    with copied() as copy:
        for fault in chosen:
            why_not = noticed(copy, fault)
            missed += why_not is not None
            print(f"{'noticed' if why_not is None else 'MISSED '}  {fault.name}  ({' '.join(fault.tests)})", flush=True)
            if why_not is not None:
                print(f"         {why_not}", flush=True)
    print(f"{len(chosen) - missed} of {len(chosen)} faults noticed")
    return int(missed > 0 or not chosen)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
