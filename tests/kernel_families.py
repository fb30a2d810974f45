"""Which tests belong to a kernel: to each file and folder of ``kernels/``, and to each operation.

``make test-kernel NAME=gemm_epilogue`` runs them; ``python -m tests.kernel_families gemm_epilogue`` prints their files,
and with ``--gpu`` those that need a GPU.
"""

from __future__ import annotations

import argparse

_LINEAR = ("linear", "linear_autograd", "linear_module", "planning_linear", "code_generation_split_k")
_GEMM_GEMM = (
    *("gemm_gemm", "ffn", "ffn_layouts", "autograd", "planning", "planning_pipelined", "code_generation"),
    "prepared_launches",
)
_GPU_GEMM_GEMM = ("gemm_gemm_gpu", "ffn_gpu", "pipelined", "exact_integers")
_EPILOGUE = ("ffn_epilogue", "ffn_chunked", "planning_epilogue", "planning_chunks", "layouts")
_GPU_CROSS_ENTROPY = tuple(f"linear_cross_entropy_{kind}gpu" for kind in ("", "fused_", "recomputed_"))
_GPU_EPILOGUE = ("ffn_epilogue_gpu", "data_gradient_gpu")
_HIDDEN_GRADIENT = ("hidden_gradient", "planning_hidden_gradient", "code_generation_gradients")
_CROSS_ENTROPY = (
    *("linear_cross_entropy", "linear_cross_entropy_calls", "linear_cross_entropy_module"),
    *("linear_cross_entropy_fused", "linear_cross_entropy_memory"),
    *("planning_linear_cross_entropy", "code_generation_cross_entropy"),
)
_EXPERTS = (
    "moe_ffn",
    "moe_ffn_by_torch",
    "moe_sorting",
    "moe_arguments",
    "moe_module",
    "planning_moe",
    "code_generation_moe",
)
_DROPOUT = ("dropout", "dropping", "lora_ffn_dropout", "replacing_adapter_dropout")

# Files of tests/, without test_ and .py.
TESTS: dict[str, tuple[str, ...]] = {
    # The kernels of operations.
    "gemm_gemm": (*_GEMM_GEMM, "dropout", "hopper"),
    "gemm_epilogue": (
        *(*_EPILOGUE, *_HIDDEN_GRADIENT, "lora_ffn", "lora_ffn_dropout"),
        *("code_generation_epilogue", "prepared_launches", "dropout"),
    ),
    "gemm_reduce": (
        *("gemm_reduce", "gemm_reduce_kernels", "gemm_reduce_calls", "reference_reduce", "planning_reduce"),
        *("reduce_code_generation", "prepared_reductions"),
    ),
    "cross_entropy": _CROSS_ENTROPY,
    "grouped_gemm": _EXPERTS,
    "maxsim": ("maxsim", "maxsim_arguments", "maxsim_planning", "code_generation_maxsim", "prepared_reductions"),
    "split_k": (*_LINEAR, "prepared_launches"),
    "weight_gradient": (
        *("weight_gradient", "planning_weight_gradient", "code_generation_gradients", "prepared_launches"),
    ),
    # Operations that are named otherwise than their kernels.
    "ffn": ("ffn", "ffn_layouts", "autograd", "planning_costs", "dropping", *_EPILOGUE),
    "hidden_gradient": _HIDDEN_GRADIENT,
    "linear": _LINEAR,
    "lora_ffn": (
        *("lora_ffn", "lora_ffn_dropout", "replacing_adapters", "replacing_adapter_dropout"),
        "code_generation_epilogue",
    ),
    "linear_cross_entropy": _CROSS_ENTROPY,
    "linear_log_probs": _CROSS_ENTROPY,
    "moe_ffn": _EXPERTS,
    # What kernels share.
    "activations": ("activations", "replacing_activations", "ffn", "gemm_gemm"),
    "column_sums": ("column_sums", "weight_gradient", "prepared_launches"),
    "dropout": _DROPOUT,
    "partials": ("ffn", "linear", "weight_gradient"),
    "tiles": ("ffn", "gemm_gemm", "linear", "weight_gradient"),
    "pipeline": ("hopper", "planning_pipelined", "code_generation"),
    "hopper": ("hopper", "layouts", "planning_pipelined"),
    "tuning": (
        *("planning", "planning_pipelined", "planning_epilogue", "planning_linear", "planning_reduce"),
        *("planning_weight_gradient", "maxsim_planning", "code_generation"),
    ),
    # How kernels are launched.
    "launching": ("prepared_launches", "prepared_reductions", "relaunching", "capturing"),
    "relaunching": ("relaunching", "prepared_launches"),
    "capturing": ("capturing", "planning_captures"),
    "device": ("compilation_record", "dispatch", "quick_interpreter"),
}

# The same of tests/gpu.
GPU_TESTS: dict[str, tuple[str, ...]] = {
    "gemm_gemm": _GPU_GEMM_GEMM,
    "gemm_epilogue": (*_GPU_EPILOGUE, "hidden_gradient_gpu", "lora_ffn_gpu"),
    "gemm_reduce": ("gemm_reduce_gpu", "pipelined_reduce", "maxsim_gpu"),
    "grouped_gemm": ("moe_ffn_gpu", "grouped_gemm_gpu", "model_experts_gpu"),
    "maxsim": ("maxsim_gpu",),
    "cross_entropy": _GPU_CROSS_ENTROPY,
    "split_k": ("linear_gpu",),
    "weight_gradient": ("weight_gradient_gpu",),
    "ffn": (*_GPU_GEMM_GEMM[1:], *_GPU_EPILOGUE),
    "hidden_gradient": ("hidden_gradient_gpu",),
    "linear": ("linear_gpu",),
    "lora_ffn": ("lora_ffn_gpu",),
    "linear_cross_entropy": _GPU_CROSS_ENTROPY,
    "linear_log_probs": _GPU_CROSS_ENTROPY,
    "moe_ffn": ("moe_ffn_gpu", "grouped_gemm_gpu", "model_experts_gpu"),
    "activations": ("ffn_gpu",),
    "column_sums": ("weight_gradient_gpu",),
    "dropout": ("ffn_gpu", "ffn_epilogue_gpu"),
    "partials": ("ffn_gpu", "linear_gpu", "weight_gradient_gpu"),
    "tiles": ("ffn_gpu", "gemm_gemm_gpu", "linear_gpu"),
    "pipeline": ("pipelined", "pipelined_reduce"),
    "hopper": ("pipelined", "pipelined_reduce"),
    "tuning": ("exact_integers",),
    "launching": ("capture", "capturing_gpu", "running_gpu"),
    "relaunching": ("capture", "running_gpu"),
    "capturing": ("capture", "capturing_gpu"),
    "device": ("running_gpu",),
}


def files(name: str, gpu: bool) -> list[str]:
    """The files of the tests that belong to a name.

    Raises:
        ValueError: nothing is known by that name.
    """
    if name not in TESTS:
        raise ValueError(f"NAME is {name!r}; expected one of {', '.join(sorted(TESTS))}")
    return (
        [f"tests/gpu/test_{each}.py" for each in GPU_TESTS[name]]
        if gpu
        else [f"tests/test_{each}.py" for each in TESTS[name]]
    )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.kernel_families", description=__doc__)
    parser.add_argument("name", nargs="?", default="")
    parser.add_argument("--gpu", action="store_true", help="those that need a GPU")
    given = parser.parse_args()
    try:
        print(*files(given.name, given.gpu))
    except ValueError as error:
        parser.exit(2, f"error: {error}\n")


if __name__ == "__main__":
    main()
