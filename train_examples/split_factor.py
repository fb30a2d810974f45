"""The picture that explains split-K: the time of the wide layer's forward product by the number of splits S.

With S = 1 each output tile is one program that loops over the whole reduction axis, and there are few tiles; with a
larger S more SMs work at once, until writing and adding the partial sums costs more than that gains.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from fusedlayers import functional
from train_examples import plots
from train_examples.loop import environment

# A split must not be shorter than this along the reduction axis: a few tiles.
SHORTEST_RANGE = 256
# The median over replays counts: launches, clocks and neighbours disturb some.
REPLAYS = 25
REASON = (
    "time against the split factor S: not measured, because without a CUDA device every S computes with the same "
    "operation of torch"
)


def picture(rows: int, layer: nn.Linear, directory: Path) -> str:
    """Time the product of ``rows`` inputs with the weight of ``layer`` for S = 1, 2, 4, ... on its GPU, and write
    ``split_factor.json`` and ``split_factor.png``; returns the result, or why there is none, as text."""
    device = layer.weight.device
    if device.type != "cuda":
        return REASON
    dtype = torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else torch.float16
    seconds = measure(rows, layer.out_features, layer.in_features, dtype, device)
    times = {name: value * 1e6 for name, value in seconds.items()}
    name = torch.cuda.get_device_name(device)
    shape = f"{rows} × {layer.out_features} × {layer.in_features:,}"
    title = f"{shape} on {name}, {str(dtype).removeprefix('torch.')}"
    result = {
        "device": name,
        **environment(),
        "dtype": str(dtype),
        "rows × outputs × inner axis": shape,
        "microseconds": times,
    }
    (directory / "split_factor.json").write_text(json.dumps(result, indent=2, ensure_ascii=False) + "\n")
    plots.split_factors(times, title, directory / "split_factor.png")
    return "\n".join(
        [f"Forward product, {title}:", *(f"  {label:<10} {time:8.1f} µs" for label, time in times.items())]
    )


def measure(rows: int, outputs: int, inner: int, dtype: torch.dtype, device: torch.device) -> dict[str, float]:
    """Seconds of one product by torch, with ``split_k="auto"``, and for each S, from replayed CUDA graphs.

    Every graph holds calls on different operands, together at least four times as large as the L2 cache, so that each
    call reads its operands from memory. The graphs take turns.
    """
    size = (rows + outputs) * inner * dtype.itemsize
    cache = torch.cuda.get_device_properties(device).L2_cache_size
    operands = [
        (
            torch.randn(rows, inner, dtype=dtype, device=device),
            torch.randn(outputs, inner, dtype=dtype, device=device) / inner**0.5,
        )
        for _ in range(max(2, -(-4 * cache // size)))
    ]
    products: dict[str, Callable[..., torch.Tensor]] = {"torch": F.linear, "auto": functional.linear}
    split = 1
    while split == 1 or inner // split >= SHORTEST_RANGE:
        products[f"S = {split}"] = partial(functional.linear, split_k=split)
        split *= 2
    with torch.no_grad():
        graphs = {name: captured(product, operands) for name, product in products.items()}
    times: dict[str, list[float]] = {name: [] for name in graphs}
    for _ in range(REPLAYS):
        for name, graph in graphs.items():
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            times[name].append(start.elapsed_time(end) / 1e3 / len(operands))
    return {name: statistics.median(values) for name, values in times.items()}


def captured(
    product: Callable[..., torch.Tensor], operands: list[tuple[torch.Tensor, torch.Tensor]]
) -> torch.cuda.CUDAGraph:
    """A CUDA graph with one call per pair of operands."""
    # Once outside of the capture, which cannot compile the kernel.
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        product(*operands[0])
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for x, weight in operands:
            product(x, weight)
    return graph
