"""Replicas get what they lack, one by one, and a replica that is away delays and spoils nothing."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from streamlearn.events import Event
from streamlearn.publish.replicas import Replica, ReplicaRefusedError, ReplicaSet
from tests.publish.stub_replica import StubReplica, replica_set, replicas

HANGING = """
import threading
from streamlearn.publish.replicas import Replica, ReplicaSet

asked = threading.Event()

class Hanging(Replica):
    def loaded(self):
        asked.set()
        threading.Event().wait()

fleet = ReplicaSet([Hanging("http://127.0.0.1:1", key=None, timeout_s=1.0)], "", bool)
threading.Thread(target=fleet.reconcile, args=([],), daemon=True).start()
asked.wait()
fleet.close()
"""


@pytest.fixture
def stubs() -> Iterator[list[StubReplica]]:
    with replicas(2) as running:
        yield running


@pytest.fixture
def fleet(stubs: list[StubReplica], tmp_path: Path) -> Iterator[ReplicaSet]:
    names = ("s-regime-1@10-5d3c1f", "s-regime-1@20-5d3c1f", "s-regime-2@20-5d3c1f")
    with replica_set(stubs, tmp_path, names) as built:
        yield built


def test_a_version_is_loaded_on_every_replica_before_it_may_be_used(
    fleet: ReplicaSet, stubs: list[StubReplica]
) -> None:
    """Loading returns when all have it; one that is loaded already is not loaded again."""
    assert fleet.fault_of_loading(["s-regime-1@10-5d3c1f"]) is None
    assert fleet.fault_of_loading(["s-regime-1@10-5d3c1f", "s-regime-2@20-5d3c1f"]) is None
    for stub in stubs:
        assert stub.calls == [("load", "s-regime-1@10-5d3c1f"), ("load", "s-regime-2@20-5d3c1f")]


def test_a_replica_that_is_away_gets_what_it_lacks_when_it_is_back(fleet: ReplicaSet, stubs: list[StubReplica]) -> None:
    """It died and forgot everything; the other one served on."""
    fleet.reconcile(["s-regime-1@10-5d3c1f"])
    stubs[1].stop()
    assert fleet.fault_of_loading(["s-regime-1@20-5d3c1f"]) is None
    with capture_logs() as logs:
        fleet.reconcile(["s-regime-1@20-5d3c1f", "s-regime-1@10-5d3c1f"])
    assert [row["event"] for row in logs] == [Event.REPLICA_LOST]
    assert [row.is_up for row in fleet.status] == [True, False]
    stubs[1].start()
    with capture_logs() as logs:
        fleet.reconcile(["s-regime-1@20-5d3c1f"])
    assert [row["event"] for row in logs] == [Event.REPLICA_REACHED]
    assert [set(stub.loaded) for stub in stubs] == [{"s-regime-1@20-5d3c1f"}] * 2
    assert [(row.loaded, row.wanted, row.fault) for row in fleet.status] == [(1, 1, None)] * 2


def test_what_is_replaced_stays_loaded_but_is_not_loaded_again(fleet: ReplicaSet, stubs: list[StubReplica]) -> None:
    """Requests that began with it may still come; a replica that forgot it has none of them."""
    stubs[0].loaded = {"s-regime-1@10-5d3c1f": {}}
    fleet.reconcile(["s-regime-1@20-5d3c1f"], ["s-regime-1@10-5d3c1f"])
    assert [set(stub.loaded) for stub in stubs] == [
        {"s-regime-1@10-5d3c1f", "s-regime-1@20-5d3c1f"},
        {"s-regime-1@20-5d3c1f"},
    ]
    assert [(row.loaded, row.wanted) for row in fleet.status] == [(1, 1)] * 2
    fleet.reconcile(["s-regime-1@20-5d3c1f"])
    assert [set(stub.loaded) for stub in stubs] == [{"s-regime-1@20-5d3c1f"}] * 2


def test_what_is_not_ours_is_left_alone(fleet: ReplicaSet, stubs: list[StubReplica]) -> None:
    """Ours is what was loaded from our folder, or has the name of a version of ours where a server lists no paths."""
    ours = {"s-regime-9@1-5d3c1f", "s-regime-10@184-5d3c1fr2"}
    theirs = {"their-own", "s-regime-9", "s-regime-9@1", "s-regime-9@1-77aa01", "x-s-regime-9@1-5d3c1f"}
    stubs[0].loaded = {name: {} for name in (*theirs, *ours)}
    stubs[1].loaded = dict(stubs[0].loaded)
    stubs[1].roots = {name: f"/elsewhere/{name}" for name in theirs}
    stubs[1].roots |= {name: f"{fleet._folder}/{name}" for name in ours}
    stubs[1].roots["their-own"] = f"{fleet._folder}/s-regime-9@1-5d3c1f"  # an operator's name for one of ours
    fleet.reconcile([])
    assert [set(stub.loaded) for stub in stubs] == [theirs] * 2


def test_a_name_is_answered_by_the_published_folder(
    fleet: ReplicaSet, stubs: list[StubReplica], tmp_path: Path
) -> None:
    """Another adapter of that name is replaced, whether it was there before or came later."""
    name = "s-regime-1@10-5d3c1f"
    stubs[0].loaded, stubs[0].roots = {name: {}}, {name: "/old/run"}
    stubs[1].loaded, stubs[1].roots = {name: {}}, {name: f"{tmp_path}/./{name}"}  # by an earlier process
    with capture_logs() as logs:
        fleet.reconcile([name])
    assert [(row["event"], row["url"], row["found"]) for row in logs if row["log_level"] == "warning"] == [
        (Event.REPLICA_ADAPTER_REPLACED, stubs[0].url, "/old/run")
    ]
    assert stubs[0].roots == {name: f"{tmp_path}/{name}"}
    assert stubs[1].calls == []
    stubs[0].roots[name] = "/other"
    fleet.reconcile([name])
    assert stubs[0].roots == {name: f"{tmp_path}/{name}"}


@pytest.mark.parametrize("lists_roots", [True, False])
def test_a_new_version_is_never_answered_by_what_was_there(
    fleet: ReplicaSet, stubs: list[StubReplica], tmp_path: Path, *, lists_roots: bool
) -> None:
    """Even from its very path: the folder may have been emptied, and the server has the old weights."""
    name = "s-regime-1@10-5d3c1f"
    stubs[0].lists_roots = lists_roots
    stubs[0].loaded, stubs[0].roots = {name: {}}, {name: f"{tmp_path}/{name}"}
    assert fleet.fault_of_loading([name]) is None
    assert stubs[0].calls == [("unload", name), ("load", name)]
    assert fleet.fault_of_loading([name]) is None
    assert len(stubs[0].calls) == 2, "a retry loads nothing again"


def test_versions_that_vanish_are_logged_once_and_loaded_again(fleet: ReplicaSet, stubs: list[StubReplica]) -> None:
    """Another program on the server unloads them."""
    name = "s-regime-1@10-5d3c1f"
    fleet.reconcile([name])
    with capture_logs() as logs:
        for _ in range(3):
            stubs[0].loaded, stubs[0].roots = {}, {}
            fleet.reconcile([name])
            assert set(stubs[0].loaded) == {name}
    assert [(row["event"], row["versions"]) for row in logs] == [(Event.REPLICA_VERSIONS_VANISHED, [name])]


def test_a_folder_that_only_its_owner_may_read_is_named(
    fleet: ReplicaSet, stubs: list[StubReplica], tmp_path: Path
) -> None:
    """It exists here, so a path is not what is missing."""
    stubs[0].refusal, stubs[0].refusal_status = "No adapter found for it", 404
    assert "let the server's user read it" in (fleet.fault_of_loading(["s-regime-1@10-5d3c1f"]) or "")


def test_a_refusal_is_reported_with_what_to_do(fleet: ReplicaSet, stubs: list[StubReplica]) -> None:
    """In the server's own words, then ours. A server answers 404 both without a folder and without the option."""
    for status, said, advice in (
        (400, "LoRA rank 32 is greater than max_lora_rank 16", "--max-lora-rank of at least the adapters' rank"),
        (404, "No adapter found for /srv/rank/s-regime-1@30-5d3c1f", "set publish.vllm.folder to its path there"),
        (404, "Not Found", "start the server with VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 and --enable-lora"),
    ):
        stubs[0].refusal, stubs[0].refusal_status = said, status
        fault = fleet.fault_of_loading(["s-regime-1@30-5d3c1f"]) or ""
        assert said in fault
        assert fault.endswith(advice)
    fleet.reconcile(["s-regime-1@10-5d3c1f"])
    assert [row.is_up for row in fleet.status] == [True, True]
    assert [row.fault is None for row in fleet.status] == [False, True]
    for stub in stubs:
        stub.stop()
    assert "no replica answers" in (fleet.fault_of_loading(["s-regime-1@20-5d3c1f"]) or "")


def test_a_replica_that_hangs_does_not_keep_the_process_from_ending() -> None:
    """The interpreter waits for no thread that waits for an answer."""
    subprocess.run([sys.executable, "-c", HANGING], check=True, timeout=60.0)


def test_a_wrong_key_is_refused_and_a_right_one_is_sent(stubs: list[StubReplica]) -> None:
    """The key travels as a bearer token."""
    stubs[0].key = "secret"
    with pytest.raises(ReplicaRefusedError, match="401"):
        Replica(stubs[0].url, key="other", timeout_s=5.0).loaded()
    assert Replica(stubs[0].url, key="secret", timeout_s=5.0).loaded() == {"base": None}
