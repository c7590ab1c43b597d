"""Test files are opened by the runs that score the test split, and by no other measurement."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.concept import exchanged
from benchmarks.learn.suites import SUITES, Draw, make_suite
from benchmarks.streams import read_folder
from tests.fuzz import images as fuzz_images
from tests.fuzz import records as fuzz_records

ROOT = Path(__file__).parents[3]
DATA = ROOT.parent / "shared/data"
FOLDERS = [DATA / "superni", DATA / "trace", DATA / "images", DATA / "natural"]
_watchers: list[list[str]] = []
"""Each collects the names of the files opened while it is here."""

needs_data = pytest.mark.skipif(not DATA.is_dir(), reason="the shared data is not next to the repository")


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "open":
        for opened in _watchers:
            opened.append(str(arguments[0]))


sys.addaudithook(_audit)  # called for every file that the interpreter opens, however it is opened


@pytest.fixture
def opened() -> Iterator[Callable[[], list[str]]]:
    """The test files opened since the last call."""
    seen: list[str] = []

    def names() -> list[str]:
        found = [name for name in seen if ".test." in name]
        seen.clear()
        return found

    _watchers.append(seen)
    yield names
    _watchers.remove(seen)


def test_development_needs_no_test_file(write_tasks: Callable[..., Path], opened: Callable[[], list[str]]) -> None:
    """The test split opens each; the development split opens none, and does without them."""
    folder = write_tasks("fox", "dog")
    draw = Draw([folder], 12, 6, split="development")
    opened()
    suite = make_suite(str(folder), draw)
    assert opened() == []
    assert [len(own.scored) for own in suite.tasks.values()] == [6, 6]
    make_suite(str(folder), Draw([folder], 12, 6))
    assert len(opened()) == 2
    for file in folder.glob("*.test.*"):
        file.unlink()
    assert make_suite(str(folder), draw) == suite


@needs_data
@pytest.mark.data
@pytest.mark.parametrize("name", SUITES)
def test_no_suite_opens_one_for_development(name: str, opened: Callable[[], list[str]]) -> None:
    """Development records have no input in common with the training records of any seed."""
    suite = make_suite(name, Draw(FOLDERS, split="development"))
    scored = {inputs(record) for own in suite.tasks.values() for record in own.scored}
    assert len(scored) >= 26
    for seed in (0, 1):
        tasks = make_suite(name, Draw(FOLDERS, seed=seed, split="development")).tasks
        assert not scored & {inputs(record) for own in tasks.values() for record in own.train}
    assert opened() == []


def inputs(record: dict[str, str]) -> tuple[str, str]:
    return record["prompt"], record.get("image", "")


@needs_data
@pytest.mark.data
def test_no_other_measurement_opens_one(opened: Callable[[], list[str]]) -> None:
    """Detection, concept drift and fuzzing read training files only."""
    read_folder(DATA / "superni", limit=2)
    exchanged(DATA / "superni", "task363", 0)
    fuzz_images.originals(DATA / "images")
    fuzz_records.originals(DATA / "superni", fuzz_records.nano_decoder()[0])
    assert opened() == []
