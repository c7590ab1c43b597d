"""Test doubles: a loop without a model, a clock set by hand, and a server on top of both."""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx2
import orjson

from streamlearn.board import Board, Clock
from streamlearn.controls import AUDIT_FILE_NAME, AuditLog
from streamlearn.errors import Reason
from streamlearn.http.server import HttpServer, Listener
from streamlearn.jobs.queue import (
    ControlJob,
    ControlResult,
    EvalJob,
    EvalResult,
    ExampleResult,
    GenerateJob,
    GenerateResult,
    GenerationStart,
    JobQueue,
    RouteJob,
    RouteResult,
    SnapshotResult,
    Ticket,
)
from streamlearn.serve.app import create_app
from streamlearn.serve.models import SnapshotRow
from streamlearn.serve.openai_schemas import DEFAULT_NAME
from streamlearn.settings import ServeSettings
from streamlearn.status import (
    AdaptationStatus,
    FallbackStatus,
    PartitionStatus,
    Phase,
    RegimeStatus,
    Route,
    Scoring,
    ShiftStatus,
    SnapshotStatus,
    Status,
)

TOKEN = "0123456789abcdef" * 2
AUTHORIZED = {"authorization": f"Bearer {TOKEN}"}
SETTINGS = ServeSettings(port=0, queue_size=2, max_body_bytes=20_000, max_examples=4, max_new_tokens=32)

KNOWN = Route(3, 0.5, known=True, answered_by="regime")
UNKNOWN = Route(1, 0.001, known=False, answered_by="backbone")

FIRST_SHIFT = ShiftStatus(
    kind="inputs",
    number=1,
    regime=1,
    known=False,
    previous=None,
    declared_at=1,
    onset=1,
    statistic=0.0,
    threshold=0.0,
    parent=None,
    dropped=None,
    step=0,
    probe_tokens=0,
    probe_seconds=0.0,
    mean_similarity=None,
)
SECOND_SHIFT = replace(
    FIRST_SHIFT,
    number=2,
    regime=3,
    previous=1,
    declared_at=104,
    onset=101,
    statistic=5.5,
    threshold=3.25,
    dropped=2,
    step=13,
    probe_tokens=10_240,
    probe_seconds=7.5,
    mean_similarity=0.125,
)
ADAPTATION = AdaptationStatus(
    regimes=(
        RegimeStatus(
            number=1,
            slot=1,
            visits=2,
            records=100,
            first_record=1,
            last_record=100,
            prequential_loss=1.5,
            holdout_records=5,
            history=(Scoring(10, 1.0, 0.75), Scoring(40, 1.25, 0.5)),
            best_accuracy=0.75,
            end_accuracy=0.625,
        ),
        RegimeStatus(number=3, slot=0, current=True, visits=1, records=250, first_record=101, last_record=350),
    ),
    shifts=(FIRST_SHIFT, SECOND_SHIFT),
    num_shifts={"inputs": 2},
    average_forgetting=0.25,
    backward_transfer=-0.125,
    probe_seconds=7.5,
    holdout_seconds=1.5,
    fallback=FallbackStatus("auto", "backbone", mean_loss=3.375, nearest_loss=3.5, backbone_loss=3.25, regimes=20),
)

RUNNING = Status(
    phase=Phase.RUNNING,
    ready=True,
    started_at=1_000_000.0,
    step=42,
    last_step_at=46.0,
    records_trained=336,
    records_held_out=14,
    tokens_trained=9000,
    tokens_per_s=1234.56,
    loss=2.5,
    loss_smoothed=2.75,
    dead_letters={Reason.NOT_JSON: 3, Reason.EMPTY: 1},
    ignored={Reason.DELETION: 2},
    update_refusals=1,
    adaptation=ADAPTATION,
    partitions=(
        PartitionStatus("orders", 0, position=200, lag=7),
        PartitionStatus("orders", 1, position=140, lag=None),
    ),
    snapshot=SnapshotStatus("0000000000000040", step=40, written_at=1_000_090.0, write_seconds=0.05),
    records_since_snapshot=16,
    step_seconds=0.3,
    requests={(False, "backbone"): 3, (True, "regime"): 40},
    backbone="builtin:nano",
    dtype="float32",
    device="cpu",
    preset="mh-moe",
    versions={"streamlearn": "0.1.0", "kafka-python": "3.0.12"},
)


@dataclass
class Time:
    """Monotonic and wall time, set by hand."""

    monotonic: float = 50.0
    wall: float = 1_000_100.0

    def clock(self) -> Clock:
        return Clock(monotonic=lambda: self.monotonic, wall=lambda: self.wall)


