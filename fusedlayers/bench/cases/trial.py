"""One call of the self-test, and as if it were which machine."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from ... import planning
from ...functional.switches import switched
from ...kernels.tuning.dtypes import GENERIC
from ...planning import Call, Decision, Device
from .case import ALL, DTYPES, Case, Inputs, Options, Shape

# (tokens, hidden) of a feed-forward block: whole tiles, and tails in both.
WHOLE, RAGGED = (1024, 512), (1061, 488)
# "few": few SMs, so that each program of an sm90 kernel takes many tiles, with two consumers. "all": those of the
# device, with one consumer. "generic": the generic kernels run in place of the sm90 ones. "recomputing": the backward
# pass recomputes what it would store otherwise. "in chunks": so little memory that the logits are cut into several
# chunks. "transposed": weights are transposed in memory, which the sm90 kernels read as they are.
MACHINES: dict[str, dict[str, Any]] = {
    "few": {"sms": 4},
    "all": {},
    "generic": {"backend": GENERIC},
    "recomputing": {"sms": 4, "recompute": True},
    "recomputing, all": {"recompute": True},
    "recomputing, generic": {"backend": GENERIC, "recompute": True},
    "in chunks": {"sms": 4, "workspace": 2},
    "in chunks, recomputing": {"sms": 4, "recompute": True, "workspace": 2},
    "in chunks, recomputing, generic": {"backend": GENERIC, "recompute": True, "workspace": 2},
    "few, transposed": {"sms": 4, "transposed": True},
    "recomputing, transposed": {"sms": 4, "recompute": True, "transposed": True},
}
# These are no facts of the device, but an argument of the call, MiB of temporary memory, and the layout of weights.
_NO_FACTS = ("recompute", "workspace", "transposed")


@dataclass(frozen=True)
class Trial:
    """One call of a benchmark case on integers, on ``device`` or as if it were this ``machine``; plain data."""

    case: str
    options: Options
    shape: Shape
    dtype: str
    machine: str = "all"
    backward: bool = True

    def __str__(self) -> str:
        dropping = " with dropout" if self.options.dropout_p else ""
        kind = ("gated " if self.options.gated else "") + self.case + dropping
        passes = "" if self.backward else ", forward alone"
        shape = "x".join(map(str, self.shape))
        return f"{kind} {shape} {self.options.activation} {self.dtype} ({self.machine}{passes})"

    @property
    def facts(self) -> dict[str, Any]:
        """What is assumed of the device; nothing is avoided, as that is what is tested."""
        assumed = {name: value for name, value in MACHINES[self.machine].items() if name not in _NO_FACTS}
        return assumed | {"avoided": frozenset()}

    @property
    def switches(self) -> dict[str, str]:
        """What the user's switches must say."""
        workspace = MACHINES[self.machine].get("workspace")
        return {} if workspace is None else {"FUSEDLAYERS_WORKSPACE_MIB": str(workspace)}

    def prepared(self) -> tuple[Case, Options]:
        """The case and its options."""
        case = ALL[self.case]
        recompute = MACHINES[self.machine].get("recompute", "auto")
        return replace(case, backward=case.backward and self.backward), replace(self.options, recompute=recompute)

    def laid_out(self, inputs: Inputs) -> Inputs:
        """The inputs, and the weights among them as they lie in memory."""
        if not MACHINES[self.machine].get("transposed"):
            return inputs
        parameters = ALL[self.case].parameters
        return {
            name: tensor.detach().T.contiguous().T.requires_grad_(tensor.requires_grad)
            if name in parameters and tensor.dim() == 2
            else tensor
            for name, tensor in inputs.items()
        }

    def problem(self) -> Call:
        """The planning problem, without data."""
        case, options = self.prepared()
        operands = case.operands(self.shape, options)
        blank = {name: operand.blank(DTYPES[self.dtype], case.backward) for name, operand in operands.items()}
        with torch.set_grad_enabled(case.backward), switched(self.switches):
            return case.problem(blank, options)

    def plan(self, device: Device) -> Decision:
        """What runs on ``device`` if kernels are forced."""
        return planning.plan(self.problem(), replace(device, **self.facts), "triton")
