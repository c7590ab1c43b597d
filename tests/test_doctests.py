"""The examples in docstrings hold, in every module that has one."""

import doctest
import importlib
from functools import partial
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from streamlearn.shift import change_tests
from streamlearn.shift.change_tests import OTHER_TESTS, WINDOW_TESTS

ROOT = Path(__file__).parents[1]
FILES = [
    file for folder in ("streamlearn", "connectors", "benchmarks", "tests") for file in (ROOT / folder).rglob("*.py")
]
MODULES = [
    ".".join(file.relative_to(ROOT).with_suffix("").parts)
    for file in sorted(FILES)
    if "\n>>> " in (text := file.read_text(encoding="utf-8")) or "    >>> " in text
]


@pytest.mark.parametrize("module", [name for name in MODULES if name != __name__])
def test_the_examples_of_a_module_hold(module: str) -> None:
    with capture_logs():
        result = doctest.testmod(importlib.import_module(module))
    assert (result.failed, result.attempted > 0) == (0, True)


def test_every_test_of_changes_finds_a_planted_shift_in_its_docstring() -> None:
    """At the index that it states."""
    examples = doctest.DocTestFinder(exclude_empty=True).find(change_tests)
    listed = {test.func if isinstance(test, partial) else test for test in (*WINDOW_TESTS, *OTHER_TESTS)}
    assert sum(bool(example.examples) for example in examples) >= len(listed)
