"""Controls over HTTP: who may ask, in which order they are served, and what is written about refusals."""

import threading

import httpx2
import pytest
from structlog.testing import capture_logs

from streamlearn.controls import VERBS, Control, Requester
from streamlearn.errors import UsageError
from streamlearn.events import Event
from streamlearn.jobs.queue import ControlJob, SnapshotJob, Ticket
from streamlearn.status import Phase, Status

from .doubles import Daemon, finish

ANN = Requester(user="ann@box")
PATHS = [verb.route.format(snapshot="00000042", number=3) for verb in VERBS.values()]


@pytest.mark.parametrize("path", PATHS)
def test_a_control_without_the_token_is_refused_and_logged(daemon: Daemon, client: httpx2.Client, path: str) -> None:
    """With the address. Anyone on the machine can send such a request, so the audit log has no line."""
    with capture_logs() as events:
        answer = client.post(path, headers={"authorization": ""})
    assert answer.status_code == 401
    assert daemon.refusals == []
    (event,) = [event for event in events if event["event"] == Event.REQUEST_REFUSED]
    assert (event["path"], event["peer"], event["code"]) == (path, "127.0.0.1", "no_token")


def test_the_loop_receives_the_control_and_who_asks(daemon: Daemon, client: httpx2.Client) -> None:
    seen: list[Ticket] = []

    def respond(ticket: Ticket) -> None:
        seen.append(ticket)
        finish(ticket)

    daemon.loop.respond = respond
    body = {"skip_records": ["orders:0:5..9"]}
    assert client.post("/v1/snapshots/00000042/rollback", json=body).status_code == 200
    assert client.post("/v1/regimes/3/rename", json={"name": "refunds"}).status_code == 200
    assert client.post("/v1/regimes/3/freeze", headers={"user-agent": "me"}).json()["control"] == "freeze"
    jobs = [ticket.job for ticket in seen]
    assert all(isinstance(job, ControlJob) for job in jobs)
    controls = [job.control for job in jobs if isinstance(job, ControlJob)]
    assert controls == [
        Control.snapshot("rollback", "00000042", skip_records=("orders:0:5..9",)),
        Control.regime("rename", 3, new_name="refunds"),
        Control.regime("freeze", 3),
    ]
    who = [job.who.to_json() for job in jobs if isinstance(job, ControlJob)]
    assert who[-1] == {"peer": "127.0.0.1", "token": True, "agent": "me"}
    assert daemon.refusals == []  # the loop writes the lines of what it begins


def test_what_the_loop_refuses_is_a_conflict(daemon: Daemon, client: httpx2.Client) -> None:
    """Its own line says so; there is no second one."""

    def refuse(ticket: Ticket) -> None:
        ticket.begin()
        ticket.fail(UsageError("there is no snapshot 00000042"))

    daemon.loop.respond = refuse
    answer = client.post("/v1/snapshots/00000042/pin")
    assert (answer.status_code, answer.json()["error"]["code"]) == (409, "refused")
    assert answer.json()["error"]["message"] == "there is no snapshot 00000042"
    assert daemon.refusals == []


def test_a_control_that_the_loop_does_not_begin_is_written_down(daemon: Daemon, client: httpx2.Client) -> None:
    for path, body, why in (
        ("/v1/regimes/x/freeze", None, "path.number"),
        ("/v1/regimes/3/rename", {"nam": "a"}, "body.name"),
        ("/v1/snapshots/00000042/rollback", {"skip_records": ["9"]}, "body.skip_records.0"),
    ):
        assert client.post(path, json=body).status_code == 422
        assert why in daemon.refusals[-1]["message"]
    answer = client.post("/v1/regimes/3/rename", content=b'{"name":"a"}', headers={"content-type": "text/plain"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (415, "wrong_content_type")
    assert answer.json()["error"]["hint"] == "add -H 'content-type: application/json'"
    daemon.board.publish(Status(phase=Phase.RESTORING, reason="snapshot 40 is being read"))
    assert client.post("/v1/pause").status_code == 503
    assert "snapshot 40 is being read" in daemon.refusals[-1]["message"]
    assert len(daemon.refusals) == 5


def test_a_full_queue_does_not_keep_a_control_out(daemon: Daemon, client: httpx2.Client) -> None:
    """And it is served first."""
    order: list[str] = []

    def respond(ticket: Ticket) -> None:
        order.append(type(ticket.job).__name__)
        finish(ticket)

    daemon.loop.respond = respond
    daemon.loop.paused.set()
    waiting = [daemon.jobs.submit(SnapshotJob()) for _ in range(daemon.jobs.size)]
    answers: list[httpx2.Response] = []
    asking = threading.Thread(target=lambda: answers.append(client.post("/v1/pause")))
    asking.start()
    while len(daemon.jobs) <= daemon.jobs.size:
        assert asking.is_alive()
    daemon.loop.paused.clear()
    asking.join()
    for future in waiting:
        future.result(timeout=5)
    assert answers[0].json()["paused"]
    assert order == ["ControlJob", *["SnapshotJob"] * daemon.jobs.size]
