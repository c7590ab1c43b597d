"""Canaries: how files are read, what is scored and when, and that nothing of it changes what is learned."""

from collections.abc import Callable
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from streamlearn.adapters.context import NO_REGIME
from streamlearn.cli.doctor import check_backbone
from streamlearn.errors import ConfigError
from streamlearn.regimes import canaries as canaries_module
from streamlearn.settings import Settings
from tests.daemon.test_daemon import daemon_of, opened
from tests.learners import differences
from tests.regimes.shifting_streams import run, stream, tensors_of

GENERAL = b"""
{"text": "the lazy dog", "slice": "animals"}

{"prompt": "the capital of France is", "completion": " Paris"}
{"text": "the quick fox", "slice": "animals"}
"""


def canaries(folder: Path, content: bytes = GENERAL, name: str = "general.jsonl") -> dict[str, Any]:
    """The section of a configuration with a file of canaries."""
    (folder / name).write_bytes(content)
    return {"holdout": {"canaries": [folder / name], "time_share": 0.5}}


def test_a_record_is_named_by_file_and_line_and_its_slice_by_a_key_or_the_file(
    make: Callable[..., Settings], tmp_path: Path
) -> None:
    """Blank lines are skipped and numbered, as in a source."""
    with opened(make(stream("animals"), **canaries(tmp_path))) as components:
        rows = [(row.id, row.slice) for row in components.adaptation.scorer.canary_scores.canaries]
    assert rows == [("general.jsonl:1", "animals"), ("general.jsonl:3", "general"), ("general.jsonl:4", "animals")]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "general.jsonl must be a readable file, found: No such file"),
        (b"\n", "must hold at least one record, found none"),
        (b'{"text": "a"}\n{"text":\n', "offset 1: a record must be JSON"),
        (b'{"words": "a"}\n', "offset 0: "),
        (b'{"text": "a dog", "slice": 3}\n', "slice must be a string of 1 to 64 printable characters, found a number"),
        (b'{"text": "a dog", "slice": ""}\n', "printable characters, found ''"),
        (b'{"text": "a dog"}\n' * 3, "at most 2 records, found more"),
    ],
)
def test_files_that_cannot_be_used_are_refused(
    make: Callable[..., Settings],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    content: bytes | None,
    message: str,
) -> None:
    """By check-config and at the start; the message names the file and the record."""
    monkeypatch.setattr(canaries_module, "MAX_CANARIES", 2)
    settings = make(stream("animals"), **canaries(tmp_path, content or b""))
    if content is None:
        (tmp_path / "general.jsonl").unlink()
    for start in (check_backbone, lambda settings: opened(settings).__enter__()):
        with pytest.raises(ConfigError, match=message) as raised:
            start(settings)
        assert str(tmp_path / "general.jsonl") in str(raised.value) or "at most" in message


def test_files_of_one_name_are_refused(make: Callable[..., Settings], tmp_path: Path) -> None:
    """A record's id would be that of two."""
    (tmp_path / "other").mkdir()
    files = [canaries(folder)["holdout"]["canaries"][0] for folder in (tmp_path, tmp_path / "other")]
    with pytest.raises(ConfigError, match=r"different names, found general\.jsonl twice"):
        check_backbone(make(stream("animals"), holdout={"canaries": files}))


def test_canaries_change_no_bit_and_are_scored_between_steps(make: Callable[..., Settings], tmp_path: Path) -> None:
    """Every tensor of a snapshot ends as without canaries; each regime has been scored since a snapshot with it."""
    lines = stream("animals", "sums")
    plain, _ = run(make(lines, "plain", holdout={"time_share": 0.5}))
    with opened(make(lines, "watched", **canaries(tmp_path))) as components:
        daemon_of(components).run()
        watched = tensors_of(components)
        regimes = components.adaptation.status().regimes
    assert differences(plain, watched) == []
    assert [[(row.slice, row.records) for row in regime.canaries] for regime in regimes] == [
        [("animals", 2), ("general", 1)]
    ] * 2


def test_a_regime_is_scored_once_after_a_snapshot_that_changed_it(
    make: Callable[..., Settings], tmp_path: Path
) -> None:
    """Its losses are those of its adapter, beside those of the untouched backbone; idle time suffices."""
    with opened(make(stream("animals", "sums"), **canaries(tmp_path))) as components:
        daemon = daemon_of(components)
        daemon.run()
        daemon.score_all()
        learner, adaptation = components.learner, components.adaptation
        examples = [row.example for row in adaptation.scorer.canary_scores.canaries]
        for slot, regime in adaptation.by_slot.items():
            assert regime.canaries_at >= regime.scores.trained_at
            scored = {row.slice: row for row in regime.canaries}
            own, untouched = learner.measure(examples, [slot] * 3), learner.measure(examples, [NO_REGIME] * 3)
            assert scored["animals"].loss == pytest.approx(fmean([own[0], own[2]]), rel=1e-4)
            assert scored["animals"].backbone_loss == pytest.approx(fmean([untouched[0], untouched[2]]), rel=1e-4)
            rises = {"general.jsonl:1": own[0] - untouched[0], "general.jsonl:4": own[2] - untouched[2]}
            named = sorted((id_ for id_, rise in rises.items() if rise > 0), key=lambda id_: -rises[id_])
            assert list(scored["animals"].worst) == named
        assert not adaptation.score_stalest(idle=True), "nothing changed since"


def test_a_snapshot_is_scored_with_its_weights_whatever_is_learned_meanwhile(
    make: Callable[..., Settings], tmp_path: Path
) -> None:
    """One forward pass at a time, between steps that change the regime."""
    content = b"".join(b'{"text": "hello world, number %d"}\n' % i for i in range(40))
    with opened(make(stream("animals"), **canaries(tmp_path, content))) as components:
        daemon = daemon_of(components)
        daemon.run()
        daemon.score_all()
        learner, scores = components.learner, components.adaptation.scorer.canary_scores
        regime = components.adaptation.by_slot[0]
        expected, regime.canaries, regime.canaries_at = regime.canaries, (), -1
        scores.schedule([regime])
        passes = 0
        while not regime.canaries:
            learner.step([components.adaptation.examples(0)[0]], [0])
            assert scores.advance()
            passes += 1
        assert passes > 2
        assert regime.canaries == expected
        assert scores.measure(0) != expected
        assert not scores.advance()
