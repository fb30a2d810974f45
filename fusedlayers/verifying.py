"""`verify`: compares results and gradients with float64 and with torch, on the user's machine.

The call runs three times, each time on a new copy of the module: as it is; with torch's own arithmetic (`restore`, and
``reference`` for the layers of this library); and with torch's in float64. :mod:`.closeness` gives the verdict.
"""

from __future__ import annotations

import copy
import inspect
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import keystr, tree_flatten, tree_flatten_with_path, tree_unflatten

from .closeness import MAX_ERROR_LIMIT, RMS_LIMIT, TILE, Closeness, Evidence, compare, compare_all, red
from .closeness.noise import OF_LAYER, OF_WEIGHT_GRADIENT, judged_by_noise
from .functional.dispatch import decisions
from .functional.operation import OPERATIONS, Operation, operation_of
from .functional.switches import switched
from .modules import FusedFFN, class_path
from .replacing import restore
from .replacing.experts.formula import run_eagerly

# A name, because importing the class takes seconds.
_DISTRIBUTED = "torch.distributed.tensor.DTensor"
_TORCH_ALONE = {"FUSEDLAYERS_BACKEND": "torch", "FUSEDLAYERS_STRICT": "0"}
_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
# A result with fewer elements says too little about torch's error to question it as a yardstick.
_FEW = 16
# A verdict must tell the right numbers from these multiples of them, which are as wrong as a forgotten dropout scale.
_WRONG = 1.1
# A gradient that fails with the first upstream gradient is judged again over this many others together.
_AGAIN = 7

# Results and gradients by name; None for a result without a gradient.
_Results = dict[str, Tensor | None]
# The results of one upstream gradient: ours, torch's, and those in float64.
_Draw = tuple[_Results, _Results, _Results]


@dataclass(frozen=True, repr=False)
class Verification:
    """The verdicts of `verify` on every result and gradient. Prints as a table.

    ``paths`` counts the calls that took each path. Calls on torch's path were compared with torch itself.
    """

    target: str
    verdicts: tuple[Closeness, ...]
    paths: Mapping[str, int]

    @property
    def ok(self) -> bool:
        """Whether every result and gradient is as close to float64 as torch's, by the rule of ``closeness``.

        This is the verdict for these inputs on this device, and for the paths in ``paths``: if all of these are torch's
        own, no kernel of this library ran, and torch was compared with torch. Tensors that are too small to judge do
        not count; empty and zero ones count only if others do. False if no tensor counts.
        """
        judged = [verdict.ok for verdict in self.verdicts if verdict.judged]
        return bool(judged) and all(judged)

    def __str__(self) -> str:
        faulty = sum(not verdict.ok for verdict in self.verdicts)
        small = sum(not verdict.judged for verdict in self.verdicts)
        judged = f"{faulty} of {len(self.verdicts)} tensors are NOT close" if faulty else "every tensor is close"
        if small and not faulty:
            judged = f"{small} of {len(self.verdicts)} tensors are too small to judge, and the others are close"
        if small == len(self.verdicts):
            judged = "nothing could be judged"
        taken = ", ".join(f"{path} x {count}" for path, count in sorted(self.paths.items()))
        head = f"max error / torch's* (limit {MAX_ERROR_LIMIT})", f"RMS error / torch's* (limit {RMS_LIMIT})"
        rows: list[tuple[str, ...]] = [("tensor", *head, "share of limit", "")]
        for verdict in self.verdicts:
            numbers = (verdict.max_error_ratio, verdict.rms_ratio, verdict.worst_fraction)
            word = ("ok" if verdict.ok else "RED") if verdict.judged else "not judged"
            rows.append((verdict.name, *(f"{number:.2f}" for number in numbers), word))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
        faults = [f"  {verdict.message}" for verdict in self.verdicts if not (verdict.ok and verdict.judged)]
        if self._torch_alone:
            # This comes first, because "close" alone would seem to be about kernels.
            judged = f"{'no kernel' if self.paths else 'nothing'} of this library ran: {judged}"
        title = f"fusedlayers.verify: {self.target}: {judged}"
        ran = f"  calls: {taken or 'none of this library'}"
        if self._torch_alone:
            ran += "\n  This call runs torch's own operations, so nothing of this library's kernels was proven."
        note = "  * torch's error, or that of one rounding in the dtype where torch's is less"
        if _in_8_bits(self.paths):
            note += f"\n  Products ran in 8 bits, so tensors are judged by an SQNR of {OF_LAYER:g} dB"
            note += f", gradients of parameters by {OF_WEIGHT_GRADIENT:g}."
        return "\n".join([title, ran, *(f"  {line.rstrip()}" for line in lines), note, *faults])

    __repr__ = __str__

    @property
    def _torch_alone(self) -> bool:
        """Whether every call went through torch's own expression; True without calls."""
        taken = [name.rsplit(" ", 1) for name in self.paths]
        return all(path in OPERATIONS[operation].torch_paths for operation, path in taken)


