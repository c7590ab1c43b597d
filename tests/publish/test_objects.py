"""A published folder in an object store, against a real S3 server."""

import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
from structlog.testing import capture_logs

from streamlearn.errors import ConfigError, PublicationError
from streamlearn.events import Event
from streamlearn.publish import publisher as adapter_publisher
from streamlearn.publish.folder import PublicationFiles
from streamlearn.publish.objects import ObjectStore
from streamlearn.publish.open import own_folder
from streamlearn.publish.publication import FILE, Publication
from streamlearn.settings import Settings
from streamlearn.snapshot.parts import SnapshotInfo
from tests.daemon.test_daemon import daemon_of, opened
from tests.gateway.kit import ask, metric, prompts_of_each_task, ready_gateway, wait_until
from tests.gateway.sample_publication import publish_sample, served_models
from tests.gateway.stub_upstream import StubUpstream
from tests.learners import differences
from tests.publish.s3_server import KEY, S3Server, s3_server
from tests.publish.stub_replica import replicas
from tests.publish.test_folder import BASE
from tests.publish.test_open import publication
from tests.publish.test_publisher import HOLDOUT, SNAPSHOTS, PatientDaemon, patient, serve_until
from tests.regimes.conftest import backbone, make
from tests.regimes.shifting_streams import run, stream, tensors_of

__all__ = ["backbone", "make"]

RUN = "r"
"""Of `publication`."""
KILLED = """
import os, signal, sys
from pathlib import Path
from streamlearn.publish.objects import ObjectStore
url, folder, survived = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
store, done = ObjectStore(url), []
for name in ("put_file", "pipe_file", "rm"):
    def write(*args, _write=getattr(store._client, name), **options):
        if len(done) == survived:
            os.kill(os.getpid(), signal.SIGKILL)
        done.append(args)
        return _write(*args, **options)
    setattr(store._client, name, write)
store.mirror(folder, ["r"])
"""


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    with s3_server() as server:
        yield server


@pytest.fixture
def url(server: S3Server) -> str:
    """A place that nobody uses."""
    return f"s3://bucket/{uuid.uuid4().hex}/adapters"


def objects(url: str) -> dict[str, bytes]:
    """What the store has, by path; no publisher works on it."""
    client, root = fsspec.core.url_to_fs(url, use_listings_cache=False)
    return {path[len(root) + 1 :]: client.cat_file(path) for path in client.find(root)}


def newest_of(url: str) -> Publication:
    """What `publication.json` in the store says; may be called while a publisher works on the store."""
    client, root = fsspec.core.url_to_fs(url, use_listings_cache=False)
    return Publication.from_bytes(client.cat_file(f"{root}/{FILE}"), where=url)


def assert_whole(url: str, folder: Path) -> int:
    """What `publication.json` names is there, as it is in the folder; returns its sequence."""
    held, newest = objects(url), newest_of(url)
    parts = [newest.routing, newest.tokenizer, *(f"adapters/{name}" for name in newest.adapters)]
    for part in parts:
        paths = [folder / part] if (folder / part).is_file() else list((folder / part).iterdir())
        assert paths
        for path in paths:
            assert held[str(path.relative_to(folder))] == path.read_bytes()
    return newest.sequence


def test_the_copy_has_what_the_folder_has_and_loses_what_it_lost(url: str, tmp_path: Path) -> None:
    """Objects of others beside it stay."""
    folder, store = PublicationFiles(tmp_path, BASE), ObjectStore(url)
    client, root = fsspec.core.url_to_fs(url)
    client.pipe_file(f"{root}/adapters/another/adapter_config.json", b"{}")
    for sequence in (1, 2, 3):
        newest = publication(folder, sequence, f"s-regime-1@{sequence}-5d3c1f")
        store.mirror(tmp_path, [RUN])
        assert assert_whole(url, tmp_path) == sequence
        folder.prune(newest.adapters, [newest.routing])
    versions = {path.split("/")[1] for path in objects(url) if path.startswith("adapters/")}
    assert versions == {"another", "s-regime-1@2-5d3c1f", "s-regime-1@3-5d3c1f"}
    assert not [path for path in objects(url) if "staging" in path or path.endswith("lock")]


