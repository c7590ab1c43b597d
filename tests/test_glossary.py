"""One concept, one name: words that were replaced by the field's own do not come back as identifiers."""

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]
FILES = sorted(path for folder in ("streamlearn", "connectors") for path in (ROOT / folder).rglob("*.py"))
MAX_TOP_MODULES = 5


class Replaced(NamedTuple):
    """A word that is not used any more."""

    word: str
    by: str
    within: str = ""
    """Folder to which the rule is limited."""
    as_part: bool = False
    """Whether longer names must not contain it either; the words of a name are separated by case or underscores."""


REPLACED = (
    Replaced("Passage", "RoutingContext"),
    Replaced("passage", "routing_context"),
    Replaced("passing", "routing_context"),
    Replaced("Course", "RoutingContextHolder"),
    Replaced("course", "the holder of the routing context"),
    Replaced("companion", "ParallelAdapter", as_part=True),
    Replaced("watcher", "RoutingHook", as_part=True),
    Replaced("sees", "is_vision"),
    Replaced("owner_T", "segment_ids_T"),
    Replaced("bounds", "ends", "streamlearn/learner"),
    Replaced("Row", "PackedBatch"),
    Replaced("inputs_watch", "InputShiftDetector", as_part=True),
    Replaced("answers_watch", "ConceptDriftDetector", as_part=True),
    Replaced("judge", "SegmentClassifier", as_part=True),
    Replaced("signer", "Featurizer", as_part=True),
    Replaced("signature", "Features", "streamlearn/shift", as_part=True),
    Replaced("sign", "featurize", "streamlearn/shift"),
    Replaced("Usual", "RunningStats"),
    Replaced("usual", "running_stats"),
    Replaced("look", "update, or what it does"),
    Replaced("see", "update, or what it does"),
    Replaced("heed", "observe, notify, on_signal or on_publish", as_part=True),
    Replaced("meet", "update, or what it does"),
    Replaced("sighted", "AssignedBatch", as_part=True),
    Replaced("outlook", "assigned_batches", as_part=True),
    Replaced("sightings", "assigned_batches", as_part=True),
    Replaced("stretch", "segment (of a stream), interval (of time)", as_part=True),
    Replaced("stretches", "segments (of a stream), intervals (of time)", as_part=True),
    Replaced("nearest", "assign"),
    Replaced("sketch", "RegimeProfile"),
    Replaced("Sketch", "RegimeProfile"),
    Replaced("in_hand", "CrashGuard", as_part=True),
    Replaced("chronicle", "RegimeStatistics", as_part=True),
    Replaced("desk", "JobRunner", as_part=True),
    Replaced("trouble", "Degradation", as_part=True),
    Replaced("Rooms", "Components"),
    Replaced("rooms", "components"),
    Replaced("room", "component, the module's name, or remaining (space)"),
    Replaced("backbone_room", "load, or what is imported from it"),
    Replaced("assembly", "components", as_part=True),
    Replaced("letters", "dead_letters"),
    Replaced("rejects", "dead_letters"),
    Replaced("Rejects", "DeadLetterWriter"),
    Replaced("pictures", "images or plots", as_part=True),
    Replaced("picture", "RecordImage, image or plot", as_part=True),
    Replaced("Look", "ImageInputs"),
    Replaced("sight", "image_placeholders", as_part=True),
    Replaced("words", "naive_bayes", "streamlearn/shift"),
    Replaced("shares", "document_frequency", "streamlearn/shift"),
    Replaced("word_share", "token_presence_test", as_part=True),
    Replaced("Watch", "ProgressDisplay, PartitionMonitor"),
    Replaced("Entry", "ShiftReport, JournalEntry, RecentRecord"),
)
"""The left column of the glossary, as names."""

MODULES = {
    "row": "packing",
    "answers": "concept_drift_detector, or what it answers",
    "memory": "oom_retry, state_arrays, regime_memory, ...",
}
"""Names of modules that were replaced; the others follow from the names above."""
IN_MEMORY_CONNECTOR = ROOT / "connectors/memory.py"

SIBLINGS = {
    "__init__": "every package has one",
    "app": "the daemon's application, and the gateway's",
    "dead_letters": "connectors: dead letters in a file, and in a topic",
    "evaluate": "the eval command, and the eval job",
    "feed": "the feed command, and what it calls",
    "gateway": "the gateway command, its settings and its benchmark",
    "model": "PEFT's file set (config, layer, model), and the model of a run",
    "replies": "the form of errors, and what becomes which error of the daemon",
    "source": "the protocol, its Kafka implementation, and its settings",
    "status": "the status command, and the status that it prints",
}
"""Names that several modules share, each for one concept."""


