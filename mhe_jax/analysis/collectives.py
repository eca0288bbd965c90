"""The traffic of a compiled program between devices.

A collective counts once for each time that it runs. Its bytes are those that one device hands in,
or for an all-gather those that it gets: the whole array, the same however it travels.

A TPU also has collectives in disguise, which count as what they amount to: a fusion
`all-reduce-scatter`, where each device keeps a part of the all-reduce; and loops around a matrix
product that pass its parts from device to device (`windowed_dot_general`), which piece by piece are
an all-gather before the product or a reduce-scatter after it. Sums over several slices are
scattered and gathered within each slice; the parts that travel between slices are a kind of their
own.
"""

import functools
from collections.abc import Iterator
from dataclasses import dataclass

from mhe_jax.analysis.hlo import Instruction, Program, array_bytes, branches

BETWEEN_SLICES = "between-slices"
COLLECTIVES = (
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "all-to-all",
    "collective-permute",
    BETWEEN_SLICES,
)
# A part of a computation's name, and what the collective in it amounts to.
DISGUISES = (
    ("all-reduce-scatter", "reduce-scatter"),
    ("windowed_dot_general_body_ag", "all-gather"),
    ("windowed_dot_general_body_rs", "reduce-scatter"),
)


@dataclass(frozen=True)
class Collective:
    """All collectives of a kind: how often they run, their bytes, and the largest array of one."""

    count: int = 0
    bytes: int = 0
    largest: int = 0

    def __add__(self, other: "Collective") -> "Collective":
        largest = max(self.largest, other.largest)
        return Collective(self.count + other.count, self.bytes + other.bytes, largest)

    def __mul__(self, times: int) -> "Collective":
        return Collective(times * self.count, times * self.bytes, self.largest if times else 0)


Collectives = dict[str, Collective]


def collectives_of(program: Program) -> Collectives:
    """The collectives of one call, by kind; a conditional counts as its branch with most bytes."""

    @functools.cache
    def of(name: str) -> Collectives:
        found: Collectives = {}
        channels: set[tuple[str, str | None]] = set()

        def add(kind: str, collective: Collective) -> None:
            found[kind] = found.get(kind, Collective()) + collective

        for own, i in _with_fused(program, name):
            kind = _kind(i)
            if kind in COLLECTIVES:
                # A collective that is cut up and fused with other work stands in several places.
                channel = kind, i.called("channel_id")
                if channel[1] is None or channel not in channels:
                    channels.add(channel)
                    meant = (k for part, k in DISGUISES if part in own)
                    add(next(meant, kind), _moved(program, own, i))
            elif kind == "while":
                for kind, collective in of(i.called("body") or "").items():
                    add(kind, collective * program.trips(i))
            elif kind == "conditional":
                weigh = lambda branch: sum(c.bytes for c in branch.values())  # noqa: E731
                for kind, collective in max(map(of, branches(i)), key=weigh).items():
                    add(kind, collective)
            elif kind == "call":
                for kind, collective in of(i.called("to_apply") or "").items():
                    add(kind, collective)
        return found

    return {kind: of(program.entry)[kind] for kind in COLLECTIVES if kind in of(program.entry)}


def _kind(i: Instruction) -> str:
    if i.opcode == "send" and "xla_megascale_runtime" in i.attributes:
        return BETWEEN_SLICES
    return i.opcode.removesuffix("-start")


def _with_fused(program: Program, name: str) -> Iterator[tuple[str, Instruction]]:
    """The instructions of a computation and of its fusions, each with its computation's name."""
    for i in program.computations[name].values():
        yield name, i
        if i.opcode in ("fusion", "async-start"):
            yield from _with_fused(program, i.called("calls") or "")


def _moved(program: Program, name: str, i: Instruction) -> Collective:
    own = program.computations[name]
    if i.opcode == "all-gather":
        arrays = array_bytes(i.shape)
    elif i.opcode == "all-gather-start":  # what is handed in, what is got, and more
        arrays = array_bytes(i.shape)[len(i.operands) : 2 * len(i.operands)]
    else:
        arrays = [b for operand in i.operands for b in array_bytes(own[operand].shape)]
    return Collective(1, sum(arrays), max(arrays, default=0))
