"""Calls as registered custom operations, for everything that cannot look through a kernel launch.

torch.compile, torch.export, FLOP counters, selective checkpointing and dispatch modes of users see nothing but
registered operations. Two kinds are registered here, in the namespace ``fusedlayers``:

A ``Composite`` is a public function as one operation. Dynamo, which cannot trace the choice of a path, puts it into its
graph as one node; the next tracer (AOTAutograd, an export's decomposition) runs the public function itself on fake
tensors. Where that chooses torch, plain operations of torch remain, for the compiler to fuse.

A ``KernelOperation`` is a path that launches kernels, or loops over chunks, as one opaque operation and another for its
backward pass. They run what eager calls run. The path is the one chosen for the sizes of the traced example, so that no
size is guarded; tiles and splits are planned for the sizes of each call.
"""

import inspect
import json
import operator
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import fields
from functools import lru_cache
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from ..devices import records
from ..planning import Call
from ..sources import stamp
from . import dispatch
from .autograd import DirectCalls
from .call import with_known_sizes
from .precision import Float8
from .prepared import Prepared
from .recalling import Recalled, like
from .switches import backend, strict, switches

_LIBRARY = torch.library.Library("fusedlayers", "DEF")
_SOURCES = stamp()
_SCHEMA_TYPES = {
    Tensor: "Tensor", Tensor | None: "Tensor?", str: "str", str | None: "str?", bool | str: "str", int | str: "str",
    bool | int | str: "str", bool: "bool", int: "int", int | None: "int?", float: "float", float | None: "float?",
    str | Float8 | None: "str?",
}  # fmt: skip
# Types of arguments that the schema passes as str -> how to read them back.
_WORDS: dict[Any, Callable[[str], bool | int | str]] = {
    bool | str: lambda word: {"True": True, "False": False}.get(word, word),
    int | str: lambda word: int(word) if word.removeprefix("-").isdecimal() else word,
    bool | int | str: lambda word: {"True": True, "False": False}.get(word, _WORDS[int | str](word)),
    str | Float8 | None: lambda word: word,
}

_AS_IT_IS = nullcontext()


def _word(argument: Any) -> str | None:
    if argument is None:
        return None
    if isinstance(argument, Float8):
        return argument.word
    # In a trace an int argument may be a SymInt; operator.index makes it a plain int.
    return str(operator.index(argument) if type(argument) is int else argument)


class Composite:
    """A public function as an operation of its name, which returns the list of its results that are not None."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function, self.parameters = function, inspect.signature(function).parameters
        found = {name: _WORDS.get(each.annotation) for name, each in self.parameters.items()}
        self.words = {name: read for name, read in found.items() if read is not None}
        arguments = [f"{_SCHEMA_TYPES[each.annotation]} {name}" for name, each in self.parameters.items()]
        name = function.__name__
        # The user's switches, the sources and the state of the records are an argument, so that no cache of compiled
        # graphs, on disk or not, mixes them up.
        _LIBRARY.define(f"{name}({', '.join(arguments)}, str switches) -> Tensor[]", tags=torch.Tag.pt2_compliant_tag)
        # The second key is for torch.func.vmap, which needs a rule of its own.
        for key in ("CompositeImplicitAutograd", "FuncTorchBatchedDecomposition"):
            _LIBRARY.impl(name, self._run, key)
        self.operation = getattr(torch.ops.fusedlayers, name).default

    def _run(self, *arguments: Any) -> list[Tensor]:
        # Under dynamic shapes a float may arrive as SymFloat; make it a plain float.
        plain = (float(each) if isinstance(each, torch.SymFloat) else each for each in arguments)
        given: dict[str, Any] = dict(zip(self.parameters, plain, strict=False))
        given |= {name: read(given[name]) for name, read in self.words.items()}
        found = self.function(**given)
        return [found] if isinstance(found, Tensor) else [tensor for tensor in found if tensor is not None]

    def __call__(self, *arguments: Any) -> list[Tensor]:
        """The results for all arguments, in the order of the function's signature."""
        given = list(arguments)
        places, said = self.constants()
        for place in places:
            given[place] = _word(given[place])
        return self.operation(*given, said)

    def constants(self) -> tuple[tuple[int, ...], str]:
        """Positions of the arguments that are passed as str, and the switches: constants for Dynamo, without guards."""
        places = tuple(place for place, name in enumerate(self.parameters) if name in self.words)
        return places, self.switches()

    # What torch.compiler.assume_constant_result does, but without importing Dynamo, which takes seconds.
    constants._dynamo_marked_constant = True  # type: ignore[attr-defined]

    def switches(self) -> str:
        """The operation's last argument: the current switches, a stamp of the sources, the state of the records."""
        return f"{backend()} {strict()} {_SOURCES}{records()}"


