"""A stream that goes quiet is learned to its end, goes on when records come again, and is repeated exactly."""

from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from structlog.testing import capture_logs
from torch import Tensor

import streamlearn.daemon.checkpoint as daemon_module
from streamlearn.daemon.build import Components
from streamlearn.daemon.loop import Daemon
from streamlearn.errors import SnapshotError
from streamlearn.events import Event
from streamlearn.regimes.regimes import Regimes
from streamlearn.settings import Settings, SourceSettings
from streamlearn.snapshot.journal import Journal
from streamlearn.stream.position import TopicPartition
from streamlearn.stream.record import Record
from tests.broker import Broker
from tests.daemon.test_daemon import DieAt, StopAfter, daemon_of, opened
from tests.doubles import SetClock
from tests.learners import differences
from tests.memory import MemorySource
from tests.regimes.conftest import backbone, make, maker
from tests.regimes.shifting_streams import stream, tensors_of

__all__ = ["backbone", "make"]

SPELL_S = 150
"""Quiet time between two bursts: enough for two lingers of 60 s."""
Bursts = Sequence[Sequence[bytes]]
BURSTS = [
    stream("animals", per_task=70),
    stream("sums", per_task=83) + stream("cities", per_task=7),  # begins right after a quiet spell
    stream("cities", per_task=67)[7:],  # begins among the records of a flush
]
RECORDS = sum(map(len, BURSTS))


class Log:
    """What was produced so far, and what will be after the next quiet spells. It outlives the daemon's processes."""

    def __init__(self, bursts: Bursts, partitions: int = 1) -> None:
        self._bursts = [list(burst) for burst in bursts]
        self.ends = [0] * partitions
        """Number of records in each partition so far."""
        self.records: list[Record] = []
        self.produce()

    def produce(self) -> list[Record]:
        """Append the next burst, in turn to each partition."""
        records = []
        for number, value in enumerate(self._bursts.pop(0) if self._bursts else []):
            partition = number % len(self.ends)
            records.append(Record(TopicPartition("log", partition), self.ends[partition], value))
            self.ends[partition] += 1
        self.records += records
        return records


class BurstySource(MemorySource):
    """Each poll that returns nothing takes a second; the next burst comes after `SPELL_S` of them, in the end none.

    A process that starts later finds the records of one partition before those of the next.
    """

    def __init__(self, log: Log, clock: SetClock) -> None:
        super().__init__(sorted(log.records, key=lambda record: record.id), endless=True)
        self._produced, self._clock = log, clock
        self._quiet_s = 0
        self._ended = False
        self.on_spell: Callable[[], None] = lambda: None

    def poll(self, *, max_records: int, timeout_s: float) -> Sequence[Record]:
        """Return what is there, without waiting."""
        del timeout_s
        records = super().poll(max_records=max_records, timeout_s=0.0)
        self._clock.now += not records
        self._quiet_s = 0 if records else self._quiet_s + 1
        if self._quiet_s == SPELL_S:
            self._quiet_s = 0
            self.on_spell()
            burst = self._produced.produce()
            self.append(*burst)
            self._ended = not burst
        return records

    @property
    def exhausted(self) -> bool:
        """Whether the last spell is over."""
        return self._ended


def learned(
    settings: Settings, log: Log, observer: Any = None, watch: Callable[[Daemon], None] = lambda _: None
) -> Components:
    """Run one process over a log to its end; `watch` gets the daemon before it runs."""
    clock = SetClock()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("streamlearn.daemon.build.open_source", lambda _: BurstySource(log, clock))
        components = Components(settings, clock=clock)
    with closing(components):
        daemon = daemon_of(components, observer)
        watch(daemon)
        daemon.run()
    return components


class Died(BaseException):
    """The process was killed."""


def die_in(monkeypatch: pytest.MonkeyPatch, owner: type, method: str, *, after: bool, times: int) -> list[int]:
    """Each of the next calls of a method kills the process, before or after it does its work; the list counts down."""
    real, left = getattr(owner, method), [times]

    def dying(*args: Any, **kwargs: Any) -> Any:
        if left[0] and not after:
            left[0] -= 1
            raise Died
        result = real(*args, **kwargs)
        if left[0]:
            left[0] -= 1
            raise Died
        return result

    monkeypatch.setattr(owner, method, dying)
    return left


