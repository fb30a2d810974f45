"""Problems and plans as plain data: frozen, keys, pickled and copied, without torch and Triton."""

from __future__ import annotations

import base64
import copy
import importlib.util
import os
import pickle
import subprocess
import sys
from dataclasses import FrozenInstanceError
from pathlib import Path

import pytest

from fusedlayers.planning import Device, Problem, plan

H200 = Device("cuda", "NVIDIA H200", "sm_90", sms=132, triton=True)
TRAINING = Problem(
    "ffn", batch=1, M=1_048_576, K=64, N=256, O=64, dtype="bfloat16", activation="gelu_tanh",
    needs_data_gradient=True, needs_weight_gradient=True,
)  # fmt: skip


def test_plans_and_problems_cannot_be_changed_and_can_be_keys() -> None:
    for value, name in ((plan(TRAINING, H200), "path"), (TRAINING, "M"), (H200, "name")):
        hash(value)
        with pytest.raises(FrozenInstanceError):
            setattr(value, name, None)


def test_planning_needs_no_torch_and_no_triton() -> None:
    """Plain Python: both packages load, and read what was measured, where neither can be imported."""
    files = [importlib.util.find_spec(f"fusedlayers.{name}") for name in ("planning", "kernels.tuning")]
    roots = [str(Path(spec.origin or "").parent.parent) for spec in files if spec is not None]
    assert len(roots) == 2
    code = f"""
import importlib.util, sys, types

for blocked in ("torch", "triton", "numpy"):
    sys.modules[blocked] = None
for name, folder in (("fusedlayers", {roots[0]!r}), ("fusedlayers.kernels", {roots[1]!r})):
    sys.modules[name] = package = types.ModuleType(name)
    package.__path__ = [folder]
from fusedlayers.planning import Device, Problem, plan

problem = Problem("ffn", batch=1, M=2**20, K=64, N=256, O=64, dtype="bfloat16")
assert plan(problem, Device("cuda", "NVIDIA H200", "sm_90", 132, True, "sm90")).timed
"""
    done = subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_a_pickled_problem_keeps_no_hash_of_its_process() -> None:
    """Python salts the hashes of strings in every process: a stale one would miss in every dict and set."""
    hash(TRAINING)
    given = base64.b64encode(pickle.dumps((TRAINING, plan(TRAINING, H200)))).decode()
    script = f"""
import base64, pickle
from dataclasses import fields
problem, plan = pickle.loads(base64.b64decode({given!r}))
fresh = type(problem)(**{{each.name: getattr(problem, each.name) for each in fields(problem)}})
assert problem == fresh and hash(problem) == hash(fresh) and problem in {{fresh}}
assert plan.problem in {{fresh}}
"""
    environment = os.environ | {"PYTHONHASHSEED": "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"}
    subprocess.run([sys.executable, "-c", script], check=True, env=environment, cwd=Path(__file__).parents[2])


def test_a_copied_problem_keeps_no_hash() -> None:
    hash(TRAINING)
    for twin in (copy.copy(TRAINING), copy.deepcopy(TRAINING), pickle.loads(pickle.dumps(TRAINING))):
        assert "_hash" not in vars(twin)
        assert twin == TRAINING
        assert hash(twin) == hash(TRAINING)
