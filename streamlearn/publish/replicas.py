"""vLLM servers that load and unload adapters while they run.

All are asked concurrently, so that one that hangs delays no other. The threads are daemons: they never keep the
process from ending.
"""

import re
import threading
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

import httpx2

from streamlearn.errors import StreamlearnError
from streamlearn.events import Event, get_logger
from streamlearn.status import ReplicaStatus

ASK_S = 5.0
"""Maximum time for a request that needs no weights."""

_log = get_logger("publish")

Answer = TypeVar("Answer")


class ReplicaUnreachableError(StreamlearnError):
    """The server does not answer; the publisher retries."""


class ReplicaRefusedError(StreamlearnError):
    """The server refuses; the message is its own."""


class Replica:
    """A client of one server. Every method blocks until the server answers, and may be called from any one thread."""

    def __init__(self, url: str, *, key: str | None, timeout_s: float) -> None:
        self.url = url
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        self._timeout_s = timeout_s
        # A proxy named in the environment must not receive the key.
        self._client = httpx2.Client(base_url=url, headers=headers, trust_env=False)

    def loaded(self) -> frozenset[str]:
        """Names of all models: the backbone and the loaded adapters.

        Raises:
            ReplicaUnreachableError: it does not answer.
            ReplicaRefusedError: its answer is not in the form of OpenAI's API.
        """
        answer = self._request("GET", "/v1/models", timeout_s=ASK_S)
        try:
            return frozenset(str(model["id"]) for model in answer.json()["data"])
        except (ValueError, KeyError, TypeError) as error:
            raise ReplicaRefusedError(f"{self.url}/v1/models: expected a list of models, found {error!r}") from error

    def load(self, name: str, folder: str) -> None:
        """Load an adapter from a folder that the server sees; returns once it is loaded.

        Raises:
            ReplicaUnreachableError: it does not answer.
            ReplicaRefusedError: it cannot load the adapter.
        """
        self._request("POST", "/v1/load_lora_adapter", {"lora_name": name, "lora_path": folder})

    def unload(self, name: str) -> None:
        """Unload an adapter. Raises like `load`."""
        self._request("POST", "/v1/unload_lora_adapter", {"lora_name": name})

    def close(self) -> None:
        """Close its connections."""
        self._client.close()

    def _request(self, method: str, path: str, body: Any = None, *, timeout_s: float | None = None) -> httpx2.Response:
        try:
            answer = self._client.request(method, path, json=body, timeout=timeout_s or self._timeout_s)
        except httpx2.HTTPError as error:
            raise ReplicaUnreachableError(f"{self.url}: no answer ({type(error).__name__}: {error})") from error
        if answer.status_code >= 500:
            raise ReplicaUnreachableError(f"{self.url}{path}: {answer.status_code} {answer.text[:200]}")
        if answer.is_error:
            raise ReplicaRefusedError(f"{self.url}{path}: {answer.status_code} {_message(answer)}")
        return answer


def _message(answer: httpx2.Response) -> str:
    """The server's own words, with advice on the most frequent ones."""
    text = answer.text[:500]
    if "No adapter found" in text:
        return f"{text}; the server must see publish.folder: set publish.vllm.folder to its path there"
    if answer.status_code == httpx2.codes.NOT_FOUND:
        return f"{text}; start the server with VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 and --enable-lora"
    if "max_lora_rank" in text or "rank" in text:
        return f"{text}; start the server with --max-lora-rank of at least the adapters' rank"
    return text


class ReplicaSet:
    """Replicas that should have the same adapters loaded. Only the publisher's thread calls it."""

    def __init__(self, replicas: Sequence[Replica], folder_of: Callable[[str], str], name: str) -> None:
        """Build the set.

        Args:
            replicas: The servers.
            folder_of: Path of a version's folder as the servers see it.
            name: First part of the names of our versions, NAME-regime-NUMBER@STEP; other adapters are left alone.
        """
        self._replicas = replicas
        self._folder_of = folder_of
        self._our_name = re.compile(rf"{re.escape(name)}-regime-[1-9][0-9]*@[0-9A-Za-z]+")
        self.status: tuple[ReplicaStatus, ...] = tuple(ReplicaStatus(replica.url, False, 0, 0) for replica in replicas)

    def fault_of_loading(self, names: Collection[str]) -> str | None:
        """Load versions on every replica that answers.

        Returns why requests cannot be sent to them: no replica answers, or one refuses. None if they can, or without
        replicas.
        """
        if not (names and self._replicas):
            return None
        faults = _concurrently(lambda replica: self._load(replica, names), self._replicas)
        refused = [str(fault) for fault in faults if isinstance(fault, ReplicaRefusedError)]
        if refused:
            return refused[0]
        return None if None in faults else f"no replica answers; {faults[0]}"

    def reconcile(self, wanted: Collection[str], draining: Collection[str] = ()) -> None:
        """Have each replica load the wanted versions, and unload others of ours unless they are draining."""
        before = self.status
        self.status = tuple(_concurrently(lambda replica: self._reconcile(replica, wanted, draining), self._replicas))
        for old, new in zip(before, self.status, strict=True):
            if new.is_up and not old.is_up:
                _log.info(Event.REPLICA_REACHED, url=new.url, loaded=new.loaded, wanted=new.wanted)
            elif old.is_up and not new.is_up:
                _log.warning(Event.REPLICA_LOST, url=new.url, fault=new.fault)
            elif new.fault is not None and new.fault != old.fault:
                _log.warning(Event.REPLICA_REFUSED, url=new.url, fault=new.fault)

    def close(self) -> None:
        """Close all connections, without waiting for answers."""
        for replica in self._replicas:
            replica.close()

    def _load(self, replica: Replica, names: Collection[str]) -> StreamlearnError | None:
        try:
            loaded = replica.loaded()
            for name in names:
                if name not in loaded:
                    replica.load(name, self._folder_of(name))
        except (ReplicaUnreachableError, ReplicaRefusedError) as error:
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
        except ReplicaUnreachableError as error:
            return ReplicaStatus(replica.url, False, 0, len(wanted), str(error))
        except ReplicaRefusedError as error:
            return ReplicaStatus(replica.url, True, len(loaded & set(wanted)), len(wanted), str(error))
        return ReplicaStatus(replica.url, True, len(wanted), len(wanted))


def _concurrently(ask: Callable[[Replica], Answer], replicas: Sequence[Replica]) -> list[Answer]:
    """Ask each replica in its own thread, and wait for all answers."""
    answers: list[Future[Answer]] = [Future() for _ in replicas]
    for replica, answer in zip(replicas, answers, strict=True):
        threading.Thread(target=_answer, args=(ask, replica, answer), name="publish-replica", daemon=True).start()
    return [answer.result() for answer in answers]


def _answer(ask: Callable[[Replica], Answer], replica: Replica, answer: Future[Answer]) -> None:
    try:
        answer.set_result(ask(replica))
    except Exception as error:  # noqa: BLE001 - raised by the thread that waits
        answer.set_exception(error)
