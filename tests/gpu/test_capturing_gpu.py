"""Kernels that run for the first time inside the capture of a CUDA graph, in a fresh process."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

# The warm-up takes torch's path, as calls do that are launched one by one; the capture takes the kernels'.
CAPTURE = """
import os
import torch
from fusedlayers import functional

width, gated = int(os.environ["WIDTH"]), os.environ["GATED"] == "1"
def drawn(*shape):
    return (torch.randn(shape, device="cuda", dtype=torch.bfloat16) / 8).requires_grad_()
x, w_up, w_down = drawn(4096, width), drawn(4 * width, width), drawn(width, 4 * width)
b_up, b_down = drawn(4 * width), drawn(width)
w_gate = drawn(4 * width, width) if gated else None
dy = torch.randn(4096, width, device="cuda", dtype=torch.bfloat16)
leaves = [each for each in (x, w_up, w_down, b_up, b_down, w_gate) if each is not None]
def step():
    y = functional.ffn(x, w_up, w_down, b_up, b_down, w_gate, activation="gelu")
    return y, *torch.autograd.grad(y, leaves, dy)
os.environ["FUSEDLAYERS_BACKEND"] = "torch"
stream = torch.cuda.Stream()
with torch.cuda.stream(stream):
    for _ in range(3):
        step()
torch.cuda.synchronize()
os.environ["FUSEDLAYERS_BACKEND"] = "triton"
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    found = step()
graph.replay()
torch.cuda.synchronize()
for ours, launched in zip(found, step(), strict=True):
    assert torch.equal(ours, launched)
    assert ours.any()
"""


@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
@pytest.mark.parametrize("width", [128, 256, 768])
def test_a_first_launch_is_recorded(width: int, gated: bool, tmp_path: object) -> None:
    """From autograd's own thread, too. The cache of compiled kernels is empty, so that all of it happens inside."""
    settings = {"WIDTH": str(width), "GATED": str(int(gated)), "TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", CAPTURE], env=os.environ | settings, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
