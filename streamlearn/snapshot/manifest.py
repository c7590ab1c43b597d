r"""What a snapshot holds, written beside it: `manifest.json`.

The manifest names every other file with its size and SHA-256, and is itself sealed: its field `sha256` is the SHA-256
of the file's own bytes with those 64 digits replaced by zeros. The seal depends on no JSON library's way of spelling a
number, and a shell can check it:

    sed -E 's/^(  "sha256": ")[0-9a-f]{64}/\10000000000000000000000000000000000000000000000000000000000000000/' \
        manifest.json | sha256sum

The order of checks on reading is fixed for every format to come: the seal, then `version`, then the keys. So a damaged
manifest is never mistaken for one of another version.
"""

import hashlib
import math
import re
from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Annotated, Any, Literal, NamedTuple, Self

import orjson
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeInt,
    PlainSerializer,
    PlainValidator,
    ValidationError,
)

from streamlearn.errors import SnapshotDamagedError, SnapshotError, SnapshotMismatchError
from streamlearn.stream.record import Position

FORMAT_VERSION = 2
MAX_BYTES = 64 << 20
"""Largest manifest, bytes: far above what the rooms keep, far below what hurts to read."""

_SEAL = re.compile(rb'^  "sha256": "([0-9a-f]{64})"', re.MULTILINE)  # two spaces: a key of the outermost object alone
_UNSEALED = "0" * 64


def _json_ready(value: Any, where: str = "") -> Any:
    """A deep copy in JSON's own types.

    Raises:
        SnapshotError: a value that JSON would lose, above all NaN and the infinities, which become null.
    """
    if value is None or isinstance(value, str | bool):
        return value
    if isinstance(value, int) and -(1 << 63) <= value < 1 << 64:
        return int(value)
    if isinstance(value, float) and math.isfinite(value):
        return float(value)
    if isinstance(value, list | tuple):
        return [_json_ready(item, f"{where}[{index}]") for index, item in enumerate(value)]
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return {key: _json_ready(item, f"{where}.{key}" if where else key) for key, item in value.items()}
    raise SnapshotError(
        f"a manifest holds finite numbers, 64-bit integers, strings, lists and mappings with string keys; found "
        f"{value!r:.80} at {where or 'the top'}: keep it as a tensor, or as null when it means nothing yet"
    )


def _position(value: Any) -> Position:
    if isinstance(value, Position):
        return value
    try:
        return Position.from_json(value)
    except (TypeError, ValueError) as error:
        raise ValueError(f"rows of topic, partition, offset must stand here: {error}") from error


def _utc(value: str) -> str:
    if datetime.fromisoformat(value).utcoffset() != timedelta(0):
        raise ValueError("an ISO time in UTC must stand here, for example 2026-01-31T12:00:00+00:00")
    return value


JsonMap = Annotated[Mapping[str, Any], AfterValidator(_json_ready)]
"""A mapping that survives JSON unchanged; anything else is a SnapshotError when the model is built."""
PositionRows = Annotated[Position, PlainValidator(_position), PlainSerializer(Position.to_json)]


class LedgerRow(NamedTuple):
    """What became of one partition's records since the stream began."""

    topic: str
    partition: int
    trained: int
    dead_lettered: int
    held_out: int


class FileEntry(BaseModel):
    """One file of the snapshot."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    bytes: NonNegativeInt
    sha256: str


class ManifestDraft(BaseModel):
    """All that the daemon knows about a snapshot before its files exist."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_by_name=True, validate_by_alias=True)

    step: NonNegativeInt
    """Updates taken."""
    created_at: Annotated[str, AfterValidator(_utc)]
    """When, ISO in UTC. Data for people: nothing is decided by it."""
    position: PositionRows
    """Per partition, the offset of the next record to train on."""
    ledger: tuple[LedgerRow, ...]
    """Per partition, how many records were trained, dead-lettered, and held out."""
    dead_letter_mark: JsonMap
    """The sink's bookmark, as `DeadLetters.mark` gave it."""
    config: JsonMap
    """`settings.fingerprint` of the run."""
    backbone: JsonMap
    """model, revision, and digest of its files."""
    adapter: JsonMap
    """What decides the adapter's shape."""
    dtype: str
    """Arithmetic of a step, as chosen."""
    versions: Mapping[str, str]
    """streamlearn, torch, transformers, peft."""
    learner: JsonMap
    """Prequential statistics and counters; tensors are in state.safetensors."""
    components: JsonMap = Field(alias="rooms")
    """State of further components, each under its own name; `rooms` in the file."""


class Manifest(ManifestDraft):
    """A draft and the files that it turned into."""

    version: Literal[2]
    """The format's, `FORMAT_VERSION`."""
    files: Mapping[str, FileEntry]
    """Every file of the snapshot but the manifest, by name relative to its folder."""

    @classmethod
    def of(cls, draft: ManifestDraft, files: Mapping[str, FileEntry]) -> Self:
        """The manifest of these files."""
        return cls(**dict(draft), version=FORMAT_VERSION, files=files)

    def to_bytes(self) -> bytes:
        """The sealed file.

        Raises:
            SnapshotError: it would be larger than reading accepts, or a string is not UTF-8.
        """
        try:
            blank = orjson.dumps(
                {**self.model_dump(mode="json", by_alias=True), "sha256": _UNSEALED},
                option=orjson.OPT_SORT_KEYS | orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE,
            )
        except (TypeError, ValueError) as error:
            raise SnapshotError(f"the manifest of step {self.step} cannot be written as JSON: {error}") from error
        if len(blank) > MAX_BYTES:
            raise SnapshotError(
                f"the manifest of step {self.step} must stay within {MAX_BYTES} bytes, found {len(blank)}: keep large "
                "state as tensors"
            )
        seal = hashlib.sha256(blank).hexdigest()
        return _SEAL.sub(b'  "sha256": "' + seal.encode() + b'"', blank, count=1)

    @classmethod
    def from_bytes(cls, data: bytes, *, where: str) -> Self:
        """Read back what `to_bytes` wrote; `where` begins each message.

        Raises:
            SnapshotDamagedError: a byte differs from what was written.
            SnapshotMismatchError: it is whole, but another streamlearn wrote it.
        """
        _check_seal(data, where)
        values = orjson.loads(data)
        del values["sha256"]
        found = values.get("version")
        if found != FORMAT_VERSION:
            raise SnapshotMismatchError(
                f"{where}: this streamlearn reads manifest format {FORMAT_VERSION}, found format {found}: run the "
                f"release that wrote it ({values.get('versions')}) or start anew with --fresh"
            )
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            faults = "; ".join(f"{'.'.join(map(str, fault['loc']))}: {fault['msg']}" for fault in error.errors())
            raise SnapshotMismatchError(
                f"{where}: manifest format {FORMAT_VERSION} does not look like this: {faults}: run the release "
                f"that wrote it ({values.get('versions')}) or start anew with --fresh"
            ) from error


def _check_seal(data: bytes, where: str) -> None:
    seals = _SEAL.findall(data)
    if len(seals) != 1:
        raise SnapshotDamagedError(
            f"{where}: exactly one seal must stand in it, found {len(seals)} in {len(data)} bytes"
        )
    expected = seals[0].decode()
    found = hashlib.sha256(_SEAL.sub(b'  "sha256": "' + _UNSEALED.encode() + b'"', data)).hexdigest()
    if found != expected:
        raise SnapshotDamagedError(f"{where}: its content must have SHA-256 {expected}, found {found}")
