"""Which tests belong to a kernel: to each file and folder of ``kernels/``, and to each operation.

``make test-kernel NAME=gemm_epilogue`` runs them; ``python -m tests.kernel_families gemm_epilogue`` prints their files,
and with ``--gpu`` those that need a GPU.
"""

from __future__ import annotations

import argparse

_LINEAR = (
    "functional/linear",
    "functional/linear_autograd",
    "modules/linear_module",
    "planning/linear",
    "kernels/code_generation_split_k",
)
_GEMM_GEMM = (
    *(
        "functional/gemm_gemm",
        "functional/gemm_gemm_reassociated",
        "functional/ffn",
        "functional/ffn_layouts",
        "functional/autograd",
        "planning/paths",
        "planning/sm90",
        "kernels/code_generation",
    ),
    "kernels/prepared_launches",
)
_GPU_GEMM_GEMM = ("gemm_gemm_gpu", "ffn_gpu", "sm90", "exact_integers")
_EPILOGUE = (
    "functional/ffn_epilogue",
    "functional/ffn_chunked",
    "planning/epilogue",
    "planning/chunks",
    "functional/layouts",
)
_GPU_CROSS_ENTROPY = tuple(f"linear_cross_entropy_{kind}gpu" for kind in ("", "fused_", "recomputed_"))
_GPU_EPILOGUE = ("ffn_epilogue_gpu", "data_gradient_gpu")
_HIDDEN_GRADIENT = ("functional/hidden_gradient", "planning/hidden_gradient", "kernels/code_generation_gradients")
_CROSS_ENTROPY = (
    *(
        "functional/linear_cross_entropy",
        "functional/linear_cross_entropy_calls",
        "functional/linear_cross_entropy_names",
        "modules/linear_cross_entropy_module",
    ),
    *("functional/linear_cross_entropy_fused", "functional/linear_cross_entropy_memory"),
    *("planning/linear_cross_entropy", "kernels/code_generation_cross_entropy"),
)
_EXPERTS = (
    "functional/moe_ffn",
    "functional/moe_ffn_by_torch",
    "kernels/moe_sorting",
    "functional/moe_arguments",
    "modules/moe_module",
    "planning/moe",
    "kernels/code_generation_moe",
)
_DROPOUT = ("kernels/dropout", "functional/dropping", "functional/lora_ffn_dropout", "replacing/adapter_dropout")

