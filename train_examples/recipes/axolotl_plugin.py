"""A plugin for axolotl. Copy this file to where axolotl is started, and name it in the configuration:

plugins:
  - axolotl_plugin.FusedLayersPlugin
fusedlayers:
  norm: false
"""

from __future__ import annotations

from typing import Any

from axolotl.integrations.base import BasePlugin
from pydantic import BaseModel
from torch import nn

import fusedlayers as fl


class FusedLayersArguments(BaseModel):
    """What axolotl's configuration gains."""

    fusedlayers: dict[str, Any] | None = None  # arguments of fl.replace, such as loss, norm or recompute


class FusedLayersPlugin(BasePlugin):  # type: ignore[misc]
    """Calls ``fl.replace`` when the model is complete, and prints its report."""

    def get_input_args(self) -> str:
        """The path of the class above, as axolotl asks for it."""
        return f"{__name__}.{FusedLayersArguments.__name__}"

    def post_model_load(self, cfg: Any, model: nn.Module) -> None:
        """The one line: after adapters are loaded, so that blocks are fused with them, and before the trainer."""
        print(fl.replace(model, **(cfg.get("fusedlayers") or {})))
