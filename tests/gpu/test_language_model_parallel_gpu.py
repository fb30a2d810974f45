"""The tests of ``tests/train_examples/test_language_model_parallel.py`` once more: over NCCL, on two GPUs.

Not those that a GPU changes nothing about, nor bit-equal resume: torch's attention does not sum in a fixed order there.
"""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("hydra")

# Imported to be collected here, too.
from tests.train_examples.test_language_model_parallel import (  # noqa: F401
    band,
    test_mixed_precision_learns,
    test_other_layers,
    test_the_curve_is_that_of_one_process,
    test_torchrun,
)

pytestmark = [
    pytest.mark.xdist_group("two processes of the language model"),
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]