def test_nothing_waits_after_a_quiet_time(make: Callable[..., Settings]) -> None:
    """Each spell ends with every record trained or held out, lag 0 and an idle daemon; each task is a regime."""
    seen: list[tuple[int, int, list[int | None], str]] = []

    def watch(daemon: Daemon) -> None:
        def note() -> None:
            status = daemon.board.read()
            waiting = len(daemon.adaptation.waiting)
            done = status.records_trained + status.records_held_out
            seen.append((done, waiting, [partition.lag for partition in status.partitions], str(status.phase)))

        source: Any = daemon.components.source
        source.on_spell = note

    with capture_logs() as logs:
        components = learned(make([]), Log(BURSTS), watch=watch)
    assert seen == [(70, 0, [0], "idle"), (160, 0, [0], "idle"), (RECORDS, 0, [0], "idle")]
    flushed = [log for log in logs if log["event"] == Event.STREAM_FLUSHED]
    assert [log["reason"] for log in flushed] == ["linger"] * 3
    assert [report.shift.onset for report in components.adaptation.state.reports] == [1, 71, 154]


def test_without_a_linger_records_wait(make: Callable[..., Settings]) -> None:
    """`null`: the last 16 records and an open batch wait for the next burst, and only the end flushes."""
    seen: list[int] = []

    def watch(daemon: Daemon) -> None:
        source: Any = daemon.components.source
        source.on_spell = lambda: seen.append(daemon.state.records)

    with capture_logs() as logs:
        learned(make([], stream={"linger_s": None}), Log(BURSTS), watch=watch)
    assert all(done <= read - 16 for done, read in zip(seen, (70, 160, RECORDS), strict=True))
    assert [log["reason"] for log in logs if log["event"] == Event.STREAM_FLUSHED] == ["end"]


def test_a_probe_reads_what_came_before_the_quiet_time(make: Callable[..., Settings]) -> None:
    """A new regime with fewer tokens than `probe.warmup_tokens` is probed with those, and trained on."""
    log = Log([stream("animals", per_task=70), stream("sums", per_task=30)])
    components = learned(make([], probe={"warmup_tokens": 10_000}), log)
    _, report = components.adaptation.state.reports
    assert 0 < report.probe_tokens < 10_000
    assert components.state.records == 100


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, backbone: Path) -> dict[str, Tensor]:
    """Every tensor at the end of a run that nothing interrupted."""
    return tensors_of(learned(maker(tmp_path_factory.mktemp("whole"), backbone)([]), Log(BURSTS)))


DEATHS: dict[str, tuple[type, str, bool, int]] = {
    "before the journal": (Journal, "append_flush", False, 3),
    "after the journal": (Journal, "append_flush", True, 3),
    "after the flush": (Regimes, "flush", True, 1),
}


@pytest.mark.parametrize("moment", DEATHS)
@pytest.mark.parametrize("partitions", [1, 2])
def test_a_death_at_a_flush_loses_and_repeats_nothing(
    make: Callable[..., Settings],
    whole: dict[str, Tensor],
    monkeypatch: pytest.MonkeyPatch,
    moment: str,
    partitions: int,
) -> None:
    """One partition: every tensor ends as in a run that was not killed and was flushed at the same places.

    The next burst arrives while the process is dead, so that only the journal knows of a flush. Two partitions: after
    each death the records come in another order and form other batches; the ledger stays exact.
    """
    owner, method, after, times = DEATHS[moment]
    settings, log = make([]), Log(BURSTS, partitions)
    left = die_in(monkeypatch, owner, method, after=after, times=times)
    while left[0]:
        with pytest.raises(Died):
            learned(settings, log)
        if after and partitions == 1:
            log.produce()
    components = learned(settings, log)
    ledger = components.state.ledger
    assert [trained + held_out for _, _, trained, _, held_out, _ in ledger.rows()] == log.ends
    assert [*ledger.position.values()] == log.ends
    assert partitions == 2 or differences(whole, tensors_of(components)) == []


def test_a_death_among_the_steps_of_a_flush_changes_no_bit(
    make: Callable[..., Settings], whole: dict[str, Tensor]
) -> None:
    """After each of these steps, with a snapshot of every step: no tensor differs.

    The first flush is before step 14, when 52 of 70 records are trained and 18 wait, and ends with step 18.
    """
    settings, log = make([], snapshot={"every_records": 4}), Log(BURSTS)
    for step in range(12, 21):
        with pytest.raises(KeyboardInterrupt):
            learned(settings, log, DieAt(step))
    components = learned(settings, log)
    assert components.state.records == RECORDS
    assert differences(whole, tensors_of(components)) == []


