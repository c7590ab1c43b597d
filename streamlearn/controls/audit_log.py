"""The audit log, `audit.jsonl` in the state folder: who asked for what, when, and what became of it.

    {"at":"2026-01-31T12:00:00.000+00:00","id":"5f0c...","who":{"user":"ann@box"},"control":"pause","arguments":{},
     "result":"asked"}
    {..., "id":"5f0c...", "result":"done"}

A control that is carried out has two lines with one id: `asked`, durable before anything changes, and its outcome,
durable before it is answered. After `asked` without an outcome the process died meanwhile: the control took effect
completely or not at all, and what a start finished has a line of its own. A refusal may be the only line.
"""

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import Any

import orjson

from streamlearn.controls.control import Control
from streamlearn.controls.requester import Requester
from streamlearn.errors import SnapshotError, StreamlearnError, UsageError
from streamlearn.events import Event, get_logger
from streamlearn.snapshot.files import Files

NAME = "audit.jsonl"
_log = get_logger("controls")


class Result(StrEnum):
    """What became of a control."""

    ASKED = "asked"
    """It is about to be carried out."""
    DONE = "done"
    UNCHANGED = "unchanged"
    """It was so already."""
    REFUSED = "refused"
    """Nothing was changed; the message says why."""
    FAILED = "failed"
    """It could not be carried out, or not completely; the message says what holds."""


class ControlOutcome:
    """The outcome of a control under way; `unchanged` is set by who carries it out."""

    unchanged = False


class AuditLog:
    """An append-only file. Lines of several threads and processes do not mix: each is one write."""

    def __init__(self, folder: Path, files: Files | None = None) -> None:
        self._path = folder / NAME
        self._files = files if files is not None else Files()

    @contextmanager
    def carrying_out(self, control: Control, who: Requester) -> Iterator[ControlOutcome]:
        """Write the two lines of a control around the block that carries it out; its errors pass.

        Raises:
            SnapshotError: a line could not be written. If it is the first, the block was not entered.
        """
        number, outcome = secrets.token_hex(8), ControlOutcome()
        self.write(control.name, control.arguments, who, Result.ASKED, number=number)
        try:
            yield outcome
        except StreamlearnError as error:
            result = Result.REFUSED if isinstance(error, UsageError) else Result.FAILED
            self.write(control.name, control.arguments, who, result, message=str(error), number=number)
            raise
        except Exception as error:
            self.write(control.name, control.arguments, who, Result.FAILED, message=repr(error), number=number)
            raise
        result = Result.UNCHANGED if outcome.unchanged else Result.DONE
        self.write(control.name, control.arguments, who, result, number=number)

    def write(
        self,
        control: str,
        arguments: dict[str, Any],
        who: Requester,
        result: Result,
        *,
        message: str = "",
        number: str | None = None,
    ) -> None:
        """Append one line; it is durable when this returns. `number` identifies the control among its lines.

        Raises:
            SnapshotError: it could not be written.
        """
        line = {
            "at": datetime.now(UTC).isoformat(timespec="milliseconds"),
            "id": number or secrets.token_hex(8),
            "who": who.to_json(),
            "control": control,
            "arguments": arguments,
            "result": result,
            **({"message": message} if message else {}),
        }
        try:
            self._append(orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE))
        except OSError as error:
            raise SnapshotError(
                f"{self._path}: must be writable, found: {error.strerror}; check the disk's free space and health. "
                "No control is carried out without its line"
            ) from error
        if result is not Result.ASKED:
            event = Event.CONTROL_REFUSED if result in (Result.REFUSED, Result.FAILED) else Event.CONTROL_APPLIED
            _log.info(event, control=control, arguments=arguments, who=who.to_json(), result=result, message=message)

    def _append(self, line: bytes) -> None:
        is_new = not self._path.exists()
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(self._path, flags, 0o600)
        try:
            size = os.fstat(descriptor).st_size
            torn = size > 0 and os.pread(descriptor, 1, size - 1) != b"\n"  # by a power loss
            data = b"\n" + line if torn else line
            if os.write(descriptor, data) != len(data):
                os.ftruncate(descriptor, size)
                raise OSError(28, "No space left on device")
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        if is_new:
            self._files.sync(self._path.parent)
