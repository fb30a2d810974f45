"""Print the table of support in docs/models.md, one row for every small model of ``small.FAMILIES``.

    TRITON_INTERPRET=1 FUSEDLAYERS_BACKEND=triton python -m tests.models.support_table

Each is computed before and after `replace` in float32, and compared with itself in float64; the switches say that the
kernels compute it. The bytes are those of the report, for the widths that the library takes by default, in bfloat16.
"""

from __future__ import annotations

import copy
import importlib.util
import logging
import sys

import torch

import fusedlayers as fl
from tests.models.device_table import worst_error
from tests.models.small import FAMILIES, Family

HEADER = (
    "| family | what becomes fused | its FFN | logits: torch / fused | gradients: torch / fused "
    "| kept per token and block: torch / `recompute=True` |"
)


def row(name: str, family: Family) -> str:
    """One line of the table."""
    torch.manual_seed(0)
    model, inputs = family.build().eval(), family.inputs()
    truth = family.truth(copy.deepcopy(model).double(), inputs)
    theirs = family.results(model, inputs)
    report = fl.replace(model)
    ours = family.results(model, inputs)
    errors = [
        " / ".join(f"{worst_error(results, truth, gradients):.1e}" for results in (theirs, ours))
        for gradients in (False, True)
    ]
    published = fl.replace(family.build_published().bfloat16(), recompute=True)
    text = published.replaced[0].reason.partition(": ")[2]
    theirs_kept, ours_kept = published.replaced[0].saved_bytes or (0, 0)
    kept = f"{theirs_kept:,} / {ours_kept:,} bytes"
    blocks = ", ".join(f"`{block}`" for block in family.blocks)
    assert len(report.replaced) == family.count
    return f"| {name} | {blocks} | {text} | {errors[0]} | {errors[1]} | {kept} |"


def main() -> None:
    """Print the table; a family whose library is missing is named below it."""
    logging.disable(logging.WARNING)
    missing = [name for name, family in FAMILIES.items() if importlib.util.find_spec(family.package) is None]
    rows = [row(name, family) for name, family in FAMILIES.items() if name not in missing]
    print("\n".join([HEADER, "| " + "--- | " * HEADER.count(" | ") + "--- |", *rows]))
    if missing:
        print(f"not installed, so left out: {', '.join(missing)}", file=sys.stderr)


if __name__ == "__main__":
    main()
