import dataclasses
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import httpx2
import orjson
import pytest

from streamlearn.errors import Reason, RecordError, SnapshotError
from streamlearn.jobs.queue import (
    EvalJob,
    ExampleError,
    Job,
    PromptInput,
    RouteJob,
    Ticket,
)
from streamlearn.status import AnsweredBy, Phase, RegimeExperts, Status

from .doubles import ADAPTATION, AUTHORIZED, RUNNING, Daemon, finish, row

JSON = {"content-type": "application/json"}
ONE = {"examples": [{"prompt": "a", "completion": "b"}]}


def error_of(answer: httpx2.Response) -> dict[str, str]:
    """The error of a response in the error format."""
    body = answer.json()
    assert list(body) == ["error"]
    assert list(body["error"]) == ["code", "message", "hint"]
    detail: dict[str, str] = body["error"]
    return detail


def wait_until(holds: Any) -> None:
    deadline = time.monotonic() + 3
    while not holds():
        assert time.monotonic() < deadline, "did not happen within 3 s"
        time.sleep(0.005)


def test_health_follows_the_heartbeat_and_the_phase(daemon: Daemon, client: httpx2.Client) -> None:
    daemon.time.monotonic += 12.5
    assert client.get("/livez").json() == {"alive": True, "heartbeat_age_s": 12.5, "heartbeat_bound_s": 60.0}
    assert client.get("/readyz").json() == {"ready": True, "phase": "running", "step": 42}
    daemon.time.monotonic += 62.7
    answer = client.get("/livez")
    assert answer.status_code == 503
    assert error_of(answer)["code"] == "not_alive"
    assert "75.2 s old" in error_of(answer)["message"]
    assert client.get("/readyz").status_code == 503
    daemon.board.publish(Status(phase=Phase.RESTORING, reason="snapshot 40 is being read"))
    answer = client.get("/readyz")
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "5")
    assert error_of(answer)["message"] == "snapshot 40 is being read"
    assert client.get("/livez").status_code == 200


def test_status_is_what_was_published_with_ages_of_now(daemon: Daemon, client: httpx2.Client) -> None:
    daemon.time.wall = 1_000_102.5
    status = client.get("/v1/status").json()
    assert status["phase"] == "running"
    assert status["ready"] is True
    assert status["reason"] is None
    assert status["started_at"] == "1970-01-12T13:46:40Z"
    assert status["step"] == 42
    assert status["prequential_loss_nats"] == {"last": 2.5, "smoothed": 2.75}
    assert status["dead_letters"] == {"not_json": 3, "empty": 1}
    assert status["records_dead_lettered"] == 4
    assert status["partitions"] == [
        {"topic": "orders", "partition": 0, "position": 200, "lag": 7},
        {"topic": "orders", "partition": 1, "position": 140, "lag": None},
    ]
    assert status["last_snapshot"]["age_s"] == 12.5
    assert status["step_seconds"] == 0.3
    assert status["jobs"] == {"waiting": 0, "capacity": 2}
    assert status["versions"]["kafka-python"] == "3.0.12"
    assert (status["records_held_out"], status["current_regime"], status["num_regimes"]) == (14, 3, 2)
    assert status["num_shifts"] == {"inputs": 2, "answers": 0}
    assert status["forgetting"] == {
        "average_forgetting": 0.25,
        "backward_transfer": -0.125,
        "loss_by_regime": {"1": 1.25},
    }
    assert status["unknown_requests"]["mean_loss"] == 3.375
    counts: dict[tuple[bool, AnsweredBy], int] = {(True, "regime"): 40, (False, "regime"): 7}
    daemon.board.publish(dataclasses.replace(RUNNING, loss=float("nan"), requests=counts, degraded="disk full"))
    status = client.get("/v1/status").json()
    assert (status["ready"], status["degraded"], status["prequential_loss_nats"]["last"]) == (True, "disk full", None)
    requests = status["requests"]
    assert (requests["answered_by"]["regime"], requests["unknown_answered_by"]["regime"]) == (47, 7)
    daemon.board.publish(Status(phase=Phase.STARTING))
    status = client.get("/v1/status").json()
    assert (status["reason"], status["last_snapshot"]) == ("the daemon is starting", None)


def test_regimes_and_shifts_are_listed_oldest_first(client: httpx2.Client) -> None:
    answer = client.get("/v1/regimes").json()
    assert (answer["current"], answer["average_forgetting"], answer["backward_transfer"]) == (3, 0.25, -0.125)
    past, present = answer["regimes"]
    assert (past["number"], past["best_accuracy"], past["history"][0]) == (
        1,
        0.75,
        {"step": 10, "loss": 1.0, "accuracy": 0.75},
    )
    assert (present["current"], present["history"]) == (True, [])
    answer = client.get("/v1/shifts").json()
    assert answer["total"] == {"inputs": 2, "answers": 0}
    assert [(shift["previous"], shift["mean_similarity"]) for shift in answer["shifts"]] == [(None, None), (1, 0.125)]


