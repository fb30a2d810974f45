"""Memory of a card that several processes of pytest-xdist share.

Tests that need more than about 4 GiB are in two groups, each of which runs in one process at a time:
``xdist_group("large")`` for tensors of more than 2^31 elements, ``xdist_group("logits")`` for large vocabularies.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

# Below it, allocating the blocks again would cost time and win little: fifteen processes keep less than 4 GiB.
MOST_KEPT = 256 * 2**20


@pytest.fixture(autouse=True)
def no_memory_is_kept() -> Iterator[None]:
    """Under xdist, return cached blocks after a test: other processes cannot use what this one's allocator keeps."""
    yield
    if "PYTEST_XDIST_WORKER" in os.environ and torch.cuda.memory_reserved() > MOST_KEPT:
        torch.cuda.empty_cache()