def verify(target: nn.Module | Callable[..., Any], /, *inputs: Any, **options: Any) -> Verification:
    """Compare ``target(*inputs, **options)`` and all its gradients with float64 and with torch in the same dtype.

    The error of ours and that of torch are measured against the same computation in float64: see
    :mod:`fusedlayers.closeness`. Gradients are compared for every parameter that requires one, every floating-point
    tensor in ``inputs``, and every tensor in ``options`` that requires one, for a random upstream gradient. A gradient
    that fails is judged again over seven other upstream gradients, because torch's error in a tile may have been small
    by chance. If autocast is on, it applies to ours and to torch. If products ran in 8 bits, results are judged by
    their signal-to-noise ratio against float64 alone. Nothing changes in ``target`` and the tensors: no parameter,
    ``.grad``, buffer or training flag, and no random generator. Code of the module that casts to float32 (norms, rotary
    embeddings) does so in the float64 run, too.

    Args:
        target: a module that `replace` has fused, in whole or in part, a module of this library, or a function of
            ``functional``. The module is copied three times, one after the other, once in float64.
        inputs: the positional arguments of the call; tensors may be in lists, tuples and dicts.
        options: the keyword arguments of the call.

    Returns:
        The verdicts, which print as a table; ``.ok`` says whether all are right. The table says if only torch's
        operations ran, which proves nothing about kernels. All verdicts are red if torch and float64 compute different
        things, for example because each draws its own random mask: then nothing could be judged.

    Raises:
        TypeError: ``target`` is none of these, is distributed over processes, cannot be copied, or returns no
            floating-point tensor.
        ValueError: the call draws random numbers (dropout in training), so no two runs compute the same, or a tensor
            is on the meta device.
    """
    call = _Call(target, inputs, options)
    if any(tensor.is_meta for tensor in call.tensors):
        raise ValueError(f"target: {call.name} or an input is on the meta device; expected tensors that hold numbers")
    if any(class_path(type(tensor)) == _DISTRIBUTED for tensor in call.tensors):
        raise TypeError(
            f"target: {call.name} or an input is a DTensor; expected plain tensors: verify it before sharding"
        )
    devices = sorted({tensor.device.index for tensor in call.tensors if tensor.is_cuda})
    with torch.random.fork_rng(devices=devices), torch.inference_mode(False), torch.enable_grad():
        before = _random_states(devices)
        with decisions() as paths:
            ours = call.run()
        if any(not torch.equal(*pair) for pair in zip(before, _random_states(devices), strict=True)):
            raise ValueError(
                f"target: {call.name} draws random numbers, such as dropout masks in training, and our kernels draw "
                "others than torch does: verify it after .eval(), with a dropout probability of 0, or with a "
                "dropout_seed"
            )
        theirs, truth = call.run_torch()
        drawn = any(not torch.equal(*pair) for pair in zip(before, _random_states(devices), strict=True))
        if all(tensor is None for tensor in ours.values()):
            raise TypeError(f"target: {call.name} returned no floating-point tensor, so there is nothing to compare")
        dtype = _coarsest(call.tensors)
        reason = "torch's own computation draws random numbers, which the target's does not" if drawn else None
        if reason := reason or _why_apart(theirs, truth, dtype):
            verdicts = {key: red(key, reason) for key, tensor in theirs.items() if tensor is not None}
        else:
            verdicts = _verdicts(call, (ours, theirs, truth), dtype, _in_8_bits(paths))
    return Verification(f"{call.name} on {_where(call.tensors)}", tuple(verdicts.values()), Counter(paths))


