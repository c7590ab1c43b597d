"""vLLM and SGLang servers that load and unload adapters while they run.

All are asked concurrently, so that one that hangs delays no other. The threads are daemons: they never keep the
process from ending.

A server lists each adapter with the path that it was loaded from (`root`). One with the name of a published version
and another path has other weights: it is replaced. What other programs loaded from other folders is left alone.
"""

import os
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

import httpx2

from streamlearn.errors import StreamlearnError
from streamlearn.events import Event, get_logger
from streamlearn.publish.servers import VLLM, kind_of
from streamlearn.status import ReplicaStatus

ASK_S = 5.0
"""Maximum time for a request that needs no weights."""

_MISSING = ("No adapter found", "Repo id must")
"""How vLLM and SGLang say that a folder is not there; the latter then looks for it on the hub."""

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
        self._kind = VLLM
        """As of the newest `loaded`, which is asked before anything is loaded."""
        self.own: dict[str, str | None] = {}
        """Adapters that this process loaded, by name, with the path that the server listed then."""
        self.reported: set[str] = set()
        """Those that vanished from the server and were logged."""

    def loaded(self) -> dict[str, str | None]:
        """Return the path of every model, the backbone and the loaded adapters, by name; None where none is listed.

        Raises:
            ReplicaUnreachableError: it does not answer.
            ReplicaRefusedError: its answer is not in the form of OpenAI's API.
        """
        answer = self._request("GET", "/v1/models", timeout_s=ASK_S)
        try:
            models = answer.json()["data"]
            self._kind = kind_of(models)
            return {
                str(model["id"]): None if model.get("root") == model["id"] else model.get("root") for model in models
            }
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ReplicaRefusedError(f"{self.url}/v1/models: expected a list of models, found {error!r}") from error

    def load(self, name: str, folder: str) -> None:
        """Load an adapter from a folder that the server sees; returns once it is loaded.

        Raises:
            ReplicaUnreachableError: it does not answer.
            ReplicaRefusedError: it cannot load the adapter.
        """
        path = self._kind.adapters.format(action="load")
        self._request("POST", path, {"lora_name": name, "lora_path": folder}, folder=folder)
        self.own[name] = self.loaded().get(name)

    def unload(self, name: str) -> None:
        """Unload an adapter. Raises like `load`."""
        self._request("POST", self._kind.adapters.format(action="unload"), {"lora_name": name})
        self.own.pop(name, None)

    def close(self) -> None:
        """Close its connections."""
        self._client.close()

    def _request(
        self, method: str, path: str, body: Any = None, *, timeout_s: float | None = None, folder: str = ""
    ) -> httpx2.Response:
        try:
            answer = self._client.request(method, path, json=body, timeout=timeout_s or self._timeout_s)
        except httpx2.HTTPError as error:
            raise ReplicaUnreachableError(f"{self.url}: no answer ({type(error).__name__}: {error})") from error
        if answer.status_code >= 500:
            raise ReplicaUnreachableError(f"{self.url}{path}: {answer.status_code} {answer.text[:200]}")
        if answer.is_error:
            raise ReplicaRefusedError(f"{self.url}{path}: {answer.status_code} {_message(answer, folder)}")
        return answer


def _message(answer: httpx2.Response, folder: str) -> str:
    """The server's own words, with advice on the most frequent ones; `folder` is what it should load, if anything."""
    text = answer.text[:500]
    is_missing = any(words in text for words in _MISSING)
    if is_missing and folder and Path(folder).exists():
        return (
            f"{text}; it exists on this machine: let the server's user read it and enter every folder above it; for a "
            "server on another machine set publish.vllm.folder to the path of publish.folder there"
        )
    if is_missing:
        return f"{text}; the server must see publish.folder: set publish.vllm.folder to its path there"
    if answer.status_code == httpx2.codes.NOT_FOUND:
        return f"{text}; start the server with VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 and --enable-lora"
    if "max_lora_rank" in text or "rank" in text:
        return f"{text}; start the server with --max-lora-rank of at least the adapters' rank"
    return text


class ReplicaSet:
    """Replicas that should have the same adapters loaded. Only the publisher's thread calls it."""

    def __init__(self, replicas: Sequence[Replica], folder: str, own_name: Callable[[str], object]) -> None:
        """Build the set.

        Args:
            replicas: The servers.
            folder: Folder of the versions as the servers see it.
            own_name: Whether a name is one of this run's versions; asked about servers that list no paths.
        """
        self._replicas = replicas
        self._folder = folder
        self._own_name = own_name
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
        """Load new versions: what a server has under such a name, and this process did not load, is something else."""
        try:
            loaded = replica.loaded()
            for name in names:
                if name not in replica.own or not self._is_published(replica, name, loaded):
                    self._replace(replica, name, loaded)
        except (ReplicaUnreachableError, ReplicaRefusedError) as error:
            return error
        return None

    def _reconcile(self, replica: Replica, wanted: Collection[str], draining: Collection[str]) -> ReplicaStatus:
        served: set[str] = set()
        try:
            loaded = replica.loaded()
            _report_vanished(replica, wanted, loaded)
            served = {name for name in wanted if self._is_published(replica, name, loaded)}
            for name in sorted(set(wanted) - served):
                self._replace(replica, name, loaded)
                served.add(name)
            for name in sorted(loaded.keys() - {*wanted, *draining}):
                if self._is_own(replica, name, loaded[name]):
                    replica.unload(name)
        except ReplicaUnreachableError as error:
            replica.own.clear()  # it may have died, and forgotten everything
            return ReplicaStatus(replica.url, False, 0, len(wanted), str(error))
        except ReplicaRefusedError as error:
            return ReplicaStatus(replica.url, True, len(served), len(wanted), str(error))
        return ReplicaStatus(replica.url, True, len(wanted), len(wanted))

    def _is_published(self, replica: Replica, name: str, loaded: Mapping[str, str | None]) -> bool:
        """Whether a server has a version from its published folder."""
        if name not in loaded or name in replica.own:
            return name in loaded and replica.own[name] == loaded[name]
        root = loaded[name]
        return root is None or self._is_path(root, name)

    def _is_own(self, replica: Replica, name: str, root: str | None) -> bool:
        """Whether an adapter is a version from the published folder, whichever process loaded it."""
        if name in replica.own:
            return True
        return bool(self._own_name(name)) if root is None else self._is_path(root, name)

    def _is_path(self, root: str, name: str) -> bool:
        """Whether this is the path of a version of this name."""
        return os.path.realpath(root) == os.path.realpath(f"{self._folder}/{name}")

    def _replace(self, replica: Replica, name: str, loaded: Mapping[str, str | None]) -> None:
        """Load a version, in place of another adapter of its name."""
        folder = f"{self._folder}/{name}"
        if name in loaded:
            _log.warning(Event.REPLICA_ADAPTER_REPLACED, url=replica.url, version=name, found=loaded[name], root=folder)
            replica.unload(name)
        replica.load(name, folder)


def _report_vanished(replica: Replica, wanted: Collection[str], loaded: Collection[str]) -> None:
    """Log published versions that a server no longer has although nothing here unloaded them, each once."""
    vanished = replica.own.keys() - set(loaded)
    for name in vanished:
        del replica.own[name]
    if new := sorted(vanished & set(wanted) - replica.reported):
        replica.reported.update(new)
        _log.warning(
            Event.REPLICA_VERSIONS_VANISHED,
            url=replica.url,
            versions=new,
            hint="the server was restarted, or another program unloads adapters there; they are loaded again",
        )


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