def words_of(name: str) -> str:
    """The words of a name in snake case.

    >>> words_of("InHandFile"), words_of("_stretch_by")
    ('in_hand_file', 'stretch_by')
    """
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower().strip("_")


def identifiers(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Every name that is defined or used, with its line."""
    for node in ast.walk(tree):
        match node:
            case ast.ClassDef() | ast.FunctionDef() | ast.AsyncFunctionDef():
                yield node.name, node.lineno
            case ast.Name():
                yield node.id, node.lineno
            case ast.Attribute():
                yield node.attr, node.lineno
            case ast.arg() | ast.keyword() if node.arg is not None:
                yield node.arg, node.lineno
            case ast.alias():
                for name in [*node.name.split("."), *([node.asname] if node.asname else [])]:
                    yield name, node.lineno
            case ast.ExceptHandler() | ast.MatchAs() | ast.MatchStar() if node.name is not None:
                yield node.name, node.lineno


def occurs(rule: Replaced, name: str) -> bool:
    """Whether a name breaks a rule."""
    if rule.as_part:
        return f"_{rule.word}_" in f"_{words_of(name)}_"
    return name.strip("_") == rule.word


def findings(file: Path) -> list[str]:
    """Where a file uses a replaced word, and what to write instead."""
    where = file.relative_to(ROOT)
    rules = [rule for rule in REPLACED if where.is_relative_to(rule.within or ".")]
    named = [rule for rule in rules if rule.as_part and occurs(rule, file.stem)]
    found = [f"{where}: module {file.stem}: use {rule.by}" for rule in named]
    if file.stem in MODULES and file != IN_MEMORY_CONNECTOR:
        found.append(f"{where}: module {file.stem}: use {MODULES[file.stem]}")
    tree = ast.parse(file.read_text(encoding="utf-8"))
    for line, name in sorted({(line, name) for name, line in identifiers(tree)}):
        found += [f"{where}:{line}: {name}: use {rule.by}" for rule in rules if occurs(rule, name)]
    return found


@pytest.mark.parametrize("file", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_replaced_word_is_an_identifier(file: Path) -> None:
    found = findings(file)
    assert not found, "\n".join(found)


def test_the_search_finds_each_kind_of_identifier(tmp_path: Path) -> None:
    """Class, function, argument, attribute, variable, import, alias and keyword."""
    source = (
        "import a.stretch as b\nfrom c import d as room\n"
        "class Passage:\n    def heed(self, sightings): self._desk = 1\n"
        "trouble = f(in_hand=2)\ntry: pass\nexcept E as chronicle: ...\n"
    )
    names = {name for name, _ in identifiers(ast.parse(source))}
    expected = {"stretch", "room", "Passage", "heed", "sightings", "_desk", "trouble", "in_hand", "chronicle"}
    assert expected <= names
    for name in expected:
        assert any(occurs(rule, name) for rule in REPLACED), name


def test_words_are_found_in_longer_names_but_not_in_longer_words() -> None:
    """`stretch_by` and `StretchBy`, but not `stretched`."""
    (stretch,) = [rule for rule in REPLACED if rule.word == "stretch"]
    assert [occurs(stretch, name) for name in ("stretch_by", "StretchBy", "_stretch", "stretched")] == [
        True, True, True, False,
    ]  # fmt: skip


def test_modules_of_one_name_are_of_one_concept() -> None:
    """Those that share a name are listed with the reason."""
    by_name = defaultdict(list)
    for file in FILES:
        by_name[file.stem].append(str(file.relative_to(ROOT)))
    shared = {name: paths for name, paths in by_name.items() if len(paths) > 1}
    assert {name: paths for name, paths in shared.items() if name not in SIBLINGS} == {}
    assert {name for name in SIBLINGS if name not in shared} == set(), "no longer shared: remove from SIBLINGS"


def test_no_two_classes_have_the_same_name() -> None:
    by_name = defaultdict(list)
    for file in FILES:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                by_name[node.name].append(f"{file.relative_to(ROOT)}:{node.lineno}")
    assert {name: places for name, places in by_name.items() if len(places) > 1} == {}


def test_few_modules_lie_at_the_top() -> None:
    """Everything else has a package."""
    assert len(list((ROOT / "streamlearn").glob("*.py"))) <= MAX_TOP_MODULES
