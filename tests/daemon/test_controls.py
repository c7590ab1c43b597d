"""Controls of a running loop: what they stop, what they change, and what a death right after them leaves."""

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import orjson
import pytest
from torch import Tensor

import streamlearn.daemon.checkpoint as daemon_module
from connectors.dead_letters import FileDeadLetters
from streamlearn.board import Board, Clock
from streamlearn.controls import Control, ControlFile, Requester
from streamlearn.daemon.build import Components
from streamlearn.daemon.loop import Daemon
from streamlearn.errors import DeadLetterError, Reason, SnapshotError, StreamlearnError, UsageError
from streamlearn.jobs.queue import ControlJob, ControlResult, JobQueue, Result
from streamlearn.learner.learner import Step
from streamlearn.regimes.regime import RegimesState
from streamlearn.settings import Settings
from streamlearn.snapshot.store import SnapshotStore
from streamlearn.status import Phase, Status
from streamlearn.stream.record import Batch
from tests.daemon.test_daemon import opened
from tests.learners import differences
from tests.regimes.conftest import backbone, maker
from tests.regimes.shifting_streams import Silent, run, stream, tensors_of

__all__ = ["backbone"]

ANN = Requester(user="ann@box")
POISON = range(90, 130)
"""Offsets of the records that should never have been in the stream."""
EARLY, LATE, NOTICED = "00000010", "00000020", 45
"""Snapshots at offsets 40 and 80; the second was written when records of the poison had been examined. The step at
which the operator acts."""
SKIP = Control.snapshot("rollback", EARLY, skip_records=(f"{POISON.start}..{POISON.stop - 1}",))


def poisoned() -> list[bytes]:
    """Records of two tasks, and between them some of a third."""
    return [*clean()[:90], *stream("cities", per_task=len(POISON)), *clean()[90:]]


def clean() -> list[bytes]:
    return stream("animals", "sums")


@pytest.fixture
def make(tmp_path: Path, backbone: Path) -> Callable[..., Settings]:
    """Settings of runs that keep every snapshot."""
    build = maker(tmp_path, backbone)
    return lambda lines, name="run", **sections: build(
        lines, name, snapshot={"every_records": 40, "keep": 99}, **sections
    )


@pytest.fixture(scope="module")
def without(tmp_path_factory: pytest.TempPathFactory, backbone: Path) -> dict[str, Tensor]:
    """The end of a run whose stream never had the poison."""
    return run(maker(tmp_path_factory.mktemp("clean"), backbone)(clean()))[0]


@pytest.fixture(scope="module")
def with_poison(tmp_path_factory: pytest.TempPathFactory, backbone: Path) -> dict[str, Tensor]:
    """The end of a run that learned the poison."""
    return run(maker(tmp_path_factory.mktemp("poisoned"), backbone)(poisoned()))[0]


class Operator(Silent):
    """Asks for controls after certain steps, each once."""

    def __init__(self, plan: Mapping[int, Control]) -> None:
        self.jobs = JobQueue(1)
        self.answers: dict[str, Future[Result]] = {}
        self._plan = dict(plan)

    def ask(self, control: Control) -> Future[Result]:
        self.answers[control.verb] = self.jobs.submit(ControlJob(control, ANN))
        return self.answers[control.verb]

    def on_step(self, batch: Batch, step: Step, status: Status) -> None:
        if step.number in self._plan:
            self.ask(self._plan.pop(step.number))

    def answer(self, name: str) -> ControlResult:
        result = self.answers[name].result(timeout=0)
        assert isinstance(result, ControlResult)
        return result


def daemon_of(components: Components, operator: Operator) -> Daemon:
    return Daemon(components, Board(Status(Phase.STARTING), Clock()), operator.jobs, observer=operator)


def operated(settings: Settings, plan: Mapping[int, Control]) -> tuple[dict[str, Tensor], Daemon, Operator]:
    """Learn to the end while an operator acts; every tensor that the next step would depend on."""
    with opened(settings) as components:
        operator = Operator(plan)
        daemon = daemon_of(components, operator)
        daemon.run()
        return tensors_of(components), daemon, operator


def audit(settings: Settings) -> list[dict[str, Any]]:
    return [orjson.loads(line) for line in (settings.state / "audit.jsonl").read_bytes().splitlines()]


