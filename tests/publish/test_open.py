"""Publications as commits of a hub repository, through the hub's own client against a server of its API."""

import base64
import json
import os
import threading
from collections.abc import Iterator
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from streamlearn.backbone.lora import CONFIG, WEIGHTS
from streamlearn.errors import PublicationError
from streamlearn.publish.folder import PublicationFiles
from streamlearn.publish.open import upload_folder
from streamlearn.publish.publication import Publication, PublishedRegime
from streamlearn.settings import HubSettings
from tests.publish.test_folder import BASE, LORA, RUN, assert_shared, version


class StubHub:
    """The part of the hub's API that commits small files."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.commits: list[str] = []
        self.created: list[dict[str, Any]] = []
        self.tokens: set[str | None] = set()
        self.url = ""

    def answer(self, method: str, path: str, body: bytes) -> tuple[int, Any]:
        if path == "/api/repos/create":
            self.created.append(json.loads(body))
            return 200, {"url": f"{self.url}/owner/name", "id": "owner/name"}
        if "/preupload/" in path:
            names = [file["path"] for file in json.loads(body)["files"]]
            return 200, {"files": [{"path": name, "uploadMode": "regular", "shouldIgnore": False} for name in names]}
        if "/commit/" in path:
            for line in map(json.loads, body.splitlines()):
                value = line["value"]
                if line["key"] == "header":
                    self.commits.append(value["summary"])
                elif line["key"] == "file":
                    self.files[value["path"]] = base64.b64decode(value["content"])
                else:
                    del self.files[value["path"]]
            return 200, {"commitUrl": f"{self.url}/owner/name/commit/1", "commitOid": "1", "hookOutput": ""}
        siblings = [{"rfilename": name} for name in self.files]
        tree = [{"type": "file", "path": name, "size": 1, "oid": "1"} for name in self.files]
        return 200, tree if "/tree/" in path else {"id": "owner/name", "sha": "1", "siblings": siblings}


@pytest.fixture
def hub() -> Iterator[tuple[StubHub, str]]:
    stub = StubHub()

    class Handler(BaseHTTPRequestHandler):
        def _answer(self, method: str) -> None:
            stub.tokens.add(self.headers["authorization"])
            body = self.rfile.read(int(self.headers["content-length"] or 0))
            status, answer = stub.answer(method, self.path.partition("?")[0], body)
            data = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def do_GET(self) -> None:
            self._answer("GET")

        def do_POST(self) -> None:
            self._answer("POST")

        def log_message(self, *_: Any) -> None:
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    stub.url = f"http://127.0.0.1:{server.server_address[1]}"
    yield stub, stub.url
    server.shutdown()
    server.server_close()


def hub_settings(folder: Path) -> HubSettings:
    token = folder / "token"
    token.write_text("hf_secret")
    token.chmod(0o600)
    return HubSettings(repository="owner/name", token_file=token)


def publication(folder: PublicationFiles, sequence: int, adapter: str) -> Publication:
    """Write a publication with one regime."""
    folder.write_version(version(adapter), LORA, "a card")
    written = Publication(
        name="s",
        run="r",
        sequence=sequence,
        written_at=datetime.now(UTC),
        snapshot=f"{sequence:08d}",
        backbone="base",
        seed=0,
        max_known_rejected=0.01,
        routing=folder.write_routing(sequence, {"a": np.zeros(2)}),
        tokenizer=folder.write_tokenizer(lambda target: (target / "tokenizer.json").write_text("{}")),
        regimes=(PublishedRegime(slot=0, number=1, label=None, adapter=adapter),),
    )
    written.write(folder.folder)
    return written


@pytest.mark.parametrize("umask", [0o022, 0o027, 0o077])
def test_other_users_may_read_what_the_umask_allows(tmp_path: Path, umask: int) -> None:
    """Also where a library would write for the owner only: model servers and gateways run as users of their own."""
    before = os.umask(umask)
    try:
        folder = PublicationFiles(tmp_path / "published", BASE)
        publication(folder, 1, "s-regime-1@1-5d3c1f")
    finally:
        os.umask(before)
    assert {path.name for path in folder.path("s-regime-1@1-5d3c1f").iterdir()} > {WEIGHTS, CONFIG, "README.md"}
    assert_shared(tmp_path, umask)


def test_each_publication_is_one_commit_of_what_it_names(hub: tuple[StubHub, str], tmp_path: Path) -> None:
    """New versions come, those that it does not name go, and the files are those of the folder."""
    stub, url = hub
    settings, folder = hub_settings(tmp_path), PublicationFiles(tmp_path / "published", BASE)
    stub.files["README.md"] = b"the owner's own"
    upload_folder(settings, folder.folder, [RUN], publication(folder, 1, "s-regime-1@1-5d3c1f"), endpoint=url)
    assert "adapters/s-regime-1@1-5d3c1f/adapter_model.safetensors" in stub.files
    upload_folder(settings, folder.folder, [RUN], publication(folder, 2, "s-regime-1@2-5d3c1f"), endpoint=url)
    assert stub.commits == ["Publication 1, snapshot 00000001", "Publication 2, snapshot 00000002"]
    assert stub.created[0]["visibility"] == "private"
    assert stub.tokens == {"Bearer hf_secret"}
    here = {
        "publication.json",
        "routing/2.safetensors",
        *(f"adapters/s-regime-1@2-5d3c1f/{path.name}" for path in folder.path("s-regime-1@2-5d3c1f").iterdir()),
    }
    theirs = {name: data for name, data in stub.files.items() if not name.startswith("tokenizer-")}
    assert theirs.keys() == here | {"README.md"}
    assert all(theirs[name] == (folder.folder / name).read_bytes() for name in here)
    before = dict(stub.files)
    with pytest.raises(
        PublicationError, match=r"found adapters/s-regime-1@2-5d3c1f/.* set publish\.hub\.repository to"
    ):
        upload_folder(
            settings, folder.folder, ["77aa01" + RUN[6:]], publication(folder, 3, "s-regime-1@3-77aa01"), endpoint=url
        )
    assert stub.files == before
