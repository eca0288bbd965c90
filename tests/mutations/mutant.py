"""One bug."""

from typing import NamedTuple


class Mutant(NamedTuple):
    """`old` becomes `new` in what is defined as `where`, and `tests` must see it.

    `where` is the qualified name of a function, class or constant (`Mask.block`, `make.step` for a
    function inside one), never a file; `old` stands there once. `tests` are names of test files
    without their folders, each whole or as `test_file.py::test_name`, with blanks between.
    """

    name: str
    where: str
    old: str
    new: str
    tests: str