def results(settings: Settings) -> list[tuple[str, str]]:
    return [(line["control"], line["result"]) for line in audit(settings)]


# --- pause ------------------------------------------------------------------------------------------------------------


def test_a_paused_daemon_takes_no_step_and_reads_no_record(
    make: Callable[..., Settings], monkeypatch: pytest.MonkeyPatch, without: dict[str, Tensor]
) -> None:
    """It serves jobs and says `paused`; once resumed it ends with the bits of a run that was never paused."""
    settings = make(clean())
    with opened(settings) as components:
        operator = Operator({7: Control.run("pause")})
        daemon = daemon_of(components, operator)
        shown: set[tuple[Phase, bool, int]] = set()

        def acts() -> Iterator[Callable[[], object]]:
            monkeypatch.setattr(components.source, "poll", lambda **_: pytest.fail("read while paused"))
            for _ in range(3):
                status = daemon.board.read()
                shown.add((status.phase, status.ready, status.step))
                yield lambda: None
            monkeypatch.undo()
            yield lambda: operator.ask(Control.run("resume"))

        turns = acts()
        monkeypatch.setattr("streamlearn.daemon.loop.time.sleep", lambda _: next(turns)())
        daemon.run()
        assert shown == {(Phase.PAUSED, True, 7)}
        assert operator.answer("pause").paused
        assert not operator.answer("resume").paused
        assert differences(without, tensors_of(components)) == []
    assert results(settings) == [("pause", "asked"), ("pause", "done"), ("resume", "asked"), ("resume", "done")]
    assert audit(settings)[0]["who"] == {"user": "ann@box"}


class Died(BaseException):
    """The process was killed."""


# --- pins -------------------------------------------------------------------------------------------------------------


def test_a_pinned_snapshot_is_never_pruned(make: Callable[..., Settings]) -> None:
    """Beyond `snapshot.keep`, also when the disk is full. The journal is cut all the same, as by a rollback to it."""
    settings = make(clean())
    settings = settings.model_copy(update={"snapshot": settings.snapshot.model_copy(update={"keep": 2})})
    with opened(settings) as components:
        operator = Operator({11: Control.snapshot("pin", EARLY), 25: Control.snapshot("pin", "00000077")})
        daemon_of(components, operator).run()
        store = components.store
        newest = int(store.names()[-2])
        assert all(entry.step >= newest for entry in components.journal.entries(after_step=0))
    assert operator.answers["pin"].exception(timeout=0) is not None  # there is no 77
    assert store.names()[0] == EARLY
    store.prune(keep=1)
    assert store.names() == [EARLY, store.names()[-1]]
    assert [line["result"] for line in audit(settings)] == ["asked", "done", "asked", "refused"]
    controls = ControlFile(settings.state)
    assert controls.state.pins == {EARLY}
    _, daemon, _ = operated(settings, {})
    assert daemon.components.store.names()[0] == EARLY
    assert ControlFile(settings.state).state.pins == {EARLY}


# --- rollback ---------------------------------------------------------------------------------------------------------


def test_a_rollback_that_skips_records_ends_as_if_they_had_never_been(
    make: Callable[..., Settings], without: dict[str, Tensor], with_poison: dict[str, Tensor]
) -> None:
    """Bit for bit; each is one dead letter, the position is after the last record, and snapshots are moved aside."""
    settings = make(poisoned())
    state, daemon, operator = operated(settings, {NOTICED: SKIP})
    answer = operator.answer("rollback")
    assert answer.moved_aside == ("00000040", "00000030", LATE)
    assert answer.snapshot == EARLY
    assert differences(without, state) == []
    assert with_poison.keys() != without.keys() or differences(without, with_poison)
    assert daemon.state.reasons == {Reason.SKIPPED: len(POISON)}
    assert list(daemon.state.ledger.position.values()) == [len(poisoned())]
    assert sum(daemon.state.ledger.rows()[0][2:]) == len(poisoned())
    letters = (settings.state / "dead_letters.jsonl").read_bytes().splitlines()
    offsets = [int(orjson.loads(line)["headers"]["__streamlearn.errors.offset"]) for line in letters]
    assert offsets == list(POISON)
    aside = sorted(path.name for path in (settings.state / "snapshots").glob("rolled-back-*"))
    assert aside == ["rolled-back-00000020", "rolled-back-00000030", "rolled-back-00000040"]


