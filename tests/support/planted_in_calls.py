"""Planted faults of how calls run, and of what they and blocks keep for the next one: see ``planted_faults.py``."""

from __future__ import annotations

from tests.support.planting import Fault
from tests.support.planting import fault as _fault

_AUTOGRAD = "fusedlayers/functional/autograd.py"
_INTERNALS = "kernels/torch_internals.py"

CALLS: tuple[Fault, ...] = (
    _fault(
        "autocast that stays off", "fusedlayers/functional/operands.py",
        "torch.set_autocast_enabled(self._kind, True)", "pass",
        "functional/test_ffn_autograd as_it_was_after_a_call",
    ),
    _fault(
        "batches that wait for the step before", "train_examples/parallel.py",
        "batch = tuple(tensor.pin_memory() for tensor in batch)", "pass",
        "train_examples/test_loop pinned_memory",
    ),
    _fault(
        "torch's order of products in a graph", "fusedlayers/functional/linear.py",
        "(call.observed or not call.plan.data_gradient_first)", "True",
        "functional/test_linear_autograd products_with_the_data_gradient_first",
    ),
    _fault(
        "a call that another thread has half noted", _AUTOGRAD,
        "wanted = ctx.needs_input_grad[1:]\n", "wanted = call.wanted = ctx.needs_input_grad[1:]\n",
        "functional/test_recalled_calls half_noted",
    ),
    _fault(
        "kind of what was saved not looked at", _AUTOGRAD,
        "if found[:2] != kept[:2] if found and kept else found is not kept:", "if found is None:",
        "functional/test_autograd_contract_calls what_comes_back",
    ),
    _fault(
        "attributes of a class not watched", "fusedlayers/modules/children.py",
        "return {name: value for name, value in static.items() if not isinstance(value, type)} | ", "return ",
        "replacing/test_later_changes says_now",
    ),
    _fault(
        "sum of dW that no chunk begins", "fusedlayers/functional/linear_cross_entropy/chunked.py",
        "made = torch.empty if len(input) else torch.zeros", "made = torch.empty",
        "parallel/test_parallel_loss no_tokens",
    ),
    _fault(
        "graph that ends inside of a parallel loss", "fusedlayers/parallel/loss.py",
        '@torch.compiler.disable(reason="the loss of a vocabulary in parts runs in eager mode")', "",
        "parallel/test_parallel_loss compiled",
    ),
    _fault(
        "calls that a mode watches run their kernels at once", _INTERNALS,
        "return later.highestPriorityTypeId() in (torch._C.DispatchKey.CPU, torch._C.DispatchKey.CUDA)", "return True",
        "functional/test_flop_counts without_gradients",
    ),
    _fault(
        "autograd out of reach within an operation", _INTERNALS,
        "_ForceDispatchKeyGuard(include, exclude - _AUTOGRAD)", "_ForceDispatchKeyGuard(include, exclude)",
        "functional/test_flop_counts kernels_count",
    ),
    _fault(
        "dtypes of an observed call forgotten", "fusedlayers/functional/recalling.py",
        "if not check(*found):", "if False:",
        "functional/test_observed_calls always_given_the_same_dtypes",
    ),
    _fault(
        "alignment of a recalled call not looked at", "fusedlayers/functional/recalling.py",
        "if addresses & ALIGNMENT_MASK:", "if False:",
        "functional/test_recalling alignment_of_a_parameter",
    ),
    _fault(
        "hooks of a child not looked at", "fusedlayers/modules/guarding.py",
        'or own["_forward_hooks"]', "",
        "modules/test_guarding a_changed_linear_counts",
    ),
)  # fmt: skip
