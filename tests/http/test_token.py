"""The bearer token: where it is required, where it comes from, and HTTPS."""

from pathlib import Path
from typing import Any

import httpx2
import pytest
from starlette.applications import Starlette
from starlette.responses import Response
from starlette.routing import Route
from starlette.testclient import TestClient

from streamlearn.errors import ConfigError
from streamlearn.http.guards import MIN_CHARS, guards, obtain_token
from streamlearn.settings import ServeSettings, Settings
from tests.serve.doubles import AUTHORIZED, SETTINGS, TOKEN, Daemon

JSON = {"content-type": "application/json"}
READING = (
    "/metrics",
    "/v1/status",
    "/v1/regimes",
    "/v1/shifts",
    "/v1/experts",
    "/v1/publication",
    "/v1/snapshots",
    "/openapi.json",
    "/",
)


def settings(state: Path, **serve: Any) -> Settings:
    jsonl = {"jsonl": {"path": str(state / "records.jsonl")}}
    return Settings.model_validate({"state": state, "source": jsonl, "serve": serve})


def test_writing_requires_the_token_and_reading_does_not(daemon: Daemon) -> None:
    with httpx2.Client(base_url=f"http://127.0.0.1:{daemon.server.port}") as anonymous:
        assert all(anonymous.get(path).status_code == 200 for path in ("/livez", "/readyz", *READING))
        assert anonymous.post("/v1/eval", json={"examples": [{"text": "a"}]}).status_code == 200
        for headers in ({}, {"authorization": "Bearer x"}, {"authorization": TOKEN}, {"authorization": "Bearer é"}):
            raw = {**JSON, **{name: value.encode() for name, value in headers.items()}}
            refused = anonymous.post("/v1/snapshots", headers=raw)  # type: ignore[arg-type]
            assert refused.status_code == 401
            assert refused.headers["www-authenticate"] == "Bearer"
            assert refused.json()["error"]["code"] == "no_token"
            assert TOKEN not in refused.text
        assert len(daemon.jobs) == 0
        assert anonymous.post("/v1/snapshots", headers={**JSON, **AUTHORIZED}).status_code == 201


@pytest.mark.parametrize(("always", "given"), [(True, None), (False, "Bearer ")])
def test_without_a_token_nothing_can_be_written(always: bool, given: str | None) -> None:
    """An empty token is no token, and nobody has it."""
    app = Starlette(
        routes=[
            Route("/it", lambda _: Response("read")),
            Route("/it", lambda _: Response("written"), methods=["POST"]),
        ],
        middleware=guards(ServeSettings(port=0, require_token=always), token=""),
    )
    headers = {"host": "localhost"} | ({} if given is None else {"authorization": given})
    with TestClient(app, headers=headers) as client:
        assert client.post("/it").status_code == 401
        assert client.get("/it").status_code == (401 if always else 200)
    middleware = guards(ServeSettings(port=0, require_token=always), TOKEN, has_writes=False)
    with TestClient(Starlette(middleware=middleware), headers=headers) as client:
        assert client.post("/it").status_code == (401 if always else 404), "without writes only reading is checked"


def test_health_needs_no_token_even_if_everything_else_does() -> None:
    daemon = Daemon(SETTINGS.model_copy(update={"require_token": True}))
    with httpx2.Client(base_url=f"http://127.0.0.1:{daemon.server.port}") as anonymous:
        codes = {path: anonymous.get(path).status_code for path in ("/livez", "/readyz", *READING, "/nowhere")}
        query = anonymous.post("/v1/eval", json={"examples": [{"text": "a"}]}).status_code
        allowed = anonymous.get("/v1/status", headers=AUTHORIZED).status_code
    daemon.stop()
    assert codes == {"/livez": 200, "/readyz": 200, **dict.fromkeys((*READING, "/nowhere"), 401)}
    assert (query, allowed) == (401, 200)


def test_the_token_is_created_once_and_readable_by_its_owner_only(tmp_path: Path) -> None:
    token = obtain_token(settings(tmp_path / "state"))
    assert len(token) >= MIN_CHARS
    path = tmp_path / "state" / "http.token"
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700, "the state folder that dead letters will be in"
    assert obtain_token(settings(tmp_path / "state")) == token
    assert obtain_token(settings(tmp_path / "other")) != token
    assert [file.name for file in path.parent.iterdir()] == ["http.token"]


@pytest.mark.parametrize(
    ("content", "mode", "message"),
    [
        (TOKEN, 0o640, "readable by its owner only, found mode 640"),
        ("short", 0o600, "at least 32 printable ASCII characters without spaces, found 5"),
        ("a b" * 20, 0o600, "without spaces"),
        ("é" * 40, 0o600, "printable ASCII"),
        ("\n" + TOKEN, 0o600, "in the first line, found nothing"),
        (None, 0o600, "cannot be read"),
    ],
)
def test_an_unsafe_or_missing_token_is_refused(tmp_path: Path, content: str | None, mode: int, message: str) -> None:
    path = tmp_path / "token"
    if content is not None:
        path.write_text(content)
        path.chmod(mode)
    with pytest.raises(ConfigError, match=message):
        obtain_token(settings(tmp_path, token_file=str(path)))


@pytest.mark.parametrize(
    ("is_own", "mode", "allowed"),
    [
        *((is_own, mode, True) for is_own in (True, False) for mode in (0o600, 0o400)),
        *((False, mode, True) for mode in (0o440, 0o640)),
        *((True, mode, False) for mode in (0o440, 0o640, 0o610)),
        *((is_own, mode, False) for is_own in (True, False) for mode in (0o604, 0o644, 0o620, 0o601, 0o460)),
    ],
)
def test_the_group_may_read_a_secret_of_another_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_own: bool, mode: int, allowed: bool
) -> None:
    """As PostgreSQL has it for its key: root gives a file to a service by its group. Nobody else may."""
    path = tmp_path / "token"
    path.write_text(TOKEN)
    path.chmod(mode)
    owner = path.stat().st_uid
    monkeypatch.setattr("os.geteuid", lambda: owner if is_own else owner + 1)
    if allowed:
        assert obtain_token(settings(tmp_path, token_file=str(path))) == TOKEN
    else:
        with pytest.raises(
            ConfigError, match=rf"expected a file readable by its owner .*found mode {mode:o}; run chmod"
        ):
            obtain_token(settings(tmp_path, token_file=str(path)))
