"""The whole loop in this process: a tiny backbone, a file as its stream, real snapshots."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import orjson
import pytest
from structlog.testing import capture_logs
from torch import Tensor

import streamlearn.learner.learner as learner_module
from connectors.jsonl import JsonlSource
from streamlearn.board import Board, Clock
from streamlearn.daemon.build import Components
from streamlearn.daemon.loop import Daemon
from streamlearn.errors import DivergedError, SnapshotMismatchError
from streamlearn.events import Event
from streamlearn.jobs.queue import EvalJob, JobQueue, QueueClosedError
from streamlearn.learner.learner import Learner, Step
from streamlearn.learner.loss import PackedLoss, packed_loss
from streamlearn.regimes.report import ShiftReport
from streamlearn.settings import Settings
from streamlearn.snapshot.parts import Snapshot, SnapshotInfo
from streamlearn.snapshot.store import SnapshotStore
from streamlearn.status import Phase, Status
from streamlearn.stream.position import Gap, OffsetRange, Position
from streamlearn.stream.record import Batch, Record
from tests.doubles import tiny_backbone
from tests.learners import differences, regime_tensors, state_of

PER_BATCH = 4
RUBBISH = b"{not json"


@pytest.fixture(scope="module")
def backbone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_backbone(tmp_path_factory.mktemp("backbone"))


@pytest.fixture
def make(tmp_path: Path, backbone: Path) -> Callable[..., Settings]:
    """Settings over a file of lines; `name` tells runs apart."""

    def build(lines: list[bytes], name: str = "run", **learner: Any) -> Settings:
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        (folder / "stream.jsonl").write_bytes(b"".join(line + b"\n" for line in lines))
        return Settings.model_validate(
            {
                "state": folder / "state",
                "source": {"jsonl": {"path": folder / "stream.jsonl"}},
                "stream": {"max_tokens": 32, "batch_tokens": 32 * PER_BATCH, "batch_records": PER_BATCH},
                "backbone": {"model": str(backbone), "dtype": "float32"},
                "adapter": {"num_heads": 4},
                "learner": {"lr": 1e-2, **learner},
                "holdout": {"every_records": 0},
                "snapshot": {"every_records": 3 * PER_BATCH},
            }
        )

    return build


def records(count: int, **meta: Any) -> list[bytes]:
    """Distinct usable records."""
    return [
        orjson.dumps({"prompt": f"say {i}", "completion": f" {i * i}", "meta": {**meta, "i": i}}) for i in range(count)
    ]


@contextmanager
def opened(settings: Settings, **options: Any) -> Iterator[Components]:
    components = Components(settings, **options)
    try:
        yield components
    finally:
        components.close()


def daemon_of(components: Components, observer: Any = None) -> Daemon:
    return Daemon(components, Board(Status(Phase.STARTING), Clock()), JobQueue(1), observer=observer)


def run(settings: Settings, observer: Any = None, **options: Any) -> tuple[dict[str, Tensor], Daemon]:
    """Learn to the end; everything that a next step would depend on, and the daemon."""
    with opened(settings, **options) as components:
        daemon = daemon_of(components, observer)
        daemon.run()
        snapshot = components.store.newest()
        assert snapshot is not None
        groups = components.learner.optimizer.groups
        weights = {f"{group.name}.{n}": p.detach().clone() for group in groups for n, p in group.parameters.items()}
        return {**state_of(components.learner), **regime_tensors(components.adaptation), **weights}, daemon


def without_numbers(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """A refused batch has a step number and passes the detector, a rejected record has not; the rest must be equal."""
    return {name: tensor for name, tensor in state.items() if not name.startswith(("learner.counts", "regimes."))}


class StopAfter:
    """Asks the daemon to stop at a step."""

    def __init__(self, step: int) -> None:
        self.step = step
        self.daemon: Daemon | None = None

    def on_start(self, status: Status) -> None:
        pass

    def on_step(self, batch: Batch, step: Step, status: Status) -> None:
        if step.number == self.step:
            assert self.daemon is not None
            self.daemon.stop("the test")

    def on_shift(self, entry: ShiftReport) -> None:
        pass

    def on_snapshot(self, info: SnapshotInfo) -> None:
        pass


def test_a_stop_and_a_restart_change_no_bit(make: Callable[..., Settings]) -> None:
    """Stopped after any step, the next process ends where an uninterrupted one ends, and replays nothing."""
    lines = records(30)
    lines[9:9] = [RUBBISH]
    lines[25:25] = [RUBBISH]  # decoded, and its dead letter written, before the stop at record 17
    whole, _ = run(make(lines, "whole"))
    settings = make(lines, "halves")
    with opened(settings) as components:
        hook = StopAfter(4)
        hook.daemon = daemon_of(components, hook)
        hook.daemon.run()
        assert components.learner.number == 4
    halves, daemon = run(settings)
    assert daemon.state.ledger.rows()[0][2:4] == (30, 2)
    assert len((settings.state / "dead_letters.jsonl").read_bytes().splitlines()) == 2
    assert differences(whole, halves) == []


def test_deletions_are_counted_by_themselves_over_a_restart(make: Callable[..., Settings]) -> None:
    """In the ledger, the status and the metrics, and not among the dead letters; the training is that without them."""
    deletion = b'{"before": {"id": 1}, "after": null, "op": "d"}'
    lines = records(20)
    whole, _ = run(make(lines, "whole"))
    lines[7:7] = [deletion] * 3
    lines[20:20] = [deletion]  # read by the second process only
    settings = make(lines)
    with opened(settings) as components:
        hook = StopAfter(3)
        hook.daemon = daemon_of(components, hook)
        hook.daemon.run()
    state, daemon = run(settings)
    assert differences(whole, state) == []
    assert daemon.state.ledger.rows() == [("stream.jsonl", 0, 20, 0, 0, 4)]
    status = daemon.board.read()
    assert (status.ignored, status.records_dead_lettered) == ({"deletion": 4}, 0)
    counted = daemon.board.counters.registry.get_sample_value(
        "streamlearn_records_ignored_total", {"reason": "deletion"}
    )
    assert counted == 1
    assert (settings.state / "dead_letters.jsonl").read_bytes() == b""


def test_truncation_is_counted_by_form_and_logged_where_it_begins(make: Callable[..., Settings]) -> None:
    """In the status over a restart and in the metrics; two rows of truncated batches are two events."""
    long = "the fox " * 40
    conversation = [{"role": "user", "content": long}, {"role": "assistant", "content": "No."}]
    pair: dict[str, Any] = {"prompt": long, "completion": " No."}
    values: list[dict[str, Any]] = [{"text": long}, pair, {"messages": conversation}, {"text": long}]
    short, cut = records(PER_BATCH), [orjson.dumps(value) for value in values]
    settings = make([*short, *cut, *cut, *short, *cut])
    with opened(settings) as components, capture_logs() as logs:
        decoder = components.decoder
        truncations = [decoder.decode_value(value).truncation for value in values]
        hook = StopAfter(3)
        hook.daemon = daemon_of(components, hook)
        hook.daemon.run()
    lost = [0 if truncation is None else truncation.num_cut for truncation in truncations]
    assert min(lost) > 0
    forms = {"text": 2, "prompt + completion": 1, "messages": 1}
    with capture_logs() as later:
        _, daemon = run(settings)
    for entries in (logs, later):
        [event] = [entry for entry in entries if entry["event"] == Event.RECORDS_TRUNCATED]
        assert (event["forms"], event["tokens"], event["max_tokens"]) == (forms, sum(lost), 32)
    status, registry = daemon.board.read(), daemon.board.counters.registry
    tokens = {"text": lost[0] + lost[3], "prompt + completion": lost[1], "messages": lost[2]}
    for form, number in forms.items():
        assert (status.truncated_records[form], status.truncated_tokens[form]) == (3 * number, 3 * tokens[form])
        for name, value in (("records", number), ("tokens", tokens[form])):  # of this process
            assert registry.get_sample_value(f"streamlearn_{name}_truncated_total", {"form": form}) == value


def test_a_stop_ends_the_job_that_is_unfinished(make: Callable[..., Settings]) -> None:
    """Its client is told so, and does not wait for an answer that never comes."""
    settings = make(records(30))
    brief = settings.serve.model_copy(update={"eval_budget_s": 1e-4})  # one piece of a job after each step
    with opened(settings.model_copy(update={"serve": brief})) as components:
        hook, jobs = StopAfter(4), JobQueue(1)
        hook.daemon = Daemon(components, Board(Status(Phase.STARTING), Clock()), jobs, observer=hook)
        future = jobs.submit(EvalJob(tuple({"text": f"text {i}"} for i in range(40)), generate=True, max_new_tokens=64))
        hook.daemon.run()
    with pytest.raises(QueueClosedError, match="before it finished this job"):
        future.result(0)


class DieAt(StopAfter):
    """Interrupts the loop as if the process had been killed."""

    def on_step(self, batch: Batch, step: Step, status: Status) -> None:
        if step.number == self.step:
            raise KeyboardInterrupt


def die(settings: Settings, step: int) -> None:
    """Run until after `step`, and die without a snapshot of it."""
    with opened(settings) as components, pytest.raises(KeyboardInterrupt):
        daemon_of(components, DieAt(step)).run()


def test_a_death_between_snapshots_changes_no_bit(make: Callable[..., Settings]) -> None:
    """Two deaths, the second while steps lost in the first are repeated."""
    lines = records(30)
    lines[9:9] = [RUBBISH]
    whole, _ = run(make(lines, "whole"))
    settings = make(lines, "deaths")
    die(settings, 5)
    die(settings, 4)
    state, daemon = run(settings)
    assert daemon.state.ledger.rows()[0][2:4] == (30, 1)
    assert len((settings.state / "dead_letters.jsonl").read_bytes().splitlines()) == 1
    assert differences(whole, state) == []


def test_the_journal_stays_whole_when_batches_change(make: Callable[..., Settings]) -> None:
    """After an accepted change of the batch size every step has one line, in order, with the new batches."""
    settings = make(records(30))
    die(settings, 5)
    stream = settings.stream.model_copy(update={"batch_records": 3})
    smaller = settings.model_copy(update={"stream": stream})
    with opened(smaller, accept_config_change=True) as components:
        first = components.learner.number
        daemon_of(components).run()
        entries = components.journal.entries(after_step=first)
        assert [entry.step for entry in entries] == list(range(first + 1, components.learner.number + 1))
        assert sum(run.num_records for entry in entries for run in entry.runs) == 30 - first * PER_BATCH


class Expiring(JsonlSource):
    """A file whose first lines expire, like a topic's, and that has an identity."""

    begins = 0
    identity: Mapping[str, str] = {"stream.jsonl": "7f"}
    remembered: ClassVar[list[Mapping[str, str] | None]] = []

    def seek(
        self,
        position: Position,
        identity: Mapping[str, str] | None = None,
        skipped: Sequence[OffsetRange] = (),
    ) -> Position:
        self.remembered.append(identity)
        return super().seek(Position({self._origin: max(self.begins, position.get(self._origin, 0))}))


