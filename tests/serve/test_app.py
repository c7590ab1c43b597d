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
from streamlearn.status import AnsweredBy, Phase, Status

from .doubles import AUTHORIZED, RUNNING, Daemon, finish, row

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


def test_livez_reports_the_heartbeat_and_its_bound(daemon: Daemon, client: httpx2.Client) -> None:
    daemon.time.monotonic += 12.5
    answer = client.get("/livez")
    assert answer.status_code == 200
    assert answer.json() == {"alive": True, "heartbeat_age_s": 12.5, "heartbeat_bound_s": 60.0}


def test_livez_fails_when_the_loop_is_silent(daemon: Daemon, client: httpx2.Client) -> None:
    daemon.time.monotonic += 75.2
    answer = client.get("/livez")
    assert answer.status_code == 503
    assert error_of(answer)["code"] == "not_alive"
    assert "75.2 s old" in error_of(answer)["message"]
    assert client.get("/readyz").status_code == 503


def test_readyz_names_the_reason(daemon: Daemon, client: httpx2.Client) -> None:
    assert client.get("/readyz").json() == {"ready": True, "phase": "running", "step": 42}
    daemon.board.publish(Status(phase=Phase.RESTORING, reason="snapshot 40 is being read"))
    answer = client.get("/readyz")
    assert answer.status_code == 503
    assert answer.headers["retry-after"] == "5"
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


def test_status_answers_before_the_first_step(daemon: Daemon, client: httpx2.Client) -> None:
    daemon.board.publish(Status(phase=Phase.STARTING))
    status = client.get("/v1/status").json()
    assert status["reason"] == "the daemon is starting"
    assert status["last_snapshot"] is None
    assert status["prequential_loss_nats"] == {"last": None, "smoothed": None}


def test_a_loss_that_is_not_finite_is_null(daemon: Daemon, client: httpx2.Client) -> None:
    daemon.board.publish(dataclasses.replace(RUNNING, loss=float("nan")))
    assert client.get("/v1/status").json()["prequential_loss_nats"]["last"] is None


def test_status_reports_the_regime_and_forgetting(client: httpx2.Client) -> None:
    status = client.get("/v1/status").json()
    assert (status["records_held_out"], status["current_regime"], status["num_regimes"]) == (14, 3, 2)
    assert status["num_shifts"] == {"inputs": 2, "answers": 0}
    assert status["forgetting"] == {
        "average_forgetting": 0.25,
        "backward_transfer": -0.125,
        "loss_by_regime": {"1": 1.25},
    }
    assert (status["probe_seconds"], status["holdout_seconds"]) == (7.5, 1.5)


def test_regimes_have_their_history(client: httpx2.Client) -> None:
    answer = client.get("/v1/regimes").json()
    assert (answer["current"], answer["average_forgetting"], answer["backward_transfer"]) == (3, 0.25, -0.125)
    past, present = answer["regimes"]
    assert past == {
        "number": 1,
        "slot": 1,
        "name": "",
        "frozen": False,
        "current": False,
        "visits": 2,
        "records": 100,
        "first_record": 1,
        "last_record": 100,
        "prequential_loss": 1.5,
        "holdout_records": 5,
        "best_accuracy": 0.75,
        "end_accuracy": 0.625,
        "history": [{"step": 10, "loss": 1.0, "accuracy": 0.75}, {"step": 40, "loss": 1.25, "accuracy": 0.5}],
    }
    assert present["current"] is True
    assert present["history"] == []
    assert (present["best_accuracy"], present["end_accuracy"], present["history"]) == (None, None, [])


def test_shifts_are_listed_oldest_first_with_the_result_of_the_probe(client: httpx2.Client) -> None:
    answer = client.get("/v1/shifts").json()
    assert answer["total"] == {"inputs": 2, "answers": 0}
    first, second = answer["shifts"]
    assert (first["previous"], first["mean_similarity"]) == (None, None)
    assert second == {
        "kind": "inputs",
        "number": 2,
        "regime": 3,
        "known": False,
        "previous": 1,
        "declared_at": 104,
        "onset": 101,
        "statistic": 5.5,
        "threshold": 3.25,
        "parent": None,
        "dropped": 2,
        "step": 13,
        "probe_tokens": 10_240,
        "probe_seconds": 7.5,
        "mean_similarity": 0.125,
        "started_from": None,
        "refused_return": None,
    }


