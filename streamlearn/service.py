"""One run of the daemon as a process: logging, HTTP, the loop, and an orderly end."""

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

from streamlearn.assembly import Rooms, versions
from streamlearn.daemon import Daemon
from streamlearn.display import Watch
from streamlearn.errors import StreamlearnError
from streamlearn.events import Event, configure_logging, get_logger
from streamlearn.learner.evaluation import ExampleScore, score
from streamlearn.serve.answers import at_once
from streamlearn.serve.app import create_app
from streamlearn.serve.jobs import JobQueue
from streamlearn.serve.schemas import SnapshotRow
from streamlearn.serve.server import HttpServer
from streamlearn.serve.status import Board, Clock, Phase, Status
from streamlearn.serve.token import obtain
from streamlearn.settings import Settings
from streamlearn.snapshot.store import SnapshotStore
from streamlearn.stopping import StopEarly, StopSignals
from streamlearn.stream.decode import Example
from streamlearn.supervision import ServiceManager, dump_stacks_on_abort

_log = get_logger("daemon")


def serve_and_learn(
    settings: Settings,
    signals: StopSignals,
    *,
    fresh: bool,
    accept_config_change: bool,
    stretch_by: str | None = None,
) -> None:
    """Run until the stream ends or one of `signals`, which are installed, comes.

    Raises:
        StreamlearnError: as errors.py says; the board and the log have it too.
    """
    configure_logging(settings.log.level, settings.log.style)
    dump_stacks_on_abort()
    clock = Clock()
    manager = ServiceManager.from_environment(os.environ)
    loading = Status(Phase.STARTING, reason="the backbone is being loaded", started_at=clock.wall())
    board = Board(loading, clock, heed=manager.heed)
    jobs = JobQueue(settings.serve.queue_size)
    _log.info(Event.DAEMON_STARTED, state=str(settings.state), versions=versions())
    signals.opening()
    try:
        with _http(settings, board, jobs, clock) as endpoint:
            try:
                accept = accept_config_change
                _learn(settings, board, jobs, signals, endpoint, fresh=fresh, accept=accept, by=stretch_by)
            except StreamlearnError as error:
                board.publish(Status(Phase.FAILED, reason=str(error), started_at=board.read().started_at))
                raise
            finally:
                jobs.close()
    except StopEarly as stop:
        _log.info(Event.DAEMON_STOPPED, reason=str(stop), records=0)


def _learn(
    settings: Settings,
    board: Board,
    jobs: JobQueue,
    signals: StopSignals,
    endpoint: str | None,
    *,
    fresh: bool,
    accept: bool,
    by: str | None,
) -> None:
    started = time.monotonic()
    rooms = Rooms(settings, fresh=fresh, accept_config_change=accept)
    _introduce(rooms, board)
    watch = Watch(by, endpoint)
    try:
        daemon = Daemon(rooms, board, jobs, observer=watch)
        signals.ask(daemon.stop)
        daemon.run()
        watch.close()
        seconds = round(time.monotonic() - started, 1)
        _log.info(Event.DAEMON_STOPPED, records=board.read().records_trained, seconds=seconds)
        compare = by is not None and not daemon.stopped  # whoever stops a daemon does not want to wait for a comparison
        if compare:
            daemon.score_all()
        watch.report(board.read(), str(settings.state), partial(_frozen, rooms) if compare else None)
    finally:
        watch.close()
        rooms.close()


def _frozen(rooms: Rooms, examples: Sequence[Example]) -> Sequence[ExampleScore]:
    """Scores under the backbone alone."""
    learner = rooms.learner
    with learner.model.disable_adapter():
        work = score(learner.model, examples, learner.device, row_tokens=rooms.settings.stream.batch_tokens)
        return at_once(work)


def _introduce(rooms: Rooms, board: Board) -> None:
    """Publish what the daemon works with."""
    backbone = rooms.model.backbone
    board.publish(
        replace(
            board.read(),
            backbone=backbone.identity["model"],
            dtype=backbone.arithmetic.name,
            device=str(backbone.device),
            preset=rooms.settings.adapter.preset,
            versions=versions(),
        )
    )


@contextmanager
def _http(settings: Settings, board: Board, jobs: JobQueue, clock: Clock) -> Iterator[str | None]:
    """The endpoint, up before the backbone is loaded so that readiness can be asked for; yields its address."""
    if not settings.serve.enabled:
        yield None
        return
    store = SnapshotStore(settings.state / "snapshots", keep=settings.snapshot.keep)

    def rows() -> list[SnapshotRow]:
        return [
            SnapshotRow(name=info.name, step=info.step, written_at=info.created_at, size_bytes=info.bytes)
            for info in store.infos()
        ]

    app = create_app(board, jobs, settings.serve, rows, clock, token=obtain(settings))
    server = HttpServer(app, settings.serve)
    server.start()
    try:
        host = f"[{settings.serve.host}]" if ":" in settings.serve.host else settings.serve.host
        yield f"{'https' if settings.serve.tls_certfile else 'http'}://{host}:{server.port}"
    finally:
        server.stop()
