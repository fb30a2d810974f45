"""What the tests of ``explain`` share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from fusedlayers import devices


@pytest.fixture
def without_kernels_here(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A CPU on which no interpreter stands in for Triton, and no switch is set."""
    monkeypatch.setenv("FUSEDLAYERS_BACKEND", "auto")
    with monkeypatch.context() as patched:
        patched.setattr(devices, "interpreted", lambda: False)
        devices._describe.cache_clear()
        yield
    devices._describe.cache_clear()