def test_routing_among_experts_is_listed_by_regime(daemon: Daemon, client: httpx2.Client) -> None:
    assert client.get("/v1/experts").json() == {"regimes": [], "effective_regimes": None}
    experts = (RegimeExperts(3, shares=((0.25, 0.75),), bias=((0.0, 0.125),)), RegimeExperts(4, ((1.0, 0.0),), None))
    daemon.board.publish(dataclasses.replace(RUNNING, adaptation=dataclasses.replace(ADAPTATION, experts=experts)))
    assert client.get("/v1/experts").json()["regimes"] == [
        {"regime": 3, "shares": [[0.25, 0.75]], "bias": [[0.0, 0.125]]},
        {"regime": 4, "shares": [[1.0, 0.0]], "bias": None},
    ]


def test_snapshots_are_listed_newest_first(client: httpx2.Client) -> None:
    rows = client.get("/v1/snapshots").json()["snapshots"]
    assert [row["step"] for row in rows] == [42, 41, 40]
    assert rows[0]["written_at"] == "2026-01-01T00:00:42Z"


def test_the_loop_receives_the_examples_and_prompts_unchanged(daemon: Daemon, client: httpx2.Client) -> None:
    jobs: list[Job] = []

    def respond(ticket: Ticket) -> None:
        jobs.append(ticket.job)
        finish(ticket)

    daemon.loop.respond = respond
    result = client.post("/v1/eval", json={"examples": [{"text": "ä", "meta": {"k": [1]}}], "max_new_tokens": 5}).json()
    assert (result["step"], result["examples"], result["tokens"], result["exact_match"]) == (42, 1, 3, None)
    assert jobs.pop() == EvalJob(({"text": "ä", "meta": {"k": [1]}},), generate=False, max_new_tokens=5)
    turns = [{"role": "user", "content": "hi"}]
    answer = client.post("/v1/route", json={"prompts": [{"prompt": "a", "image": "eA=="}, {"messages": turns}]})
    route = {"regime": 1, "score": 0.001, "known": False, "answered_by": "backbone"}
    assert answer.json() == {"step": 42, "routes": [route, route], "seconds": 0.01}
    assert jobs == [RouteJob((PromptInput("a", None, "eA=="), PromptInput(None, tuple(turns))))]


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("/v1/route", {"prompts": [{"prompt": "a"}] * 5}, "prompts: expected at most 4, found 5"),
        ("/v1/route", {"prompts": [{}]}, "prompts[0]: expected exactly one of prompt and messages, found neither"),
        ("/v1/eval", {}, "examples: required, found none"),
        ("/v1/eval", {"examples": [{}] * 5}, "examples: expected at most 4, found 5"),
        ("/v1/eval", {**ONE, "max_new_tokens": 33}, "max_new_tokens: expected at most 32, found 33"),
        (
            "/v1/route",
            {"prompts": [{"messages": [{"role": "user", "contnt": "a", "content": "a"}]}]},
            "prompts[0].messages[0].contnt: unknown field, did you mean content?",
        ),
        ("/v1/eval", [], "body: expected a mapping of keys to values"),
    ],
)
def test_an_invalid_request_names_the_field(client: httpx2.Client, path: str, body: Any, message: str) -> None:
    answer = client.post(path, json=body)
    assert answer.status_code == 422
    assert message in error_of(answer)["message"]
    answer = client.post(path, content=b"[" * 5000, headers=JSON)
    assert (answer.status_code, error_of(answer)["code"]) == (400, "not_json")


def test_an_unusable_example_is_named_with_its_reason(daemon: Daemon, client: httpx2.Client) -> None:
    daemon.loop.respond = lambda ticket: ticket.fail(ExampleError(3, RecordError(Reason.BAD_FORM, "no known form")))
    answer = client.post("/v1/eval", json=ONE)
    assert answer.status_code == 400
    assert error_of(answer)["message"] == "examples[3] is unusable (bad_form): no known form"
    daemon.loop.respond = lambda ticket: ticket.fail(RecordError(Reason.TOO_MANY_TOKENS, "1025 tokens"))
    answer = client.post("/v1/route", json={"prompts": [{"prompt": "a"}]})
    assert answer.status_code == 400
    assert error_of(answer)["message"] == "unusable (too_many_tokens): 1025 tokens"


def test_errors_of_the_daemon_are_shown_and_unexpected_exceptions_are_hidden(
    daemon: Daemon, client: httpx2.Client
) -> None:
    daemon.loop.respond = lambda ticket: ticket.fail(SnapshotError("disk full"))
    answer = client.post("/v1/snapshots", headers=JSON)
    assert answer.status_code == 500
    assert (error_of(answer)["code"], error_of(answer)["message"]) == ("snapshot_failed", "disk full")
    daemon.loop.respond = lambda ticket: ticket.fail(KeyError("secret"))
    answer = client.post("/v1/snapshots", headers=JSON)
    assert answer.status_code == 500
    assert error_of(answer)["code"] == "internal"
    assert "secret" not in answer.text


