"""Names of the log events, and how events are written.

An event is a verb in the past tense with fields: `snapshot_written name=00018204 seconds=0.21`. On a terminal it is one
readable line; elsewhere it is one JSON object per line, serialised by orjson. A program that did not configure
structlog hears of warnings and errors only, by `warnings`.
"""

import logging
import sys
import warnings
from collections.abc import Mapping
from contextlib import suppress
from enum import StrEnum
from io import StringIO
from typing import Any, Literal, TextIO, cast

import orjson
import structlog

from streamlearn.errors import without_credentials


class Event(StrEnum):
    """Every event that the daemon or the gateway logs."""

    DAEMON_STARTED = "daemon_started"
    DAEMON_STOPPED = "daemon_stopped"
    DAEMON_FAILED = "daemon_failed"
    THREAD_FAILED = "thread_failed"
    LIBRARY_LOGGED = "library_logged"
    PROCESSES_JOINED = "processes_joined"
    STOP_REQUESTED = "stop_requested"
    DTYPE_CHOSEN = "dtype_chosen"
    ADAPTER_ATTACHED = "adapter_attached"
    ADAPTER_NOT_WRITTEN = "adapter_not_written"
    ADAPTER_NOT_REMOVED = "adapter_not_removed"
    SOURCE_OPENED = "source_opened"
    POSITION_SET = "position_set"
    SOURCE_EXHAUSTED = "source_exhausted"
    STREAM_FLUSHED = "stream_flushed"
    SOURCE_REBUILT = "source_rebuilt"
    SOURCE_UNREACHABLE = "source_unreachable"
    SOURCE_REACHABLE = "source_reachable"
    OFFSETS_SKIPPED = "offsets_skipped"
    PARTITIONS_CHANGED = "partitions_changed"
    OFFSETS_COMMITTED = "offsets_committed"
    OFFSET_COMMIT_FAILED = "offset_commit_failed"
    CRASH_DETECTED = "crash_detected"
    RECORD_DEAD_LETTERED = "record_dead_lettered"
    RECORDS_TRUNCATED = "records_truncated"
    DEAD_LETTER_SHORTENED = "dead_letter_shortened"
    FIRST_REGIME_ENTERED = "first_regime_entered"
    SHIFT_DETECTED = "shift_detected"
    RETURN_REFUSED = "return_refused"
    VISIT_REFUSED = "visit_refused"
    REGIME_FROZEN = "regime_frozen"
    REGIME_UNFROZEN = "regime_unfrozen"
    REGIME_RENAMED = "regime_renamed"
    REGIME_APPROVED = "regime_approved"
    REGIME_DROPPED = "regime_dropped"
    HOLDOUT_SCORED = "holdout_scored"
    HOLDOUT_NOT_FINITE = "holdout_not_finite"
    CANARIES_SCORED = "canaries_scored"
    STEP_TAKEN = "step_taken"
    UPDATE_REFUSED = "update_refused"
    OUT_OF_MEMORY_RETRIED = "out_of_memory_retried"
    ROLLED_BACK = "rolled_back"
    SNAPSHOT_WRITTEN = "snapshot_written"
    DEGRADATION_STARTED = "degradation_started"
    DEGRADATION_ENDED = "degradation_ended"
    SNAPSHOT_RESTORED = "snapshot_restored"
    SNAPSHOT_DAMAGED = "snapshot_damaged"
    JOURNAL_TRUNCATED = "journal_truncated"
    SNAPSHOT_PRUNED = "snapshot_pruned"
    SNAPSHOT_PRUNE_FAILED = "snapshot_prune_failed"
    HTTP_STARTED = "http_started"
    HTTP_FAILED = "http_failed"
    REQUEST_REFUSED = "request_refused"
    JOB_FINISHED = "job_finished"
    JOB_FAILED = "job_failed"
    VERSION_PUBLISHED = "version_published"
    VERSION_HELD_BACK = "version_held_back"
    VERSION_WITHDRAWN = "version_withdrawn"
    PUBLICATION_WRITTEN = "publication_written"
    PUBLICATION_FAILED = "publication_failed"
    REPLICA_REACHED = "replica_reached"
    REPLICA_LOST = "replica_lost"
    REPLICA_REFUSED = "replica_refused"
    REPLICA_ADAPTER_REPLACED = "replica_adapter_replaced"
    REPLICA_VERSIONS_VANISHED = "replica_versions_vanished"
    TRACKING_FAILED = "tracking_failed"
    TRACKING_RECOVERED = "tracking_recovered"
    GATEWAY_STARTED = "gateway_started"
    GATEWAY_STOPPED = "gateway_stopped"
    GATEWAY_FAILED = "gateway_failed"
    PUBLICATION_TAKEN_UP = "publication_taken_up"
    PUBLICATION_REFUSED = "publication_refused"
    PUBLICATION_DELAYED = "publication_delayed"
    UPSTREAM_REACHABLE = "upstream_reachable"
    UPSTREAM_UNREACHABLE = "upstream_unreachable"
    UPSTREAM_TIMED_OUT = "upstream_timed_out"
    REQUEST_RETRIED = "request_retried"
    STREAM_BROKEN = "stream_broken"
    SERVICE_MANAGER_UNREACHABLE = "service_manager_unreachable"
    CONFIG_CHANGE_ACCEPTED = "config_change_accepted"
    CONTROL_APPLIED = "control_applied"
    CONTROL_REFUSED = "control_refused"
    HISTORY_FAILED = "history_failed"
    HISTORY_LINES_DROPPED = "history_lines_dropped"
    SNAPSHOT_MOVED_ASIDE = "snapshot_moved_aside"


