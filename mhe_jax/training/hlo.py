"""What a compiled program says of itself: its collectives, and its compiler's estimate of cycles.

The text of a program (`compiled.as_text()`) is a list of computations. A `while` runs its body as
often as its trip count says, a `conditional` one of its branches, a call or a fusion what it calls.
So a collective counts once for each time that it runs, and bytes are those that one device hands
in, or for an all-gather those that it gets: the whole array, the same however it travels. A fusion
`all-reduce-scatter` of a TPU, an all-reduce of which each device keeps its part, is a
reduce-scatter.
"""

import functools
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")

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
        """What the attribute `role` names."""
        found = re.search(rf"\b{role}=%?([\w.\-]+)", self.attributes)
        return found and found[1]


@dataclass(frozen=True)
class Collective:
    """All collectives of a kind: how often one runs, their bytes, and the largest array of one."""

    count: int = 0
    bytes: int = 0
    largest: int = 0

    def __add__(self, other: "Collective") -> "Collective":
        largest = max(self.largest, other.largest)
        return Collective(self.count + other.count, self.bytes + other.bytes, largest)

    def __mul__(self, times: int) -> "Collective":
        return Collective(times * self.count, times * self.bytes, self.largest if times else 0)


Collectives = dict[str, Collective]


class Program:
    """The computations of a program's text."""

    def __init__(self, text: str):
        self.computations: dict[str, dict[str, Instruction]] = {}
        self.entry, self._has_cycles = "", bool(_CYCLES.search(text))
        # Loops whose trip count neither the compiler nor the condition says: counted once.
        self.unknown_loops: set[str] = set()
        current: dict[str, Instruction] = {}
        for line in text.splitlines():
            if header := _COMPUTATION.match(line):
                current = self.computations.setdefault(header[2], {})
                self.entry = header[2] if header[1] else self.entry
            elif found := _INSTRUCTION.match(line):
                current[found[1]] = _instruction(found[1], found[2])

    def collectives(self) -> Collectives:
        """Kind to what runs of it in one call; of a conditional, the branch with the most bytes."""

        @functools.cache
        def of(name: str) -> Collectives:
            found: Collectives = {}
            channels: set[str] = set()

            def add(kind: str, collective: Collective) -> None:
                found[kind] = found.get(kind, Collective()) + collective

            for own, i in self._fused(name):
                kind = i.opcode.removesuffix("-start")
                if kind in KINDS:
                    # Cut up and fused with other work, one collective stands in several places.
                    if (channel := i.called("channel_id")) in channels:
                        continue
                    channels |= {channel} if channel else set()
                    scatters = own.startswith("all-reduce-scatter")
                    add("reduce-scatter" if scatters else kind, self._moved(own, i))
                elif kind in ("while", "conditional", "call"):
                    for kind, collective in self._inside(i, of).items():
                        add(kind, collective)
            return found

        return {kind: of(self.entry)[kind] for kind in KINDS if kind in of(self.entry)}

    def _fused(self, name: str) -> Iterator[tuple[str, Instruction]]:
        """The instructions of a computation and of what it fuses, with where they stand."""
        for instruction in self.computations[name].values():
            yield name, instruction
            if instruction.opcode in ("fusion", "async-start"):
                yield from self._fused(instruction.called("calls") or "")

    def _inside(self, i: Instruction, of: Callable[[str], Collectives]) -> Collectives:
        if i.opcode == "while":
            body = of(i.called("body") or "")
            return {kind: collective * self.trips(i) for kind, collective in body.items()}
        if i.opcode == "conditional":
            weigh = lambda found: sum(c.bytes for c in found.values())  # noqa: E731
            return max(map(of, branches(i)), key=weigh)
        return of(i.called("to_apply") or "")

    def _moved(self, name: str, i: Instruction) -> Collective:
        if i.opcode == "all-gather":
            arrays = array_bytes(i.shape)
        elif i.opcode == "all-gather-start":
            arrays = array_bytes(_elements(i.shape)[1])
        else:
            own = self.computations[name]
            arrays = [b for operand in i.operands for b in array_bytes(own[operand].shape)]
        return Collective(1, sum(arrays), max(arrays, default=0))

    def cycles(self, choose: Callable[[Iterable[int]], int] = min) -> int | None:
        """The compiler's estimated cycles of one call; None where it gives none.

        `choose` takes one of a conditional's branches. Neither collectives nor Pallas kernels have
        an estimate.
        """

        @functools.cache
        def of(name: str) -> int:
            return sum(map(inside, self.computations[name].values()))

        def inside(instruction: Instruction) -> int:
            if instruction.opcode == "while":
                roles = (instruction.called("body"), instruction.called("condition"))
                return self.trips(instruction) * sum(of(name) for name in roles if name)
            if instruction.opcode == "conditional":
                return choose(of(name) for name in branches(instruction))
            if instruction.opcode in ("call", "async-start"):
                role = "to_apply" if instruction.opcode == "call" else "calls"
                return of(instruction.called(role) or self.entry)
            found = _CYCLES.search(instruction.attributes)
            return int(found[1]) if found else 0

        return of(self.entry) if self._has_cycles else None

    def trips(self, loop: Instruction) -> int:
        """How often a `while` runs its body: what the compiler says, else the bound in `i < n`."""
        if known := _TRIPS.search(loop.attributes):
            return int(known[1])
        condition = self.computations[loop.called("condition") or ""].values()
        bounds = [i.arguments for i in condition if i.opcode == "constant" and "[]" in i.shape]
        if len(bounds) == 1 and bounds[0].isdecimal():
            return int(bounds[0])
        self.unknown_loops.add(loop.name)
        return 1


def branches(conditional: Instruction) -> list[str]:
    """The computations of which a conditional runs one."""
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


def _elements(shape: str) -> list[str]:
    """The elements of a tuple shape."""
    parts, start, depth = [], 1, 0
    for i, letter in enumerate(shape):
        if letter in "([{":
            depth += 1
        elif letter in ")]}":
            depth -= 1
        if (letter == "," and depth == 1) or (letter == ")" and depth == 0):
            parts.append(shape[start:i].strip())
            start = i + 1
    return parts


def _closing(text: str, opening: int) -> int:
    """Where the bracket that opens at `opening` closes."""
    depth = 0
    for match in re.finditer(r"[()]", text[opening:]):
        depth += 1 if match[0] == "(" else -1
        if depth == 0:
            return opening + match.start()
    return len(text)