@pytest.mark.parametrize("path", ["/v1/eval", "/v1/snapshots"])
def test_no_job_is_queued_while_not_ready(daemon: Daemon, client: httpx2.Client, path: str) -> None:
    daemon.board.publish(Status(phase=Phase.RESTORING))
    answer = client.post(path, json=ONE)
    assert answer.status_code == 503
    assert error_of(answer)["code"] == "not_ready"
    assert int(answer.headers["retry-after"]) > 0
    assert len(daemon.jobs) == 0


def test_a_full_queue_is_503_with_retry_after_and_health_still_answers(daemon: Daemon, client: httpx2.Client) -> None:
    daemon.loop.paused.set()
    threads = [
        threading.Thread(target=httpx2.post, args=(f"{client.base_url}/v1/eval",), kwargs={"json": ONE}) for _ in "ab"
    ]
    for thread in threads:
        thread.start()
    wait_until(lambda: len(daemon.jobs) == 2)
    answer = client.post("/v1/eval", json=ONE)
    assert answer.status_code == 503
    assert answer.headers["retry-after"] == "1"
    assert error_of(answer)["message"] == "at most 2 jobs may be queued, found 2"
    assert client.get("/livez").status_code == client.get("/readyz").status_code == 200
    daemon.loop.paused.clear()
    for thread in threads:
        thread.join()


def test_a_client_that_disconnects_cancels_its_running_job(daemon: Daemon) -> None:
    taken: list[Ticket] = []
    daemon.loop.respond = taken.append
    with socket.create_connection(("127.0.0.1", daemon.server.port)) as connection:
        connection.sendall(raw_post("/v1/eval", orjson.dumps(ONE)))
        wait_until(lambda: taken)
        assert not taken[0].cancelled
    wait_until(lambda: taken[0].cancelled)


def test_a_job_past_its_deadline_is_cancelled() -> None:
    daemon = Daemon(job_deadline_s=0.05)
    taken: list[Ticket] = []
    daemon.loop.respond = taken.append
    answer = daemon.client.post("/v1/eval", json=ONE)
    daemon.stop()
    assert answer.status_code == 504
    assert error_of(answer)["message"] == "the job must finish within 0.05 s and was cancelled"
    assert taken[0].cancelled


def test_openapi_describes_every_endpoint_and_the_index_lists_it(client: httpx2.Client) -> None:
    described = client.get("/openapi.json").json()
    paths = described["paths"]
    views = ("status", "history", "regimes", "shifts", "experts", "publication", "snapshots")
    reading = {f"/v1/{name}" for name in views}
    jobs = {"/v1/eval", "/v1/route"}
    snapshots = {f"/v1/snapshots/{{snapshot}}/{verb}" for verb in ("pin", "unpin", "rollback")}
    regimes = {f"/v1/regimes/{{number}}/{verb}" for verb in ("freeze", "unfreeze", "rename", "approve", "drop")}
    controls = {"/v1/pause", "/v1/resume", *snapshots, *regimes}
    official = {"/v1/models", "/v1/models/{name}", "/v1/completions", "/v1/chat/completions"}
    assert set(paths) == {"/livez", "/readyz", "/metrics", *reading, *jobs, *controls, *official}
    index = client.get("/").text
    for path, methods in paths.items():
        for method, operation in methods.items():
            assert operation["description"]
            assert f"{method.upper():5}{path}" in index
    assert paths["/v1/eval"]["post"]["responses"]["422"]["content"]["application/json"]["schema"] == {
        "$ref": "#/components/schemas/ErrorBody"
    }
    missing, wrong = client.get("/v1/evall"), client.get("/v1/eval")
    assert (missing.status_code, error_of(missing)["code"]) == (404, "not_found")
    assert (wrong.status_code, error_of(wrong)["code"], wrong.headers["allow"]) == (405, "method_not_allowed", "POST")


def test_every_described_request_is_answered_as_described(daemon: Daemon, tmp_path: Path) -> None:
    """Five requests per operation, made by schemathesis; 300 take a minute and find nothing more."""
    daemon.rows = (row(40), row(41))
    program = Path(sys.executable).with_name("st")
    [(name, value)] = AUTHORIZED.items()
    command = [str(program), "run", f"http://127.0.0.1:{daemon.server.port}/openapi.json", "-H", f"{name}: {value}"]
    options = ["--max-examples", "5", "--seed", "1", "--no-color"]
    done = subprocess.run([*command, *options], capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-1000:]
    assert "Tested: 27" in done.stdout


def raw_post(path: str, body: bytes) -> bytes:
    """A request as sent over the connection."""
    head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    head += f"content-length: {len(body)}\r\n\r\n"
    return head.encode() + body
