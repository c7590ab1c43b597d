"""Errors that are raised on purpose, and what each means for the operator or the daemon.

    StreamlearnError                  any of these                                               exit 70
    ├── ConfigError                   the operator corrects the configuration                    exit 78
    │   └── SnapshotMismatchError     the snapshot belongs to another setup                      exit 78
    ├── UsageError                    the operator corrects the command line or the control      exit 64
    │   └── RegimeError               the operator corrects the regime's number or name          exit 64
    │       └── RegimeBusyError       the stream is entering a regime; retry later               exit 75
    ├── SourceError                   the stream cannot be read; restart later                   exit 74
    │   ├── OffsetGapError            untrained records were deleted; the operator decides       exit 74
    │   ├── RowError                  a row of a file cannot become a record; it is corrected    exit 74
    │   └── CredentialsError          the operator replaces a certificate, key or password       exit 78
    ├── DeadLetterError               unusable records cannot be set aside; the daemon stops     exit 74
    ├── SnapshotError                 state cannot be written or read                            exit 74
    │   └── SnapshotDamagedError      a checksum fails; the previous snapshot is tried           exit 74
    ├── PublicationError              a published folder cannot be read or written; retried      exit 74
    ├── StateLockedError              another daemon uses the state, or writes the same files    exit 75
    ├── RankLostError                 another process of the run died or hangs; restart          exit 75
    ├── DivergedError                 updates are still not finite after a rollback              exit 70
    ├── RecordError                   one record is unusable; it becomes a dead letter           -
    ├── QueueFullError                a client's request fails; it may retry                     -
    ├── QueueClosedError              a client's request fails; the daemon is stopping           -
    ├── AdapterGoneError              a client's request fails; it may be repeated               -
    ├── ExampleError                  a client's request fails; it corrects the example          -
    ├── UnknownRegimeError            a client's request fails; it names another regime          -
    ├── PublishingStoppedError        the daemon stops; tested again after the next start        -
    ├── ReplicaUnreachableError       a model server does not answer; asked again later          -
    └── ReplicaRefusedError           a model server refuses an adapter; shown in the status     -

Exit codes follow sysexits.h; `-` never ends the process. A message states what must hold, what was found, where, and
what to do.
"""

import re
from enum import StrEnum
from typing import ClassVar

_CREDENTIALS = (
    (re.compile(r"//\S*@"), "//...@"),
    (re.compile(r"[^\s'\"/,(\[]+(?::(?!//)\S*@|@(?=[\w-]+[.:]\w))"), "...@"),
    (re.compile(r"\?[^\s=]*=\S*?(?=[\"',;:)\]]*(?:\s|$))"), "?..."),
)
"""User information of a URL, the same of a host without a scheme, and a query. Versions (regime-3@184) stay."""


def without_credentials(text: str) -> str:
    """Return a text without the user information and the query of every URL or host in it.

    >>> without_credentials("found 'http://me:secret@10.0.0.1/a?token=secret', me:secret@broker:9092")
    "found 'http://...@10.0.0.1/a?...', ...@broker:9092"
    """
    for pattern, shown in _CREDENTIALS if "@" in text or "?" in text else ():
        text = pattern.sub(shown, text)
    return text


class StreamlearnError(Exception):
    """Base class of every error that this package raises on purpose. Its text never shows a URL's credentials."""

    exit_code: ClassVar[int] = 70
    is_logged = False
    """Whether an event says what it says."""

    def __str__(self) -> str:
        return without_credentials(super().__str__())


class ConfigError(StreamlearnError):
    """The configuration cannot work; nothing was started."""

    exit_code: ClassVar[int] = 78


class UsageError(StreamlearnError):
    """The command line or a control cannot work; nothing was started or changed."""

    exit_code: ClassVar[int] = 64


class SourceError(StreamlearnError):
    """The stream cannot be read; a restart resumes from the last snapshot."""

    exit_code: ClassVar[int] = 74


class OffsetGapError(SourceError):
    """Records between the position and the start of the log were deleted; the operator decides how to continue."""


class CredentialsError(SourceError):
    """A certificate, key or password cannot be used. A running daemon waits: it may be about to be replaced."""

    exit_code: ClassVar[int] = 78


class DeadLetterError(StreamlearnError):
    """An unusable record could not be written to the dead letters; to continue would lose it, to stop does not."""

    exit_code: ClassVar[int] = 74


class SnapshotError(StreamlearnError):
    """A snapshot cannot be written or read."""

    exit_code: ClassVar[int] = 74


class SnapshotDamagedError(SnapshotError):
    """The content of a snapshot differs from its manifest; a start tries the previous one."""


class SnapshotMismatchError(ConfigError):
    """A snapshot belongs to another backbone, adapter shape or configuration."""


class PublicationError(StreamlearnError):
    """A published folder cannot be read or written; what was published before stays in use."""

    exit_code: ClassVar[int] = 74


class StateLockedError(StreamlearnError):
    """Another daemon holds the lock of the state folder, of `publish.folder` or of `dead_letters.file`."""

    exit_code: ClassVar[int] = 75


class RankLostError(StreamlearnError):
    """Another process of a distributed run has ended or does not answer; what is on disk is whole."""

    exit_code: ClassVar[int] = 75


class RegimeError(UsageError):
    """What is asked of a regime cannot be done; nothing was changed."""


class RegimeBusyError(RegimeError):
    """What is asked of a regime cannot be done yet; nothing was changed."""

    exit_code: ClassVar[int] = 75


class AdapterGoneError(StreamlearnError):
    """The weights that a request began with were removed or replaced while it ran; it may be repeated."""


class DivergedError(StreamlearnError):
    """Loss or gradient is still not finite after the last good snapshot was restored."""

    exit_code: ClassVar[int] = 70


class Reason(StrEnum):
    """Why a record became a dead letter, or was ignored."""

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
    UNREADABLE = "unreadable"
    SKIPPED = "skipped"
    BAD_FRAMING = "bad_framing"
    DELETION = "deletion"
    LABEL_FALSE = "label_false"


IGNORABLE = (Reason.DELETION, Reason.LABEL_FALSE)
"""Reasons for which a setting of `records` decides whether a record is ignored or becomes a dead letter."""


class RecordError(StreamlearnError):
    """One record is unusable; it becomes a dead letter, or is ignored."""

    def __init__(self, reason: Reason, message: str) -> None:
        super().__init__(message)
        self.reason = reason
