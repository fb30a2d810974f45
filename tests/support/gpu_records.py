"""A record of the benchmark as a run on a GPU leaves it."""

from __future__ import annotations

from typing import Any

from fusedlayers.bench import record
from fusedlayers.bench.record import Record


def entry(launched: float, replayed: float | None, **fields: Any) -> Record:
    """Times in µs."""

    def spread(median: float) -> Record:
        quartiles = {"first_quartile": 0.99 * median * 1e-6, "third_quartile": 1.01 * median * 1e-6}
        return {"median": median * 1e-6, **quartiles, "minimum": 0.0, "repeats": 9}

    return {
        "status": "timed", "reason": "", "path": None, "replayed_path": None, "host_seconds": 1e-5, "host_bound": False,
        "tflops": 1.0, "floor_share": 0.5, "saved_bytes": 3 * 2**20, "peak_bytes": 200 * 2**20,
        "launched": spread(launched),
        "replayed": None if replayed is None else spread(replayed),
    } | fields  # fmt: skip


def gpu_record() -> Record:
    """As a GPU run would leave it: one shape where ours wins, one where torch does."""
    same = record.untimed_entry("auto mode chose the fused kernels", ("fused", "fused"), "same as auto")
    shared = {
        "case": "ffn", "grid": "ffn", "title": "FFN, gelu_tanh, bias", "letters": ["M", "K", "N"],
        "meaning": "tokens × d_model × d_ff", "dtype": "bf16", "activation": "gelu_tanh", "gated": False, "bias": True,
        "recompute": "auto", "direction": "forward_backward", "flops": 10, "bytes": 10, "floor_seconds": 33e-6,
        "verification": [], "clocks": None,
    }  # fmt: skip
    won = {
        "torch eager": entry(416, 400, host_bound=True),
        "torch.compile": entry(917, None),
        "auto": entry(208, 160, path="fused", replayed_path="fused"),
        "fused": same,
    }
    lost = {
        "torch eager": entry(1000, 990),
        "torch.compile": entry(900, 800),
        "auto": entry(1000, 1600, path="torch", replayed_path="fused"),
        "fused": entry(2000, 1900, path="fused"),
    }
    return {
        "schema": 1, "arguments": [], "started": "2026-11-20T10:00:00+00:00", "finished": None, "commit": "c" * 40,
        "dirty": True, "source_sha256": "",
        "versions": {"fusedlayers": "0.2.0", "torch": "2.11.0", "triton": "3.6.0"},
        "device": {"kind": "cuda", "name": "NVIDIA H200", "ceilings": [790e12, 4.3e12]},
        "method": {"cold_cache_bytes": 1},
        "rows": [
            shared | {"shape": [131072, 64, 256], "contenders": won},
            shared | {"shape": [8192, 2048, 8192], "contenders": lost},
        ],
    }  # fmt: skip
