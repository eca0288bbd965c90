"""The schedule of a TPU program, without a TPU: cycles of its Pallas kernels and of the rest.

libtpu writes what it schedules where `dump_flags` says. A kernel is a loop over its grid; one
bundle of instructions takes one cycle where no memory is late, which no schedule shows. Behind
branches stand what starts and ends a row of blocks, which runs once a row, and under a mask the
arithmetic of a block, which hidden blocks leave out; that of blocks that the mask cuts may stand
apart, after that of whole blocks. The rest of the program, fusions of XLA, are such loops as well:
all bundles of each, in every step.
"""

import glob
import re
from pathlib import Path
from typing import NamedTuple

import numpy as np

from mhe_jax.analysis.hlo import Program

_ADDRESS = re.compile(r"^\s*(?:0x[0-9a-f]+|0) ", re.M)
_TRIPS = re.compile(r"scmp\.ge\.s32\.totalorder \S+ (\d+) /\* loop exit test")
_SKIPS = re.compile(r"sbr\.rel \(%\w+\) target = \$region(\d+)")
_REGION = re.compile(r"Start(?:/End empty)? region (\d+)")
# Of a step: shorter branches belong to the copies between memories, which any step may have.
SHORT = 0.02
# Of what matrix units do in a step: the arithmetic of a block has more, what ends a row less.
ARITHMETIC = 0.25
# More cycles than any program has.
_CHOSEN = 2**62


class Blocks(NamedTuple):
    """The blocks of a kernel's arrays, of all rows of examples and heads together."""

    whole: int  # a query sees all keys
    cut: int  # the mask hides some
    rows: int  # of blocks


def blocks_of(
    arrays: int, length: int, sizes: tuple[int, ...], causal: bool, by_keys: bool
) -> Blocks:
    """Those of `arrays` times [length, length]; a row has one block of queries, or of keys."""
    i, j = (np.arange(-(-length // size)) for size in sizes)
    first, last = i[:, None] * sizes[0], (i[:, None] + 1) * sizes[0] - 1
    hidden = (j * sizes[1] > last) & np.bool(causal)
    whole = ((j + 1) * sizes[1] - 1 <= first) | np.bool(not causal)
    counts = whole.sum(), (~whole & ~hidden).sum(), len(j) if by_keys else len(i)
    return Blocks(*(arrays * int(n) for n in counts))


class Kernel(NamedTuple):
    """A Pallas kernel, in bundles of instructions."""

    name: str
    steps: int | None  # None where only the program knows: one for each block that is not hidden
    step: int  # of every step
    blocks: tuple[
        int, ...
    ]  # of the arithmetic, where it stands apart: of whole blocks, of cut ones
    ends: int  # of a row of blocks
    matrix_units: float  # how full they are in a whole block, 0 to 1

    def cycles(self, blocks: Blocks) -> int:
        steps = self.steps or blocks.whole + blocks.cut
        cycles = steps * self.step + blocks.rows * self.ends
        if self.blocks:
            cycles += blocks.whole * self.blocks[0] + blocks.cut * self.blocks[-1]
        return cycles


def dump_flags(directory: Path) -> dict[str, str]:
    """The environment in which libtpu writes its schedules; read once, when it is loaded."""
    flags = f"--xla_jf_dump_to={directory} --xla_jf_dump_llo_text=true"
    return {
        "LIBTPU_INIT_ARGS": f"{flags} --xla_jf_emit_annotations=true",
        "XLA_FLAGS": f"--xla_dump_to={directory} --xla_dump_hlo_as_text",
    }


def read(directory: Path) -> tuple[list[Kernel], int]:
    """The kernels of the program, that of the forward pass first, and the cycles of all else.

    Where the program takes one of two branches, it is that of kernels, else the shorter one.
    """
    (file,) = directory.glob("*after_codegen.txt")
    program = Program(file.read_text())
    names = [
        instruction.name
        for computation in program.computations.values()
        for instruction in computation.values()
        if 'custom_call_target="tpu_custom_call"' in instruction.attributes
    ]
    kernels = [_kernel(directory, name) for name in names]
    rest = program.total(lambda i: -_CHOSEN if i.name in names else _whole(directory, i.name))
    forward = [re.search("forward|fwd", kernel.name) is not None for kernel in kernels]
    return [kernels[at] for at in np.argsort(forward)[::-1]], rest % _CHOSEN


def _bundles(directory: Path, name: str) -> list[str]:
    """The instructions `name` was compiled to; none where it takes no time."""
    files = [
        path
        for path in directory.glob(f"*-{glob.escape(name)}-*final_bundles.txt")
        if re.fullmatch(rf"\d+-{re.escape(name)}-\d+-final_bundles.txt", path.name)
    ]
    return _ADDRESS.split(files[0].read_text())[1:] if files else []


def _loop(bundles: list[str]) -> tuple[int | None, int, int]:
    """The trips of the loop over the grid, if the schedule has them; its first and last bundle."""
    trips = [(int(m[1]), at) for at, text in enumerate(bundles) if (m := _TRIPS.search(text))]
    steps, end = max(trips, default=(None, len(bundles) - 1))
    return steps, next((i for i, x in enumerate(bundles) if "iteration index" in x), 0), end


def _whole(directory: Path, name: str) -> int:
    bundles = _bundles(directory, name)
    steps, begin, end = _loop(bundles)
    return (steps or 1) * (end - begin + 1)


def _kernel(directory: Path, name: str) -> Kernel:
    bundles = _bundles(directory, name)
    steps, begin, end = _loop(bundles)
    used = _matrix_units(directory, name)
    found = _branches(bundles, begin, end)
    # Those that hold others are of the pipeline, whose first pass skips nearly all of a step.
    branches = [
        b for b in found if not any(b != o and b[0] <= o[0] and o[1] <= b[1] for o in found)
    ]
    work = ARITHMETIC * sum(used[begin : end + 1])
    blocks = [b for b in branches if sum(used[slice(*b)]) > work]
    apart = {at for first, last in branches for at in range(first, last)}
    own = [used[at] for at in range(begin, end + 1) if at not in apart]
    of_block = own + [x for b in blocks[:1] for x in used[slice(*b)]]
    return Kernel(
        name,
        steps,
        step=len(own),
        blocks=tuple(map(_size, blocks)),
        ends=len(apart) - sum(map(_size, blocks)),
        matrix_units=sum(of_block) / len(of_block),
    )


def _branches(bundles: list[str], begin: int, end: int) -> list[tuple[int, int]]:
    """(first, last) of what branches inside the loop jump over, but for short ones."""
    starts = {number: at for at, text in enumerate(bundles) for number in _REGION.findall(text)}
    found = []
    for at in range(begin, end + 1):
        for number in _SKIPS.findall(bundles[at]):
            target = starts.get(number, at)
            if SHORT * (end - begin) < target - at and target <= end:
                found.append((at + 1, target))
    return found


def _size(branch: tuple[int, int]) -> int:
    return branch[1] - branch[0]


def _matrix_units(directory: Path, name: str) -> list[float]:
    """How full the matrix units are, for each bundle; the first line has what they can take."""
    pattern = f"*-{name}-*final_hlo-static-per-bundle-utilization.txt"
    (file,) = directory.glob(pattern)
    rows = [line.split() for line in file.read_text().splitlines()]
    numbers = [[int(x) for x in row] for row in rows if row and all(x.isdigit() for x in row)]
    capacity, *used = (row[0] for row in numbers)
    return [x / capacity for x in used]
