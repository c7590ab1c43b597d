"""The history of real runs: what it adds up to, and that neither a death nor a rollback empties or falsifies it."""

from collections.abc import Callable
from dataclasses import fields, replace
from itertools import pairwise
from typing import Any

import torch

from streamlearn.daemon.loop import Daemon
from streamlearn.series import HistoryPoint, HistoryStatus
from streamlearn.settings import Settings
from tests.daemon.test_daemon import RUBBISH, daemon_of, die, opened
from tests.regimes.shifting_streams import stream


def lines() -> list[bytes]:
    """Two tasks, the first of which returns, and two dead letters."""
    result = stream("animals", "sums", "animals", per_task=60)
    result[130:130] = [RUBBISH]
    result[20:20] = [RUBBISH]
    return result


def finished(settings: Settings) -> Daemon:
    """Learn to the end."""
    with opened(settings) as components:
        daemon = daemon_of(components)
        daemon.run()
        return daemon


def stream_part(point: HistoryPoint) -> tuple[Any, ...]:
    """Its fields that depend on the stream only."""
    names = [field.name for field in fields(HistoryPoint)]
    return tuple(getattr(point, name) for name in names[: names.index("at")])


def of_the_stream(history: HistoryStatus) -> tuple[Any, ...]:
    """Everything in it that does not depend on time: accuracies of other regimes than the one that ended do."""
    segments = [
        replace(each, accuracy={key: value for key, value in each.accuracy.items() if key == str(each.regime)})
        for each in history.segments
    ]
    letters = [replace(each, at=0.0) for each in history.dead_letters]
    marks = [(mark.name, mark.step, mark.record) for mark in history.snapshots]
    return list(map(stream_part, history.points)), segments, letters, marks


def test_two_deaths_leave_the_history_of_an_uninterrupted_run(make: Callable[..., Settings]) -> None:
    """Bit for bit, in everything that depends on the stream."""
    whole = finished(make(lines(), "whole")).history.status
    settings = make(lines(), "deaths")
    die(settings, 17)
    die(settings, 31)
    assert of_the_stream(finished(settings).history.status) == of_the_stream(whole)
    assert [each.regime for each in whole.segments] == [1, 2, 1]
    assert [bool(each.accuracy) for each in whole.segments] == [True, True, False]


def test_it_adds_up_to_the_ledger(make: Callable[..., Settings]) -> None:
    """Every record is in one point and one segment, every dead letter is counted and named."""
    daemon = finished(make(lines()))
    history, [(_, _, trained, dead, held_out, _)] = daemon.history.status, daemon.state.ledger.rows()
    streams = history.points
    assert sum(each.records for each in streams) == trained + held_out == streams[-1].record
    assert sum(each.tokens for each in streams) == daemon.state.tokens
    assert sum(number for each in streams for number in each.dead_letters.values()) == dead == 2
    assert [(row.offset, row.reason) for row in history.dead_letters] == [(20, "not_json"), (131, "not_json")]
    assert all("must be JSON" in row.message or "not JSON" in row.message for row in history.dead_letters)
    assert all(one.last_record + 1 == other.first_record for one, other in pairwise(history.segments))
    by_regime = [each.records for each in history.segments]
    assert [sum(counts.values()) for counts in by_regime] == [each.num_records for each in history.segments]
    onsets = [report.shift.onset for report in daemon.adaptation.state.reports]
    assert [each.first_record for each in history.segments] == onsets


def test_a_rollback_restores_the_history_of_the_snapshot(make: Callable[..., Settings]) -> None:
    """What came after it is gone, and is not counted twice when the records are read again."""
    settings = make(lines())
    with opened(settings) as components:
        daemon = daemon_of(components)
        daemon.run()
        whole = of_the_stream(daemon.history.status)
        earlier = components.store.names()[-2]
        components.store.move_newer_aside(earlier)
        components.journal.rewind(to_step=int(earlier))
        daemon.restore_newest()
        assert daemon.board.read().history.points[-1].step == int(earlier)
        assert daemon.history.status.snapshots[-1].name == earlier
        daemon.run()
        assert of_the_stream(daemon.history.status) == whole


def test_the_backbone_s_loss_is_that_of_the_backbone(make: Callable[..., Settings]) -> None:
    """On the sampled records, whose loss under the model is the step's; it changes no bit of what is learned."""
    weights, samples = [], []
    for name, share in (("none", 0.0), ("much", 0.5)):
        daemon = finished(make(lines(), name, holdout={"time_share": share}))
        learner = daemon.learner
        weights.append([w for adapter in sorted(learner.revisions) for w in learner.weights(adapter).values()])
        samples.append([point for point in daemon.history.status.points if point.sample_records])
    none, much = samples
    assert not none
    assert sum(run.sample_records for run in much) > 5
    assert all(torch.equal(one, other) for one, other in zip(*weights, strict=True))
    learned = sum(run.sample_loss_sum for run in much) < sum(run.backbone_loss_sum for run in much)
    assert learned, "the model learned these tasks, the backbone did not"