class Result(NamedTuple):
    """The description of a result or saved tensor of an operation."""

    shape: Sequence[int]
    dtype: torch.dtype
    transposed: bool = False  # whether its last two axes are swapped in memory

    def empty(self, like: Tensor) -> Tensor:
        """A tensor of this shape on the device of ``like``."""
        if not self.transposed:
            return like.new_empty(self.shape, dtype=self.dtype)
        return like.new_empty((*self.shape[:-2], self.shape[-1], self.shape[-2]), dtype=self.dtype).mT


# (outputs, saved tensors); None where not requested.
Results = tuple[Sequence[Result | None], Sequence[Result | None]]


class _Described(NamedTuple):
    """What a custom operation knows of its call besides the tensors."""

    problem: Any
    path: str
    extras: dict[str, Any]
    wanted: list[bool]  # whose gradients


class _Ready(NamedTuple):
    """A planned call of a custom operation, and which outputs (``given``) and saved tensors (``made``) it has."""

    call: Any
    wanted: list[bool]
    given: list[bool]
    made: list[bool]


class KernelOperation:
    """The kernels of an operation as ``fusedlayers::<name>_forward`` and ``<name>_backward``."""

    def __init__(self, operation: Any) -> None:
        self.operation = operation
        self.calls: Recalled[_Ready] = Recalled()
        names = operation.operands.split()
        self.count = len(names)
        typed = [f"Tensor? {each[:-1]}" if each.endswith("?") else f"Tensor {each}" for each in names]
        name = operation.name
        self.forward = self._register(
            f"{name}_forward",
            ", ".join(typed),
            self._forward,
            self._forward_fake,
            lambda problem: problem.model_flops[0],
        )
        torch.library.register_autograd(
            f"fusedlayers::{name}_forward", self._differentiate, setup_context=self._keep,
            lib=cast(torch.library.Library, DirectCalls(_LIBRARY, self._forward)),
        )  # fmt: skip
        if operation.has_backward:
            self.backward = self._register(
                f"{name}_backward", "Tensor?[] upstream, Tensor?[] tensors, Tensor[] made", self._backward,
                self._backward_fake, lambda problem: problem.model_flops[1],
            )  # fmt: skip
            _LIBRARY.impl(f"{name}_backward", self._backward_batched, "Batched")

    def _register(
        self,
        name: str,
        tensors: str,
        run: Callable[..., list[Tensor]],
        fake: Callable[..., list[Tensor]],
        flops: Callable[[Any], int],
    ) -> Any:
        _LIBRARY.define(f"{name}({tensors}, SymInt[] sizes, str call) -> Tensor[]", tags=torch.Tag.pt2_compliant_tag)
        _LIBRARY.impl(name, run, "CompositeExplicitAutograd")
        torch.library.register_fake(f"fusedlayers::{name}", fake, lib=_LIBRARY)
        packet = getattr(torch.ops.fusedlayers, name)
        # The model's FLOPs, as torch counts them: recomputation in kernels does not count.
        register_flop_formula(packet)(lambda *given, **_: flops(self._described(*given[-2:]).problem))
        return packet.default

    def __call__(self, operands: Sequence[Any], call: Any) -> Any:
        """The results of the kernels for these operands, in a call that a dispatch mode observes."""
        problem, path, extras = call.problem, call.plan.path, call.extras
        wanted = [torch.is_grad_enabled() and t is not None and t.requires_grad for t in operands]
        found = iter(self.forward(*operands, *_description(problem, path, extras, wanted)))
        given, _ = self.operation.results(operands, problem, path, extras, any(wanted))
        results = tuple(None if result is None else next(found) for result in given)
        return results[0] if len(results) == 1 else results

    def gradients(
        self,
        call: Any,
        operands: Sequence[Any],
        made: Sequence[Any],
        wanted: Sequence[bool],
        upstream: Sequence[Any],
    ) -> list[Tensor | None]:
        """The backward pass of a plain forward call, which a dispatch mode observes."""
        if not self.operation.has_backward:
            return self.operation.differentiable_gradients(call, operands, wanted, upstream)
        there = [each for each in made if each is not None]
        described = _description(call.problem, call.plan.path, call.extras, wanted)
        given, _ = self.operation.results(operands, call.problem, call.plan.path, call.extras, any(wanted))
        existing = [gradient for gradient, result in zip(upstream, given, strict=True) if result is not None]
        results = iter(self.backward(existing, list(operands), there, *described))
        return [next(results) if want else None for want in wanted]

    def _described(self, sizes: Sequence[int], call: str) -> _Described:
        # SymInts cannot be cache keys; an operation that runs has none.
        kind = self.operation.problem_type
        symbolic = any(isinstance(size, torch.SymInt) for size in sizes)
        return _describe(kind, tuple(sizes), call) if symbolic else _known(kind, tuple(sizes), call)

    def _results(self, operands: Sequence[Any], described: _Described) -> Results:
        problem, path, extras, wanted = described
        return self.operation.results(operands, problem, path, extras, any(wanted))

    def _prepared(
        self, operands: Sequence[Tensor | None], sizes: Sequence[int], call: str, made: Sequence[Tensor] = ()
    ) -> _Ready:
        """The planned call, cached unless a size is a SymInt, as in a trace."""
        if any(type(size) is not int for size in sizes):
            return self._prepare(operands, sizes, call)
        tensors = (*operands, *made)
        # The current switches, which may differ from those when the graph was compiled.
        key = (call, *sizes, *switches())
        ready = self.calls.find(key, tensors)
        # A device has other facts while some are assumed, and after a self-test.
        if ready is None or ready.call.facts is not dispatch.describe(_device_of(operands)):
            ready = self._prepare(operands, sizes, call)
            self.calls.add(key, like(tensors, aligned=True), ready)
        return ready

    def _prepare(self, tensors: Sequence[Tensor | None], sizes: Sequence[int], call: str) -> _Ready:
        device, described = _device_of(tensors), self._described(sizes, call)
        described = described._replace(problem=with_known_sizes(described.problem))
        given, made = ([result is not None for result in part] for part in self._results(tensors, described))
        plan = dispatch.plan_on_path(described.problem, described.path, device)
        # A custom operation has no options.
        planned = Prepared(self.operation, (), described.problem, plan, dispatch.describe(device), described.extras)
        return _Ready(planned, described.wanted, given, made)

    def _forward(self, *given: Any) -> list[Tensor]:
        *operands, sizes, call = given
        ready = self._prepared(operands, sizes, call)
        with _without_gradients():
            results, made = self.operation.forward(ready.call, operands, ready.wanted)
        return [tensor for tensor in (*results, *made) if tensor is not None]

    def _forward_fake(self, *given: Any) -> list[Tensor]:
        *operands, sizes, call = given
        results, made = self._results(operands, self._described(sizes, call))
        return [result.empty(operands[0]) for result in (*results, *made) if result is not None]

    def _keep(self, ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
        *operands, ctx.sizes, ctx.call = inputs
        described = self._described(ctx.sizes, ctx.call)
        results, possible = self._results(operands, described)
        made = [result for result in possible if result is not None]
        ctx.made = len(made)
        given = dict(zip([place for place, result in enumerate(results) if result is not None], output, strict=False))
        constant = self.operation.constant(described.problem, described.wanted)
        ctx.mark_non_differentiable(*[given[place] for place in constant if place in given])
        needed = self.operation.kept(described.wanted)
        keeping = [
            operand if place != self.operation.added and (need or want) else None
            for place, (operand, need, want) in enumerate(zip(operands, needed, described.wanted, strict=True))
        ]
        ctx.save_for_backward(*keeping, *output[len(output) - len(made) :])
        ctx.set_materialize_grads(False)

    def _differentiate(self, ctx: Any, upstream: list[Tensor | None]) -> tuple[Any, ...]:
        # Read once: a checkpoint recomputes the saved tensors at the first access and refuses a second one.
        saved = ctx.saved_tensors
        operands, made = saved[: self.count], saved[self.count :]
        upstream = upstream[: len(upstream) - ctx.made]
        wanted = list(ctx.needs_input_grad[: self.count])
        gradients: list[Tensor | None] = [None] * self.count
        added = self.operation.added
        if added is not None and wanted[added]:
            gradients[added], wanted[added] = upstream[0], False
        if any(wanted) and any(gradient is not None for gradient in upstream):
            call = json.dumps({**json.loads(ctx.call), "wanted": wanted})
            if self.operation.has_backward and not torch.is_grad_enabled():
                found = iter(self.backward(upstream, operands, made, ctx.sizes, call))
            else:
                # The backward operation has no derivative: with create_graph its contents run here.
                ready = self._prepare(operands, ctx.sizes, call)
                found = iter(self._gradients(ready, upstream, operands, made))
            gradients = [next(found) if want else old for want, old in zip(wanted, gradients, strict=True)]
        # torch takes an empty list of sizes for one of tensors.
        return *gradients, None if ctx.sizes else [], None

    def _backward(self, *given: Any) -> list[Tensor]:
        upstream, operands, made, sizes, call = given
        ready = self._prepared(operands, sizes, call, made)
        with _without_gradients():
            found = self._gradients(ready, upstream, operands, made)
        return _apart([gradient.contiguous() for gradient in found if gradient is not None])

    def _backward_batched(self, *given: Any) -> list[Tensor | None]:
        """The gradients for batched upstream gradients (``is_grads_batched``), in torch's own operations."""
        upstream, operands, made, sizes, call = given
        return self._gradients(self._prepare(operands, sizes, call), upstream, operands, made)

    def _gradients(
        self,
        ready: _Ready,
        upstream: Sequence[Tensor | None],
        operands: Sequence[Tensor | None],
        made: Sequence[Tensor],
    ) -> list[Tensor | None]:
        """The wanted gradients, as the operation computes them."""
        # Saved-tensor hooks may return the kernels' own saved tensors in another layout.
        of_results, of_made = iter(upstream), (each.contiguous() for each in made)
        upstream = [next(of_results) if there else None for there in ready.given]
        saved = [*operands, *[next(of_made) if there else None for there in ready.made]]
        found = self.operation.gradients(ready.call, saved, ready.wanted, upstream, inside=True)
        return [gradient for gradient, want in zip(found, ready.wanted, strict=True) if want]

    def _backward_fake(
        self,
        upstream: Sequence[Tensor | None],
        operands: Sequence[Any],
        made: Sequence[Tensor],
        sizes: Sequence[int],
        call: str,
    ) -> list[Tensor]:
        wanted = self._described(sizes, call).wanted
        return [t.new_empty(t.shape) for t, want in zip(operands, wanted, strict=True) if want]


def _description(problem: Call, path: str, extras: dict[str, Any], wanted: Sequence[bool]) -> tuple[list[int], str]:
    """The SymInt sizes of a problem, and all else as one JSON string."""
    facts = {each.name: getattr(problem, each.name) for each in fields(problem)}
    sizes: dict[str, Any] = {name: fact for name, fact in facts.items() if type(fact) is torch.SymInt}
    rest = {name: fact for name, fact in facts.items() if name not in sizes}
    return list(sizes.values()), json.dumps({"problem": rest, "path": path, "extras": extras, "wanted": list(wanted)})


def _without_gradients() -> AbstractContextManager[Any]:
    """``torch.no_grad()`` where gradients are enabled; compiled graphs call without gradients, and skip its cost."""
    return torch.no_grad() if torch.is_grad_enabled() else _AS_IT_IS


def _device_of(tensors: Sequence[Tensor | None]) -> torch.device:
    return next(tensor.device for tensor in tensors if tensor is not None)


def _apart(results: Sequence[Tensor]) -> list[Tensor]:
    """Copies all but the first of the results that share a storage: those of a custom operation must not alias."""
    # Two tensors that share a storage begin at the same address, or one has a storage offset.
    places = {result.data_ptr() for result in results}
    if len(places) == len(results) and not any(result.storage_offset() for result in results):
        return list(results)
    taken: set[int] = set()
    found = []
    for result in results:
        memory = result.untyped_storage().data_ptr()
        found.append(result.clone() if memory in taken else result)
        taken.add(memory)
    return found


def _describe(problem: type[Call], sizes: tuple[int, ...], call: str) -> _Described:
    facts = json.loads(call)
    names = [each.name for each in fields(problem) if each.name not in facts["problem"]]
    given: dict[str, Any] = facts["problem"] | dict(zip(names, sizes, strict=True))
    return _Described(problem(**given), facts["path"], facts["extras"], facts["wanted"])


_known: Callable[..., _Described] = lru_cache(maxsize=4096)(_describe)
