"""Bytes that the kernels of a compiled GPU program read and write, from its text.

A kernel reads each of its operands once and writes each of its results once: caches are left out,
and so are repeated reads by a matrix product of cuBLAS. If a fusion takes slices of an operand,
only the slices count; if it updates a result in place, only the update.
"""

from collections.abc import Iterator

from mhe_jax.analysis.hlo import Instruction, Program, array_bytes

# Opcodes that start no kernel.
_FREE = frozenset(
    ("after-all", "bitcast", "constant", "get-tuple-element", "parameter", "tuple", "partition-id")
)
_SLICES = ("dynamic-slice", "slice")
# Opcodes that change their first operand in place, and the operand that they put there.
_UPDATES = {"dynamic-update-slice": 1, "scatter": 2}
# Opcodes that give the same numbers another name.
_VIEWS = ("bitcast", "reshape")


def traffic(program: Program) -> int:
    """Bytes of one call; a conditional counts as its branch with the fewest."""
    sizes = {instruction.name: size for instruction, size in kernels(program)}
    return program.total(lambda instruction: sizes.get(instruction.name, 0))


def kernels(program: Program) -> Iterator[tuple[Instruction, int]]:
    """Each kernel, with the bytes of one run."""
    inside = {
        i.called("calls") or i.called("to_apply")
        for own in program.computations.values()
        for i in own.values()
        if i.opcode in ("fusion", "reduce", "sort", "scatter", "reduce-window", "map")
    }
    for name, own in program.computations.items():
        for i in own.values() if name not in inside else ():
            if i.opcode not in (*_FREE, "while", "conditional", "call"):
                yield i, _bytes(program, own, i)


def _bytes(program: Program, own: dict[str, Instruction], i: Instruction) -> int:
    sizes = [_size(own[name].shape) for name in i.operands]
    if i.opcode == "custom-call":
        results = array_bytes(i.shape)
        # The last result of cuBLAS is room to work in.
        return sum(sizes) + sum(results[:1] if "__cublas" in i.attributes else results)
    if i.opcode != "fusion":
        return sum(sizes) + _size(i.shape)
    fused = program.computations[i.called("calls") or ""]
    root = list(fused.values())[-1]
    results = [fused[name] for name in root.operands] if root.opcode == "tuple" else [root]
    written = sum(_written(fused, result) for result in results)
    read = 0
    for parameter in fused.values():
        if parameter.opcode == "parameter":
            size = sizes[int(parameter.arguments)]
            read += min(size, _read(fused, parameter.name, size))
    return read + written


def _read(fused, name: str, size: int) -> int:
    """Bytes that a fusion reads of `name`: only slices, if it takes nothing else."""
    total = 0
    for user in fused.values():
        if name not in user.operands:
            continue
        if user.opcode in _VIEWS:
            total += _read(fused, user.name, size)
        elif user.opcode in _SLICES:
            total += _size(user.shape)
        elif user.opcode not in _UPDATES or user.operands[0] != name:
            total += size
    return total


def _written(fused, result: Instruction) -> int:
    while result.opcode in _VIEWS:
        result = fused[result.operands[0]]
    if result.opcode in _UPDATES:
        return _size(fused[result.operands[_UPDATES[result.opcode]]].shape)
    return _size(result.shape)


def _size(shape: str) -> int:
    return sum(array_bytes(shape))
