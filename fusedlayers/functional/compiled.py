"""Calls as registered operations, for everything that cannot look through a kernel launch.

torch.compile, torch.export and FLOP counters see operations of torch alone. Two kinds are registered here, in the
namespace ``fusedlayers``:

A ``Composite`` is a public function as one operation. Dynamo, which cannot follow the choice of a path, writes it down
unread; what traces the graph next (AOTAutograd, an export's decomposition) runs the public function itself on symbolic
tensors. Where that chooses torch, plain operations of torch remain, for the compiler to fuse.

A ``KernelCall`` is a path that launches kernels, or loops over chunks, as one opaque operation and another for its
backward pass. They run the body of the autograd Function that eager calls run. The path is the one chosen for the sizes
of the traced example, so that no size is guarded; tiles and splits are planned for the sizes of each call.
"""

import inspect
import json
import operator
from collections.abc import Callable, Sequence
from dataclasses import fields
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from ..devices import describe
from ..planning import Call, Decision, Device
from ..sources import stamp
from .dispatch import backend, plan_on_path, strict
from .signatures import switches
from .tracing import with_known_sizes

_LIBRARY = torch.library.Library("fusedlayers", "DEF")
_SOURCES = stamp()
_SCHEMA_TYPES = {
    Tensor: "Tensor", Tensor | None: "Tensor?", str: "str", str | None: "str?", bool | str: "str", int | str: "str",
    bool | int | str: "str", bool: "bool", int: "int", float: "float",
}  # fmt: skip
# What an argument that may be a word else is -> that, of the word that stands for it.
_WORDS: dict[Any, Callable[[str], bool | int | str]] = {
    bool | str: lambda word: {"True": True, "False": False}.get(word, word),
    int | str: lambda word: int(word) if word.removeprefix("-").isdecimal() else word,
    bool | int | str: lambda word: {"True": True, "False": False}.get(word, _WORDS[int | str](word)),
}


# Calls of one operation: when they become many, all are forgotten, which costs no more than planning them again.
_READY_LIMIT = 4096


def _word(argument: Any) -> str:
    # An index is never a symbol, which an int may be where a compiled function is given it.
    return str(operator.index(argument) if type(argument) is int else argument)


class Composite:
    """A public function as an operation of its name, which gives a list of those of its results that are not None."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function, self.parameters = function, inspect.signature(function).parameters
        found = {name: _WORDS.get(each.annotation) for name, each in self.parameters.items()}
        self.words = {name: read for name, read in found.items() if read is not None}
        arguments = [f"{_SCHEMA_TYPES[each.annotation]} {name}" for name, each in self.parameters.items()]
        name = function.__name__
        # What the user's switches said, and which sources ran, is an argument: no cache of compiled graphs, on disk or
        # not, mixes them up.
        _LIBRARY.define(f"{name}({', '.join(arguments)}, str switches) -> Tensor[]", tags=torch.Tag.pt2_compliant_tag)
        # The second is for torch.func.vmap, which looks for a rule of its own.
        for key in ("CompositeImplicitAutograd", "FuncTorchBatchedDecomposition"):
            _LIBRARY.impl(name, self._run, key)
        self.operation = getattr(torch.ops.fusedlayers, name).default

    def _run(self, *arguments: Any) -> list[Tensor]:
        # A number that changes is a symbol; options are none.
        plain = (float(each) if isinstance(each, torch.SymFloat) else each for each in arguments)
        given: dict[str, Any] = dict(zip(self.parameters, plain, strict=False))
        given |= {name: read(given[name]) for name, read in self.words.items()}
        found = self.function(**given)
        return [found] if isinstance(found, Tensor) else [tensor for tensor in found if tensor is not None]

    def __call__(self, *arguments: Any) -> list[Tensor]:
        """The results for all arguments, in the order of the function's signature."""
        named = zip(self.parameters, arguments, strict=True)
        words = [_word(argument) if name in self.words else argument for name, argument in named]
        return self.operation(*words, f"{backend()} {strict()} {_SOURCES}")


