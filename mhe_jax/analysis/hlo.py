"""The text of a compiled program: its computations, its loops, its compiler's estimate of cycles.

A program (`compiled.as_text()`) is a list of computations. A `while` runs its body as often as its
trip count says, a `conditional` one of its branches, a call or a fusion what it calls.
"""

import functools
import re
from collections.abc import Callable
from typing import NamedTuple

_COMPUTATION = re.compile(r"(ENTRY )?%?([\w.\-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"\s+(?:ROOT )?%?([\w.\-]+) = (.*)")
_ARRAY = re.compile(r"\b(pred|[a-z]+(\d+)\w*)\[([\d,]*)\]")
_NAME = re.compile(r"%([\w.\-]+)")
_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")


class Instruction(NamedTuple):
    """`name = shape opcode(operands), attributes`."""

    name: str
    shape: str
    opcode: str
    operands: tuple[str, ...]
    arguments: str  # the operands as they stand: a constant has its value there
    attributes: str

    def called(self, role: str) -> str | None:
        """The computation that the attribute `role` names."""
        found = re.search(rf"\b{role}=%?([\w.\-]+)", self.attributes)
        return found and found[1]


class Program:
    """The computations of a program's text."""

    def __init__(self, text: str):
        self.computations: dict[str, dict[str, Instruction]] = {}
        self.entry, self._has_cycles = "", bool(_CYCLES.search(text))
        # Loops whose trip count neither the compiler nor the condition gives: counted once.
        self.unknown_loops: set[str] = set()
        current: dict[str, Instruction] = {}
        for line in text.splitlines():
            if header := _COMPUTATION.match(line):
                current = self.computations.setdefault(header[2], {})
                self.entry = header[2] if header[1] else self.entry
            elif found := _INSTRUCTION.match(line):
                current[found[1]] = _instruction(found[1], found[2])

    def cycles(self) -> int | None:
        """The compiler's estimate for one call, if any; of kernels and collectives it has none."""

        def estimated(instruction: Instruction) -> int:
            found = _CYCLES.search(instruction.attributes)
            return int(found[1]) if found else 0

        return self.total(estimated) if self._has_cycles else None

    def total(self, cost: Callable[[Instruction], int]) -> int:
        """The `cost` of all instructions, each as often as it runs; of branches the cheapest."""

        @functools.cache
        def of(name: str) -> int:
            return sum(map(inside, self.computations[name].values()))

        def inside(instruction: Instruction) -> int:
            if instruction.opcode == "while":
                roles = (instruction.called("body"), instruction.called("condition"))
                return self.trips(instruction) * sum(of(name) for name in roles if name)
            if instruction.opcode == "conditional":
                return min(of(name) for name in branches(instruction))
            if instruction.opcode in ("call", "async-start"):
                role = "to_apply" if instruction.opcode == "call" else "calls"
                return of(instruction.called(role) or "")
            return cost(instruction)

        return of(self.entry)

    def trips(self, loop: Instruction) -> int:
        """How often a `while` runs its body: as the compiler says, else by `i < n` and `i += s`."""
        if known := _TRIPS.search(loop.attributes):
            return int(known[1])
        condition = self.computations[loop.called("condition") or ""]
        body = self.computations[loop.called("body") or ""]
        carried = self._carried(loop)
        for test in condition.values():
            if test.opcode != "compare" or "direction=LT" not in test.attributes:
                continue
            index, limit = test.operands
            place = _source(condition, index).called("index")
            start, stop = carried.get(place or ""), _number(condition, limit, carried)
            step = self._step(body, place, carried)
            if stop is not None and start is not None and step:
                return max(0, -(-(stop - start) // step))
        self.unknown_loops.add(loop.name)
        return 1

    def _carried(self, loop: Instruction) -> dict[str, int]:
        """The constants in the tuple that a loop starts with, by place."""
        for own in self.computations.values():
            if own.get(loop.name) is loop and own[loop.operands[0]].opcode == "tuple":
                first = own[loop.operands[0]].operands
                found = {str(i): _number(own, name, {}) for i, name in enumerate(first)}
                return {i: value for i, value in found.items() if value is not None}
        return {}

    def _step(self, body: dict[str, Instruction], place: str | None, carried) -> int | None:
        """The step of the carried number at `place` in one run of the body."""
        root = list(body.values())[-1]
        if place is None or root.opcode != "tuple":
            return None
        after = _source(body, root.operands[int(place)])
        if after.opcode != "add":
            return None
        terms = [name for name in after.operands if _source(body, name).called("index") != place]
        return _number(body, terms[0], carried) if len(terms) == 1 else None


def _number(own: dict[str, Instruction], name: str, carried: dict[str, int]) -> int | None:
    """The whole number named `name`: a constant, or one that a loop carries along."""
    i = _source(own, name)
    if i.opcode == "get-tuple-element":
        return carried.get(i.called("index") or "")
    return int(i.arguments) if i.opcode == "constant" and i.arguments.isdecimal() else None


def _source(own: dict[str, Instruction], name: str) -> Instruction:
    """The instruction behind copies of `name`."""
    i = own[name]
    while i.opcode in ("bitcast", "copy", "copy-start", "copy-done"):
        i = own[i.operands[0]]
    return i


def branches(conditional: Instruction) -> list[str]:
    """The computations of a conditional, which runs one of them."""
    if listed := _BRANCHES.search(conditional.attributes):
        return _NAME.findall(listed[1])
    pair = (conditional.called("true_computation"), conditional.called("false_computation"))
    return [name for name in pair if name]


def array_bytes(shape: str) -> list[int]:
    """Bytes of each array in a shape, without the padding of its layout.

    >>> array_bytes("(f32[2,3]{1,0:T(8,128)}, bf16[5]{0}, pred[])")
    [24, 10, 1]
    """
    sizes = []
    for name, bits, dimensions in _ARRAY.findall(shape):
        count = 1
        for size in filter(None, dimensions.split(",")):
            count *= int(size)
        sizes.append(count if name == "pred" else -(-count * int(bits) // 8))
    return sizes


def _instruction(name: str, rest: str) -> Instruction:
    end = _closing(rest, 0) + 1 if rest.startswith("(") else rest.find(" ")
    shape, rest = rest[:end], rest[end:].lstrip()
    opening = rest.find("(")
    closing = _closing(rest, opening)
    arguments = rest[opening + 1 : closing]
    operands = tuple(_NAME.findall(arguments))
    return Instruction(name, shape, rest[:opening], operands, arguments, rest[closing + 1 :])


def _closing(text: str, opening: int) -> int:
    """Where the bracket that opens at `opening` closes."""
    depth = 0
    for match in re.finditer(r"[()]", text[opening:]):
        depth += 1 if match[0] == "(" else -1
        if depth == 0:
            return opening + match.start()
    return len(text)
