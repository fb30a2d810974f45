"""Planted faults of FFNs that compute their hidden in parts: see ``planted_faults.py``."""

from __future__ import annotations

from tests.support.planting import Fault
from tests.support.planting import fault as _fault

_CHUNKED, _PLAN = "fusedlayers/functional/ffn/chunked.py", "fusedlayers/planning/ffn_chunked.py"

CHUNKS: tuple[Fault, ...] = (
    _fault(
        "gate left out of dx", _CHUNKED,
        "first=first and not place)", "first=first)",
        "functional/test_ffn_chunked chunks_of_any_size",
    ),
    _fault(
        "sum begun anew with every group", _CHUNKED,
        "first, last = weights.first == 0,", "first, last = True,",
        "functional/test_ffn_chunked kernels_compute_chunks",
    ),
    _fault(
        "dx rounded after every group", _CHUNKED,
        "wide = accumulated(gradient.dtype)", "wide = gradient.dtype",
        "functional/test_ffn_chunked summed_in_float32",
    ),
    _fault(
        "sums of the rows before replaced", _CHUNKED,
        "total += summed_rows(d_pre)", "total.copy_(summed_rows(d_pre))",
        "functional/test_ffn_chunked chunks_of_any_size",
    ),
    _fault(
        "dropout of all units of a group as if they were its first", _CHUNKED,
        "weights.first + units.start)", "weights.first)",
        "functional/test_ffn_chunked chunks_of_any_size",
    ),
    _fault(
        "hidden of a group in dx although it is larger", _PLAN,
        "in_dx = summed and (columns <= p.K or columns > beside)", "in_dx = summed",
        "planning/test_chunks free",
    ),
    _fault(
        "hidden of a whole group in dx", _PLAN,
        "min(columns, p.K) if in_dx else columns", "columns",
        "planning/test_chunks free",
    ),
    _fault(
        "partial sums beside the workspace", "kernels/gemm_epilogue/hidden_gradient.py",
        "if memory is None or memory.shape[0] < size:", "if True:",
        "functional/test_ffn_chunked partial_sums_lie",
    ),
    _fault(
        "groups as large without the gradient of w_up", _CHUNKED,
        "columns = math.ceil(columns / 16) * 8", "pass",
        "functional/test_ffn_chunked partial_sums_lie",
    ),
    _fault(
        "chunks as large as half of the tokens", _PLAN,
        "most = max(1, min(most, tokens // 2, CHUNK_RULE.most_rows))", "most = max(1, tokens // 2)",
        "functional/test_ffn_chunked the_allocator_never_gives_a_hidden",
    ),
)  # fmt: skip