def test_snapshots_are_listed_newest_first(client: httpx2.Client) -> None:
    rows = client.get("/v1/snapshots").json()["snapshots"]
    assert [row["step"] for row in rows] == [42, 41, 40]
    assert rows[0]["written_at"] == "2026-01-01T00:00:42Z"


def test_a_snapshot_is_made_on_request(client: httpx2.Client) -> None:
    answer = client.post("/v1/snapshots", headers=JSON)
    assert answer.status_code == 201
    assert answer.json() == {"name": "0000000000000042", "step": 42}


def test_eval_measures_the_examples(client: httpx2.Client) -> None:
    result = client.post("/v1/eval", json={"examples": [{"text": "a"}, {"text": "b"}]}).json()
    assert (result["step"], result["examples"], result["tokens"]) == (42, 2, 6)
    assert result["exact_match"] is None
    known = {"regime": 3, "score": 0.5, "known": True, "answered_by": "regime"}
    assert result["per_example"][0] == {"loss": 0.5, "tokens": 3, "output": None, "route": known}
    assert (result["num_known"], result["num_unknown"], result["answered_by"]) == (2, 0, {"regime": 2})


def test_the_loop_receives_the_examples_unchanged(daemon: Daemon, client: httpx2.Client) -> None:
    seen: list[Ticket] = []

    def respond(ticket: Ticket) -> None:
        seen.append(ticket)
        finish(ticket)

    daemon.loop.respond = respond
    client.post("/v1/eval", json={"examples": [{"text": "ä", "meta": {"k": [1]}}], "max_new_tokens": 5})
    assert seen[0].job == EvalJob(({"text": "ä", "meta": {"k": [1]}},), generate=False, max_new_tokens=5)


def test_prompts_and_conversations_are_routed_together(daemon: Daemon, client: httpx2.Client) -> None:
    jobs: list[Job] = []

    def respond(ticket: Ticket) -> None:
        jobs.append(ticket.job)
        finish(ticket)

    daemon.loop.respond = respond
    turns = [{"role": "user", "content": "hi"}]
    answer = client.post("/v1/route", json={"prompts": [{"prompt": "a", "image": "eA=="}, {"messages": turns}]})
    route = {"regime": 1, "score": 0.001, "known": False, "answered_by": "backbone"}
    assert answer.json() == {"step": 42, "routes": [route, route], "seconds": 0.01}
    assert jobs == [RouteJob((PromptInput("a", None, "eA=="), PromptInput(None, tuple(turns))))]


def test_what_the_nearest_regime_answered_is_not_counted_as_explained(daemon: Daemon, client: httpx2.Client) -> None:
    """It is answered by a regime, as what one explains."""
    counts: dict[tuple[bool, AnsweredBy], int] = {(True, "regime"): 40, (False, "regime"): 7}
    daemon.board.publish(dataclasses.replace(RUNNING, requests=counts))
    requests = client.get("/v1/status").json()["requests"]
    assert (requests["answered_by"]["regime"], requests["unknown_answered_by"]["regime"]) == (47, 7)