def test_a_rollback_that_skips_nothing_repeats_the_run(
    make: Callable[..., Settings], with_poison: dict[str, Tensor]
) -> None:
    """The same records end in the same bits."""
    state, _, _ = operated(make(poisoned()), {NOTICED: Control.snapshot("rollback", LATE)})
    assert differences(with_poison, state) == []


def test_a_death_after_a_rollback_repeats_nothing_of_the_old_run(
    make: Callable[..., Settings], without: dict[str, Tensor]
) -> None:
    """Killed at the answer, and again while the skipped records are read."""
    settings = make(poisoned())

    class Dying(Operator):
        def on_step(self, batch: Batch, step: Step, status: Status) -> None:
            super().on_step(batch, step, status)
            if "rollback" in self.answers and self.answers["rollback"].done() and step.number == 23:
                raise Died

    with opened(settings) as components, pytest.raises(Died):
        daemon_of(components, Dying({NOTICED: SKIP})).run()
    state, daemon, _ = operated(settings, {})
    assert differences(without, state) == []
    assert len((settings.state / "dead_letters.jsonl").read_bytes().splitlines()) == len(POISON)
    assert daemon.state.reasons == {Reason.SKIPPED: len(POISON)}


REFUSED = [
    (Control.snapshot("rollback", "00000011"), "expected the name of a snapshot"),
    (Control.snapshot("rollback", "../../etc"), "expected the name of a snapshot"),
    (Control.snapshot("rollback", LATE, skip_records=("90..129",)), "examined for shifts.*roll back to 00000010"),
    (Control.snapshot("rollback", LATE, skip_records=("70..129",)), "up to offset 79.*roll back to 00000010"),
    (Control.snapshot("rollback", EARLY, skip_records=("0..9",)), "up to offset 39.*roll back to 00000000"),
    (Control.snapshot("rollback", EARLY, skip_records=("9..3",)), "FROM <= TO"),
    (Control.snapshot("rollback", EARLY, skip_records=("orders:0:90..129",)), "must be of a topic of this stream"),
    (Control.snapshot("unpin", "00000011"), "expected the name of a snapshot"),
    (Control.regime("freeze", 7), "found 7"),
]


def test_what_cannot_be_done_is_refused_and_changes_nothing(
    make: Callable[..., Settings], with_poison: dict[str, Tensor]
) -> None:
    """The message says why and what to do; the run goes on, and the refusals are in the audit log."""
    settings = make(poisoned())
    answers: list[Future[Result]] = []

    class Asking(Operator):
        def on_step(self, batch: Batch, step: Step, status: Status) -> None:
            if 0 <= step.number - int(LATE) - 10 < len(REFUSED):
                answers.append(self.ask(REFUSED[len(answers)][0]))

    with opened(settings) as components:
        daemon = daemon_of(components, Asking({}))
        daemon.run()
        assert differences(with_poison, tensors_of(components)) == []
    for answer, (_, message) in zip(answers, REFUSED, strict=True):
        with pytest.raises(UsageError, match=message):
            answer.result(timeout=0)
    assert [result for _, result in results(settings)] == ["asked", "refused"] * len(REFUSED)
    assert daemon.controls.state.skipped == ()


def test_a_rollback_that_cannot_be_finished_ends_the_process(
    make: Callable[..., Settings], monkeypatch: pytest.MonkeyPatch, without: dict[str, Tensor]
) -> None:
    """The disk fails once it is decided; the next start finishes it.

    `tests.controls.test_rollback_protocol` has a death at every call.
    """
    settings = make(poisoned())

    def failing(*_: object) -> list[str]:
        raise SnapshotError("disk full")

    with monkeypatch.context() as patch:
        patch.setattr(SnapshotStore, "move_newer_aside", failing)
        with pytest.raises(SnapshotError, match="must be completed before the run continues"):
            operated(settings, {NOTICED: SKIP})
    assert results(settings) == [("rollback", "asked"), ("rollback", "failed")]
    state, _, _ = operated(settings, {})
    assert differences(without, state) == []


