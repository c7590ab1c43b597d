"""The run command: one daemon process with its logging, HTTP endpoint and loop, and an orderly end."""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from streamlearn import controls as control_file
from streamlearn.board import HEARTBEAT_BOUND_S, Board, Clock
from streamlearn.cli.progress import ProgressDisplay
from streamlearn.cli.streams import failures_as_events
from streamlearn.controls import AuditLog
from streamlearn.daemon.build import Components
from streamlearn.daemon.loop import Daemon
from streamlearn.daemon.process import (
    ServiceManager,
    StopEarly,
    StopSignals,
    dump_stacks_on_abort,
    thread_failures_to,
    versions,
)
from streamlearn.distributed import ProcessRank
from streamlearn.errors import ConfigError, StreamlearnError, without_credentials
from streamlearn.events import Event, configure_logging, get_logger
from streamlearn.http.guards import obtain_token
from streamlearn.http.server import HttpServer, Listener
from streamlearn.http.tracing import configure_tracing
from streamlearn.jobs.queue import JobQueue
from streamlearn.serve.app import create_app, health_app
from streamlearn.serve.models import SnapshotRow
from streamlearn.serve.openai_schemas import DEFAULT_NAME
from streamlearn.settings import Settings
from streamlearn.snapshot.files import StateLock
from streamlearn.snapshot.store import SnapshotStore
from streamlearn.status import Phase, Status

if TYPE_CHECKING:
    from streamlearn.distributed.processes import Leader

_log = get_logger("daemon")


def run_daemon(
    settings: Settings,
    signals: StopSignals,
    place: ProcessRank,
    *,
    fresh: bool,
    accept_config_change: bool,
    segment_by: str | None = None,
) -> None:
    """Run until the stream ends or one of `signals`, which must be installed, arrives.

    Args:
        settings: The configuration.
        signals: The stop signals.
        place: This process among those of the run. All but the leader compute their shares of its steps.
        fresh: Move existing snapshots aside.
        accept_config_change: Resume though settings that affect training have changed.
        segment_by: Key of the records' meta by which the closing table is divided.

    Raises:
        StreamlearnError: see errors.py; also published on the board.
    """
    as_json = configure_logging(settings.log.level, settings.log.style)
    with failures_as_events(_log, Event.DAEMON_FAILED, as_json=as_json):
        if not place.leads:
            from streamlearn.daemon.launch import run_follower  # noqa: PLC0415  most runs are one process

            run_follower(settings, place)
            return
        _lead(settings, signals, place, fresh=fresh, accept=accept_config_change, segment_by=segment_by)


def _lead(
    settings: Settings, signals: StopSignals, place: ProcessRank, *, fresh: bool, accept: bool, segment_by: str | None
) -> None:
    """Be the daemon of the run."""
    configure_tracing("streamlearn")
    dump_stacks_on_abort()
    clock = Clock()
    manager = ServiceManager.from_environment(os.environ)
    loading = Status(Phase.STARTING, reason="the backbone is being loaded", started_at=clock.wall())
    bound_s = HEARTBEAT_BOUND_S if place.size == 1 else min(HEARTBEAT_BOUND_S, settings.distributed.wait_s)
    board = Board(loading, clock, bound_s=bound_s, on_publish=manager.on_publish)
    jobs = JobQueue(settings.serve.queue_size)
    _log.info(Event.DAEMON_STARTED, state=str(settings.state), versions=dict(versions()))
    signals.raise_on_signal()
    try:
        # The lock comes first: a second daemon with this configuration would find the port in use and blame the port.
        with (
            thread_failures_to(board.thread_ended),
            StateLock(settings.state) as lock,
            _health(settings, board),
            _http(settings, board, jobs, clock) as endpoint,
        ):
            try:
                with _leading(settings, place, board) as leader:
                    build = partial(
                        Components,
                        settings,
                        fresh=fresh,
                        accept_config_change=accept,
                        lock=lock,
                        leader=leader,
                    )
                    _train(build, board, jobs, signals, endpoint, segment_by)
            except StreamlearnError as error:
                board.publish(Status(Phase.FAILED, reason=str(error), started_at=board.read().started_at))
                raise
            finally:
                jobs.close()
    except StopEarly as stop:
        _log.info(Event.DAEMON_STOPPED, reason=str(stop), records=0)