# Files of tests/: their folder, and their name without test_ and .py.
TESTS: dict[str, tuple[str, ...]] = {
    # The kernels of operations.
    "gemm_gemm": (*_GEMM_GEMM, "kernels/dropout", "kernels/hopper"),
    "gemm_epilogue": (
        *(*_EPILOGUE, *_HIDDEN_GRADIENT, "functional/ffn_layouts", "functional/lora_ffn"),
        "functional/lora_ffn_dropout",
        *("kernels/code_generation_epilogue", "kernels/code_generation_scaled"),
        *("kernels/prepared_launches", "kernels/dropout"),
    ),
    "gemm_reduce": (
        *(
            "functional/gemm_reduce",
            "kernels/gemm_reduce_kernels",
            "functional/gemm_reduce_calls",
            "verifying/reference_reduce",
            "planning/reduce",
        ),
        *("kernels/reduce_code_generation", "kernels/prepared_reductions"),
    ),
    "cross_entropy": _CROSS_ENTROPY,
    "grouped_gemm": _EXPERTS,
    # What is put together of the same parts: its users, which compare bits, and what compilers make of each kernel.
    "matmul": (
        *(*_EPILOGUE, "functional/ffn_layouts", "functional/hidden_gradient", "functional/lora_ffn"),
        *("functional/moe_ffn", "functional/linear", "functional/weight_gradient", "kernels/hopper"),
        *("kernels/code_generation_epilogue", "kernels/code_generation_moe", "kernels/code_generation_split_k"),
        *("kernels/code_generation_gradients", "kernels/code_generation_cross_entropy", "kernels/prepared_launches"),
        "kernels/code_generation_scaled",
    ),
    "maxsim": (
        "functional/maxsim",
        "functional/maxsim_arguments",
        "planning/maxsim",
        "kernels/code_generation_maxsim",
        "kernels/prepared_reductions",
    ),
    "split_k": (*_LINEAR, "kernels/prepared_launches"),
    "weight_gradient": (
        *(
            "functional/weight_gradient",
            "planning/weight_gradient",
            "kernels/code_generation_gradients",
            "kernels/prepared_launches",
        ),
    ),
    # Operations that are named otherwise than their kernels.
    "ffn": (
        "functional/ffn",
        "functional/ffn_layouts",
        "functional/autograd",
        "planning/costs",
        "functional/dropping",
        *_EPILOGUE,
    ),
    "hidden_gradient": _HIDDEN_GRADIENT,
    "linear": _LINEAR,
    "lora_ffn": (
        *("functional/lora_ffn", "functional/lora_ffn_dropout", "replacing/adapters", "replacing/adapter_dropout"),
        "kernels/code_generation_epilogue",
    ),
    "linear_cross_entropy": _CROSS_ENTROPY,
    "linear_log_probs": _CROSS_ENTROPY,
    "moe_ffn": _EXPERTS,
    # What kernels share.
    "activations": ("kernels/activations", "replacing/activations", "functional/ffn", "functional/gemm_gemm"),
    "column_sums": ("kernels/column_sums", "functional/weight_gradient", "kernels/prepared_launches"),
    "float8": (
        *("kernels/float8_kernels", "functional/float8", "modules/float8_modules", "replacing/float8_replaced"),
        *("verifying/verifying_float8", "planning/float8_plans", "benchmarks/float8"),
    ),
    "dropout": _DROPOUT,
    "partials": ("functional/ffn", "functional/linear", "functional/weight_gradient"),
    "tiles": ("functional/ffn", "functional/gemm_gemm", "functional/linear", "functional/weight_gradient"),
    "hopper": ("kernels/hopper", "functional/layouts", "planning/sm90"),
    "tuning": (
        *("planning/paths", "planning/sm90", "planning/epilogue", "planning/linear", "planning/reduce"),
        *("planning/weight_gradient", "planning/maxsim", "kernels/code_generation"),
    ),
    # How kernels are launched.
    "launching": (
        "kernels/prepared_launches",
        "kernels/prepared_reductions",
        "kernels/relaunching",
        "kernels/capturing",
    ),
    "relaunching": ("kernels/relaunching", "kernels/prepared_launches"),
    "capturing": ("kernels/capturing", "planning/captures"),
    "device": ("kernels/compilation_record", "functional/dispatch", "support/quick_interpreter"),
}

# The same of tests/gpu.
GPU_TESTS: dict[str, tuple[str, ...]] = {
    "gemm_gemm": _GPU_GEMM_GEMM,
    "gemm_epilogue": (*_GPU_EPILOGUE, "hidden_gradient_gpu", "lora_ffn_gpu", "scaled_hidden_gpu", "scaled_product_gpu"),
    "gemm_reduce": ("gemm_reduce_gpu", "sm90_reduce", "maxsim_gpu"),
    "grouped_gemm": ("moe_ffn_gpu", "grouped_gemm_gpu", "model_experts_gpu"),
    "matmul": (
        *_GPU_EPILOGUE,
        "lora_ffn_gpu",
        "grouped_gemm_gpu",
        "linear_gpu",
        "weight_gradient_gpu",
        "added_product_gpu",
        "scaled_hidden_gpu",
    ),
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
    "float8": ("float8_gpu", "scaled_product_gpu"),
    "dropout": ("ffn_gpu", "ffn_epilogue_gpu"),
    "partials": ("ffn_gpu", "linear_gpu", "weight_gradient_gpu"),
    "tiles": ("ffn_gpu", "gemm_gemm_gpu", "linear_gpu"),
    "hopper": ("sm90", "sm90_reduce"),
    "tuning": ("exact_integers",),
    "launching": ("capture", "capturing_gpu", "launching_gpu", "running_gpu"),
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
    paths = [f"gpu/{each}" for each in GPU_TESTS[name]] if gpu else TESTS[name]
    folders_and_names = [path.rpartition("/") for path in paths]
    return [f"tests/{folder}/test_{each}.py" for folder, _, each in folders_and_names]


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
