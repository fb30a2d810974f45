"""Finds the 32-bit products in a kernel's intermediate code that overflow in tensors of more than 2^31 elements."""

import re

_RESULT = re.compile(r"^\s*(%[\w$.-]+)(?::\d+)? = ([\w.]+)")
_VALUE = re.compile(r"%[\w$.-]+(?:#\d+)?")
_SAME_VALUE = ("tt.splat", "tt.broadcast", "tt.expand_dims", "arith.extsi", "arith.trunci", "arith.index_cast")


def int32_products(ttir: str) -> list[str]:
    """The 32-bit products in ``ttir`` that overflow where a tensor has more than 2^31 elements, one line each.

    Sizes and strides are the integer arguments of a kernel, but for counts of tiles: ``tile_rows``, ``tile_columns``,
    ``bands``, and the few rows of a ``group``. A 32-bit product is at fault if a size or stride is one of its factors,
    and, where it is part of an address, if it has a tensor of factors or a constant factor that is no power of two:
    tile numbers times tile sizes are the only products that stay below the number of rows or columns.
    TMA's coordinates are rows and columns, 32 bits wide by nature: a launcher hands it no larger matrix. An expert
    times a number of units is a row of the weights of all experts, which is such a coordinate, too.
    """
    lines = _with_own_names([line for line in ttir.splitlines() if not line.startswith("#")])
    named = re.findall(r"(%[\w$.-]+): i(?:32|64)\b", next(line for line in lines if "tt.func public" in line))
    arguments = set(named) - {"%tile_rows", "%tile_columns", "%bands", "%group"}
    inputs, operation, constants, products = _data_flow(lines)

    def is_argument(value: str) -> bool:
        while operation.get(value) in _SAME_VALUE:
            value = inputs[value][0]
        return value in arguments

    def made_from(waiting: list[str]) -> set[str]:
        found: set[str] = set()
        while waiting:
            value = waiting.pop()
            # What is loaded is data; the address it came from has its own entry.
            if value not in found and operation.get(value) != "tt.load":
                found.add(value)
                waiting += inputs.get(value, [])
        return found

    in_address = made_from([inputs[value][1] for value, name in operation.items() if name == "tt.addptr"])
    copies = [line for line in lines if "ttng.async_tma_copy" in line]
    in_coordinate = made_from([value for line in copies for value in _VALUE.findall(line.split("[")[1].split("]")[0])])

    def at_fault(value: str, is_tensor: bool) -> bool:
        if value in in_coordinate - in_address or any(factor.startswith("%expert") for factor in inputs[value]):
            return False
        if any(is_argument(factor) for factor in inputs[value]):
            return True
        sizes = [constants[factor] for factor in inputs[value] if factor in constants]
        return value in in_address and (is_tensor or any(size & (size - 1) for size in sizes))

    return [line.split(" loc(")[0].strip() for value, (line, tensor) in products.items() if at_fault(value, tensor)]


def _with_own_names(lines: list[str]) -> list[str]:
    """The lines, with names that the partitions of a warp-specialised kernel do not share."""
    found, behind = [], ""
    for line in lines:
        if partition := re.match(r"\s*partition(\d+)\(", line):
            behind = f".{partition[1]}"
        found.append(re.sub(r"(%[\w$.-]+)", rf"\g<1>{behind}", line))
        if "ttg.warp_return" in line:
            behind = ""
    return found


def _data_flow(
    lines: list[str],
) -> tuple[dict[str, list[str]], dict[str, str], dict[str, int], dict[str, tuple[str, bool]]]:
    """From the text of a function: inputs and operation of each value, integer constants, and the 32-bit products."""
    inputs: dict[str, list[str]] = {}
    operation: dict[str, str] = {}
    constants: dict[str, int] = {}
    products: dict[str, tuple[str, bool]] = {}
    regions: list[tuple[str, list[str]]] = []  # results of the enclosing loops and branches, and what they carry
    for line in lines:
        text = line.split(" loc(")[0]
        found = _RESULT.match(text)
        result, name = (found[1], found[2]) if found else ("", text.split(maxsplit=1)[0] if text.strip() else "")
        values = _VALUE.findall(text)[1 if found else 0 :]
        if name == "scf.yield":
            owner, carried = regions[-1]
            for index, value in enumerate(values):
                targets = [f"{owner}#{index}", *([owner] if index == 0 else []), *carried[index : index + 1]]
                for target in targets:
                    inputs.setdefault(target, []).append(value)
        elif name.startswith("scf."):
            carried = re.findall(r"(%[\w$.-]+) = (%[\w$.-]+(?:#\d+)?)", text.partition("iter_args(")[2])
            counter = re.search(r"scf\.for (%[\w$.-]+) = (%[\w$.#-]+) to (%[\w$.#-]+) step (%[\w$.#-]+)", text)
            if counter:
                inputs[counter[1]] = [counter[2], counter[4]]
            for inner, initial in carried:
                inputs.setdefault(inner, []).append(initial)
            regions.append((result, [inner for inner, _ in carried]))
        elif result:
            inputs[result], operation[result] = values, name
            if name == "arith.constant" and (value := re.search(r"(-?\d+)>? : (?:tensor<\w+xi32>|i32)$", text)):
                constants[result] = int(value[1])
            if name == "arith.muli" and (kind := re.search(r": (tensor<\w+xi32>|i32)$", text)):
                products[result] = (line, kind[1] != "i32")
        elif text.strip() == "}" and regions:
            regions.pop()
    return inputs, operation, constants, products