class Result(NamedTuple):
    """A tensor that a Function gives or keeps."""

    shape: Sequence[int]
    dtype: torch.dtype
    transposed: bool = False  # whether its last two axes are swapped in memory

    def empty(self, like: Tensor) -> Tensor:
        """A tensor of this shape on the device of ``like``."""
        if not self.transposed:
            return like.new_empty(self.shape, dtype=self.dtype)
        return like.new_empty((*self.shape[:-2], self.shape[-1], self.shape[-2]), dtype=self.dtype).mT


# What a Function gives, None for what is not asked for, and what it made itself and saves, None for what is not needed.
Results = tuple[Sequence[Result | None], Sequence[Result | None]]


class _Context:
    """What the body of a Function asks of autograd's context."""

    def __init__(self, wanted: Sequence[bool], arguments: dict[str, Any], saved: Sequence[Tensor | None] = ()) -> None:
        self.needs_input_grad = tuple(wanted)
        self.saved_tensors = tuple(saved)
        self.__dict__.update(arguments)

    def save_for_backward(self, *tensors: Tensor | None) -> None:
        self.saved_tensors = tensors

    def set_materialize_grads(self, value: bool) -> None:
        """None stays None anyway."""

    def mark_non_differentiable(self, *tensors: Tensor) -> None:
        """Indices are of integers: autograd knows."""


class _Described(NamedTuple):
    """What an operation knows of its call besides the tensors."""

    problem: Any
    path: str
    options: dict[str, Any]
    wanted: list[bool]  # gradients of the tensors


class _Prepared(NamedTuple):
    """What an operation that runs knows of its call, and finds out only once."""

    facts: Device  # of the device that it was planned for
    wanted: list[bool]
    arguments: dict[str, Any]  # of the Function, behind the tensors
    given: list[bool]  # which results there are
    made: list[bool]  # and which of the tensors that the Function made itself


