"""What `replace` makes of small models of nearly every family of transformers, as a record and as a table.

    python -m tests.models.family_table

writes the record; ``make docs`` makes the table of docs/families.md from it. Each model is computed in float32 before
and after `replace`, on the machine's own path, and compared with itself in float64.
"""

from __future__ import annotations

import json
import logging
import re
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import torch

import fusedlayers as fl
from tests.models.device_table import worst_error
from tests.models.every_family import FAMILIES, Family
from tests.models.family_data import NO_TRUTH
from tests.models.small import blocks

RECORD = Path(__file__).with_name("results") / "families.json"
# What comes of experts is said once, and not for every class of them.
_EXPERTS = "looks like the experts of a mixture"


def row(name: str, family: Family) -> dict[str, Any]:
    """What is fused in the family's model, what is left and why, and the largest errors over the largest values."""
    model, inputs = family.build().eval(), family.inputs()
    theirs = family.results(model, inputs)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        report = fl.replace(model)
    ours = family.results(model, inputs)
    modules = {(entry.path, entry.module): entry.reason.partition(": ")[2] for entry in blocks(report.replaced)}
    left = {entry.module: _shorter(entry.reason) for entry in report.skipped if entry.is_ffn_left}
    found: dict[str, Any] = {
        "family": name,
        "fused": dict(Counter(module for _, module in modules)),
        "ffns": sorted({_formula(text) for text in modules.values()}),
        "left": left,
    }
    if name not in NO_TRUTH:
        truth = family.truth(family.build().double().eval(), inputs)
        found["errors"] = [worst_error(results, truth, gradients=True) for results in (theirs, ours)]
    return found


def _formula(text: str) -> str:
    """The activation of a description, and whether it gates."""
    return text.partition(",")[0]


def _shorter(reason: str) -> str:
    """A reason without the sizes of the small model."""
    if reason.startswith(_EXPERTS):
        return "experts of a mixture"
    return re.sub(r"^looks like an? .*?\), but (.*)$", r"\1", reason)


def record() -> dict[str, Any]:
    """The rows of all families, and the versions of the libraries."""
    import transformers

    rows = [row(name, FAMILIES[name]) for name in sorted(FAMILIES)]
    return {"versions": {"torch": torch.__version__, "transformers": transformers.__version__}, "rows": rows}


def markdown(found: dict[str, Any]) -> str:
    """The table, and the paragraph before it."""
    rows = found["rows"]
    fused = [each for each in rows if each["fused"]]
    worst = max(each["errors"][1] / max(each["errors"][0], 1e-12) for each in fused if "errors" in each)
    modules = sum(sum(each["fused"].values()) for each in rows)
    lines = [
        f"Small models of {len(rows)} families with random weights, transformers {found['versions']['transformers']}, "
        f"torch {found['versions']['torch']}: {len(fused)} have blocks that run fused, {modules} blocks in all. "
        "*Gradients* are the largest error of all gradients over the largest value, in float32 against float64, for "
        f"torch and for the replaced model; nowhere are they more than {worst:.1f} times apart.",
        "",
        "| family | what becomes fused | its FFNs | gradients: torch / fused | left, and why |",
        "| --- | --- | --- | --- | --- |",
    ]
    for each in rows:
        errors = " / ".join(f"{error:.1e}" for error in each.get("errors", ())) or "not run in float64"
        blocks = ", ".join(f"`{kind}`" for kind in each["fused"])
        left = "; ".join(f"`{kind}`: {_cell(reason)}" for kind, reason in each["left"].items())
        lines.append(f"| {each['family']} | {blocks} | {', '.join(each['ffns'])} | {errors} | {left} |")
    return "\n".join(lines)


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def main() -> None:
    """Write the record."""
    logging.disable(logging.WARNING)
    RECORD.write_text(json.dumps(record(), indent=1) + "\n")


if __name__ == "__main__":
    main()
