"""A model server that loads and unloads adapters, and fails as it is told."""

import json
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

from safetensors.numpy import load_file, save_file

from streamlearn.publish.publication import version_pattern
from streamlearn.publish.replicas import Replica, ReplicaSet


class StubReplica:
    """The state behind one server."""

    def __init__(self) -> None:
        self.loaded: dict[str, dict[str, Any]] = {}
        self.roots: dict[str, str] = {}
        """Path that each was loaded from, by name."""
        self.lists_roots = True
        self.calls: list[tuple[str, str]] = []
        """Loads and unloads, in their order."""
        self.refusal: str | None = None
        """What it says to a load."""
        self.refusal_status = 400
        self.key: str | None = None
        self._server: ThreadingHTTPServer | None = None
        self.port = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Listen, on the same port as before if it was stopped."""
        handler = type("Handler", (_Handler,), {"replica": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", self.port), handler)
        self.port = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()

    def stop(self, *, forget: bool = True) -> None:
        """Stop listening; a server that dies forgets its adapters."""
        assert self._server is not None
        self._server.shutdown()
        self._server.server_close()
        self._server = None
        if forget:
            self.loaded, self.roots = {}, {}

    def answer(self, method: str, path: str, body: dict[str, str]) -> tuple[int, object]:
        if path == "/v1/models":
            roots = {"base": "base", **{name: self.roots.get(name) for name in self.loaded}}
            rows = [{"id": name, "root": root} if self.lists_roots else {"id": name} for name, root in roots.items()]
            return 200, {"object": "list", "data": rows}
        name = body["lora_name"]
        self.calls.append((path.removeprefix("/v1/").removesuffix("_lora_adapter"), name))
        if path == "/v1/load_lora_adapter":
            if self.refusal is not None:
                return self.refusal_status, {"error": self.refusal}
            assert name not in self.loaded, "vLLM refuses a name that is loaded"
            self.loaded[name] = load_file(Path(body["lora_path"]) / "adapter_model.safetensors")
            self.roots[name] = body["lora_path"]
            return 200, "Success"
        if path == "/v1/unload_lora_adapter":
            if name not in self.loaded:
                return 404, {"error": "not loaded"}
            del self.loaded[name]
            self.roots.pop(name, None)
            return 200, "Success"
        return 404, {"error": f"no {method} {path}"}


class _Handler(BaseHTTPRequestHandler):
    replica: ClassVar[StubReplica]

    def do_GET(self) -> None:
        self._answer("GET", {})

    def do_POST(self) -> None:
        self._answer("POST", json.loads(self.rfile.read(int(self.headers["content-length"]))))

    def _answer(self, method: str, body: dict[str, str]) -> None:
        if self.replica.key is not None and self.headers["authorization"] != f"Bearer {self.replica.key}":
            status, answer = 401, {"error": "unauthorized"}
        else:
            status, answer = self.replica.answer(method, self.path, body)  # type: ignore[assignment]
        data = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: Any) -> None:
        """Say nothing."""


@contextmanager
def replicas(number: int) -> Iterator[list[StubReplica]]:
    """Running servers."""
    stubs = [StubReplica() for _ in range(number)]
    for stub in stubs:
        stub.start()
    try:
        yield stubs
    finally:
        for stub in stubs:
            if stub._server is not None:
                stub.stop()


@contextmanager
def replica_set(stubs: Sequence[StubReplica], folder: Path, names: Iterable[str]) -> Iterator[ReplicaSet]:
    """The publisher's view of these servers, with a version of each name in a folder."""
    for name in names:
        (folder / name).mkdir()
        save_file({}, folder / name / "adapter_model.safetensors")
    clients = [Replica(stub.url, key=None, timeout_s=5.0) for stub in stubs]
    built = ReplicaSet(clients, str(folder), version_pattern("s", ["5d3c1f66"]).fullmatch)
    yield built
    built.close()
