"""The schedule of a TPU program, without a TPU: cycles of its Pallas kernels and of the rest.

libtpu writes what it schedules where `dump_flags` says. A kernel is a loop over its grid; one
bundle of instructions takes one cycle where no memory is late, which no schedule shows. What
starts and ends a row of blocks stands in the loop too, behind branches, and runs once a row. The
rest of the program, fusions of XLA, are such loops as well: all bundles of each, in every step.
"""

import glob
import re
from pathlib import Path
from typing import NamedTuple

from mhe_jax.analysis.hlo import Program

_ADDRESS = re.compile(r"^\s*(?:0x[0-9a-f]+|0) ", re.M)
_TRIPS = re.compile(r"scmp\.ge\.s32\.totalorder \S+ (\d+) /\* loop exit test")
_SKIPS = re.compile(r"sbr\.rel \(%\w+\) target = \$region(\d+)")
_REGION = re.compile(r"Start(?:/End empty)? region (\d+)")
# Of a step: shorter branches belong to the copies between memories, which any step may have.
SHORT = 0.02


class Kernel(NamedTuple):
    """A Pallas kernel: `steps` of `block` bundles, and `ends` bundles a row of blocks."""

    name: str
    steps: int
    block: int
    ends: int
    matrix_units: float  # how full they are in a block, 0 to 1

    def cycles(self, steps_in_a_row: int) -> int:
        return self.steps * self.block + self.steps // steps_in_a_row * self.ends


def dump_flags(directory: Path) -> dict[str, str]:
    """The environment in which libtpu writes its schedules; read once, when it is loaded."""
    flags = f"--xla_jf_dump_to={directory} --xla_jf_dump_llo_text=true"
    return {
        "LIBTPU_INIT_ARGS": f"{flags} --xla_jf_emit_annotations=true",
        "XLA_FLAGS": f"--xla_dump_to={directory} --xla_dump_hlo_as_text",
    }


def read(directory: Path) -> tuple[list[Kernel], int]:
    """The kernels of the program, from short blocks to long ones, and the cycles of all else.

    Where the program takes one of two branches, it is that of the kernels.
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
    rest = program.total(lambda i: 0 if i.name in names else _whole(directory, i.name))
    return sorted(kernels, key=lambda kernel: kernel.block), rest


def _bundles(directory: Path, name: str) -> list[str]:
    """The instructions `name` was compiled to; none where it takes no time."""
    files = [
        path
        for path in directory.glob(f"*-{glob.escape(name)}-*final_bundles.txt")
        if re.fullmatch(rf"\d+-{re.escape(name)}-\d+-final_bundles.txt", path.name)
    ]
    return _ADDRESS.split(files[0].read_text())[1:] if files else []


def _loop(bundles: list[str]) -> tuple[int, int, int]:
    """The trips of the loop over the grid, and its first and last bundle."""
    trips = [(int(m[1]), at) for at, text in enumerate(bundles) if (m := _TRIPS.search(text))]
    steps, end = max(trips, default=(1, len(bundles) - 1))
    return steps, next((i for i, x in enumerate(bundles) if "iteration index" in x), 0), end


def _whole(directory: Path, name: str) -> int:
    bundles = _bundles(directory, name)
    steps, begin, end = _loop(bundles)
    return steps * (end - begin + 1)


def _kernel(directory: Path, name: str) -> Kernel:
    bundles = _bundles(directory, name)
    steps, begin, end = _loop(bundles)
    # The first pass through the pipeline skips nearly all of a step.
    length = end - begin + 1
    branches = [b for b in _branches(bundles, begin, end) if _size(b) < 0.9 * length]
    # The block's own arithmetic stands behind a branch where some blocks are skipped.
    if branches and _size(longest := max(branches, key=_size)) > length / 2:
        branches = [b for b in branches if b[1] <= longest[0] or b[0] >= longest[1]]
    ends = {at for first, last in branches for at in range(first, last)}
    used = _matrix_units(directory, name)
    own = [used[at] for at in range(begin, end + 1) if at not in ends]
    return Kernel(name, steps, length - len(ends), len(ends), sum(own) / len(own))


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