def _verdicts(call: _Call, draw: _Draw, dtype: torch.dtype | None, in_8_bits: bool) -> dict[str, Closeness]:
    """The verdict on every result and gradient; ``draw`` has the results of the first upstream gradient."""
    ours, theirs, truth = draw
    found = compare_all(ours, theirs, truth, computed_in=dtype)
    if in_8_bits:
        found = {key: _by_noise(verdict, ours[key], truth[key]) for key, verdict in found.items()}
    judged = {key: _judged(verdict, theirs[key], truth[key], dtype) for key, verdict in found.items()}
    if not in_8_bits:
        unlucky = [key for key, verdict in judged.items() if _perhaps_unlucky(verdict)]
        judged |= _judged_again(call, draw, unlucky, dtype)
    return _beside_others(judged, truth)


def _judged_again(call: _Call, draw: _Draw, names: Sequence[str], dtype: torch.dtype | None) -> dict[str, Closeness]:
    """The verdicts on these gradients over the first ``draw`` and over ``_AGAIN`` others together."""
    if not names:
        return {}
    first, others = ({name: Evidence(name, dtype) for name in names} for _ in range(2))
    for name, evidence in first.items():
        evidence.add(*(each[name] for each in draw))  # type: ignore[arg-type]
    for seed in range(1, 1 + _AGAIN):
        draw = call.run(seed=seed), *call.run_torch(seed)
        for name, evidence in others.items():
            evidence.add(*(each[name] for each in draw))  # type: ignore[arg-type]
    return {name: evidence.verdict(again=others[name]) for name, evidence in first.items()}


def _why_apart(theirs: _Results, truth: _Results, dtype: torch.dtype | None) -> str | None:
    """The reason if torch's results differ from float64 by far more than rounding, so that they are no yardstick.

    Gradients are not checked: one that cancels to zero, such as that of an attention's key bias, is rounding alone.
    """
    for name, result in theirs.items():
        exact = truth[name]
        if not name.startswith("y") or result is None or exact is None or result.numel() < _FEW:
            continue
        both = result.isfinite() & exact.isfinite()
        difference = (result.double() - exact)[both].square().mean().sqrt()
        apart = float(difference / exact[both].square().mean().sqrt())
        if apart > 4 * math.sqrt(torch.finfo(dtype or result.dtype).eps / 2):
            return (
                f"{name} differs between torch and float64 by {apart:.2g} of its size, far beyond rounding: they do "
                "not compute the same (does each draw its own random numbers?), so torch's error is no yardstick"
            )
    return None


def _in_8_bits(paths: Mapping[str, int]) -> bool:
    return any(name.endswith(" float8") for name in paths)


def _by_noise(verdict: Closeness, ours: Tensor | None, truth: Tensor | None) -> Closeness:
    """The verdict on a result that was computed in 8 bits."""
    if ours is None or truth is None or ours.shape != truth.shape:
        return verdict
    return judged_by_noise(verdict, ours, truth, OF_WEIGHT_GRADIENT if verdict.name.startswith("d ") else OF_LAYER)


def _perhaps_unlucky(verdict: Closeness) -> bool:
    """Whether a gradient may have failed because torch's error in one tile was small by chance."""
    return not verdict.ok and verdict.name.startswith("d ") and math.isfinite(verdict.worst_fraction)


