"""All replicas: each is asked on its own, side by side, so that one that hangs delays no other.

The threads are daemons: one that waits for a replica does not keep the process from ending.
"""

import re
import threading
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from typing import TypeVar

from streamlearn.errors import StreamlearnError
from streamlearn.events import Event, get_logger
from streamlearn.publish.replica import Replica, ReplicaAwayError, ReplicaRefusedError
from streamlearn.status.publication_status import ReplicaStatus

_log = get_logger("publish")

Answer = TypeVar("Answer")


class ReplicaSet:
    """Replicas that should have the same adapters loaded. Only the publisher's thread calls it."""

    def __init__(self, replicas: Sequence[Replica], folder_of: Callable[[str], str], name: str) -> None:
        """Build the set.

        Args:
            replicas: The servers.
            folder_of: Where they find the folder of a version.
            name: First part of the names of our versions, NAME-regime-NUMBER@STEP; other adapters on a server are left
                alone.
        """
        self._replicas = replicas
        self._folder_of = folder_of
        self._our_name = re.compile(rf"{re.escape(name)}-regime-[1-9][0-9]*@[0-9A-Za-z]+")
        self.status: tuple[ReplicaStatus, ...] = tuple(ReplicaStatus(each.url, False, 0, 0) for each in replicas)

    def fault_of_loading(self, names: Collection[str]) -> str | None:
        """Load versions on every replica that answers, in addition to what it has.

        Returns why requests cannot be sent to them: no replica answers, or one refuses. None if they can, or if there
        is no replica to load them.
        """
        if not (names and self._replicas):
            return None
        faults = _side_by_side(lambda replica: self._load(replica, names), self._replicas)
        refused = [str(fault) for fault in faults if isinstance(fault, ReplicaRefusedError)]
        if refused:
            return refused[0]
        return None if None in faults else f"no replica answers; {faults[0]}"

    def reconcile(self, wanted: Collection[str], draining: Collection[str] = ()) -> None:
        """Give each replica what it lacks of `wanted`, and unload what is ours and neither wanted nor draining."""
        before = self.status
        self.status = tuple(_side_by_side(lambda replica: self._reconcile(replica, wanted, draining), self._replicas))
        for old, new in zip(before, self.status, strict=True):
            if new.is_up and not old.is_up:
                _log.info(Event.REPLICA_REACHED, url=new.url, loaded=new.loaded, wanted=new.wanted)
            elif old.is_up and not new.is_up:
                _log.warning(Event.REPLICA_LOST, url=new.url, fault=new.fault)
            elif new.fault is not None and new.fault != old.fault:
                _log.warning(Event.REPLICA_REFUSED, url=new.url, fault=new.fault)

    def close(self) -> None:
        """Close all connections. A replica that is being asked is not waited for."""
        for replica in self._replicas:
            replica.close()

    def _load(self, replica: Replica, names: Collection[str]) -> StreamlearnError | None:
        try:
            loaded = replica.loaded()
            for name in names:
                if name not in loaded:
                    replica.load(name, self._folder_of(name))
        except (ReplicaAwayError, ReplicaRefusedError) as error:
            return error
        return None

    def _reconcile(self, replica: Replica, wanted: Collection[str], draining: Collection[str]) -> ReplicaStatus:
        loaded: frozenset[str] = frozenset()
        try:
            loaded = replica.loaded()
            for name in sorted(set(wanted) - loaded):
                replica.load(name, self._folder_of(name))
                loaded |= {name}
            for name in sorted(filter(self._our_name.fullmatch, loaded - {*wanted, *draining})):
                replica.unload(name)
        except ReplicaAwayError as error:
            return ReplicaStatus(replica.url, False, 0, len(wanted), str(error))
        except ReplicaRefusedError as error:
            return ReplicaStatus(replica.url, True, len(loaded & set(wanted)), len(wanted), str(error))
        return ReplicaStatus(replica.url, True, len(wanted), len(wanted))


def _side_by_side(ask: Callable[[Replica], Answer], replicas: Sequence[Replica]) -> list[Answer]:
    """Ask each replica in a thread of its own, and wait for all answers."""
    answers: list[Future[Answer]] = [Future() for _ in replicas]
    for replica, answer in zip(replicas, answers, strict=True):
        threading.Thread(target=_answer, args=(ask, replica, answer), name="publish-replica", daemon=True).start()
    return [answer.result() for answer in answers]


def _answer(ask: Callable[[Replica], Answer], replica: Replica, answer: Future[Answer]) -> None:
    try:
        answer.set_result(ask(replica))
    except Exception as error:  # noqa: BLE001 - it is raised where the answer is waited for
        answer.set_exception(error)
