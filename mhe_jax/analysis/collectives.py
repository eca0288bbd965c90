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

from collections.abc import Iterator

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
# A collective: how often it runs, its kind, and the bytes of its arrays.
Sent = tuple[int, str, list[int]]


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


def _sent(program: Program, name: str, times: int = 1) -> Iterator[Sent]:
    """The collectives of a computation that runs so often, and of what it runs."""
    channels: set[tuple[str, str | None]] = set()
    for own, i in _with_fused(program, name):
        kind = _kind(i)
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


def _arrays(program: Program, name: str, i: Instruction) -> list[int]:
    """The bytes of each array that counts."""
    own = program.computations[name]
    if i.opcode == "all-gather":
        return array_bytes(i.shape)
    if i.opcode == "all-gather-start":  # what is handed in, what is got, and more
        return array_bytes(i.shape)[len(i.operands) : 2 * len(i.operands)]
    return [size for operand in i.operands for size in array_bytes(own[operand].shape)]