def _judged(verdict: Closeness, theirs: Tensor | None, truth: Tensor | None, dtype: torch.dtype | None) -> Closeness:
    """The verdict; "not judged" if the tensor has so few elements that even 1.1 times the right numbers would pass."""
    if not verdict.ok or theirs is None or truth is None or not 0 < theirs.numel() < TILE * TILE or not truth.any():
        return verdict
    wrong = (truth * _WRONG).to(theirs.dtype)
    if not compare(wrong, theirs, truth, computed_in=dtype).ok:
        return verdict
    few = f"{theirs.numel()} elements in {theirs.dtype} are too few"
    text = f"{verdict.name}: not judged; {few}: {_WRONG} times the right numbers would pass"
    return replace(verdict, message=text, judged=False)


def _beside_others(verdicts: Mapping[str, Closeness], truth: _Results) -> dict[str, Closeness]:
    """The verdicts; empty and zero tensors are not judged unless another tensor was.

    Zeros beside other results show that nothing was added to them. Zeros alone would also pass for a call that computes
    nothing.
    """
    numbers = {key: each is not None and bool(each.any()) for key, each in truth.items()}
    if any(verdict.judged and (numbers[key] or not verdict.ok) for key, verdict in verdicts.items()):
        return dict(verdicts)
    found = {}
    for key, verdict in verdicts.items():
        tensor = truth[key]
        kind = "it is empty" if tensor is not None and not tensor.numel() else "it is zero, and nothing else was judged"
        text = f"{verdict.name}: not judged; {kind}"
        found[key] = replace(verdict, message=text, judged=False) if verdict.judged else verdict
    return found


class _Call:
    """One call of a module or function, which can be made several times, each time with copies of its tensors.

    Raises:
        TypeError: ``target`` is neither a module nor a function of ``functional``.
    """

    def __init__(self, target: Any, inputs: tuple[Any, ...], options: dict[str, Any]) -> None:
        self.target = target
        self.operation = None if isinstance(target, nn.Module) else operation_of(target)
        if isinstance(target, nn.Module):
            self.name, self.signature = type(target).__name__, inspect.signature(target.forward)
        elif self.operation is not None:
            self.name, self.signature = self.operation.name, inspect.signature(target)
        else:
            known = "an nn.Module or a function of fusedlayers.functional"
            raise TypeError(f"target must be {known}, got {target!r}")
        _, self.structure = tree_flatten((inputs, options))
        known_names = [each.name for each in self.signature.parameters.values() if each.kind in _POSITIONAL]
        unnamed = [f"inputs[{index}]" for index in range(len(known_names), len(inputs))]
        given = [*zip([*known_names, *unnamed], inputs, strict=False), *options.items()]
        self.leaves: list[Any] = []
        self.names: list[str] = []
        self.wanted: list[bool] = []
        for position, (name, value) in enumerate(given):
            for path, leaf in tree_flatten_with_path(value)[0]:
                floating = isinstance(leaf, Tensor) and leaf.is_floating_point()
                self.leaves.append(leaf)
                self.names.append(name + keystr(path))
                self.wanted.append(floating and (position < len(inputs) or leaf.requires_grad))
        parameters = target.parameters() if isinstance(target, nn.Module) else ()
        self.tensors = [*(leaf for leaf in self.leaves if isinstance(leaf, Tensor)), *parameters]

    def run_torch(self, seed: int = 0) -> tuple[_Results, _Results]:
        """The results of torch's own arithmetic, in the same dtype and in float64."""
        with switched(_TORCH_ALONE):
            theirs = self.run(plain=True, seed=seed)
            truth = self.run(plain=True, double=True, seed=seed)
        return theirs, {key: None if tensor is None else tensor.double() for key, tensor in truth.items()}

    def run(self, *, plain: bool = False, double: bool = False, seed: int = 0) -> _Results:
        """Every floating-point result and every requested gradient, by name.

        ``plain``: with torch's own arithmetic; ``double``: in float64; ``seed`` selects the upstream gradient.
        """
        module = _copied(self.target, plain, double) if isinstance(self.target, nn.Module) else None
        call = self.target if module is None else module
        if plain and self.operation is not None:
            call = partial(_reference, self.operation, self.signature)
        copies = [self._copied(leaf, want, double) for leaf, want in zip(self.leaves, self.wanted, strict=True)]
        inputs, options = tree_unflatten(copies, self.structure)
        results = {
            f"y{keystr(path)}": leaf
            for path, leaf in tree_flatten_with_path(call(*inputs, **options))[0]
            if isinstance(leaf, Tensor) and leaf.is_floating_point()
        }
        parameters = {} if module is None else dict(module.named_parameters())
        wanted = {
            f"d input {name}" if name in parameters else f"d {name}": leaf
            for name, leaf, want in zip(self.names, copies, self.wanted, strict=True)
            if want
        }
        wanted |= {f"d {name}": tensor for name, tensor in parameters.items() if tensor.requires_grad}
        roots = [result for result in results.values() if result.requires_grad]
        gradients: tuple[Tensor | None, ...] = (None,) * len(wanted)
        if roots and wanted:
            upstream = [_upstream(result, position + 1009 * seed) for position, result in enumerate(roots)]
            gradients = torch.autograd.grad(roots, list(wanted.values()), upstream, allow_unused=True)
        return {name: result.detach() for name, result in results.items()} | dict(zip(wanted, gradients, strict=True))

    @staticmethod
    def _copied(leaf: Any, want: bool, double: bool) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        twin = leaf.detach().clone()
        return (twin.double() if double and twin.is_floating_point() else twin).requires_grad_(want)


