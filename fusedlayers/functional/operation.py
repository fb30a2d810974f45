"""How every call runs: recalled, or checked and planned; then by kernels, by torch, or as a custom operation.

An operation is one object, registered under the name of its public function. What all of them share is written here
once: the cache of prepared calls, autocast, dispatch modes and compilers, the choice between a plain run and autograd,
upstream gradients of any layout, and second derivatives.

A repeated call passes :meth:`Operation.call` or a module, then :meth:`Operation.run` and the operation's own
``forward``, which launches kernels.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable, Sequence
from contextlib import nullcontext
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling
from torch.fx import Proxy

from .. import reference
from ..kernels.activations import ACTIVATIONS
from ..kernels.capturing import make_products_ready
from ..kernels.torch_internals import autograd_in_reach, jit_trace
from ..planning import Call, Device
from . import dispatch
from .autograd import apply, contiguous, dense
from .call import observed, subclass_of, surroundings, transformed
from .custom_ops import Composite, KernelOperation, Results
from .operands import autocast, naming_layouts, without_autocast
from .prepared import Prepared
from .recalling import ModuleCalls, Recalled, call_key, like_call

Tensors = Sequence[Any]  # tensors, or None for those that are not given

# Every operation by the name of its public function.
OPERATIONS: dict[str, Operation] = {}

# The prepared calls of all operations, by :func:`call_key`.
CALLS: Recalled[Prepared] = Recalled()


class Operation:
    """The interface of an operation, which subclasses implement; an instance is created with the public function.

    The arguments of the public function are its ``tensors`` and its ``options``, both in the function's order.
    """

    problem_type: ClassVar[type[Call]]
    # The kernels' operands in order, after autocast and with a flat batch; "?" marks operands that may be None.
    operands: ClassVar[str]
    # Tensors that kernels read as matrices of rows; they are copied where the rows are not evenly spaced.
    row_operands: ClassVar[tuple[str, ...]] = ()
    # Position of the operand that is added to the result, so that its gradient is that of the result.
    added: ClassVar[int | None] = None
    # Paths that run torch's own expression.
    torch_paths: ClassVar[tuple[str, ...]] = ("torch",)
    # Whether under autocast that expression takes tensors that are cast as for kernels, with autocast off. Otherwise
    # autocast casts for each of its operations.
    torch_takes_cast: ClassVar[bool] = False
    # A :meth:`backward` that may overwrite or return ``made``, for when nobody else holds it; None: nothing to gain.
    last_backward: Callable[..., Tensors] | None = None
    # Whether kernels compute the backward pass, which is a custom operation of its own then; else torch does.
    has_backward: ClassVar[bool] = True

    def __init__(self, function: Callable[..., Any], variant: str = "") -> None:
        """``variant``: the name of another way to compute ``function``, which its operation alone leads to."""
        self.function, self.name = function, f"{variant}{function.__name__}"
        self.is_variant = bool(variant)
        self._signature = inspect.signature(function)
        parameters = self._signature.parameters
        kinds = {Tensor, Tensor | None}
        self.tensor_names = tuple(name for name, each in parameters.items() if each.annotation in kinds)
        self.option_names = tuple(name for name in parameters if name not in self.tensor_names)
        names = (*self.tensor_names, *self.option_names)
        # The position of each argument of the function among its tensors and options.
        self._positions = tuple(names.index(name) for name in parameters)
        if not variant:
            self.composite = Composite(function)
            OPERATIONS[self.name] = self
        self.kernel_operation = KernelOperation(self)

    # What a subclass implements.

    def variant(self, options: tuple[Any, ...]) -> Operation:
        """The operation that plans a call with these checked options: itself, unless it has variants."""
        return self

    def instead(self, plan: Any, options: tuple[Any, ...]) -> tuple[Operation, tuple[Any, ...]] | None:
        """The operation that runs a call with this plan, and the options that it takes; None: this one."""
        return None

    def check(self, tensors: Tensors, options: tuple[Any, ...]) -> tuple[Any, ...]:
        """Raises an error that names the argument that is wrong; returns the options with canonical names."""
        raise NotImplementedError

    def problem(self, tensors: Tensors, options: tuple[Any, ...]) -> Call:
        """The planning problem of a checked call."""
        raise NotImplementedError

    def reference(self, **arguments: Any) -> Any:
        """The oracle of ``reference``, called with all arguments of the public function by name."""
        oracle: Callable[..., Any] = getattr(reference, self.name)
        known = inspect.signature(oracle).parameters
        return oracle(**{name: value for name, value in arguments.items() if name in known})

    def title(self, problem: Any, tensors: Tensors, options: tuple[Any, ...]) -> str:
        """What a call of the public function's ``tensors`` computes, in one line of formulas."""
        raise NotImplementedError

    def through_torch(self, call: Prepared, tensors: Tensors) -> Any:
        """The result of the public function in torch's own operations."""
        raise NotImplementedError

    def flattened(self, call: Prepared, tensors: Tensors) -> Tensors:
        """The kernels' operands, from tensors that are already cast."""
        return tensors

    def forward(self, call: Prepared, operands: Tensors, wanted: Sequence[bool]) -> tuple[Tensors, Tensors]:
        """(results, saved tensors beside the operands); ``wanted``: whose gradients are wanted."""
        raise NotImplementedError

    def backward(
        self, call: Prepared, operands: Tensors, made: Tensors, wanted: Sequence[bool], upstream: Tensors
    ) -> Tensors:
        """The wanted gradients of the operands by kernels, for contiguous upstream gradients."""
        raise NotImplementedError

    def expression(self, call: Prepared, operands: Tensors) -> Tensors:
        """The results of :meth:`forward` in torch's own operations, where these are to be differentiated."""
        raise NotImplementedError

    def results(self, operands: Tensors, problem: Any, path: str, extras: dict[str, Any], saving: bool) -> Results:
        """Shapes and dtypes of what :meth:`forward` returns; ``saving``: whether any gradient is wanted."""
        raise NotImplementedError

    def facts(self, plan: Any, device: Device) -> list[tuple[str, str]]:
        """What ``explain`` prints of a plan: (what, text) rows."""
        return plan.facts(device)

    def extras(self, options: tuple[Any, ...]) -> dict[str, Any]:
        """What kernels need of the options beyond the problem: numbers and strings by name."""
        return {}

    def details(self, plan: Any, extras: dict[str, Any]) -> Any:
        """What :meth:`forward` and :meth:`backward` derive from a plan and from the extras."""
        return plan

    def kept(self, wanted: Sequence[bool]) -> tuple[bool, ...]:
        """Which operands the backward pass needs, given whose gradients are wanted."""
        return (True,) * len(wanted)

    def unread(self, call: Prepared, wanted: Sequence[bool]) -> Sequence[int]:
        """Positions of kept operands whose values :meth:`expression` reads, but :meth:`backward` does not.

        They may be changed in place before a backward pass, as torch allows for a bias, but not before one that is
        differentiated itself.
        """
        return ()

    def constant(self, problem: Any, wanted: Sequence[bool]) -> Sequence[int]:
        """Positions of the results that depend on no operand whose gradient is wanted: they require none."""
        return ()

    def finished(self, call: Prepared, tensors: Tensors, results: Any) -> Any:
        """The public result, from the results of the kernels."""
        return results

    def unpacked(self, found: list[Tensor], options: Sequence[Any], tensors: Tensors) -> Any:
        """The public result, from those of its tensors that are not None."""
        return found[0] if len(found) == 1 else tuple(found)

    # How a call runs.

    def call(
        self,
        tensors: Tensors,
        options: tuple[Any, ...],
        *,
        in_kernels: bool = False,
        module_calls: ModuleCalls | None = None,
    ) -> Any:
        """The public function of its tensors and its options.

        ``in_kernels``: return None where torch would run the call, because the caller has a faster way to do that.
        ``module_calls``: the calls of the module that calls, to which this one is added.
        """
        if is_dynamo_compiling():
            given = (*tensors, *options)
            return self.unpacked(self.composite(*[given[each] for each in self._positions]), options, tensors)
        key = call_key(self.name, tensors, options)
        call = CALLS.find(key, tensors)
        if call is None:
            named = dict(zip((*self.tensor_names, *self.option_names), (*tensors, *options), strict=True))
            if (symbol := next((each for each in tensors if isinstance(each, Proxy)), None)) is not None:
                # torch.fx cannot trace checks of a Proxy's values: the whole call is one node of its graph.
                return symbol.tracer.create_proxy("call_function", self.function, (), named)
            if jit_trace() is not None:
                # The graph of torch.jit holds nothing but torch's own operations, and its sizes are tensors.
                return self.reference(**named)
            call = self._prepare(key, tensors, options)
        if module_calls is not None:
            module_calls.note(call, tensors, options)
        if in_kernels and call.runs_eager:
            return None
        return call.operation.run(call, tensors)

    def prepared(self, tensors: Tensors, options: tuple[Any, ...]) -> Prepared:
        """The prepared call: recalled, or checked and planned now.

        Raises:
            TypeError, ValueError: as the public function.
            RuntimeError: as :func:`.dispatch.dispatch`.
        """
        key = call_key(self.name, tensors, options)
        return CALLS.find(key, tensors) or self._prepare(key, tensors, options)

    def _prepare(self, key: Hashable, tensors: Tensors, options: tuple[Any, ...]) -> Prepared:
        checked = self.check(tensors, options)
        variant = self.variant(checked)
        call = self._plan(tensors, checked) if variant is self else variant.prepared(tensors, checked)
        if call.repeatable and key is not None:
            # torch's expression takes tensors of any alignment.
            CALLS.add(key, like_call(tensors, aligned=not call.runs_eager), call)
        return call

    def _plan(self, tensors: Tensors, options: tuple[Any, ...]) -> Prepared:
        """A prepared call of these checked options."""
        device = tensors[0].device
        problem = self.problem(tensors, options)
        plan = dispatch.dispatch(problem, device)
        if self.is_variant and (other := self.instead(plan, options)) is not None:
            return other[0].prepared(tensors, other[1])
        plain = surroundings(tensors[0]) is not None and not subclass_of(*tensors)
        call = Prepared(
            self, options, problem, plan, dispatch.describe(device), self.extras(options), tensors,
            observed=not plain and observed(), repeatable=plain and self.may_be_repeated(options),
        )  # fmt: skip
        if device.type == "cuda":
            make_products_ready(device)
        if not plain:
            # For subclasses and tensors of transforms autograd decides itself.
            call.wants_gradient = True
        return call

    def problem_of(self, **arguments: Any) -> Call:
        """The planning problem of a call with these arguments by name, those left out at their defaults.

        Raises:
            TypeError, ValueError: as the public function.
        """
        tensors, options = self.bound(**arguments)
        return self.problem(tensors, self.check(tensors, options))

    def bound(self, *inputs: Any, **arguments: Any) -> tuple[Tensors, tuple[Any, ...]]:
        """The tensors and the options of a call of the public function, those left out at their defaults."""
        given = self._signature.bind(*inputs, **arguments)
        given.apply_defaults()
        values = given.arguments
        return [values[name] for name in self.tensor_names], tuple(values[name] for name in self.option_names)

    def may_be_repeated(self, options: tuple[Any, ...]) -> bool:
        """Whether the checks of a call still hold at the next one with the same key."""
        return True

    def run(self, call: Prepared, tensors: Tensors) -> Any:
        """The public result of a prepared call."""
        if dispatch.counted is not None:
            dispatch.count(call.plan)
        if call.runs_eager:
            return self.through_torch(call, tensors) if call.direct else self._through_torch(call, tensors)
        operands = self.flattened(call, tensors if call.dtype is None else self.cast(call, tensors))
        if call.observed:
            results = self.kernel_operation(operands, call)
        elif call.wants_gradient:
            results = apply(call, *operands)
        else:
            forward = self.forward if call.dtype is None else self.forward_without_autocast
            found, _ = forward(call, operands, ())
            results = found[0] if len(found) == 1 else found
        return self.finished(call, tensors, results)

    def runs_eager(self, call: Prepared) -> bool:
        """Whether torch's own expression runs, which autograd, dispatch modes and compilers see through."""
        return call.plan.path in self.torch_paths

    def _through_torch(self, call: Prepared, tensors: Tensors) -> Any:
        """torch's own expression where autocast casts its tensors first, or an error may have to name a layout."""
        cast = call.dtype is not None and self.torch_takes_cast
        autocast_off = without_autocast(tensors[0].device) if cast else nullcontext()
        naming = naming_layouts(self.tensor_names, tensors) if call.problem.subclass else nullcontext()
        with autocast_off, naming:
            return self.through_torch(call, self.cast(call, tensors) if cast else tensors)

    def cast(self, call: Prepared, tensors: Tensors) -> Tensors:
        """The floating-point tensors in the dtype that autocast gives to products."""
        assert call.dtype is not None
        return autocast(tensors, call.dtype)

    def forward_without_autocast(
        self, call: Prepared, operands: Tensors, wanted: Sequence[bool]
    ) -> tuple[Tensors, Tensors]:
        """:meth:`forward` of operands that are cast; autocast must not cast them again."""
        with without_autocast(operands[0].device):
            return self.forward(call, operands, wanted)

    def gradients(
        self,
        call: Prepared,
        saved: Tensors,
        wanted: Sequence[bool],
        upstream: Tensors,
        inside: bool = False,
        last: bool = False,
    ) -> Tensors:
        """The wanted gradients of the operands; ``saved`` are the operands, then what :meth:`forward` made.

        ``inside``: called by the custom operation, below the dispatch modes that observe it. ``last``: nobody else
        reads or holds what :meth:`forward` made.
        """
        first = next((each for each in upstream if each is not None), None)
        if first is None:
            return [None] * len(wanted)
        operands, made = saved[: len(wanted)], saved[len(wanted) :]
        if torch.is_grad_enabled() or transformed(*upstream) or not self.has_backward:
            # create_graph=True, batched upstream gradients, forward-mode derivatives of a backward pass: torch's own
            # operations can be differentiated and transformed again.
            return self.differentiable_gradients(call, operands, wanted, upstream)
        # Without operands to read, as for a bias alone, there is nothing for kernels to do.
        if observed() and not inside and any(each is not None for each in saved):
            return self.kernel_operation.gradients(call, operands, made, wanted, upstream)
        upstream = [contiguous(each) for each in upstream]
        backward = self.last_backward if last and self.last_backward is not None else self.backward
        with without_autocast(first.device):
            found = backward(call, operands, made, wanted, upstream)
        # After the kernels, which make the CUDA context current in this thread: without one torch warns.
        if first.is_cuda:
            make_products_ready(first.device)
        return found

    def differentiable_gradients(
        self, call: Prepared, operands: Tensors, wanted: Sequence[bool], upstream: Tensors
    ) -> Tensors:
        """The wanted gradients through :meth:`expression`, to be differentiated again with ``create_graph=True``."""
        again = torch.is_grad_enabled()
        # One tensor may be several operands; views, or new leaves, tell them apart.
        views = [
            t if t is None else t.view_as(t) if again else t.detach().requires_grad_(want)
            for t, want in zip(operands, wanted, strict=True)
        ]
        device = next(view.device for view in views if view is not None)
        with autograd_in_reach(), torch.enable_grad(), without_autocast(device):
            results = self.expression(call, views)
            # A result may depend on no wanted operand, or have no upstream gradient.
            pairs = [
                (result, gradient)
                for result, gradient in zip(results, map(dense, upstream), strict=True)
                if result is not None and gradient is not None and result.requires_grad
            ]
            chosen = [view for view, want in zip(views, wanted, strict=True) if want and view is not None]
            if not pairs or not chosen:
                return [None] * len(wanted)
            given, gradients = zip(*pairs, strict=True)
            found = iter(torch.autograd.grad(given, chosen, gradients, create_graph=again, allow_unused=True))
        return [next(found) if want and view is not None else None for view, want in zip(views, wanted, strict=True)]


def operation_of(function: Callable[..., Any]) -> Operation | None:
    """The operation of a public function, or None."""
    found = OPERATIONS.get(getattr(function, "__name__", ""))
    return found if found is not None and found.function is function else None


def formula(activation: str) -> str:
    """An activation as titles name it."""
    return f"{activation}: {ACTIVATIONS[activation].formula}"