Logger = structlog.stdlib.BoundLogger


def get_logger(component: str) -> Logger:
    """Return a logger that adds the field `component` to its events."""
    return cast("Logger", _LazyLogger(component))


class _LazyLogger:
    """structlog's logger where structlog is configured when an event is logged; elsewhere `warnings`."""

    def __init__(self, component: str) -> None:
        self._component = component

    def __getattr__(self, name: str) -> Any:
        if structlog.is_configured():
            return getattr(structlog.get_logger(component=self._component), name)
        return _warn if name in _WARNED else _ignore


_WARNED = ("warning", "error", "critical", "exception")


def _warn(event: str, **fields: object) -> None:
    details = without_credentials(", ".join(f"{name}={value}" for name, value in fields.items()))
    warnings.warn(f"{event.replace('_', ' ')}: {details}", RuntimeWarning, stacklevel=3)


def _ignore(event: str, **fields: object) -> None:
    pass


def configure_logging(
    level: str = "info", style: Literal["auto", "json", "console"] = "auto", stream: TextIO | None = None
) -> bool:
    """Write events of at least `level` to `stream`, by default standard error; return whether they are JSON.

    The style `auto` is `console` on a terminal and `json` elsewhere. Colors are where tables have them.
    """
    target = stream if stream is not None else sys.stderr
    console = style == "console" or (style == "auto" and target.isatty())
    shared: list[Any] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.StackInfoRenderer(),
    ]
    if console:
        from rich.console import Console  # noqa: PLC0415 - not needed for JSON

        terminal = Console(file=target)
        colors = terminal.color_system is not None and not terminal.no_color
        shared.append(_without_credentials)
        shared.append(structlog.dev.ConsoleRenderer(colors=colors, exception_formatter=_print_traceback))
    else:
        frames = structlog.tracebacks.ExceptionDictTransformer(
            show_locals=False
        )  # local variables may hold records and secrets
        shared.append(structlog.processors.ExceptionRenderer(frames))
        shared.append(_without_credentials)
        shared.append(structlog.processors.JSONRenderer(serializer=_to_json))
    structlog.configure(
        processors=shared,
        wrapper_class=structlog.make_filtering_bound_logger(getattr(logging, level.upper())),
        logger_factory=lambda *_: _Lines(target),
        cache_logger_on_first_use=False,
    )
    return not console


def _without_credentials(_logger: Any, _method: str, event: Any) -> Any:
    return {key: _shown(value) for key, value in event.items()}


def _shown(value: Any) -> Any:
    """A field of an event as it may be shown: no URL in it has credentials."""
    if isinstance(value, str):
        return without_credentials(value)
    if isinstance(value, dict):
        return {key: _shown(inner) for key, inner in value.items()}
    return [_shown(inner) for inner in value] if type(value) in (list, tuple) else value


def _print_traceback(stream: TextIO, exc_info: Any) -> None:
    text = StringIO()
    structlog.dev.plain_traceback(text, exc_info)
    stream.write(without_credentials(text.getvalue()))


class _Lines(structlog.PrintLogger):
    """Writes lines. One that cannot be written, on a full disk or to a closed pipe, is lost: training goes on."""

    def msg(self, message: str) -> None:
        """Write a line."""
        with suppress(OSError, ValueError):  # ValueError: the stream is closed
            super().msg(message)

    log = debug = info = warn = warning = error = critical = fatal = failure = err = exception = msg


def _to_json(event: dict[str, Any], **_: object) -> str:
    return orjson.dumps(event, default=_plain, option=orjson.OPT_NON_STR_KEYS).decode()


def _plain(value: object) -> object:
    return dict(value) if isinstance(value, Mapping) else str(value)