def test_after_a_rollback_the_stream_is_flushed_again(
    make: Callable[..., Settings], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two updates of the flush are refused: their records are set aside, the others trained, and none waits."""
    settings = make([], learner={"max_bad_batches": 2}, snapshot={"every_records": 40}, holdout={"every_records": 0})
    refusals = iter([torch.tensor(torch.nan)] * 2)

    def watch(daemon: Daemon) -> None:
        really = daemon.learner._clip
        flushed = Regimes.flush

        def flush(adaptation: Regimes) -> None:
            flushed(adaptation)

            def clip() -> Tensor:
                norm = really()
                return next(refusals, norm)

            monkeypatch.setattr(daemon.learner, "_clip", clip)

        monkeypatch.setattr(Regimes, "flush", flush)

    with capture_logs() as logs:
        components = learned(settings, Log([BURSTS[0]]), watch=watch)
    told = [log["event"] for log in logs if log["event"] in (Event.STREAM_FLUSHED, Event.ROLLED_BACK)]
    assert told == [Event.STREAM_FLUSHED, Event.ROLLED_BACK, Event.STREAM_FLUSHED]
    snapshot = components.store.newest()
    assert snapshot is not None
    assert [row[2:] for row in snapshot.manifest.ledger] == [(62, 8, 0, 0)]


def test_a_flush_waits_until_the_journal_can_be_written(
    make: Callable[..., Settings], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A replay would not repeat it: records wait, the status says why, and the next linger is tried."""
    real, seen = Journal._rewrite, list[str]()

    def rewrite(self: Journal, entries: Any) -> None:
        if not seen:
            seen.append("full")
            raise SnapshotError("no space left")
        real(self, entries)

    monkeypatch.setattr(Journal, "_rewrite", rewrite)
    done: list[int] = []

    def watch(daemon: Daemon) -> None:
        source: Any = daemon.components.source
        source.on_spell = lambda: done.append(daemon.state.records)

    with capture_logs() as logs:
        learned(make([]), Log([BURSTS[0]]), watch=watch)
    assert done == [70]
    events = [log["event"] for log in logs]
    assert events.index(Event.DEGRADATION_STARTED) < events.index(Event.DEGRADATION_ENDED)
    assert events.index(Event.DEGRADATION_ENDED) < events.index(Event.STREAM_FLUSHED)


def test_a_journal_that_lags_is_written_while_the_stream_is_quiet(
    make: Callable[..., Settings], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No batch comes that would write it: the status says that it works again, and later failures count anew."""
    real, reasons, full = Journal._open, list[str](), [False]

    def open_file(self: Journal) -> int:
        if full[0]:
            raise SnapshotError("no space left")
        return real(self)

    def watch(daemon: Daemon) -> None:
        source: Any = daemon.components.source
        poll = source.poll

        def polling(**options: Any) -> Sequence[Record]:
            polled: Sequence[Record] = poll(**options)
            full[0] = daemon.state.records > 40 and source._quiet_s < 10
            if source._quiet_s in (9, SPELL_S - 1):
                reasons.append(daemon.degradation.reason)
            return polled

        source.poll = polling

    monkeypatch.setattr(daemon_module, "RETRY_S", 0.0)
    monkeypatch.setattr(Journal, "_open", open_file)
    learned(make([], stream={"linger_s": None}), Log([BURSTS[0]]), watch=watch)
    assert reasons == ["journal: no space left", ""]


@pytest.mark.broker
@pytest.mark.usefixtures("leaked_sockets")
def test_a_topic_is_learned_to_its_end(make: Callable[..., Settings], broker: Broker) -> None:
    """Twenty-one records in batches of four: the last batch is one record, and no lag is left."""
    lines = stream("animals", per_task=21)
    settings = make([], stream={"linger_s": 0.3}, holdout={"every_records": 0})
    topic = broker.new_topic()
    broker.produce(topic, lines)
    source = SourceSettings(kafka=broker.settings(topic))
    with opened(settings.model_copy(update={"source": source})) as components:
        hook = StopAfter(6)
        hook.daemon = daemon_of(components, hook)
        hook.daemon.run()
        assert [row[2:] for row in hook.daemon.state.ledger.rows()] == [(21, 0, 0, 0)]
        assert [partition.lag for partition in hook.daemon.board.read().partitions] == [0]
