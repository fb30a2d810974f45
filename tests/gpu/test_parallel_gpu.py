"""The tests of two processes over NCCL, on two GPUs, with compiled kernels."""

from __future__ import annotations

import pytest
import torch

# Imported to be collected here, too.
from tests.models.test_distributed import (  # noqa: F401
    test_a_loss_without_logits,
    test_checkpointing_stays,
    test_experts,
    test_two_steps_are_the_same,
)
from tests.parallel.test_parallel import (  # noqa: F401
    test_data_parallel,
    test_dropout_differs_between_processes_and_is_replayed,
    test_fsdp_in_mixed_precision,
    test_sharded_checkpoints,
    test_tensor_parallel,
    test_tensor_parallel_in_one_compiled_graph,
    test_tensor_parallel_in_parts_that_differ_and_without_biases,
    test_tensor_parallel_keeping_less,
    test_tensor_parallel_modules,
    test_tensor_parallel_under_autocast,
)
from tests.parallel.test_parallel_experts import (  # noqa: F401
    test_a_mixture_in_parts,
    test_a_mixture_in_parts_in_kernels,
    test_arguments_by_name,
    test_copies,
    test_expert_parallelism,
    test_explanations,
    test_other_dtypes,
    test_processes_with_other_numbers_of_tokens,
    test_replaced_experts_in_parts,
    test_replaced_experts_under_autocast,
    test_shards_of_experts,
)
from tests.parallel.test_parallel_experts import test_autocast as test_experts_under_autocast  # noqa: F401
from tests.parallel.test_parallel_float8 import (  # noqa: F401
    test_a_model_of_transformers_in_8_bits,
    test_data_parallel_in_8_bits,
    test_expert_parallel_in_8_bits,
    test_linears_in_parts_in_8_bits,
    test_linears_in_uneven_parts,
    test_tensor_parallel_in_8_bits,
)
from tests.parallel.test_parallel_loss import (  # noqa: F401
    test_autocast,
    test_classes_in_parts,
    test_classes_in_parts_in_other_dtypes,
    test_classes_in_parts_with_tokens_in_parts,
    test_compiled,
    test_data_parallel_loss,
    test_frozen_classes,
    test_no_tokens,
    test_targets_that_are_no_classes,
    test_what_is_not_split,
)

pytestmark = [
    pytest.mark.xdist_group("two processes"),
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]
