"""The text of a compiled program: its loops, its estimated cycles, and what devices send.

A collective counts once for each time that it runs. Its bytes are those that one device hands in,
or for an all-gather those that it gets. A TPU also has collectives in disguise, which count as what
they amount to: a fusion `all-reduce-scatter`, where each device keeps a part of the all-reduce; and
loops around a matrix product that pass its parts from device to device (`windowed_dot_general`).
Sums over several slices are scattered and gathered within each slice; the parts that travel between
slices are a kind of their own.
"""

import functools
import math
import re
from collections.abc import Callable, Iterator
from typing import NamedTuple

BETWEEN_SLICES = "between-slices"
COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
COLLECTIVES += (BETWEEN_SLICES,)
# A part of a computation's name, and what the collective in it amounts to.
DISGUISES = (
    ("all-reduce-scatter", "reduce-scatter"),
    ("windowed_dot_general_body_ag", "all-gather"),
    ("windowed_dot_general_body_rs", "reduce-scatter"),
)
_COMPUTATION = re.compile(r"(ENTRY )?%?([\w.\-]+) \(.*\{$")
_INSTRUCTION = re.compile(
    r"\s+(?:ROOT )?%?(?P<name>[\w.\-]+) = (?P<shape>.*?) (?P<opcode>[a-z][\w\-]*)"
    r"\((?P<arguments>.*?)\)(?P<attributes>(, \w+=.*)?)$"
)
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
    arguments: str  # the operands as they stand: a constant has its value there
    attributes: str

    @property
    def operands(self) -> list[str]:
        return _NAME.findall(self.arguments)

    def called(self, role: str) -> str | None:
        """The computation that the attribute `role` names."""
        found = re.search(rf"\b{role}=%?([\w.\-]+)", self.attributes)
        return found and found[1]


class Program:
    """The computations of a program's text."""

    def __init__(self, text: str):
        self.computations: dict[str, dict[str, Instruction]] = {}
        self.entry = ""
        current: dict[str, Instruction] = {}
        for line in text.splitlines():
            if header := _COMPUTATION.match(line):
                current = self.computations.setdefault(header[2], {})
                self.entry = header[2] if header[1] else self.entry
            elif found := _INSTRUCTION.match(line):
                current[found["name"]] = Instruction(**found.groupdict())

    def cycles(self) -> int | None:
        """The compiler's estimate for one call, if any; of kernels and collectives it has none."""
        return self.total(lambda i: int((_CYCLES.search(i.attributes) or ("", 0))[1])) or None

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
        """How often a `while` runs its body: as the compiler says, else by `i < n` and `i += s`.

        1 where neither tells.
        """
        if known := _TRIPS.search(loop.attributes):
            return int(known[1])
        condition = self.computations[loop.called("condition") or ""]
        body = self.computations[loop.called("body") or ""]
        outside = next(c for c in self.computations.values() if c.get(loop.name) is loop)
        before = _numbers(outside, outside[loop.operands[0]], {})
        after = _numbers(body, list(body.values())[-1], before)
        for test in condition.values():
            if test.opcode == "compare" and "direction=LT" in test.attributes:
                start, stop = (_number(condition, name, before) for name in test.operands)
                then = _number(condition, test.operands[0], after)
                if start is not None and stop is not None and then is not None and then > start:
                    return max(0, -(-(stop - start) // (then - start)))
        return 1


def _numbers(own: dict[str, Instruction], carried: Instruction, before: dict) -> dict:
    """{place: whole number} of what a loop carries along, None where it is not known."""
    names = carried.operands if carried.opcode == "tuple" else ()
    return {str(place): _number(own, name, before) for place, name in enumerate(names)}


def _number(own: dict[str, Instruction], name: str, carried: dict) -> int | None:
    """The whole number named `name`: of constants and of what a loop carries along."""
    i = own[name]
    if i.opcode == "constant":
        return int(i.arguments) if i.arguments.isdecimal() else None
    if i.opcode == "get-tuple-element" and own[i.operands[0]].opcode == "parameter":
        return carried.get(i.called("index"))
    if i.opcode not in ("add", "bitcast", "copy", "copy-start", "copy-done"):
        return None
    terms = [_number(own, term, carried) for term in i.operands]
    known = [term for term in terms if term is not None]
    return sum(known) if len(known) == len(terms) else None


def branches(conditional: Instruction) -> list[str]:
    """The computations of a conditional, which runs one of them."""
    if listed := _BRANCHES.search(conditional.attributes):
        return _NAME.findall(listed[1])
    pair = (conditional.called("true_computation"), conditional.called("false_computation"))
    return [name for name in pair if name]


def array_bytes(shape: str) -> list[int]:
    """Bytes of each array in a shape as `(f32[2,3]{1,0}, bf16[5])`, without padding: [24, 10]."""
    sizes = []
    for name, bits, dimensions in _ARRAY.findall(shape):
        count = math.prod(int(size) for size in dimensions.split(",") if size)
        sizes.append(count if name == "pred" else -(-count * int(bits) // 8))
    return sizes


def collectives_of(program: Program) -> dict[str, dict[str, int]]:
    """The collectives of one call, by kind: how many run (`count`), their `bytes`, and the bytes of
    the `largest` array of one. A conditional counts as its branch with most bytes.
    """
    sent = [*_sent(program, program.entry)]
    found = {}
    for kind in COLLECTIVES:
        if own := [(times, arrays) for times, of, arrays in sent if of == kind]:
            found[kind] = {
                "count": sum(times for times, _ in own),
                "bytes": sum(times * sum(arrays) for times, arrays in own),
                "largest": max(max(arrays, default=0) for _, arrays in own),
            }
    return found


def _sent(program: Program, name: str, times: int = 1) -> Iterator[tuple[int, str, list[int]]]:
    """How often each collective of a computation, and of what it runs, runs; its kind and arrays.

    The computation itself runs so many `times`.
    """
    channels = set()
    for own, i in _with_fused(program, name):
        kind = i.opcode.removesuffix("-start")
        if kind == "send" and "xla_megascale_runtime" in i.attributes:
            kind = BETWEEN_SLICES
        if kind in COLLECTIVES:
            # A collective that is cut up and fused with other work stands in several places.
            channel = kind, i.called("channel_id")
            if channel[1] is None or channel not in channels:
                channels.add(channel)
                meant = (k for part, k in DISGUISES if part in own)
                yield times, next(meant, kind), _arrays(program, own, i)
        elif kind == "while":
            yield from _sent(program, i.called("body") or "", times * program.trips(i))
        elif kind == "conditional":
            each = ([*_sent(program, branch, times)] for branch in branches(i))
            yield from max(each, key=lambda sent: sum(n * sum(arrays) for n, _, arrays in sent))
        elif kind == "call":
            yield from _sent(program, i.called("to_apply") or "", times)


def _with_fused(program: Program, name: str) -> Iterator[tuple[str, Instruction]]:
    """The instructions of a computation and of its fusions, each with its computation's name."""
    for i in program.computations[name].values():
        yield name, i
        if i.opcode in ("fusion", "async-start"):
            yield from _with_fused(program, i.called("calls") or "")


def _arrays(program: Program, name: str, i: Instruction) -> list[int]:
    own = program.computations[name]
    if i.opcode == "all-gather":
        return array_bytes(i.shape)
    if i.opcode == "all-gather-start":  # what is handed in, what is got, and more
        return array_bytes(i.shape)[len(i.operands) : 2 * len(i.operands)]
    return [size for operand in i.operands for size in array_bytes(own[operand].shape)]
