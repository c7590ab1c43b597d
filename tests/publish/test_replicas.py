"""Replicas get what they lack, one by one, and a replica that is away delays and spoils nothing."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from safetensors.numpy import save_file
from structlog.testing import capture_logs

from streamlearn.events import Event
from streamlearn.publish.replicas import Replica, ReplicaRefusedError, ReplicaSet
from tests.publish.stub_replica import StubReplica, replicas

HANGING = """
import threading
from streamlearn.publish.replicas import Replica, ReplicaSet

asked = threading.Event()

class Hanging(Replica):
    def loaded(self):
        asked.set()
        threading.Event().wait()

fleet = ReplicaSet([Hanging("http://127.0.0.1:1", key=None, timeout_s=1.0)], str, "s")
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
    for name in ("s-regime-1@10", "s-regime-1@20", "s-regime-2@20"):
        (tmp_path / name).mkdir()
        save_file({}, tmp_path / name / "adapter_model.safetensors")
    clients = [Replica(stub.url, key=None, timeout_s=5.0) for stub in stubs]
    built = ReplicaSet(clients, lambda name: str(tmp_path / name), "s")
    yield built
    built.close()


def test_a_version_is_loaded_on_every_replica_before_it_may_be_used(
    fleet: ReplicaSet, stubs: list[StubReplica]
) -> None:
    """Loading returns when all have it; one that is loaded already is not loaded again."""
    assert fleet.fault_of_loading(["s-regime-1@10"]) is None
    assert fleet.fault_of_loading(["s-regime-1@10", "s-regime-2@20"]) is None
    for stub in stubs:
        assert stub.calls == [("load", "s-regime-1@10"), ("load", "s-regime-2@20")]


def test_a_replica_that_is_away_gets_what_it_lacks_when_it_is_back(fleet: ReplicaSet, stubs: list[StubReplica]) -> None:
    """It died and forgot everything; the other one served on."""
    fleet.reconcile(["s-regime-1@10"])
    stubs[1].stop()
    assert fleet.fault_of_loading(["s-regime-1@20"]) is None
    with capture_logs() as logs:
        fleet.reconcile(["s-regime-1@20", "s-regime-1@10"])
    assert [row["event"] for row in logs] == [Event.REPLICA_LOST]
    assert [row.is_up for row in fleet.status] == [True, False]
    stubs[1].start()
    with capture_logs() as logs:
        fleet.reconcile(["s-regime-1@20"])
    assert [row["event"] for row in logs] == [Event.REPLICA_REACHED]
    assert [set(stub.loaded) for stub in stubs] == [{"s-regime-1@20"}] * 2
    assert [(row.loaded, row.wanted, row.fault) for row in fleet.status] == [(1, 1, None)] * 2


def test_what_is_replaced_stays_loaded_but_is_not_loaded_again(fleet: ReplicaSet, stubs: list[StubReplica]) -> None:
    """Requests that began with it may still come; a replica that forgot it has none of them."""
    stubs[0].loaded = {"s-regime-1@10": {}}
    fleet.reconcile(["s-regime-1@20"], ["s-regime-1@10"])
    assert [set(stub.loaded) for stub in stubs] == [{"s-regime-1@10", "s-regime-1@20"}, {"s-regime-1@20"}]
    assert [(row.loaded, row.wanted) for row in fleet.status] == [(1, 1)] * 2
    fleet.reconcile(["s-regime-1@20"])
    assert [set(stub.loaded) for stub in stubs] == [{"s-regime-1@20"}] * 2


def test_what_is_not_ours_is_left_alone(fleet: ReplicaSet, stubs: list[StubReplica]) -> None:
    """Another adapter stays unless its name is that of a version; a version that nobody wants any more goes."""
    theirs = {"their-own", "s-regime-test", "s-regime-9", "s-regime-test@1", "x-s-regime-9@1"}
    stubs[0].loaded = {name: {} for name in (*theirs, "s-regime-9@1", "s-regime-10@184r2")}
    fleet.reconcile([])
    assert set(stubs[0].loaded) == theirs


def test_a_refusal_is_reported_with_what_to_do(fleet: ReplicaSet, stubs: list[StubReplica]) -> None:
    """In the server's own words, then ours. A server answers 404 both without a folder and without the option."""
    for status, said, advice in (
        (400, "LoRA rank 32 is greater than max_lora_rank 16", "--max-lora-rank of at least the adapters' rank"),
        (404, "No adapter found for /srv/rank/s-regime-1@10", "set publish.vllm.folder to its path there"),
        (404, "Not Found", "start the server with VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 and --enable-lora"),
    ):
        stubs[0].refusal, stubs[0].refusal_status = said, status
        fault = fleet.fault_of_loading(["s-regime-1@10"]) or ""
        assert said in fault
        assert fault.endswith(advice)
    fleet.reconcile(["s-regime-1@10"])
    assert [row.is_up for row in fleet.status] == [True, True]
    assert [row.fault is None for row in fleet.status] == [False, True]
    for stub in stubs:
        stub.stop()
    assert "no replica answers" in (fleet.fault_of_loading(["s-regime-1@20"]) or "")


def test_a_replica_that_hangs_does_not_keep_the_process_from_ending() -> None:
    """The interpreter waits for no thread that waits for an answer."""
    subprocess.run([sys.executable, "-c", HANGING], check=True, timeout=60.0)


def test_a_wrong_key_is_refused_and_a_right_one_is_sent(stubs: list[StubReplica]) -> None:
    """The key travels as a bearer token."""
    stubs[0].key = "secret"
    with pytest.raises(ReplicaRefusedError, match="401"):
        Replica(stubs[0].url, key="other", timeout_s=5.0).loaded()
    assert Replica(stubs[0].url, key="secret", timeout_s=5.0).loaded() == {"base"}