def finish(ticket: Ticket, route: Route = KNOWN) -> None:
    """Finish a job with a fixed result; a generation with this route."""
    job = ticket.job
    if isinstance(job, ControlJob):
        if ticket.begin():
            ticket.finish(
                ControlResult(
                    control=job.control.verb,
                    changed=True,
                    paused=job.control.verb == "pause",
                    pinned=("0000000000000040",),
                    skipped_records=("orders:0:118..122",),
                    snapshot="0000000000000042",
                )
            )
    elif isinstance(job, EvalJob):
        output = "x" if job.generate else None
        scores = tuple(
            ExampleResult(loss=0.5, tokens=3, token_accuracy=1.0, output=output, route=KNOWN) for _ in job.examples
        )
        rates = {"exact_match": 1.0, "rouge_l": 1.0} if job.generate else {}
        ticket.finish(
            EvalResult(
                step=42,
                examples=len(scores),
                tokens=3 * len(scores),
                loss=0.5,
                perplexity=1.6487,
                token_accuracy=0.75,
                num_known=len(scores),
                num_unknown=0,
                answered_by={"regime": len(scores)},
                per_example=scores,
                seconds=0.01,
                **rates,
            )
        )
    elif isinstance(job, GenerateJob):
        prompt = job.prompt if job.prompt is not None else repr(job.messages)
        if job.stream is not None:
            job.stream.begin(GenerationStart(step=42, prompt_tokens=5, route=route))
            for piece in ("after ", prompt):
                job.stream.write(piece)
        ticket.finish(
            GenerateResult(
                step=42,
                text=f"after {prompt}",
                tokens=job.max_new_tokens,
                prompt_tokens=5,
                finish_reason="length",
                route=route,
            )
        )
    elif isinstance(job, RouteJob):
        ticket.finish(RouteResult(step=42, routes=(UNKNOWN,) * len(job.prompts), seconds=0.01))
    else:
        ticket.finish(SnapshotResult(name="0000000000000042", step=42))


@dataclass
class Loop:
    """Takes jobs from the queue in a thread and passes each ticket to `respond`."""

    jobs: JobQueue
    respond: Callable[[Ticket], None] = finish
    paused: threading.Event = field(default_factory=threading.Event)
    stopped: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self.thread = threading.Thread(target=self._run, name="fake-loop")
        self.thread.start()

    def _run(self) -> None:
        while not self.stopped.wait(0.002):
            ticket = None if self.paused.is_set() else self.jobs.take()
            if ticket is not None:
                self.respond(ticket)

    def stop(self) -> None:
        self.stopped.set()
        self.thread.join()


class Daemon:
    """Board, queue, loop and server, connected as in the daemon."""

    def __init__(
        self, settings: ServeSettings = SETTINGS, *, job_deadline_s: float = 5.0, model_name: str = DEFAULT_NAME
    ) -> None:
        self.time = Time()
        self.board = Board(RUNNING, self.time.clock())
        self.jobs = JobQueue(settings.queue_size)
        self.rows: Sequence[SnapshotRow] = ()
        self._folder = TemporaryDirectory(prefix="streamlearn-audit-")
        self.audit = AuditLog(Path(self._folder.name))
        clock = self.time.clock()
        app = create_app(
            self.board,
            self.jobs,
            settings,
            lambda: self.rows,
            clock,
            token=TOKEN,
            audit=self.audit,
            model_name=model_name,
            job_deadline_s=job_deadline_s,
        )
        self.server = HttpServer(app, Listener.for_requests(settings))
        self.server.start()
        self.loop = Loop(self.jobs)
        self.client = httpx2.Client(base_url=f"http://127.0.0.1:{self.server.port}", timeout=5.0, headers=AUTHORIZED)

    @property
    def refusals(self) -> list[dict[str, Any]]:
        path = Path(self._folder.name) / AUDIT_FILE_NAME
        return [orjson.loads(line) for line in path.read_bytes().splitlines()] if path.exists() else []

    def reset(self) -> None:
        self.time.monotonic, self.time.wall = 50.0, 1_000_100.0
        self.board.publish(RUNNING)
        self.loop.respond = finish
        self.loop.paused.clear()
        self.rows = (row(40), row(42), row(41))
        (Path(self._folder.name) / AUDIT_FILE_NAME).unlink(missing_ok=True)

    def stop(self) -> None:
        self.client.close()
        self.loop.stop()
        self.jobs.close()
        self.server.stop()
        self._folder.cleanup()


def row(step: int) -> SnapshotRow:
    return SnapshotRow(name=f"{step:016d}", step=step, written_at=datetime(2026, 1, 1, 0, 0, step, tzinfo=UTC))
