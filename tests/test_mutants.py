"""Every mutant of `make mutants` still applies to one place, and the runner tells them apart."""

import collections

import mutants
import pytest
from mutations.mutant import Mutant

PACKAGE = mutants.Package(mutants.ROOT)


def test_every_mutant_applies_to_one_place():
    faults = []
    for mutant in mutants.MUTANTS:
        try:
            PACKAGE.place(mutant)
            mutants.pytest_paths(mutant.tests, mutants.ROOT)
        except ValueError as error:
            faults.append(f"{mutant.name}: {error}")
    assert not faults, "\n".join(faults)


def test_names_tell_them_apart():
    count = collections.Counter(mutant.name for mutant in mutants.MUTANTS)
    assert [name for name, times in count.items() if times > 1] == []


@pytest.mark.parametrize(
    ("where", "old", "new", "said"),
    [
        ("make_schedule", "no such text", "", "must be in one file, not none"),
        ("no_such_function", "return", "", "must be in one file, not none"),
        ("attend", "options", "", r"not mhe_jax.*, mhe_jax"),
        ("make_schedule", "peak", "", "times"),
        ("make_schedule.schedule", "+ 1", "+ 1  # one", "the same program"),
        ("make_schedule.schedule", "+ 1", "+", "invalid syntax"),
    ],
)
def test_what_does_not_apply_is_said(where, old, new, said):
    with pytest.raises((ValueError, SyntaxError), match=said):
        PACKAGE.place(Mutant("", where, old, new, ""))


@pytest.mark.parametrize(
    ("tests", "said"),
    [
        ("test_no_such.py", "must be one file below tests, not 0"),
        ("conftest.py", "must be one file below tests, not"),
        ("test_mutants.py::test_no_such", "has no test_no_such"),
    ],
)
def test_tests_that_are_not_there_are_said(tests, said):
    with pytest.raises(ValueError, match=said):
        mutants.pytest_paths(tests, mutants.ROOT)


FILE = "def one():\n    return 1\n"
TESTS = """
import time
from mhe_jax.a import one

def test_one():
    {wait}
    assert one() {expected}
"""


@pytest.mark.parametrize(
    ("test", "timeout", "seen_by", "fault"),
    [
        (TESTS.format(wait="", expected="== 1"), 60, "test_a.py::test_one", None),
        (TESTS.format(wait="", expected="< 3"), 60, None, None),
        (TESTS.format(wait="time.sleep(60)", expected="> 0"), 2, "the clock", None),
        ("def test_one(:", 60, None, "pytest ended with 2"),
    ],
    ids=["killed", "survivor", "hang", "broken"],
)
def test_a_mutant_is_judged_by_its_tests(tmp_path, monkeypatch, test, timeout, seen_by, fault):
    tree = tmp_path / "0"

    def copy_tree(target):
        for name, text in (("mhe_jax/a.py", FILE), ("tests/test_a.py", test)):
            (target / name).parent.mkdir(parents=True)
            (target / name).write_text(text)

    monkeypatch.setattr(mutants, "copy_tree", copy_tree)
    runs = mutants.Runs(tmp_path, 1, timeout)
    mutant = Mutant("two", "one", "return 1", "return 2", "test_a.py")
    found = mutants.judge(mutant, mutants.Package(tree).place(mutant), runs)
    assert found.seen_by == seen_by
    assert (found.fault is None) == (fault is None)
    assert fault is None or fault in (found.fault or "")
    assert (tree / "mhe_jax/a.py").read_text() == FILE
    assert not runs.running
