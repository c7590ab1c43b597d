"""The publisher beside a running daemon: what reaches the folder and the replicas, and what does not."""

import math
import os
import random
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
import torch
from safetensors.numpy import load_file
from structlog.testing import capture_logs

from streamlearn.adapters.context import NO_REGIME
from streamlearn.backbone.lora import WEIGHTS
from streamlearn.codec import to_arrays
from streamlearn.daemon.build import Components
from streamlearn.daemon.loop import Daemon
from streamlearn.errors import ConfigError, PublicationError, StateLockedError, UsageError
from streamlearn.events import Event
from streamlearn.export.lora import PlainLoraAdapter
from streamlearn.learner.evaluate import run_to_end, score
from streamlearn.publish import ROLLBACK
from streamlearn.publish import publisher as adapter_publisher
from streamlearn.publish.folder import PublicationFiles
from streamlearn.publish.open import forget_run
from streamlearn.publish.publication import Publication, read_vectors
from streamlearn.publish.publisher import AdapterPublisher, RollbackFile
from streamlearn.settings import Settings
from streamlearn.snapshot.parts import SnapshotInfo
from streamlearn.status import RegimePublication
from tests.daemon.test_daemon import daemon_of, opened
from tests.learners import differences
from tests.publish.stub_replica import StubReplica, replicas
from tests.publish.test_folder import BASE
from tests.regimes.conftest import backbone, make
from tests.regimes.shifting_streams import TASKS, run, stream, tensors_of

__all__ = ["backbone", "make"]

WAIT_S = 20.0
HOLDOUT = {"every_records": 10}
SNAPSHOTS = {"snapshot": {"keep": 50, "every_records": 20}}


class PatientDaemon(Daemon):
    """Waits after each snapshot until it is published, so that no snapshot is skipped, and notes what came of it."""

    def __init__(self, components: Components) -> None:
        plain = daemon_of(components)
        super().__init__(components, plain.board, plain.job_runner._jobs)
        assert components.adapter_publisher is not None
        self.publisher = components.adapter_publisher
        self.outcomes: list[tuple[int, dict[int, RegimePublication]]] = []
        """Records that were done by each snapshot, and what came of it by regime."""

    def wait(self) -> None:
        serve_until(self.publisher, lambda: self.publisher.is_idle)

    def save(self) -> SnapshotInfo:
        info = super().save()
        if self.publisher._thread.is_alive():
            self.wait()
            self.outcomes.append((self.state.records, {row.number: row for row in self.publisher.status.regimes}))
        return info


@contextmanager
def patient(settings: Settings) -> Iterator[PatientDaemon]:
    with opened(settings) as components:
        yield PatientDaemon(components)