def test_fresh_forgets_pins_and_skipped_records_and_stays_paused(
    make: Callable[..., Settings], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They belong to the run that is set aside; the audit log has them."""
    settings = make(poisoned())
    operated(settings, {15: Control.snapshot("pin", EARLY), NOTICED: SKIP})
    with opened(settings, fresh=True) as components:
        assert (components.controls.state.skipped, set(components.controls.state.pins)) == ((), set())
    last = audit(settings)[-1]
    assert (last["control"], last["arguments"]) == (
        "forget",
        {"pins": [EARLY], "skip_records": ["stream.jsonl:0:90..129"]},
    )


# --- regimes ----------------------------------------------------------------------------------------------------------


class Outage(Operator):
    """Renames a regime while nothing can be saved, and notes what is published meanwhile."""

    BEGIN, END = 12, 14

    def __init__(self) -> None:
        super().__init__({self.BEGIN: Control.regime("rename", 1, new_name="beasts")})
        self.step = 0
        self.degraded: dict[int, str] = {}

    def on_step(self, batch: Batch, step: Step, status: Status) -> None:
        super().on_step(batch, step, status)
        self.step = step.number
        self.degraded[step.number] = status.degraded

    def failing(self, real: Callable[..., Any], error: StreamlearnError) -> Callable[..., Any]:
        """`real`, which raises the error during the outage."""

        def call(*args: Any) -> Any:
            if self.BEGIN <= self.step < self.END:
                raise error
            return real(*args)

        return call


@pytest.mark.parametrize(
    ("owner", "name", "error"),
    [
        (FileDeadLetters, "flush", DeadLetterError("dead letters cannot be flushed: no broker")),
        (SnapshotStore, "save", SnapshotError("no space left")),
    ],
)
def test_a_change_of_a_regime_outlasts_an_outage(
    make: Callable[..., Settings], monkeypatch: pytest.MonkeyPatch, owner: type, name: str, error: StreamlearnError
) -> None:
    """The client is told; the daemon goes on, degraded, and saves the change as soon as it can."""
    settings, operator = make(clean()), Outage()
    monkeypatch.setattr(daemon_module, "RETRY_S", 0.0)
    monkeypatch.setattr(owner, name, operator.failing(getattr(owner, name), error))
    with opened(settings) as components:
        daemon_of(components, operator).run()
        saved = components.store.load("00000014").component("regimes", RegimesState)
    with pytest.raises(SnapshotError, match=f"the change holds .*{error}"):
        operator.answer("rename")
    assert results(settings) == [("rename", "asked"), ("rename", "failed")]
    assert str(error) in operator.degraded[operator.END]
    assert operator.degraded[operator.END + 1] == ""
    assert [regime.name for regime in saved.regimes.values()] == ["beasts"]


def test_a_pinned_snapshot_is_not_replaced_by_a_change_of_its_step(make: Callable[..., Settings]) -> None:
    """What was pinned would be lost."""
    settings = make(clean())

    class Both(Operator):
        def on_step(self, batch: Batch, step: Step, status: Status) -> None:
            if step.number == 10:
                self.ask(Control.snapshot("pin", EARLY))
                self.ask(Control.regime("freeze", 1))

    with opened(settings) as components:
        operator = Both({})
        daemon_of(components, operator).run()
    with pytest.raises(UsageError, match="unpin 00000010, or let the daemon take a step first"):
        operator.answer("freeze")


def test_a_repeated_change_of_a_regime_changes_nothing(make: Callable[..., Settings]) -> None:
    """As the answer and the audit log say; no snapshot is written for it."""
    settings = make(clean())
    rename = Control.regime("rename", 1, new_name="beasts")
    frozen_and_back = [Control.regime(verb, 1) for verb in ("freeze", "freeze", "unfreeze", "unfreeze")]
    asked = {12: [rename], 14: [rename], 16: frozen_and_back}

    class Twice(Operator):
        def on_step(self, batch: Batch, step: Step, status: Status) -> None:
            for control in asked.pop(step.number, ()):
                self.answers[f"{len(self.answers)}"] = self.jobs.submit(ControlJob(control, ANN))

    with opened(settings) as components:
        operator = Twice({})
        daemon_of(components, operator).run()
        names = components.store.names()
    assert [operator.answer(name).changed for name in operator.answers] == [True, False] * 3
    assert [result for _, result in results(settings) if result != "asked"] == ["done", "unchanged"] * 3
    assert "00000012" in names
    assert "00000014" not in names
