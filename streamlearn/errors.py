"""What can go wrong, and what happens next.

    StreamlearnError
    ├── ConfigError               the operator mends the configuration            exit 78
    │   └── SnapshotMismatchError the snapshot was made by another setup          exit 78
    ├── UsageError                the operator mends the command line             exit 64
    ├── SourceError               the stream cannot be read; restart later        exit 74
    │   └── OffsetGapError        records that were never trained are gone        exit 74
    ├── DeadLetterError           bad records cannot be set aside; stop, not drop exit 74
    ├── SnapshotError             state cannot be written or read                 exit 74
    │   └── SnapshotDamagedError  a checksum fails; the one before is tried
    ├── StateLockedError          another daemon owns the state folder            exit 75
    ├── DivergedError             updates stay non-finite after a rollback        exit 70
    ├── RecordError               one record is unusable: it becomes a dead letter
    └── in serve/jobs.py          QueueFullError, QueueClosedError, ExampleError, LayerError: a client's request fails

Exit codes follow sysexits.h. A message says what must hold, what was found, where, and what to do.
"""

from enum import StrEnum
from typing import ClassVar


class StreamlearnError(Exception):
    """Root of everything this package raises on purpose."""

    exit_code: ClassVar[int] = 70


class ConfigError(StreamlearnError):
    """The configuration cannot work; nothing was started."""

    exit_code: ClassVar[int] = 78


class UsageError(StreamlearnError):
    """The command line cannot work; nothing was started."""

    exit_code: ClassVar[int] = 64


class SourceError(StreamlearnError):
    """The stream cannot be read; a restart goes on from the last snapshot."""

    exit_code: ClassVar[int] = 74


class OffsetGapError(SourceError):
    """Records between the position and the log's start are gone; the operator decides how to go on."""


class CredentialsError(SourceError):
    """A certificate, key or password cannot be used. While a daemon runs it waits, for somebody may be replacing it."""

    exit_code: ClassVar[int] = 78


class DeadLetterError(StreamlearnError):
    """A bad record could not be set aside; stopping loses nothing, going on would."""

    exit_code: ClassVar[int] = 74


class SnapshotError(StreamlearnError):
    """A snapshot cannot be written or read."""

    exit_code: ClassVar[int] = 74


class SnapshotDamagedError(SnapshotError):
    """A snapshot's content differs from its manifest; start-up tries the one before."""


class SnapshotMismatchError(ConfigError):
    """A snapshot belongs to another backbone, adapter shape or configuration."""


class StateLockedError(StreamlearnError):
    """Another daemon holds the state folder."""

    exit_code: ClassVar[int] = 75


class DivergedError(StreamlearnError):
    """The loss or the gradient stays non-finite although the last good snapshot was restored."""

    exit_code: ClassVar[int] = 70


class Reason(StrEnum):
    """Why a record became a dead letter."""

    EMPTY = "empty"
    TOO_LARGE = "too_large"
    NOT_UTF8 = "not_utf8"
    NOT_JSON = "not_json"
    TOO_DEEP = "too_deep"
    DUPLICATE_KEY = "duplicate_key"
    NOT_FINITE = "not_finite"
    BAD_FORM = "bad_form"
    BAD_TYPE = "bad_type"
    TOKEN_OUT_OF_RANGE = "token_out_of_range"  # noqa: S105 - a token of text
    BAD_IMAGE = "bad_image"
    TOO_MANY_TOKENS = "too_many_tokens"
    NOTHING_TO_LEARN = "nothing_to_learn"
    NOT_FINITE_UPDATE = "not_finite_update"
    KILLED_PROCESS = "killed_process"


class RecordError(StreamlearnError):
    """One record is unusable."""

    def __init__(self, reason: Reason, message: str) -> None:
        super().__init__(message)
        self.reason = reason