@pytest.mark.parametrize("survived", [0, 3, 5, 6, 7, 8])
def test_a_publisher_that_is_killed_leaves_a_whole_publication(survived: int, url: str, tmp_path: Path) -> None:
    """Between any two requests: the index is never ahead of its files. The next process completes the copy."""
    folder, store = PublicationFiles(tmp_path / "own", BASE), ObjectStore(url)
    publication(folder, 1, "s-regime-1@1-5d3c1f")
    store.mirror(folder.folder, [RUN])
    shutil.copytree(folder.folder, tmp_path / "first")
    newest = publication(folder, 2, "s-regime-1@2-5d3c1f")
    folder.prune(newest.adapters, [newest.routing])
    killed = subprocess.run([sys.executable, "-c", KILLED, url, str(folder.folder), str(survived)], check=False)
    assert killed.returncode == (0 if survived == 8 else -signal.SIGKILL)  # 6 files, the index, and a deletion
    assert assert_whole(url, tmp_path / "first" if survived < 7 else folder.folder) == (1 if survived < 7 else 2)
    store.mirror(folder.folder, [RUN])
    assert assert_whole(url, folder.folder) == 2
    assert not [path for path in objects(url) if "@1-" in path]


def test_a_place_of_another_run_is_refused(url: str, tmp_path: Path, make: Callable[..., Settings]) -> None:
    """At the start with exit code 78, and by the publisher, if the store did not answer then; nothing is changed."""
    publication(PublicationFiles(tmp_path / "other", BASE), 1, "s-regime-1@1-5d3c1f")
    ObjectStore(url).mirror(tmp_path / "other", [RUN])
    before = objects(url)
    settings = make(stream("animals"), publish={"folder": url}, holdout=HOLDOUT)
    with (
        pytest.raises(
            ConfigError, match=r"publish\.folder s3://.*found one of run r, .* set publish\.folder"
        ) as refused,
        own_folder(settings),
    ):
        pass
    assert refused.value.exit_code == 78
    publication(PublicationFiles(tmp_path / "own", BASE), 1, "s-regime-1@1-77aa01")
    with pytest.raises(PublicationError, match=r"must be this daemon's, found one of run r"):
        ObjectStore(url).mirror(tmp_path / "own", ["77aa01"])
    assert objects(url) == before


