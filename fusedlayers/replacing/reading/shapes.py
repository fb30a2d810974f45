"""Operations that change a shape without moving data, or split a linear's result into halves."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from .arguments import arguments, last_dimension, plain
from .polynomials import atom
from .values import Formula, Known, NotUnderstood, Shape


def halves_of(x: Formula, sizes: Sequence[int]) -> tuple[Formula, ...]:
    """The columns of a tensor in two halves."""
    found, width = x.value.single, x.width
    if found is None or width is None or sum(sizes) != width or len(set(sizes)) != 1 or len(sizes) != 2:
        raise NotUnderstood("cuts a tensor otherwise than a linear's result into halves")
    return tuple(x.with_value(atom("half", found, which), width // 2) for which in ("first", "last"))


def chunk(x: Formula, args: Sequence[Any], options: dict[str, Any]) -> tuple[Formula, ...]:
    given = arguments(args, options, "chunk", chunks=None, dim=0)
    last_dimension(x, given["dim"], "chunk")
    if x.width is None or given["chunks"] != 2 or x.width % 2:
        raise NotUnderstood("cuts a tensor otherwise than a linear's result into halves")
    return halves_of(x, (x.width // 2,) * 2)


def split(x: Formula, args: Sequence[Any], options: dict[str, Any]) -> tuple[Formula, ...]:
    options = {("size" if name.startswith("split_size") else name): value for name, value in options.items()}
    given = arguments(args, options, "split", size=None, dim=0)
    last_dimension(x, given["dim"], "split")
    size = given["size"]
    if type(size) is int and size > 0 and x.width is not None:
        size = (size,) * (x.width // size)
    if not isinstance(size, tuple) or not all(type(each) is int for each in size):
        raise NotUnderstood("cuts a tensor into parts of unknown sizes")
    return halves_of(x, size)


@dataclasses.dataclass(frozen=True)
class Halves:
    """A linear's result viewed as ``[..., 2, N]`` or ``[..., N, 2]``: its halves, or its even and odd columns."""

    of_tensor: Formula
    interleaved: bool

    @classmethod
    def of(cls, x: Formula, sizes: Any) -> Halves:
        """The tensor with its last dimension split into these sizes."""
        if x.width is None or x.value.single is None or len(sizes) != 2 or x.width % 2:
            raise NotUnderstood("takes the last dimension apart otherwise than into two")
        sizes = tuple(x.width // 2 if size == -1 else size for size in sizes)
        if sizes not in ((2, x.width // 2), (x.width // 2, 2)):
            raise NotUnderstood("takes the last dimension apart otherwise than into two")
        return cls(x, sizes[1] == 2)

    def part(self, place: int) -> Formula:
        """One of the two."""
        x = self.of_tensor
        names = ("even", "odd") if self.interleaved else ("first", "last")
        return x.with_value(atom("half", x.value.single, names[place]), (x.width or 0) // 2)


def unflatten(x: Formula, args: Sequence[Any], options: dict[str, Any]) -> Halves:
    given = arguments(args, options, "unflatten", dim=None, sizes=None)
    last_dimension(x, given["dim"], "unflatten")
    return Halves.of(x, given["sizes"])


def view(x: Formula, args: Sequence[Any], options: dict[str, Any]) -> Any:
    sizes = list(args[0]) if len(args) == 1 and isinstance(args[0], tuple) else list(args)
    if options or not sizes:
        raise NotUnderstood("gives options to view")
    if len(sizes) == 1 and isinstance(sizes[0], Shape):
        shape = sizes[0]
        if not shape.leading and shape.of.width == x.width:
            return dataclasses.replace(x, shaped=shape.of.shaped)
        raise NotUnderstood("changes shapes by view")
    if isinstance(sizes[0], Shape) and sizes[0].leading:
        shaped = sizes[0].of.shaped
        inner = [plain(size, "view") for size in sizes[1:]]
        if len(inner) == 1 and inner[0] in (-1, x.width):
            return dataclasses.replace(x, shaped=shaped)
        if len(inner) == 2 and shaped == x.shaped:
            return Halves.of(x, inner)
    elif len(sizes) == 2 and plain(sizes[0], "view") == -1 and plain(sizes[1], "view") == x.width:
        return dataclasses.replace(x, shaped=False)
    raise NotUnderstood("changes shapes by view")


def view_as(x: Formula, args: Sequence[Any], options: dict[str, Any]) -> Formula:
    if len(args) != 1 or not isinstance(args[0], Formula) or args[0].width != x.width:
        raise NotUnderstood("changes shapes by view_as")
    return dataclasses.replace(x, shaped=args[0].shaped)


def flatten(x: Formula, args: Sequence[Any], options: dict[str, Any]) -> Formula:
    if arguments(args, options, "flatten", start_dim=0, end_dim=-1) != {"start_dim": 0, "end_dim": -2}:
        raise NotUnderstood("changes shapes by flatten")
    return dataclasses.replace(x, shaped=False)


def contiguous(x: Formula, args: Sequence[Any], options: dict[str, Any]) -> Formula:
    if args or options:
        raise NotUnderstood("gives options to contiguous")
    return x


def size_of(x: Formula, args: Sequence[Any], options: dict[str, Any]) -> Any:
    if not args and not options:
        return Shape(x)
    if arguments(args, options, "size", dim=None)["dim"] == -1 and x.width:
        return Known(x.width)
    raise NotUnderstood("asks for the shape of its input")
