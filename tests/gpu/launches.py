"""Which kernels a test has launched."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from torch import Tensor

from fusedlayers.kernels.launching import Launch


def note_launches(monkeypatch: pytest.MonkeyPatch, names: Mapping[str, str]) -> list[str]:
    """A list that every launch of these kernels from now on adds its name to, as ``names`` has it.

    Kernels are named as their functions are, without ``_`` in front and ``_kernel`` behind; others are not noted.
    """
    noted: list[str] = []
    run = Launch.__call__

    def noting(self: Any, tensors: tuple[Tensor | None, ...]) -> None:
        name = self._kernel.__name__.removeprefix("_").removesuffix("_kernel")
        if name in names:
            noted.append(names[name])
        run(self, tensors)

    monkeypatch.setattr(Launch, "__call__", noting)
    return noted