def _upstream(result: Tensor, seed: int) -> Tensor:
    """Numbers from N(0, 1), rounded to bfloat16, so that they are the same in every dtype of the result."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(result.shape, generator=generator).to(torch.bfloat16).to(result.device, result.dtype)


def _copied(module: nn.Module, plain: bool, double: bool) -> nn.Module:
    """A copy of the module; ``plain``: with torch's own arithmetic, ``double``: in float64."""
    try:
        twin = copy.deepcopy(module)
    except Exception as error:
        raise TypeError(f"target: {type(module).__name__} cannot be copied, which verify needs: {error}") from error
    if plain:
        restore(twin)
        for layer in twin.modules():
            if isinstance(layer, FusedFFN):
                layer.recompute = "auto"  # the whole hidden at once, not in chunks
    if double:
        run_eagerly(twin.double())
    return twin


def _reference(operation: Operation, signature: inspect.Signature, *inputs: Any, **options: Any) -> Any:
    """The result of the operation's reference for a call of its public function."""
    given = signature.bind(*inputs, **options)
    given.apply_defaults()
    return operation.reference(**given.arguments)


def _random_states(devices: list[int]) -> list[Tensor]:
    return [torch.get_rng_state(), *(torch.cuda.get_rng_state(index) for index in devices)]


def _coarsest(tensors: list[Tensor]) -> torch.dtype | None:
    """The coarsest dtype that the computation rounds to, including autocast's; None without floating-point tensors."""
    found = {tensor.dtype for tensor in tensors if tensor.is_floating_point()}
    kinds = {tensor.device.type for tensor in tensors}
    found |= {torch.get_autocast_dtype(kind) for kind in kinds if torch.is_autocast_enabled(kind)}
    return max(found, key=lambda dtype: torch.finfo(dtype).eps, default=None)


def _where(tensors: list[Tensor]) -> str:
    dtype = str(_coarsest(tensors)).removeprefix("torch.")
    kinds = {torch.cuda.get_device_name(t.device) if t.is_cuda else t.device.type for t in tensors}
    return f"{', '.join(sorted(kinds))}, {dtype}"