class KernelCall:
    """The autograd Function of a kernel path as the operations ``fusedlayers::<name>_forward`` and ``_backward``.

    Args:
        name: of the public function.
        function: takes the tensors, then what ``arguments`` gives.
        problem: the class of its planning problems.
        tensors: names in the order that ``function`` takes them; ``?`` marks those that may be None.
        saved: the places of the tensors that ``function`` saves, before what it made itself.
        arguments: (plan, options of the call) -> what follows the tensors, by the names that ``function`` gives them on
            its context.
        results: (tensors, problem, path, options, whether a gradient is wanted) -> what there is to give and to save.
        added: the place of a tensor that is added to the result, so that its gradient is that of the result.
        plain_backward: whether the backward pass is plain torch, so that there is no operation for it.
    """

    def __init__(
        self,
        name: str,
        function: type[torch.autograd.Function],
        problem: type[Call],
        *,
        tensors: str,
        saved: tuple[int, ...],
        arguments: Callable[..., dict[str, Any]],
        results: Callable[..., Results],
        added: int | None = None,
        plain_backward: bool = False,
    ) -> None:
        self.name, self.function, self.problem = name, function, problem
        self.saved, self.arguments, self.results = saved, arguments, results
        self.added, self.plain_backward = added, plain_backward
        self._ready: dict[tuple[object, ...], _Prepared] = {}
        names = tensors.split()
        self.count = len(names)
        typed = [f"Tensor? {each[:-1]}" if each.endswith("?") else f"Tensor {each}" for each in names]
        self.forward = self._register(
            f"{name}_forward",
            ", ".join(typed),
            self._forward,
            self._forward_fake,
            lambda problem: problem.model_flops[0],
        )
        torch.library.register_autograd(
            f"fusedlayers::{name}_forward", self._differentiate, setup_context=self._keep, lib=_LIBRARY
        )
        if not plain_backward:
            self.backward = self._register(
                f"{name}_backward", "Tensor?[] upstream, Tensor?[] tensors, Tensor[] made", self._backward,
                self._backward_fake, lambda problem: problem.model_flops[1],
            )  # fmt: skip

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
        # What the layer computes, as torch would: what a kernel computes again is not the model's work.
        register_flop_formula(packet)(lambda *given, **_: flops(self._described(*given[-2:]).problem))
        return packet.default

    def __call__(self, tensors: Sequence[Any], problem: Call, plan: Decision, **options: Any) -> Any:
        """The results of the Function for these tensors, a traced call's."""
        wanted = [torch.is_grad_enabled() and t is not None and t.requires_grad for t in tensors]
        facts = {each.name: getattr(problem, each.name) for each in fields(problem)}
        sizes = {name: fact for name, fact in facts.items() if type(fact) in (int, torch.SymInt)}
        rest = {name: fact for name, fact in facts.items() if name not in sizes}
        described = {"problem": rest, "path": plan.path, "options": options, "wanted": wanted}
        found = iter(self.forward(*tensors, list(sizes.values()), json.dumps(described)))
        given, _ = self.results(tensors, problem, plan.path, options, any(wanted))
        results = tuple(None if result is None else next(found) for result in given)
        return results[0] if len(results) == 1 else results

    def _described(self, sizes: Sequence[int], call: str) -> _Described:
        # Symbols cannot be keys of a cache; where an operation runs, there are none.
        symbolic = any(isinstance(size, torch.SymInt) for size in sizes)
        return _describe(self.problem, tuple(sizes), call) if symbolic else _known(self.problem, tuple(sizes), call)

    def _results(self, tensors: Sequence[Any], described: _Described) -> Results:
        return self.results(tensors, described.problem, described.path, described.options, any(described.wanted))

    def _prepared(self, tensors: Sequence[Tensor | None], sizes: Sequence[int], call: str) -> _Prepared:
        """Remembered, unless a size is a symbol: then a graph is traced, and this is no call that runs."""
        device = next(tensor.device for tensor in tensors if tensor is not None)
        facts = describe(device)
        if any(type(size) is not int for size in sizes):
            return self._prepare(tensors, self._described(sizes, call), device, facts)
        # The switches as they are now, which may differ from what they were when the graph was compiled.
        key = (call, *sizes, *[tensor is None for tensor in tensors], device, *switches())
        known = self._ready.get(key)
        # Described anew while others of the device's facts are assumed, or after a self-test.
        if known is None or known.facts is not facts:
            if len(self._ready) >= _READY_LIMIT:
                self._ready.clear()
            known = self._ready[key] = self._prepare(tensors, self._described(sizes, call), device, facts)
        return known

    def _prepare(
        self, tensors: Sequence[Tensor | None], described: _Described, device: torch.device, facts: Device
    ) -> _Prepared:
        described = described._replace(problem=with_known_sizes(described.problem))
        given, made = ([result is not None for result in part] for part in self._results(tensors, described))
        plan = plan_on_path(described.problem, described.path, device)
        return _Prepared(facts, described.wanted, self.arguments(plan, **described.options), given, made)

    def _forward(self, *given: Any) -> list[Tensor]:
        *tensors, sizes, call = given
        prepared = self._prepared(tensors, sizes, call)
        context = _Context(prepared.wanted, prepared.arguments)
        with torch.no_grad():
            found: Any = self.function.forward(context, *tensors, *prepared.arguments.values())
        results = found if isinstance(found, tuple) else (found,)
        made = context.saved_tensors[len(self.saved) :]
        return [tensor for tensor in (*results, *made) if tensor is not None]

    def _forward_fake(self, *given: Any) -> list[Tensor]:
        *tensors, sizes, call = given
        results, made = self._results(tensors, self._described(sizes, call))
        return [result.empty(tensors[0]) for result in (*results, *made) if result is not None]

    def _keep(self, ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
        *tensors, ctx.sizes, ctx.call = inputs
        described = self._described(ctx.sizes, ctx.call)
        made = [result for result in self._results(tensors, described)[1] if result is not None]
        ctx.made = len(made)
        keeping = [
            tensor if place != self.added and (place in self.saved or want) else None
            for place, (tensor, want) in enumerate(zip(tensors, described.wanted, strict=True))
        ]
        ctx.save_for_backward(*keeping, *output[len(output) - len(made) :])
        ctx.set_materialize_grads(False)

    def _differentiate(self, ctx: Any, upstream: list[Tensor | None]) -> tuple[Any, ...]:
        tensors, made = ctx.saved_tensors[: self.count], ctx.saved_tensors[self.count :]
        upstream = upstream[: len(upstream) - ctx.made]
        wanted = list(ctx.needs_input_grad[: self.count])
        gradients: list[Tensor | None] = [None] * self.count
        if self.added is not None and wanted[self.added]:
            gradients[self.added], wanted[self.added] = upstream[0], False
        if any(wanted) and any(gradient is not None for gradient in upstream):
            call = json.dumps({**json.loads(ctx.call), "wanted": wanted})
            # The operation has no gradient itself: those who want one see through it.
            inside = self.plain_backward or torch.is_grad_enabled()
            run = self._gradients if inside else self.backward
            found = iter(run(upstream, tensors, made, ctx.sizes, call))
            gradients = [next(found) if want else old for want, old in zip(wanted, gradients, strict=True)]
        return *gradients, None, None

    def _backward(self, *given: Any) -> list[Tensor]:
        # Chunks are differentiated by autograd, which is out of reach below an operation.
        include, exclude = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()
        with torch._C._ForceDispatchKeyGuard(include, exclude - _AUTOGRAD), torch.no_grad():
            found = self._gradients(*given)
        return _apart([gradient.contiguous() for gradient in found if gradient is not None])

    def _gradients(
        self,
        upstream: Sequence[Tensor | None],
        tensors: Sequence[Tensor | None],
        made: Sequence[Tensor],
        sizes: Sequence[int],
        call: str,
    ) -> list[Tensor | None]:
        """The wanted gradients, by the Function's own backward pass."""
        prepared = self._prepared(tensors, sizes, call)
        of_results, of_made = iter(upstream), iter(made)
        kept = [tensors[place] for place in self.saved]
        saved = [next(of_made) if there else None for there in prepared.made]
        context = _Context(prepared.wanted, prepared.arguments, (*kept, *saved))
        found: Any = self.function.backward(context, *[next(of_results) if there else None for there in prepared.given])
        return [gradient for gradient, want in zip(found, prepared.wanted, strict=False) if want]

    def _backward_fake(
        self,
        upstream: Sequence[Tensor | None],
        tensors: Sequence[Any],
        made: Sequence[Tensor],
        sizes: Sequence[int],
        call: str,
    ) -> list[Tensor]:
        wanted = self._described(sizes, call).wanted
        return [t.new_empty(t.shape) for t, want in zip(tensors, wanted, strict=True) if want]


def _apart(results: Sequence[Tensor]) -> list[Tensor]:
    """Results of an operation have no memory in common: halves of one product are copied, all but the first."""
    taken: set[int] = set()
    found = []
    for result in results:
        memory = result.untyped_storage().data_ptr()
        found.append(result.clone() if memory in taken else result)
        taken.add(memory)
    return found


_AUTOGRAD = torch._C.DispatchKeySet(torch._C.DispatchKey.AutogradFunctionality)


def _describe(problem: type[Call], sizes: tuple[int, ...], call: str) -> _Described:
    facts = json.loads(call)
    names = [each.name for each in fields(problem) if each.name not in facts["problem"]]
    given: dict[str, Any] = facts["problem"] | dict(zip(names, sizes, strict=True))
    return _Described(problem(**given), facts["path"], facts["options"], facts["wanted"])


_known: Callable[..., _Described] = lru_cache(maxsize=4096)(_describe)