def test_status_counts_requests_and_says_what_answers_the_unknown(client: httpx2.Client) -> None:
    status = client.get("/v1/status").json()
    counts = {"regime": 40, "adapter": 0, "mean": 0, "backbone": 3}
    unexplained = {"regime": 0, "adapter": 0, "mean": 0, "backbone": 3}
    wanted = {"known": 40, "unknown": 3, "answered_by": counts, "unknown_answered_by": unexplained}
    assert status["requests"] == wanted
    assert status["unknown_requests"] == {
        "setting": "auto",
        "answered_by": "backbone",
        "mean_loss": 3.375,
        "nearest_loss": 3.5,
        "backbone_loss": 3.25,
        "regimes": 20,
    }


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("/v1/route", {"prompts": []}, "prompts: Tuple should have at least 1 item"),
        ("/v1/route", {"prompts": [{"prompt": "a"}] * 5}, "prompts: expected at most 4, found 5"),
        ("/v1/route", {"prompts": [{}]}, "prompts[0]: expected exactly one of prompt and messages, found neither"),
        ("/v1/eval", {}, "examples: required, found none"),
        ("/v1/eval", {"examples": ["text"]}, "examples[0]: Input should be a valid dictionary, found 'text'"),
        ("/v1/eval", {"examples": [{}] * 5}, "examples: expected at most 4, found 5"),
        ("/v1/eval", {**ONE, "max_new_tokens": 33}, "max_new_tokens: expected at most 32, found 33"),
        ("/v1/route", {"prompts": [{"prompt": "a", "messages": [{"role": "user", "content": "a"}]}]}, "found both"),
        (
            "/v1/route",
            {"prompts": [{"messages": [{"role": "user", "contnt": "a", "content": "a"}]}]},
            "prompts[0].messages[0].contnt: unknown field, did you mean content?",
        ),
        ("/v1/eval", [], "body: Input should be"),
    ],
)
def test_an_invalid_request_names_the_field(client: httpx2.Client, path: str, body: Any, message: str) -> None:
    answer = client.post(path, json=body)
    assert answer.status_code == 422
    assert message in error_of(answer)["message"]


@pytest.mark.parametrize("body", [b"{", b"[" * 5000])
def test_a_body_that_is_not_json_is_refused(client: httpx2.Client, body: bytes) -> None:
    answer = client.post("/v1/eval", content=body, headers=JSON)
    assert answer.status_code == 400
    assert error_of(answer)["code"] == "not_json"


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
    reading = {"/v1/status", "/v1/history", "/v1/regimes", "/v1/shifts", "/v1/publication", "/v1/snapshots"}
    jobs = {"/v1/eval", "/v1/route"}
    snapshots = {f"/v1/snapshots/{{snapshot}}/{each}" for each in ("pin", "unpin", "rollback")}
    regimes = {f"/v1/regimes/{{number}}/{each}" for each in ("freeze", "unfreeze", "rename", "approve", "drop")}
    controls = {"/v1/pause", "/v1/resume", *snapshots, *regimes}
    official = {"/v1/models", "/v1/completions", "/v1/chat/completions"}
    assert set(paths) == {"/livez", "/readyz", "/metrics", *reading, *jobs, *controls, *official}
    index = client.get("/").text
    for path, methods in paths.items():
        for method, operation in methods.items():
            assert operation["description"]
            assert f"{method.upper():5}{path}" in index
    assert paths["/v1/eval"]["post"]["responses"]["422"]["content"]["application/json"]["schema"] == {
        "$ref": "#/components/schemas/ErrorBody"
    }
    schemas = described["components"]["schemas"]
    assert schemas["EvalRequest"]["examples"]
    assert all("description" in field for field in schemas["EvalResult"]["properties"].values())


def test_unknown_paths_and_methods_use_the_error_format(client: httpx2.Client) -> None:
    missing = client.get("/v1/evall")
    assert (missing.status_code, error_of(missing)["code"]) == (404, "not_found")
    wrong = client.get("/v1/eval")
    assert (wrong.status_code, error_of(wrong)["code"]) == (405, "method_not_allowed")
    assert wrong.headers["allow"] == "POST"
    for path in ("/docs", "/redoc", "/livez/"):
        assert client.get(path).status_code == 404


def test_every_described_request_is_answered_as_described(daemon: Daemon, tmp_path: Path) -> None:
    """Five requests per operation, made by schemathesis; 300 take a minute and find nothing more."""
    daemon.rows = (row(40), row(41))
    program = Path(sys.executable).with_name("st")
    [(name, value)] = AUTHORIZED.items()
    command = [str(program), "run", f"http://127.0.0.1:{daemon.server.port}/openapi.json", "-H", f"{name}: {value}"]
    options = ["--max-examples", "5", "--seed", "1", "--no-color"]
    done = subprocess.run([*command, *options], capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-1000:]
    assert "Tested: 25" in done.stdout


def raw_post(path: str, body: bytes) -> bytes:
    """A request as sent over the connection."""
    head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    head += f"content-length: {len(body)}\r\n\r\n"
    return head.encode() + body
