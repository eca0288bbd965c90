"""Every mutant of `make mutants` still applies to one place, and its tests are there."""

import mutants
import pytest


@pytest.mark.parametrize("mutant", mutants.MUTANTS, ids=lambda m: f"{m.file}: {m.where}")
def test_a_mutant_applies(mutant):
    text = (mutants.ROOT / mutants.PACKAGE / mutant.file).read_text(encoding="utf-8")
    assert mutants.mutated(mutant, text) != text
    assert mutants.paths(mutant.tests)
