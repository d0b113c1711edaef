"""The examples in the docstrings of schedules run: doctest does not look inside a `Definition` by itself."""

from __future__ import annotations

import doctest

import pytest

from optcc.dsl import Definition
from optcc.planner import LIBRARY


@pytest.mark.parametrize("definition", LIBRARY.values(), ids=LIBRARY)
def test_the_example_of_a_schedule_runs(definition: Definition) -> None:
    function = definition.function
    found = doctest.DocTestFinder().find(function, definition.name, globs=dict(function.__globals__))
    examples = [test for test in found if test.examples]
    assert examples, "a schedule of the library shows an example"
    for test in examples:
        assert doctest.DocTestRunner(verbose=False).run(test).failed == 0