def test_of_two_daemons_that_begin_at_once_one_publishes(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither finds a publication; the store refuses the second."""
    publication(PublicationFiles(tmp_path, BASE), 1, "s-regime-1@1-5d3c1f")
    second = ObjectStore(url)
    ObjectStore(url).mirror(tmp_path, [RUN])
    before = objects(url)[FILE]
    monkeypatch.setattr(second, "_newest", lambda: None)
    (tmp_path / FILE).write_bytes(before.replace(b'"r"', b'"s"'))
    with pytest.raises(PublicationError, match="FileExistsError"):
        second.mirror(tmp_path, ["s"])
    assert objects(url)[FILE] == before


class UnreliableStore(PatientDaemon):
    """The store is down from the fifth snapshot to the sixth."""

    server: S3Server
    faults: list[str | None]

    def save(self) -> SnapshotInfo:
        if len(self.outcomes) == 4:
            self.server.stop()
        elif len(self.outcomes) == 6:
            self.server.start()
        info = super().save()
        self.faults.append(self.publisher.status.fault)
        return info


def test_learning_goes_on_while_the_store_is_down_and_the_publication_catches_up(
    server: S3Server, url: str, make: Callable[..., Settings], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not a bit of what is learned differs. The fault is in the status, and in the log once."""
    monkeypatch.setattr(adapter_publisher, "RETRY_S", 0.05)
    lines = stream("animals", "sums", per_task=80)
    sections: dict[str, Any] = {"snapshot": {"keep": 50, "every_records": 20}}
    quiet, _ = run(make(lines, "quiet", holdout=HOLDOUT, **sections))
    settings = make(lines, "publishing", publish={"folder": url}, holdout=HOLDOUT, **sections)
    with capture_logs() as logs, opened(settings) as components:
        daemon = UnreliableStore(components)
        daemon.server, daemon.faults = server, []
        daemon.run()
        publisher = daemon.publisher
        serve_until(publisher, lambda: publisher.status.fault is None and publisher.is_idle and publisher._is_mirrored)
        assert not differences(quiet, tensors_of(components))
        newest = components.state.last_snapshot
    down = [fault for fault in daemon.faults if fault is not None]
    assert len(daemon.faults) > len(down) > 1
    assert f"{url}: expected a store that answers and allows it, found" in down[0]
    warned = [log for log in logs if log["event"] == Event.PUBLICATION_FAILED]
    assert [log["fault"] for log in warned] == list(dict.fromkeys(down))
    assert assert_whole(url, settings.state / "published") > 0
    held = newest_of(url)
    assert newest is not None
    assert held.snapshot == newest.name
    assert held.adapters
    assert not [log for log in logs if KEY in str(log)]


def test_replicas_keep_what_the_store_names_until_it_has_the_next(
    server: S3Server, url: str, make: Callable[..., Settings]
) -> None:
    """Gateways send requests there. The version is withdrawn while the store is down."""
    with replicas(1) as [stub]:
        vllm = {"replicas": [stub.url], "interval_s": 0.02, "drain_s": 0.05}
        sections: dict[str, Any] = {"publish": {"folder": url, "vllm": vllm}, "holdout": HOLDOUT}
        settings = make(stream("animals", per_task=110), **SNAPSHOTS, **sections)
        with patient(settings) as daemon:
            daemon.run()
            publisher, early = daemon.publisher, daemon.components.store.names()[0]
            own = settings.state / "published"
            [undone] = Publication.read(own).adapters
            server.stop()
            publisher.withdraw_after(int(early))
            publisher.notify(daemon.components.store.folder / early)
            serve_until(publisher, lambda: Publication.read(own).adapters == ())
            before = publisher._targets.replicas.status
            serve_until(publisher, lambda: publisher._targets.replicas.status is not before)
            time.sleep(10 * vllm["drain_s"])  # type: ignore[operator]
            assert undone in stub.loaded
            server.start()
            serve_until(publisher, lambda: undone not in stub.loaded)
            assert newest_of(url).adapters == ()


def test_a_process_that_ended_before_the_store_had_its_publication_is_followed_by_one_that_copies_it(
    url: str, make: Callable[..., Settings], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a new snapshot."""
    settings = make(stream("animals"), publish={"folder": url}, holdout=HOLDOUT)
    with monkeypatch.context() as patch, opened(settings) as components:
        patch.setattr(ObjectStore, "mirror", lambda *_: None)
        daemon_of(components).run()
    assert FILE not in objects(url)
    with opened(settings) as components:
        daemon_of(components).run()
    assert assert_whole(url, settings.state / "published") >= 0


def test_a_gateway_reads_the_store_and_routes(server: S3Server, url: str, tmp_path: Path) -> None:
    """It takes up the next publication, and keeps the one in use while the store is down."""
    store = ObjectStore(url)
    first = publish_sample(tmp_path)
    runs = [first.run]
    store.mirror(tmp_path, runs)
    with StubUpstream(served_models(first)) as upstream, ready_gateway(url, upstream) as client:
        answers = [ask(client, prompt).headers["x-streamlearn-model"] for prompt in prompts_of_each_task()]
        assert answers == list(first.adapters)
        second = publish_sample(tmp_path, 205, sequence=2)
        upstream.models |= served_models(second)
        store.mirror(tmp_path, runs)
        wait_until(lambda: metric(client, "publication_sequence") == 2, "the second publication")
        server.stop()
        wait_until(lambda: metric(client, "publication_refusals_total") == 1, "the fault")
        assert ask(client, prompts_of_each_task()[0]).headers["x-streamlearn-model"] == second.adapters[0]
        server.start()
        third = publish_sample(tmp_path, 226, sequence=3)
        upstream.models |= served_models(third)
        store.mirror(tmp_path, runs)
        wait_until(lambda: metric(client, "publication_sequence") == 3, "the third publication")


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("nosuch://bucket/a", "expected a scheme such as s3, found 'nosuch'"),
        ("gs://bucket/a", r"pip install 'streamlearn\[objects\]' for s3://\), found: .*gcsfs"),
    ],
)
def test_what_cannot_be_used_is_said_with_what_to_install(url: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ObjectStore(url)


def test_no_fault_shows_a_key(server: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bucket that does not exist, and a server whose address holds a password."""
    with pytest.raises(PublicationError, match="bucket does not exist") as missing:
        ObjectStore("s3://none/a").check()
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://me:{KEY}@127.0.0.1:9")
    fsspec.get_filesystem_class("s3").clear_instance_cache()
    with pytest.raises(PublicationError, match="found HTTPClientError") as unreachable:
        ObjectStore("s3://bucket/a").check()
    fsspec.get_filesystem_class("s3").clear_instance_cache()
    assert KEY not in f"{missing.value} {unreachable.value}"
