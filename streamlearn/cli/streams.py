"""Standard streams of a command, and failures as events.

What cannot be written to a full disk, a closed pipe or a terminal that is gone is lost, and changes nothing else: a
run learns on and exits as if it had been written. Only a command whose output is its result says so at its end.
"""

import errno
import io
import logging
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from streamlearn.errors import StreamlearnError
from streamlearn.events import Event, Logger

_STREAMS = {"stdout": 1, "stderr": 2}


class _Output(io.FileIO):
    """A stream of which writes never fail."""

    error: OSError | None = None
    """Why something was lost."""

    def write(self, data: Any, /) -> int:
        try:
            written: int | None = super().write(data)
        except OSError as error:
            written, self.error = len(data), error
        if written is None:  # not blocking, and its reader is too slow
            written, self.error = len(data), BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        return written


_output: dict[str, _Output] = {}


def guard() -> None:
    """Let no write to standard output or error fail, and open /dev/null for streams that the caller has closed.

    Otherwise the next file that is opened would take their place.
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # takes the lowest free number: this one
    if sys.stdin is None:
        sys.stdin = open(0, encoding="utf-8")  # noqa: SIM115 - until the process ends
    for name, descriptor in _STREAMS.items():
        own = getattr(sys, name)
        if own is not getattr(sys, f"__{name}__"):  # a caller in this process reads it
            continue
        _output[name] = _Output(descriptor, "w", closefd=False)
        guarded = io.TextIOWrapper(
            io.BufferedWriter(_output[name]),
            encoding=own.encoding if own else "utf-8",
            errors=own.errors if own else "backslashreplace",
            line_buffering=own.line_buffering if own else True,
            write_through=own.write_through if own else False,
        )
        setattr(sys, name, guarded)


def lost_output() -> str | None:
    """Return why standard output is incomplete; None if all was written, or its reader wanted no more."""
    sys.stdout.flush()
    error = _output["stdout"].error if "stdout" in _output else None
    return None if error is None or error.errno == errno.EPIPE else error.strerror


@contextmanager
def failures_as_events(log: Logger, event: Event, *, as_json: bool) -> Iterator[None]:
    """Inside the block, log an internal error; if standard error is JSON, also everything else that would be text.

    That is any error that ends the process or one of its threads, and what libraries log and warn of.

    Raises:
        SystemExit: after an internal error.
    """

    def on_thread(failure: threading.ExceptHookArgs) -> None:
        name = failure.thread.name if failure.thread is not None else None
        found = (failure.exc_type, failure.exc_value, failure.exc_traceback)
        log.critical(Event.THREAD_FAILED, thread=name, error=failure.exc_type.__name__, exc_info=found)

    before, threading.excepthook = threading.excepthook, on_thread
    forward = _ForwardToEvents(log)
    if as_json:
        logging.getLogger().addHandler(forward)
        logging.captureWarnings(True)
        _silence_libraries()
    try:
        yield
    except StreamlearnError as error:
        if as_json:
            log.critical(event, error=type(error).__name__, message=str(error), exit_code=error.exit_code)
            error.is_logged = True
        raise
    except Exception as error:
        log.critical(event, error=type(error).__name__, message=str(error), exit_code=1, exc_info=error)
        raise SystemExit(1) from error
    finally:
        threading.excepthook = before
        if as_json:
            logging.captureWarnings(False)
            logging.getLogger().removeHandler(forward)


class _ForwardToEvents(logging.Handler):
    """Logs what libraries log."""

    def __init__(self, log: Logger) -> None:
        super().__init__(logging.WARNING)
        self._log = log

    def emit(self, record: logging.LogRecord) -> None:
        message = record.getMessage().strip()
        self._log.log(
            record.levelno, Event.LIBRARY_LOGGED, logger=record.name, message=message, exc_info=record.exc_info
        )


def _silence_libraries() -> None:
    """Have libraries that print their log, such as transformers, pass it to the root logger."""
    for logger in map(logging.getLogger, list(logging.root.manager.loggerDict)):
        for handler in [handler for handler in logger.handlers if type(handler) is logging.StreamHandler]:
            logger.removeHandler(handler)
            logger.propagate = True