@pytest.fixture
def expiring(monkeypatch: pytest.MonkeyPatch) -> type[Expiring]:
    """Every source opened is such a file."""
    monkeypatch.setattr(Expiring, "remembered", [])
    monkeypatch.setattr("streamlearn.daemon.build.open_source", lambda settings: Expiring(settings.jsonl))
    return Expiring


def newest(settings: Settings) -> Snapshot:
    """The newest snapshot of a finished run."""
    snapshot = SnapshotStore(settings.state / "snapshots", keep=2).newest()
    assert snapshot is not None
    return snapshot


def test_what_expired_before_its_replay_is_left_out_and_the_rest_trained_once(
    make: Callable[..., Settings], expiring: type[Expiring], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Journalled batches that cannot be read again are dropped; the state is that of a stream without those lines."""
    lines = records(30)
    without, _ = run(make([*lines[:12], *lines[17:]], "without"))
    settings = make(lines)
    die(settings, 5)  # the last snapshot covers 12 lines
    monkeypatch.setattr(expiring, "begins", 17)
    with capture_logs() as logs:
        die(settings, 4)
    assert [entry["event"] for entry in logs if entry["log_level"] == "warning"] == [Event.JOURNAL_TRUNCATED]
    assert list(newest(settings).manifest.position.values()) == [17]  # the decision is durable before the next record
    with capture_logs() as logs:
        state, daemon = run(settings)
    assert [entry["event"] for entry in logs if entry["log_level"] == "warning"] == []
    assert daemon.state.ledger.rows()[0][2] == 30 - (17 - 12)
    assert list(daemon.state.ledger.position.values()) == [30]
    assert differences(without, state) == []


class Overtaken(Expiring):
    """Loses lines 12 to 16 while it is read."""

    gaps: Sequence[Gap] = ()

    def poll(self, *, max_records: int, timeout_s: float) -> Sequence[Record]:
        polled = super().poll(max_records=max_records, timeout_s=timeout_s)
        if any(record.offset == 12 for record in polled):
            self.gaps = [Gap(self._origin, 12, 17)]
        return [record for record in polled if not 12 <= record.offset < 17]


def test_what_expired_while_it_was_read_is_left_out_for_good(
    make: Callable[..., Settings], expiring: type[Expiring], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once everything before the gap is trained, the position moves past it: the next process replays exactly."""
    lines = records(30)
    without, _ = run(make([*lines[:12], *lines[17:]], "without"))
    settings = make(lines)
    monkeypatch.setattr("streamlearn.daemon.build.open_source", lambda settings: Overtaken(settings.jsonl))
    die(settings, 4)
    assert list(newest(settings).manifest.position.values()) == [17]
    monkeypatch.setattr("streamlearn.daemon.build.open_source", lambda settings: expiring(settings.jsonl))
    with capture_logs() as logs:
        state, daemon = run(settings)
    assert [entry["event"] for entry in logs if entry["log_level"] == "warning"] == []
    assert daemon.state.ledger.rows()[0][2] == 25
    assert differences(without, state) == []


def test_nothing_that_learns_reads_meta(make: Callable[..., Settings]) -> None:
    """Different meta, equal bits."""
    first, _ = run(make(records(20, task="a"), "a"))
    second, _ = run(make(records(20, task="b", more=[1, 2, {"x": None}]), "b"))
    assert differences(first, second) == []


def not_finite(loss: PackedLoss) -> PackedLoss:
    return replace(loss, mean=loss.mean * float("nan"))


def poison(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    """Make the loss of every packed batch that contains a certain text NaN."""
    real = packed_loss

    def poisoned(model: Any, row: Any) -> PackedLoss:
        loss = real(model, row)
        return not_finite(loss) if text in model.spell(row.input_ids[0].tolist()) else loss

    monkeypatch.setattr(learner_module, "packed_loss", poisoned)


def run_poisoned(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> tuple[dict[str, Tensor], Daemon]:
    real_init = Components.__init__

    def init(self: Components, *args: Any, **kwargs: Any) -> None:
        real_init(self, *args, **kwargs)
        self.learner.forward.spell = self.model.backbone.tokenizer.decode

    with monkeypatch.context() as patch:
        patch.setattr(Components, "__init__", init)
        poison(patch, "poison")
        return run(settings)


@pytest.mark.parametrize("learner", [{}, {"rehearsal": 0.25, "updates_per_batch": 2}], ids=["default", "rehearsal"])
def test_a_refused_update_sets_its_batch_aside(
    make: Callable[..., Settings], monkeypatch: pytest.MonkeyPatch, learner: dict[str, Any]
) -> None:
    """The batch of a non-finite loss becomes dead letters; the weights are as if its records had been unusable."""
    lines = records(24)
    bad = [orjson.dumps({"prompt": f"poison {i}", "completion": " x"}) for i in range(PER_BATCH)]
    lines[8:8] = bad
    state, daemon = run_poisoned(make(lines, "poisoned", **learner), monkeypatch)
    assert daemon.state.reasons == {"not_finite_update": PER_BATCH}
    assert daemon.state.ledger.rows()[0][2:4] == (24, PER_BATCH)
    clean, _ = run(make([*records(24)[:8], *[RUBBISH] * PER_BATCH, *records(24)[8:]], "clean", **learner))
    assert differences(without_numbers(state), without_numbers(clean)) == []


def test_a_further_update_that_is_refused_sets_nothing_aside(
    make: Callable[..., Settings], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The batch was trained on before; the weights are those of the updates that were made, and the log says so."""
    once, _ = run(make(records(24), "once"))
    update = Learner._update
    numbers: list[int] = []

    def failing(learner: Learner, *arguments: Any) -> Step:
        numbers.append(learner.number)
        with monkeypatch.context() as patch:
            if numbers[-2:] == 2 * numbers[-1:]:
                patch.setattr(learner_module, "packed_loss", lambda *_: not_finite(packed_loss(*_)))
            return update(learner, *arguments)

    monkeypatch.setattr(Learner, "_update", failing)
    with capture_logs() as logs:
        state, daemon = run(make(records(24), "twice", updates_per_batch=2))
    assert differences(once, state) == []
    assert (daemon.state.reasons, daemon.state.refusals) == ({}, 0)
    refused = [log for log in logs if log["event"] == Event.UPDATE_REFUSED]
    assert [(log["records"], log["refusal"]) for log in refused] == 6 * [(0, "loss is nan")]


def test_a_row_of_refused_updates_rolls_back(make: Callable[..., Settings], monkeypatch: pytest.MonkeyPatch) -> None:
    """After max_bad_batches in a row the last snapshot is restored, the records left out, the rest trained once."""
    lines = records(40)
    bad = [orjson.dumps({"prompt": f"poison {i}", "completion": " x"}) for i in range(3 * PER_BATCH)]
    lines[20:20] = bad
    settings = make(lines, "poisoned", max_bad_batches=3)
    state, daemon = run_poisoned(settings, monkeypatch)
    assert daemon.state.ledger.rows()[0][2:4] == (40, 3 * PER_BATCH)
    assert len((settings.state / "dead_letters.jsonl").read_bytes().splitlines()) == 3 * PER_BATCH
    status = daemon.board.read()
    value = daemon.board.counters.registry.get_sample_value
    refusals = value("streamlearn_update_refusals_total")
    assert (status.update_refusals, refusals) == (1, 3), "the snapshot has one, no counter falls"
    letters = value("streamlearn_records_dead_lettered_total", {"reason": "not_finite_update"})
    assert letters == (3 + 2) * PER_BATCH, "refused, and left out once more"
    clean, _ = run(make([*records(40)[:20], *[RUBBISH] * 3 * PER_BATCH, *records(40)[20:]], "clean"))
    assert differences(without_numbers(state), without_numbers(clean)) == []


def test_a_rollback_at_the_end_reads_the_rest_again(
    make: Callable[..., Settings], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The source was exhausted at the third refusal; what the snapshot does not cover is read again."""
    lines = records(20)
    lines[20:20] = [orjson.dumps({"prompt": f"poison {i}", "completion": " x"}) for i in range(3 * PER_BATCH)]
    _, daemon = run_poisoned(make(lines, "poisoned", max_bad_batches=3), monkeypatch)
    assert daemon.state.ledger.rows()[0][2:4] == (20, 3 * PER_BATCH)


def test_divergence_after_a_rollback_ends_the_run(
    make: Callable[..., Settings], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second row of refusals before the next snapshot ends the run with advice."""
    bad = [orjson.dumps({"prompt": f"poison {i}", "completion": " x"}) for i in range(8 * PER_BATCH)]
    with pytest.raises(DivergedError, match=r"again after a rollback: lower learner\.lr"):
        run_poisoned(make(bad, max_bad_batches=2), monkeypatch)


def test_a_changed_configuration_is_refused_until_accepted(make: Callable[..., Settings]) -> None:
    """The message names key, both values and the ways out; with the flag the run continues."""
    run(make(records(8)))
    changed = make(records(16), lr=2e-2)
    with pytest.raises(SnapshotMismatchError, match=r"learner\.lr is 0\.02 here and 0\.01 in the snapshot.*--fresh"):
        run(changed)
    _, daemon = run(changed, accept_config_change=True)
    assert daemon.state.ledger.rows()[0][2] == 16


def test_a_run_continues_with_more_regimes(make: Callable[..., Settings]) -> None:
    """As if there had been as many from the start: a slot that was never used changes nothing."""

    def ended(name: str, *limits: int) -> dict[str, Tensor]:
        for count, limit in zip((16, 32), limits, strict=True):
            settings = make(records(count), name=name)
            settings = settings.model_copy(update={"shift": settings.shift.model_copy(update={"max_regimes": limit})})
            state, _ = run(settings, accept_config_change=True)
        return state

    assert differences(ended("grown", 4, 9), ended("whole", 9, 9)) == []


def test_fresh_sets_the_old_state_aside(make: Callable[..., Settings]) -> None:
    """A fresh run begins at the first record; the old snapshots are still on disk."""
    settings = make(records(8))
    run(settings)
    _, daemon = run(settings, fresh=True)
    assert daemon.state.ledger.rows()[0][2] == 8
    assert len([path for path in settings.state.iterdir() if path.is_dir()]) == 2