def serve_until(publisher: AdapterPublisher, reached: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not reached():
        assert time.monotonic() < deadline, "not reached in time"
        if not publisher.scoring.serve(idle=True):
            time.sleep(0.001)


def poisoned(number: int) -> list[bytes]:
    """Records of the first task with garbage for answers."""
    rng, prompt = random.Random(1), TASKS["animals"][0]
    answers = ["".join(rng.choice("abcdefghij") for _ in range(8)) for _ in range(number)]
    prompts = [prompt.format(1000 + (8642 + 7919 * i) % 9000) for i in range(number)]
    return [orjson.dumps({"prompt": p, "completion": f" {a}"}) for p, a in zip(prompts, answers, strict=True)]


def publishing(tmp_path: Path, stubs: list[StubReplica] | None = None, **fields: Any) -> dict[str, Any]:
    """Sections of a configuration that publishes."""
    vllm = stubs and {"replicas": [stub.url for stub in stubs], "interval_s": 0.02, "drain_s": 0.05}
    return {"publish": {"folder": tmp_path / "published", "vllm": vllm, **fields}, "holdout": HOLDOUT}


def published(tmp_path: Path) -> Publication:
    return Publication.read(tmp_path / "published")


def test_what_is_published_is_what_the_daemon_learned(make: Callable[..., Settings], tmp_path: Path) -> None:
    """Each regime has a version of the last snapshot, which loses on no hold-out record against the daemon's own."""
    settings = make(stream("animals", "sums", "cities"), **publishing(tmp_path))
    with opened(settings) as components:
        daemon_of(components).run()
        learner, adaptation = components.learner, components.adaptation
        newest = published(tmp_path)
        assert [regime.number for regime in newest.regimes] == [1, 2, 3]
        assert newest.snapshot == components.state.last_snapshot.name  # type: ignore[union-attr]
        folder = PublicationFiles(tmp_path / "published", BASE)
        for regime in newest.regimes:
            assert regime.adapter is not None
            examples = adaptation.examples(regime.slot)
            assert len(examples) >= 5
            adapter = PlainLoraAdapter(folder.lora(regime.adapter))
            work = score(
                learner.model,
                examples,
                learner.device,
                pack_tokens=256,
                slots=[NO_REGIME] * len(examples),
                parallel_adapter=adapter,
            )
            own = score(learner.model, examples, learner.device, pack_tokens=256, slots=[regime.slot] * len(examples))
            ours, theirs = run_to_end(own), run_to_end(work)
            losses = torch.tensor([[row.loss_sum for row in rows] for rows in (ours, theirs)])
            torch.testing.assert_close(losses[0], losses[1], rtol=1e-5, atol=1e-5)
        monitor = to_arrays(components.adaptation.monitor.trained)
        routing = load_file(tmp_path / "published" / newest.routing)
        assert routing.keys() == monitor.keys()
        assert all(np.array_equal(routing[name], monitor[name]) for name in monitor)
        vectors_VD = read_vectors(tmp_path / "published" / newest.tokenizer)
        assert np.array_equal(vectors_VD, components.model.backbone.token_vectors)


def test_publishing_changes_no_bit_of_the_training_run(make: Callable[..., Settings], tmp_path: Path) -> None:
    """Scoring for the gate draws no random number and leaves no trace."""
    lines = stream("animals", "sums", per_task=70)
    quiet, _ = run(make(lines, "quiet", holdout=HOLDOUT))
    settings = make(lines, "publishing", **publishing(tmp_path))
    with patient(settings) as daemon:
        daemon.run()
        assert any(row.version for _, rows in daemon.outcomes for row in rows.values())
        assert not differences(quiet, tensors_of(daemon.components))


def test_garbage_never_reaches_a_replica(make: Callable[..., Settings], tmp_path: Path) -> None:
    """A published regime comes back with garbage for answers: that is another regime, and is held back."""
    lines = stream("animals", "sums", per_task=110)
    with replicas(2) as stubs:
        settings = make(lines + poisoned(90), snapshot={"every_records": 12}, **publishing(tmp_path, stubs))
        with patient(settings) as daemon:
            daemon.run()
            loaded = {name for stub in stubs for _, name in stub.calls}
    clean = [rows[1].version for records, rows in daemon.outcomes if rows and records <= len(lines)]
    assert clean[-1] is not None, "no version was published before the garbage"
    assert {name for name in loaded if "-regime-1@" in name} == set(clean) - {None}
    assert not any("-regime-3@" in name for name in loaded)
    garbage = [rows[3].held_back for records, rows in daemon.outcomes if 3 in rows]
    assert set(garbage) == {"answers_changed"}
    assert {rows[1].version for records, rows in daemon.outcomes if records > len(lines)} == {clean[-1]}
    assert published(tmp_path).regimes[0].adapter == clean[-1]


def test_a_version_that_harms_a_slice_of_the_canaries_is_held_back(
    make: Callable[..., Settings], tmp_path: Path
) -> None:
    """Answers that fit their own regime and spoil others: better on its hold-out records, worse on one slice."""
    rows = [
        {"prompt": TASKS[task][0].format(1234 + 777 * i), "completion": TASKS[task][1], "slice": task}
        for task in ("sums", "cities")
        for i in range(8)
    ]
    general = tmp_path / "general.jsonl"
    general.write_bytes(b"".join(orjson.dumps(row) + b"\n" for row in rows))
    sections = publishing(tmp_path, max_canary_harm=0.5)
    sections["holdout"] = {**sections["holdout"], "canaries": [general]}
    lines = [
        orjson.dumps({"prompt": TASKS["cities"][0].format(1000 + 7919 * i % 9000), "completion": " Paris"})
        for i in range(150)
    ]
    with capture_logs() as logs, patient(make(lines, **sections)) as daemon:
        daemon.run()
        row = daemon.publisher.status.regimes[0]
    assert row.held_back == "worse_on_canary"
    assert row.loss is not None
    assert row.backbone_loss is not None
    assert row.loss < row.backbone_loss
    sums, cities = row.canaries
    assert sums.loss > sums.backbone_loss + 0.5
    assert cities.loss < cities.backbone_loss
    assert set(sums.worst) < {f"general.jsonl:{offset}" for offset in range(8)}
    held = [log for log in logs if log["event"] == Event.VERSION_HELD_BACK and log["reason"] == "worse_on_canary"]
    assert held[-1]["canaries"].keys() == {"sums"}


def test_the_card_of_a_version_has_its_canaries(make: Callable[..., Settings], tmp_path: Path) -> None:
    """By slice, beside the backbone's loss."""
    general = tmp_path / "general.jsonl"
    general.write_bytes(b'{"text": "the lazy dog"}\n' * 8)
    sections = publishing(tmp_path, max_canary_harm=100.0)
    sections["holdout"] = {**sections["holdout"], "canaries": [general]}
    with patient(make(stream("animals", per_task=110), **sections)) as daemon:
        daemon.run()
        [score] = daemon.publisher.status.regimes[0].canaries
    [name] = published(tmp_path).adapters
    card = (tmp_path / "published" / "adapters" / name / "README.md").read_text()
    assert f"| general | 8 | {score.loss:.4f} | {score.backbone_loss:.4f} |" in card


def test_an_operator_may_let_changed_answers_pass(make: Callable[..., Settings], tmp_path: Path) -> None:
    """The answers changed for good: with approval the next version is published, and only that one."""
    lines = stream("animals", per_task=110) + [
        orjson.dumps({"prompt": TASKS["animals"][0].format(1000 + (8642 + 7919 * i) % 9000), "completion": " Paris"})
        for i in range(200)
    ]
    with patient(make(lines, **publishing(tmp_path))) as daemon:
        daemon.run()
        publisher = daemon.publisher
        before = published(tmp_path).regimes[0].adapter
        assert publisher.status.regimes[0].held_back == "answers_changed"
        daemon.adaptation.approve(1)
        daemon.save()
        assert publisher.status.regimes[0].held_back is None
        approved = published(tmp_path).regimes[0].adapter
        assert approved != before
    with opened(
        make(lines + lines[-40:], **publishing(tmp_path))
    ) as components:  # the approval is durable, and used up
        assert components.adaptation.by_slot[0].approved_at == int(str(approved).rpartition("@")[2].partition("-")[0])


def test_only_what_is_published_can_be_approved(make: Callable[..., Settings]) -> None:
    """Without a section publish an approval would do nothing."""
    with opened(make(stream("animals", per_task=30))) as components:
        daemon_of(components).run()
        with pytest.raises(UsageError, match="nothing is published"):
            daemon_of(components).adaptation.approve(1)


def test_weights_that_stay_held_back_are_counted_once(make: Callable[..., Settings], tmp_path: Path) -> None:
    """The first regime is not trained while the second one is; each of their versions is one, as in the log."""
    settings = make(
        stream("animals", "sums", per_task=110),
        snapshot={"every_records": 10},
        **publishing(tmp_path, min_holdout_records=16),
    )
    with patient(settings) as daemon, capture_logs() as logs:
        daemon.run()
        counts = dict(daemon.publisher.status.num_held_back)
    rows = [row for _, rows in daemon.outcomes for row in rows.values()]
    events = [row for row in logs if row["event"] == Event.VERSION_HELD_BACK]
    assert counts == {"too_few_records": len(events)}
    assert len(rows) > len(events), "no snapshot had the same weights again"


def test_a_version_is_used_only_once_every_replica_that_answers_has_it(
    make: Callable[..., Settings], tmp_path: Path
) -> None:
    """While no replica answers nothing is published; the one that is back first is enough, the other follows."""
    with replicas(2) as stubs:
        settings = make(stream("animals", per_task=110), **publishing(tmp_path, stubs))
        for stub in stubs:
            stub.stop()
        with opened(settings) as components, capture_logs() as logs:
            publisher = components.adapter_publisher
            assert publisher is not None
            daemon_of(components).run()
            assert [row["event"] for row in logs if row["event"] == Event.PUBLICATION_FAILED]
            assert published(tmp_path).adapters == ()
            assert publisher.status.regimes[0].held_back == "not_loaded"
            stubs[0].start()
            serve_until(publisher, lambda: published(tmp_path).adapters != ())
            [name] = published(tmp_path).adapters
            assert set(stubs[0].loaded) == {name}
            stubs[1].start()
            serve_until(publisher, lambda: set(stubs[1].loaded) == {name})
            written = list(map(orjson.loads, (tmp_path / "published" / "history.jsonl").read_bytes().splitlines()))
            assert len({row["weights_sha256"] for row in written}) == len(written), "a retry wrote a version again"
            serve_until(publisher, lambda: all(replica.is_up for replica in publisher.status.replicas))


def test_replicas_are_looked_after_while_publishing_fails(
    make: Callable[..., Settings], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk is full: a replica that died and is back gets what is published all the same."""

    def full(*_: Any) -> str:
        raise PublicationError("No space left on device")

    with replicas(1) as [stub]:
        settings = make(stream("animals", per_task=110), **SNAPSHOTS, **publishing(tmp_path, [stub]))
        with patient(settings) as daemon, monkeypatch.context() as patched:
            daemon.run()
            publisher, store = daemon.publisher, daemon.components.store
            [name] = published(tmp_path).adapters
            patched.setattr(publisher._targets.folder, "write_routing", full)
            publisher.notify(store.folder / store.names()[-1])
            serve_until(publisher, lambda: publisher.status.fault == "No space left on device")
            stub.stop()
            serve_until(publisher, lambda: not publisher.status.replicas[0].is_up)
            stub.start()
            serve_until(publisher, lambda: set(stub.loaded) == {name})
            assert publisher.status.fault == "No space left on device"


def test_a_replica_that_hangs_is_given_up_when_the_daemon_stops(
    make: Callable[..., Settings], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it would have loaded is published after the next start, not by the process that has ended."""
    monkeypatch.setattr(adapter_publisher, "STOP_S", 0.1)
    asked, answered = threading.Event(), threading.Event()

    def hang(_: Any) -> None:
        asked.set()
        answered.wait(WAIT_S)

    settings = make(stream("animals", per_task=110), **SNAPSHOTS, **publishing(tmp_path))
    with opened(settings) as components:
        publisher = components.adapter_publisher
        assert publisher is not None
        monkeypatch.setattr(publisher._targets.replicas, "fault_of_loading", hang)
        daemon = daemon_of(components)
        daemon.save()
        publisher.start()
        assert asked.wait(WAIT_S)
        with capture_logs() as logs:
            publisher.close()
        assert [row["fault"][:9] for row in logs] == ["abandoned"]
        answered.set()
        publisher._thread.join(WAIT_S)
    assert not (tmp_path / "published" / "publication.json").exists()


def test_what_was_replaced_is_unloaded_after_a_while(make: Callable[..., Settings], tmp_path: Path) -> None:
    """Requests that began before may still use it; after that only the published versions are loaded."""
    with replicas(1) as [stub]:
        settings = make(stream("animals", per_task=150), **publishing(tmp_path, [stub], keep=1))
        with patient(settings) as daemon:
            daemon.run()
            publisher = daemon.publisher
            loads = [name for what, name in stub.calls if what == "load"]
            assert len(loads) > 1
            newest = published(tmp_path).adapters
            serve_until(publisher, lambda: tuple(stub.loaded) == newest)
            serve_until(publisher, lambda: len(list((tmp_path / "published" / "adapters").iterdir())) == 1)
    for name in loads[:-1]:
        assert stub.calls.index(("unload", name)) > stub.calls.index(("load", loads[loads.index(name) + 1]))


def test_a_restart_goes_on_from_what_is_published(make: Callable[..., Settings], tmp_path: Path) -> None:
    """The same weights are not published twice, and a half-published version is cleaned away."""
    settings = make(stream("animals", "sums", per_task=110), **publishing(tmp_path))
    with opened(settings) as components:
        daemon_of(components).run()
    before = published(tmp_path)
    folder = PublicationFiles(tmp_path / "published", BASE)
    half = folder.versions()[-1].model_copy(update={"name": "streamlearn-regime-2@999-77aa01", "run": "another"})
    folder.write_version(half, folder.lora(before.adapters[0]), "")
    with opened(settings) as components:
        assert components.adapter_publisher is not None
        rows = [(row.number, row.version) for row in components.adapter_publisher.status.regimes]
        assert rows == [(regime.number, regime.adapter) for regime in before.regimes], (
            "nothing is shown before the first test"
        )
        daemon_of(components).run()
    after = published(tmp_path)
    assert after.adapters == before.adapters
    assert after.sequence > before.sequence
    assert not (tmp_path / "published" / "adapters" / half.name).exists()


def test_a_restart_loads_only_what_is_published(make: Callable[..., Settings], tmp_path: Path) -> None:
    """Older versions in the folder are kept, and no replica needs them."""
    with replicas(1) as [stub]:
        settings = make(stream("animals", per_task=110), **SNAPSHOTS, **publishing(tmp_path, [stub], keep=3))
        with patient(settings) as daemon:
            daemon.run()
        assert len(list((tmp_path / "published" / "adapters").iterdir())) > 1
        stub.calls, stub.loaded = [], {}
        patience = {"replicas": [stub.url], "interval_s": 0.02, "drain_s": WAIT_S}
        settings = make(stream("animals", per_task=110), **SNAPSHOTS, **publishing(tmp_path, keep=3, vllm=patience))
        with opened(settings) as components:
            daemon_of(components).run()
            publisher = components.adapter_publisher
            assert publisher is not None
            serve_until(publisher, lambda: publisher.status.replicas[0].is_up)
            assert [(row.loaded, row.wanted) for row in publisher.status.replicas] == [(1, 1)]
        assert stub.calls == [("load", name) for name in published(tmp_path).adapters]


def test_versions_of_steps_that_were_undone_are_withdrawn(make: Callable[..., Settings], tmp_path: Path) -> None:
    """The run went back to a snapshot before the first version: no later one stays published."""
    settings = make(stream("animals", per_task=110), snapshot={"keep": 50}, **publishing(tmp_path))
    with patient(settings) as daemon:
        daemon.run()
        assert published(tmp_path).adapters
        publisher, store = daemon.publisher, daemon.components.store
        early = store.names()[1]
        publisher.withdraw_after(int(early))
        publisher.notify(store.folder / "00000000-pruned")  # gone before its turn: a later one follows
        daemon.wait()
        publisher.notify(store.folder / early)
        daemon.wait()
        assert published(tmp_path).adapters == ()
        assert published(tmp_path).snapshot == early


def test_undone_versions_are_withdrawn_while_a_replica_refuses(make: Callable[..., Settings], tmp_path: Path) -> None:
    """What the snapshot of the rollback has to load is no condition: the undone version goes first."""
    with replicas(2) as stubs:
        settings = make(stream("animals", per_task=150), **SNAPSHOTS, **publishing(tmp_path, stubs))
        with patient(settings) as daemon, capture_logs() as logs:
            daemon.run()
            publisher, store = daemon.publisher, daemon.components.store
            [undone] = published(tmp_path).adapters
            stubs[1].refusal = "max_cpu_loras reached"
            early = store.names()[-2]
            publisher.withdraw_after(int(early))
            publisher.notify(store.folder / early)
            serve_until(publisher, lambda: "max_cpu_loras" in (publisher.status.fault or ""))
            assert published(tmp_path).adapters == ()
            assert [(row.version, row.held_back) for row in publisher.status.regimes] == [(None, "not_loaded")]
            assert [row["version"] for row in logs if row["event"] == Event.VERSION_WITHDRAWN] == [undone]
            serve_until(publisher, lambda: not any(undone in stub.loaded for stub in stubs))


@pytest.mark.parametrize("step", ["fault_of_loading", "write_routing"])
def test_a_publication_under_way_is_given_up_at_a_rollback(
    make: Callable[..., Settings], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    """The run goes back while its versions are loaded or its routing state is written: they are never named."""
    with replicas(1) as [stub]:
        settings = make(stream("animals", per_task=110), **SNAPSHOTS, **publishing(tmp_path, [stub]))
        with patient(settings) as daemon, monkeypatch.context() as patched:
            daemon.run()
            publisher, store = daemon.publisher, daemon.components.store
            first, *_, last = store.names()

            def roll_back() -> None:
                publisher.withdraw_after(int(first))
                publisher.notify(store.folder / first)

            roll_back()
            daemon.wait()
            targets = publisher._targets
            owner: Any = targets.replicas if step == "fault_of_loading" else targets.folder
            patched.setattr(owner, step, _once(roll_back, getattr(owner, step)))
            written: list[Publication] = []
            write = Publication.write

            def noted(self: Publication, *args: Any) -> Any:
                written.append(self)
                return write(self, *args)

            patched.setattr(Publication, "write", noted)
            publisher.notify(store.folder / last)
            serve_until(publisher, lambda: bool(written) and written[-1].snapshot == first)
            assert [(publication.snapshot, publication.adapters) for publication in written] == [(first, ())]


def test_a_rollback_is_remembered_until_its_versions_are_withdrawn(
    make: Callable[..., Settings], tmp_path: Path
) -> None:
    """The process ended before it could withdraw; the next one is past the undone steps again."""
    settings = make(stream("animals", per_task=110), **SNAPSHOTS, **publishing(tmp_path))
    with patient(settings) as daemon:
        daemon.run()
    [undone] = published(tmp_path).adapters
    with opened(settings) as components:
        assert components.adapter_publisher is not None
        components.adapter_publisher.withdraw_after(1)
    with opened(settings) as components, capture_logs() as logs:
        daemon_of(components).run()
    assert [row["version"] for row in logs if row["event"] == Event.VERSION_WITHDRAWN] == [undone]
    [again] = published(tmp_path).adapters
    assert re.fullmatch(rf"{re.escape(undone)}r\d+", again), "under a name that was never used"
    with opened(settings) as components, capture_logs() as logs:
        daemon_of(components).run()
    assert not [row for row in logs if row["event"] == Event.VERSION_WITHDRAWN], "it was withdrawn already"


def test_a_new_run_replaces_what_the_old_one_published(make: Callable[..., Settings], tmp_path: Path) -> None:
    """Its regime 1 is another one: nothing of the old run stays on the replica, and no name is used twice."""
    with replicas(1) as [stub]:
        with opened(make(stream("animals", per_task=110), **publishing(tmp_path, [stub]))) as components:
            daemon_of(components).run()
        before = published(tmp_path)
        settings = make(stream("cities", per_task=110), **publishing(tmp_path, [stub]))
        with opened(settings, fresh=True) as components:
            daemon_of(components).run()
            after = published(tmp_path)
            assert components.adapter_publisher is not None
            serve_until(components.adapter_publisher, lambda: tuple(stub.loaded) == after.adapters)
    assert after.run != before.run
    assert after.sequence > before.sequence
    assert len(after.adapters) == 1
    assert not set(before.adapters) & set(after.adapters)


def test_a_folder_has_one_daemon(make: Callable[..., Settings], tmp_path: Path) -> None:
    """A second one is refused while the first runs, by its process, and afterwards too; nothing is changed by it."""
    lines = stream("animals", per_task=30)
    with opened(make(lines, "first", **publishing(tmp_path))) as components:
        daemon_of(components).run()
        with pytest.raises(StateLockedError, match=rf"published must be used by one daemon .* process {os.getpid()}:"):
            Components(make(lines, "second", **publishing(tmp_path)))
    before = published(tmp_path)
    for fresh in (False, True):
        with pytest.raises(ConfigError, match=rf"one of run {before.run[:6]}.* set publish\.folder to another"):
            Components(make(lines, "second", **publishing(tmp_path)), fresh=fresh)
    assert published(tmp_path) == before
    (tmp_path / "published" / "publication.json").unlink()
    with opened(make(lines, "second", **publishing(tmp_path))) as components:
        daemon_of(components).run()
    assert published(tmp_path).run != before.run


def test_two_daemons_share_a_server(make: Callable[..., Settings], tmp_path: Path) -> None:
    """With a folder each and the same names: a server has the versions of both, each with its own weights."""
    with replicas(1) as [stub]:
        sections = [publishing(tmp_path / name, [stub]) for name in ("a", "b")]
        settings = [
            make(stream(task, per_task=110), name, **section)
            for task, name, section in zip(("animals", "cities"), "ab", sections, strict=True)
        ]
        with opened(settings[0]) as first, opened(settings[1]) as second, capture_logs() as logs:
            for components in (first, second):
                daemon_of(components).run()
            versions = [published(tmp_path / name).adapters for name in ("a", "b")]
            for components in (first, second, first):
                publisher = components.adapter_publisher
                assert publisher is not None
                serve_until(publisher, lambda: set(stub.loaded) == {*versions[0], *versions[1]})
        assert not [row for row in logs if row["event"] == Event.REPLICA_VERSIONS_VANISHED]
        for name, [version] in zip("ab", versions, strict=True):
            written = load_file(tmp_path / name / "published" / "adapters" / version / WEIGHTS)
            assert all(np.array_equal(stub.loaded[version][key], tensor) for key, tensor in written.items())


def test_what_cannot_be_published_is_refused_before_anything_is_loaded(
    make: Callable[..., Settings], tmp_path: Path
) -> None:
    """Also a backbone with the name of what is published. The message says what was found and what to do."""
    sections: tuple[tuple[dict[str, Any], str], ...] = (
        ({"adapter": {"preset": "cp-moe", "num_heads": 1}}, "expected a preset whose regimes are plain LoRAs"),
        ({"adapter": {"preset": "streamlearn-routed", "num_heads": 4}}, "with 2 experts per head"),
        ({"holdout": {"every_records": 0}}, "needs hold-out records"),
        ({"holdout": {"every_records": 10, "records_per_regime": 4}}, "at most holdout.records_per_regime"),
        (publishing(tmp_path, base_model="streamlearn-regime-3@184"), "base_model must differ .* found streamlearn-"),
        (
            publishing(tmp_path, vllm={"replicas": ["http://127.0.0.1:1"], "token_file": tmp_path / "k"}),
            "k: the token cannot be",
        ),
    )
    for changes, message in sections:
        with pytest.raises(ConfigError, match=message):
            Components(make(stream("animals"), **{**publishing(tmp_path), **changes}))
        assert not (tmp_path / "published").exists()


def test_a_step_is_noted_until_it_is_removed(tmp_path: Path) -> None:
    """A new run forgets it: its steps are others. Versions of an unknown step cannot be withdrawn."""
    file = RollbackFile(tmp_path)
    assert file.read() == math.inf
    for forget in (file.remove, lambda: forget_run(tmp_path)):
        file.write(20)
        file.write(10)
        assert RollbackFile(tmp_path).read() == 10
        forget()
        assert file.read() == math.inf
    (tmp_path / ROLLBACK).write_text("ten")
    with pytest.raises(PublicationError, match=ROLLBACK):
        file.read()


def _once(action: Callable[[], None], then: Callable[..., Any]) -> Callable[..., Any]:
    """A function that acts before its first call of another."""
    actions = [action]

    def call(*args: Any) -> Any:
        if actions:
            actions.pop()()
        return then(*args)

    return call