def _leading(settings: Settings, place: ProcessRank, board: Board) -> "AbstractContextManager[Leader | None]":
    """Lead the other processes of the run, if there are any, inside a block."""
    if place.size > 1:
        from streamlearn.daemon.launch import leading  # noqa: PLC0415  most runs are one process

        return leading(settings, place, board)
    if settings.backbone.shard:
        raise ConfigError(
            "backbone.shard: needs several processes to divide the backbone among, found one: start with "
            "`torchrun --nproc-per-node N -m streamlearn run`, or set it to false"
        )
    return nullcontext()


def _train(
    build: Callable[[], Components],
    board: Board,
    jobs: JobQueue,
    signals: StopSignals,
    endpoint: str | None,
    segment_by: str | None,
) -> None:
    """Train until the stream ends or a signal stops the loop, then print the closing tables."""
    started = time.monotonic()
    components = build()
    _publish_identity(components, board)
    display = ProgressDisplay(segment_by, endpoint, components.decoder.mapping)
    try:
        daemon = Daemon(components, board, jobs, observer=display)
        signals.call_on_signal(daemon.stop)
        if components.trackers is not None:
            components.trackers.start(board)
        daemon.run()
        display.close()
        seconds = round(time.monotonic() - started, 1)
        _log.info(Event.DAEMON_STOPPED, records=board.read().records_trained, seconds=seconds)
        if segment_by is not None and not daemon.stopped:  # a stop must not wait for the last scores
            daemon.score_all()
        display.report(board.read(), without_credentials(str(components.settings.state)))
    finally:
        display.close()
        components.close()


def _publish_identity(components: Components, board: Board) -> None:
    """Publish which backbone, arithmetic, device and adapter the daemon uses."""
    backbone = components.model.backbone
    board.publish(
        replace(
            board.read(),
            backbone=backbone.identity["model"],
            dtype=backbone.arithmetic.name,
            device=str(backbone.device),
            preset=components.settings.adapter.preset,
            versions=versions(),
        )
    )


def _health(settings: Settings, board: Board) -> AbstractContextManager[object]:
    """The listener for health probes, if it is configured."""
    if settings.serve.health_port is None:
        return nullcontext()
    return HttpServer(health_app(board), Listener.for_health(settings.serve))


@contextmanager
def _http(settings: Settings, board: Board, jobs: JobQueue, clock: Clock) -> Iterator[str | None]:
    """The HTTP endpoint, started before the backbone is loaded so that /readyz answers; yields its URL."""
    if not settings.serve.enabled:
        yield None
        return
    store = SnapshotStore(settings.state / "snapshots", keep=settings.snapshot.keep)

    def rows() -> list[SnapshotRow]:
        pins = control_file.read(settings.state).pins
        return [
            SnapshotRow(
                name=info.name,
                step=info.step,
                written_at=info.created_at,
                size_bytes=info.bytes,
                pinned=info.name in pins,
            )
            for info in store.infos()
        ]

    name = DEFAULT_NAME if settings.publish is None else settings.publish.name  # as a fleet's gateway names them
    audit = AuditLog(settings.state)
    token = obtain_token(settings)
    app = create_app(board, jobs, settings.serve, rows, clock, token=token, audit=audit, model_name=name)
    server = HttpServer(app, Listener.for_requests(settings.serve))
    server.start()
    try:
        host = f"[{settings.serve.host}]" if ":" in settings.serve.host else settings.serve.host
        yield f"{'https' if settings.serve.tls_certfile else 'http'}://{host}:{server.port}"
    finally:
        server.stop()
