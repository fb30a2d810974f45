"""Checks of tensors, whose errors name the argument, what it is, and what was expected.

The tensors of an operation are described once, in the letters of its documentation: see :class:`Shapes`.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .operands import autocast_dtype, describe_tensor, leading_dims

# Words of Shapes for the dtypes of tensors that are no operands of products, and what errors say is expected.
DTYPES: dict[str, tuple[str, tuple[torch.dtype, ...]]] = {
    "index": ("torch.int64 or torch.int32", (torch.int64, torch.int32)),
    "class": ("torch.int64 or torch.uint8, the class of each token", (torch.int64, torch.uint8)),
    "mask": ("torch.bool, True where an element takes part", (torch.bool,)),
    "seed": ("torch.int64", (torch.int64,)),
    "integer": (
        "an integer dtype",
        (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32, torch.uint64),
    ),
}
_COUNTS = ("no dimension", "one dimension", "two dimensions", "three dimensions", "four dimensions")


class Shapes:
    """The tensors of a call: ``"x: *B M? K, w_up: N K, w_down: O N, b_up?: N, dropout_seed?: seed(1)"``.

    Each has a name, a "?" if it may be None, and its dims:

    - a letter has one size in all tensors; ``2N`` is twice that of N, and a number is itself;
    - ``*B`` are any dims, the same in all tensors; ``*B M?`` are any dims that end with M, or none;
    - ``... M K`` are any dims before M and K; those of all tensors broadcast.

    A tensor is floating, and has the dtype of the first one unless autocast casts it. A word before the dims says
    otherwise: ``float(V)`` has any floating dtype, and ``DTYPES`` lists the other words.

    Args:
        text: the tensors, in the order of the public function.
        sparse: the names of those that may be sparse: torch's operations decide whether they can compute with them.
        note: the end of errors about shapes: on what else they depend.
    """

    def __init__(self, text: str, sparse: str = "", note: str = "") -> None:
        self._arguments = [_parsed(each) for each in text.split(",")]
        self._sparse, self._note = sparse.split(), note

    def check(self, *tensors: Any) -> None:
        """Checks the tensors of a call.

        Raises:
            TypeError: not a tensor, nested or sparse, or not of the expected dtype.
            ValueError: shapes that do not fit together, or different devices.
        """
        given: list[tuple[_Argument, Tensor]] = []
        for argument, tensor in zip(self._arguments, tensors, strict=True):
            if tensor is not None or not argument.optional:
                _check_layout(argument, tensor, argument.name in self._sparse)
                given.append((argument, tensor))
                _check_dtype_and_device(argument, tensor, *given[0])
        sizes = dict(_NUMBERS)
        for position, (argument, tensor) in enumerate(given):
            parts = argument.parts(tensor.shape, sizes)
            if parts is None or argument.wrong_dim(parts, sizes) is not None:
                raise ValueError(_shape_error(argument, tensor, given[:position]) + self._note)
            sizes.update(argument.sizes(parts))
        _check_broadcast([(argument.name, tensor) for argument, tensor in given if argument.dims[0].letter == "..."])


class _Dim(NamedTuple):
    """One dim of a tensor, ``factor`` times the size of its letter; or with a star any number of dims."""

    text: str
    letter: str  # empty for a number, which is the factor
    factor: int
    starred: bool

    def times(self, size: _Dims) -> _Dims:
        """What a shape has here if the letter has this size."""
        return size if self.factor == 1 else (self.factor * size[0],)


class _Argument(NamedTuple):
    """A tensor that :class:`Shapes` describes."""

    name: str
    optional: bool
    kind: str
    dims: tuple[_Dim, ...]

    @property
    def has_rows(self) -> bool:
        """Whether it holds the rows of a call, and does not belong to the layer."""
        return self.dims[0].letter.startswith("*")

    def letters(self, sizes: _Sizes) -> str:
        """The dims as the documentation writes them, without stars for none."""
        return f"[{', '.join(dim.text for dim in self.dims if sizes.get(dim.letter) != ())}]"

    def parts(self, shape: _Dims, sizes: _Sizes) -> list[_Dims] | None:
        """What a shape has for each of the dims, or None if it has too few or too many.

        A star that is not known takes all but one for each dim after it.
        """
        parts, start = [], 0
        for position, dim in enumerate(self.dims, start=1):
            end = start + 1
            if dim.starred:
                known = sizes.get(dim.letter)
                end = len(shape) - len(self.dims) + position if known is None else start + len(known)
            if end < start:
                return None
            parts.append(shape[start:end])
            start = end
        return parts if start == len(shape) else None

    def wrong_dim(self, parts: list[_Dims], sizes: _Sizes) -> int | None:
        """The position of the first dim that is not what the known sizes ask for."""
        for position, dim in enumerate(self.dims):
            part, size = parts[position], sizes.get(dim.letter)
            wrong = part != dim.times(size) if size is not None else dim.factor != 1 and part[0] % dim.factor
            if wrong:
                return position
        return None

    def sizes(self, parts: list[_Dims]) -> _Sizes:
        """The sizes of the letters of a shape that fits."""
        return {
            dim.letter: part if dim.factor == 1 else (part[0] // dim.factor,)
            for dim, part in zip(self.dims, parts, strict=True)
            if dim.letter != "..."
        }

    def wanted(self, sizes: _Sizes, sources: dict[str, _Given], count_is_wrong: bool) -> str:
        """What the shape should have been, and which tensors say so."""
        known = [(dim, dim.times(sizes[dim.letter])) for dim in self.dims if dim.letter in sizes]
        text = self.letters(sizes)
        if len(known) == len(self.dims):
            shape = str([size for _, part in known for size in part])
            text = text if text == shape else f"{text} = {shape}"
        else:
            told = [(dim, part) for dim, part in known if dim.letter and part]
            named = [f"{dim.text} = {list(part) if dim.starred else part[0]}" for dim, part in told]
            if count_is_wrong:
                least = "at least " if any(dim.starred and dim.letter not in sizes for dim in self.dims) else ""
                count = sum(len(sizes.get(dim.letter, ())) if dim.starred else 1 for dim in self.dims)
                text += f", {least}{_COUNTS[count]}{',' if named else ''}"
            text += f" with {' and '.join(named)}" if named else ""
        reasons = [sources[dim.letter] for dim, _ in known if dim.letter in sources]
        said = {f"{each.name} is {each.letters(sizes)} = {list(tensor.shape)}": None for each, tensor in reasons}
        return f"{text}, as {' and '.join(said)}" if said else text


_Dims = tuple[int, ...]
_Sizes = dict[str, _Dims]  # what the letters stand for
_Given = tuple[_Argument, Tensor]
_NUMBERS: _Sizes = {"": (1,)}  # a number is a multiple of 1


def _parsed(text: str) -> _Argument:
    name, _, described = text.strip().partition(":")
    kind, _, letters = described.strip().rstrip(")").rpartition("(")
    dims = []
    for each in re.sub(r"(\*\w+) (\w+)\?", r"\1,\2", letters).split():
        digits, letter = re.fullmatch(r"(\d*)(.*)", each).groups()  # type: ignore[union-attr]
        shown = "*B" if letter == "..." else f"{digits} {letter}".strip().replace(",", ", ")
        dims.append(_Dim(shown, letter, int(digits or 1), letter.startswith(("*", "..."))))
    return _Argument(name.rstrip("?"), name.endswith("?"), kind, tuple(dims))


def _check_layout(argument: _Argument, tensor: Any, may_be_sparse: bool) -> None:
    name = argument.name
    if not isinstance(tensor, Tensor):
        expected = "a torch.Tensor or None" if argument.optional else "a torch.Tensor"
        raise TypeError(f"{name} must be {expected}, got {None if tensor is None else type(tensor).__name__}")
    # A nested tensor has no shape to print.
    if tensor.is_nested:
        raise TypeError(f"{name} is a nested tensor ({tensor.layout}): expected a plain tensor, padded or packed")
    if tensor.layout is not torch.strided and not may_be_sparse:
        raise TypeError(f"{describe_tensor(name, tensor)} has the layout {tensor.layout}: expected torch.strided")


def _check_dtype_and_device(argument: _Argument, tensor: Tensor, first_argument: _Argument, first: Tensor) -> None:
    words, dtypes = DTYPES.get(argument.kind, ("a real floating-point dtype", None))
    is_right = tensor.is_floating_point() if dtypes is None else tensor.dtype in dtypes
    mixed = not argument.kind and tensor.dtype != first.dtype
    error: type[Exception] = TypeError
    if not is_right:
        expected = words
    elif tensor.device != first.device:
        error, expected = ValueError, f"the device of {first_argument.name}, {first.device}"
    elif mixed and not (autocast_dtype(first.device) and torch.float64 not in (tensor.dtype, first.dtype)):
        expected = f"the dtype of {first_argument.name}, {first.dtype}"
    else:
        return
    raise error(f"{describe_tensor(argument.name, tensor)}: expected {expected}")


def _shape_error(argument: _Argument, tensor: Tensor, earlier: list[_Given]) -> str:
    """The error of a tensor whose shape does not fit those of the earlier ones, which fit each other."""
    sizes, sources = dict(_NUMBERS), dict[str, _Given]()
    for each, other in earlier:
        found = each.sizes(each.parts(other.shape, sizes) or [])
        sizes.update(found)
        for letter in found.keys() - {""}:
            # A weight is a better reason than rows, because it says what a layer takes.
            if letter not in sources or (sources[letter][0].has_rows and not each.has_rows):
                sources[letter] = each, other
    parts = argument.parts(tensor.shape, sizes)
    wrong = None if parts is None else argument.wrong_dim(parts, sizes)
    turned = argument.parts((*tensor.shape[:-2], *tensor.shape[:-3:-1]), sizes)
    transposed = turned is not None and argument.wrong_dim(turned, sizes) is None
    hint = " (it looks transposed)" if transposed else ""
    if parts is not None and wrong is not None:
        dim = argument.dims[wrong]
        source = sources.get(dim.letter)
        if source is None and dim.letter:
            letters = argument.letters(sizes)
            return f"{describe_tensor(argument.name, tensor)}: expected {letters}, where {dim.text} is even"
        if source is not None and source[0].has_rows and not argument.has_rows:
            # The weights of a layer are what its author asked for: its input is wrong.
            hint = f", unless {argument.name} is meant to be transposed" if transposed else ""
            sizes = argument.sizes(parts)
            sources = dict.fromkeys(sizes, (argument, tensor))
            argument, tensor = source
    return f"{describe_tensor(argument.name, tensor)}: expected {argument.wanted(sizes, sources, parts is None)}{hint}"


def _check_broadcast(tensors: list[tuple[str, Tensor]]) -> None:
    """Checks that the leading dims of tensors broadcast."""
    if not tensors:
        return
    try:
        leading_dims(*(tensor for _, tensor in tensors))
    except RuntimeError as error:
        described = ", ".join(describe_tensor(name, tensor) for name, tensor in tensors)
        batches = ", ".join(str(list(tensor.shape[:-2])) for _, tensor in tensors)
        raise ValueError(f"{described}: expected leading dimensions *B that broadcast, got {batches}") from error


def check_absent(name: str, tensor: Tensor | None, because: str) -> None:
    """Checks that a tensor is None where another argument excludes it."""
    if tensor is not None:
        raise ValueError(f"{name} must be None, because {because}")
