"""What a torch device can do, asked once per device: the facts that planning works with."""

from functools import cache

import torch

from .kernels.device import HAS_TRITON, interpreted
from .kernels.hopper import HAS_GLUON
from .planning import Device


@cache
def describe(device: torch.device) -> Device:
    """The planning facts of ``device``; the interpreter counts as Triton on a CPU, for tests."""
    if device.type != "cuda":
        return Device(kind=device.type, name=device.type, triton=device.type == "cpu" and interpreted())
    facts = torch.cuda.get_device_properties(device)
    if torch.version.hip:
        architecture = facts.gcnArchName.split(":")[0]
    else:
        architecture = f"sm_{facts.major}{facts.minor}"
    return Device(
        kind="cuda",
        name=facts.name,
        architecture=architecture,
        processors=facts.multi_processor_count,
        triton=HAS_TRITON,
        pipelined=HAS_GLUON and architecture == "sm_90",
    )
