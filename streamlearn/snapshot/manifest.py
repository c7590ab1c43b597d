r"""The manifest of a snapshot, `manifest.json`.

The manifest names every other file with its size and SHA-256, and is itself sealed: its field `sha256` is the SHA-256
of the file's own bytes with those 64 digits replaced by zeros. The seal does not depend on how a JSON library formats
numbers, and a shell can check it:

    sed -E 's/^(  "sha256": ")[0-9a-f]{64}/\10000000000000000000000000000000000000000000000000000000000000000/' \
        manifest.json | sha256sum

The order of the checks on reading is fixed for every future format: the seal, then `version`, then the keys. So a
damaged manifest is never mistaken for one of another version.
"""

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Annotated, Any, Literal, NamedTuple, Self

import orjson
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    NonNegativeInt,
    PlainSerializer,
    PlainValidator,
    ValidationError,
)

from streamlearn.errors import SnapshotDamagedError, SnapshotError, SnapshotMismatchError
from streamlearn.stream.position import Position

MANIFEST = "manifest.json"
FORMAT_VERSION = 3
_RELEASES = {1: "0.1", 2: "0.1"}
"""Releases that read older formats."""
MAX_BYTES = 64 << 20
"""Maximum size of a manifest in bytes: far more than the components store, and still quick to read."""

_SEAL = re.compile(rb'^  "sha256": "([0-9a-f]{64})"', re.MULTILINE)  # two spaces: a key of the outermost object only
_UNSEALED = "0" * 64


def _json_ready(value: Any) -> Any:
    """The value after a round trip through JSON.

    Raises:
        SnapshotError: it cannot be stored without loss; NaN and the infinities would become null.
    """
    try:
        return json.loads(json.dumps(value, allow_nan=False))
    except (TypeError, ValueError) as error:
        raise SnapshotError(f"a manifest must hold JSON with finite numbers, found {value!r:.80}: {error}") from error


def _position(value: Any) -> Position:
    if isinstance(value, Position):
        return value
    try:
        return Position.from_json(value)
    except (TypeError, ValueError) as error:
        raise ValueError(f"expected rows of topic, partition, offset: {error}") from error


def _utc(value: str) -> str:
    if datetime.fromisoformat(value).utcoffset() != timedelta(0):
        raise ValueError(f"expected an ISO time in UTC such as 2026-01-31T12:00:00+00:00, found {value}")
    return value


JsonMap = Annotated[Mapping[str, Any], AfterValidator(_json_ready)]
"""A mapping that JSON stores without loss; any other raises SnapshotError when the model is built."""
PositionRows = Annotated[Position, PlainValidator(_position), PlainSerializer(Position.to_json)]


class LedgerRow(NamedTuple):
    """Number of one partition's records since the stream began, by outcome."""

    topic: str
    partition: int
    trained: int
    dead_lettered: int
    held_out: int
    ignored: int = 0


class FileEntry(BaseModel):
    """One file of the snapshot."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    bytes: NonNegativeInt
    sha256: str


class ManifestDraft(BaseModel):
    """A manifest without the list of files, which do not exist yet."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    step: NonNegativeInt
    """Number of updates so far."""
    created_at: Annotated[str, AfterValidator(_utc)]
    """Creation time, ISO in UTC. For people only: no decision depends on it."""
    position: PositionRows
    """Per partition, the offset of the next record to train on."""
    read_ahead: PositionRows
    """Per partition, the offset after the last record that was examined for shifts. Records at or after it had no
    influence on the state; those between the position and it may have."""
    ledger: tuple[LedgerRow, ...]
    """Per partition, how many records were trained, dead-lettered, held out, and ignored."""
    dead_letter_mark: JsonMap
    """The sink's bookmark, as returned by `DeadLetters.mark`."""
    config: JsonMap
    """`settings.fingerprint` of the run."""
    backbone: JsonMap
    """Model, revision, and digest of the backbone's files."""
    adapter: JsonMap
    """The options that decide the adapter's shape."""
    dtype: str
    """Arithmetic of the training step."""
    versions: Mapping[str, str]
    """Versions of streamlearn, torch, transformers and peft."""
    regime_changes: NonNegativeInt
    """Changes that an operator made to regimes. Unlike everything else, they change the state between two steps."""
    components: JsonMap
    """State of the components by name; their arrays are in state.safetensors. See `Snapshot.component`."""


class Manifest(ManifestDraft):
    """A complete manifest: a draft with the list of its files."""

    version: Literal[3]
    """Version of the format, `FORMAT_VERSION`."""
    files: Mapping[str, FileEntry]
    """Every file of the snapshot except the manifest, by name relative to the snapshot's folder."""

    @classmethod
    def from_draft(cls, draft: ManifestDraft, files: Mapping[str, FileEntry]) -> Self:
        """Complete a draft with the list of its files."""
        return cls(**dict(draft), version=FORMAT_VERSION, files=files)

    def to_bytes(self) -> bytes:
        """Return the content of the sealed file.

        Raises:
            SnapshotError: it would be too large to be read back, or a string is not valid Unicode.
        """
        try:
            blank = orjson.dumps(
                {**self.model_dump(mode="json"), "sha256": _UNSEALED},
                option=orjson.OPT_SORT_KEYS | orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE,
            )
        except (TypeError, ValueError) as error:
            raise SnapshotError(f"the manifest of step {self.step} cannot be written as JSON: {error}") from error
        if len(blank) > MAX_BYTES:
            raise SnapshotError(
                f"the manifest of step {self.step} must have at most {MAX_BYTES} bytes, found {len(blank)}: store "
                "large state as tensors"
            )
        seal = hashlib.sha256(blank).hexdigest()
        return _SEAL.sub(b'  "sha256": "' + seal.encode() + b'"', blank, count=1)

    @classmethod
    def from_bytes(cls, data: bytes, *, where: str) -> Self:
        """Read the output of `to_bytes`; each error message begins with `where`.

        1. The seal.
        2. The version of the format.
        3. The keys.

        Raises:
            SnapshotDamagedError: a byte differs from what was written.
            SnapshotMismatchError: the file is intact, but another release of streamlearn wrote it.
        """
        _check_seal(data, where)  # 1.
        values = orjson.loads(data)
        del values["sha256"]
        version = values.get("version")
        if version != FORMAT_VERSION:  # 2.
            release = _RELEASES.get(version) if isinstance(version, int) else None
            wrote = f"the release that wrote it ({_release(values)})"
            reader = wrote if release is None else f"release {release}, which reads it"
            raise SnapshotMismatchError(
                f"{where}: this release reads snapshots of format {FORMAT_VERSION}, found format {version}: run "
                f"{reader}, or start over with --fresh, which keeps the old snapshots in another folder"
            )
        try:
            return cls.model_validate(values)  # 3.
        except ValidationError as error:
            faults = "; ".join(f"{'.'.join(map(str, fault['loc']))}: {fault['msg']}" for fault in error.errors())
            raise SnapshotMismatchError(
                f"{where}: expected the keys of snapshot format {FORMAT_VERSION}, found {faults}: run the release that "
                f"wrote it ({_release(values)}), or start over with --fresh, which keeps the old snapshots in another "
                "folder"
            ) from error


def _release(values: Mapping[str, Any]) -> str:
    versions = values.get("versions")
    return f"streamlearn {versions.get('streamlearn')}" if isinstance(versions, dict) else "unknown"


def _check_seal(data: bytes, where: str) -> None:
    seals = _SEAL.findall(data)
    if len(seals) != 1:
        raise SnapshotDamagedError(
            f"{where}: expected exactly one seal (the field sha256), found {len(seals)} in {len(data)} bytes"
        )
    expected = seals[0].decode()
    found = hashlib.sha256(_SEAL.sub(b'  "sha256": "' + _UNSEALED.encode() + b'"', data)).hexdigest()
    if found != expected:
        raise SnapshotDamagedError(f"{where}: the content must have SHA-256 {expected}, found {found}")


# --- the check of a snapshot against the current configuration --------------------------------------------------------

ACCEPTABLE = ("learner", "records", "stream", "seed")
"""Sections that affect only what is learned next."""

_MAX_REGIMES = "shift.max_regimes"
"""It may grow: remembered regimes keep their slots."""
_RETURNS_REFUSED = "probe.max_returns_refused"
"""It affects future returns only."""
_START = ("start", "start_digest")
"""What a backbone's identity has of the LoRA that regimes begin from."""
_START_SETTINGS = ("adapter.start", "adapter.start_revision")
PASSED = "passed"
"""Key in a backbone's identity: a Python program passed the model, so no setting names it."""
_ABSENT = object()


@dataclass(frozen=True, slots=True)
class Change:
    """One configuration value that differs from the snapshot's."""

    key: str
    old: Any
    new: Any

    def __str__(self) -> str:
        return f"{self.key} is {_json_text(self.new)} here and {_json_text(self.old)} in the snapshot"

    @property
    def acceptable(self) -> bool:
        """Whether `--accept-config-change` covers it."""
        return self.key.partition(".")[0] in ACCEPTABLE or self.key == _RETURNS_REFUSED or self._remembers_more

    @property
    def _remembers_more(self) -> bool:
        return self.key == _MAX_REGIMES and _ABSENT not in (self.old, self.new) and self.new > self.old


def check_compatible(
    manifest: Manifest,
    fingerprint: Mapping[str, Any],
    backbone: Mapping[str, Any],
    adapter: Mapping[str, Any],
    *,
    accept: bool = False,
) -> list[Change]:
    """Return the accepted changes; empty when nothing differs.

    A backbone is identified by the digest of its files if both sides have one. The same files in another folder are the
    same backbone, so `backbone.model` and `backbone.revision` may differ then. So it is with `adapter.start`.

    Raises:
        SnapshotMismatchError: the backbone, the start or the adapter's shape differs, a value differs that can never be
            accepted, or an acceptable change was not accepted.
    """
    name = f"snapshot {manifest.step:08d}"
    old, new = ({key: own[key] for key in _START if key in own} for own in (manifest.backbone, backbone))
    same_start = old.get("start_digest") == new.get("start_digest")
    if not same_start:
        _refuse(f"{name} began from another LoRA", _changes(old, new, "adapter."))
    same_files = manifest.backbone.get("digest") is not None and manifest.backbone["digest"] == backbone.get("digest")
    if not same_files:
        if PASSED in manifest.backbone or PASSED in backbone:
            raise another_model(manifest, found=backbone["model"])
        _refuse(f"{name} was trained on another backbone", _changes(manifest.backbone, backbone, "backbone."))
    _refuse(f"{name} holds another adapter", _changes(manifest.adapter, adapter, "adapter."))
    changes = _changes(manifest.config, fingerprint)
    same = (("backbone.model", "backbone.revision") if same_files else ()) + (_START_SETTINGS if same_start else ())
    changes = [change for change in changes if change.key not in same]
    _refuse(
        f"{name} cannot be continued with this configuration", [change for change in changes if not change.acceptable]
    )
    if changes and not accept:
        raise SnapshotMismatchError(
            f"{name} was trained with another configuration: {_listing(changes)}; set {_old_values(changes)}, accept "
            f"the {'change' if len(changes) == 1 else 'changes'} with --accept-config-change, or start over with "
            "--fresh, which keeps the old snapshots in another folder"
        )
    return changes


def another_model(manifest: Manifest, found: str) -> SnapshotMismatchError:
    """The error of a run that was given the model `found`, where it or the snapshot's was passed by a program."""
    model = manifest.backbone["model"]
    again = f"Learner({model!r}, state=FOLDER)"
    if PASSED in manifest.backbone:
        model = f"a loaded model, {model}, with digest {manifest.backbone['digest']}"
        again = "Learner(model, tokenizer=tokenizer, state=FOLDER), with the same model and tokenizer"
    return SnapshotMismatchError(
        f"snapshot {manifest.step:08d} was trained on {model}, found {found}: to continue it in Python, pass the model "
        f"again: {again}"
    )


def _refuse(what: str, changes: list[Change]) -> None:
    if changes:
        raise SnapshotMismatchError(
            f"{what}: {_listing(changes)}; set {_old_values(changes)}, or start over with --fresh, which keeps the "
            "old snapshots in another folder"
        )


def _listing(changes: list[Change]) -> str:
    return "; ".join(map(str, changes))


def _old_values(changes: list[Change]) -> str:
    """Settings that undo the changes."""
    return ", ".join(f"{change.key} back to {_json_text(change.old)}" for change in changes)


def _changes(old: Mapping[str, Any], new: Mapping[str, Any], prefix: str = "") -> list[Change]:
    """The differing values. An unset option that the snapshot does not have is no change."""
    before, after = dict(_flatten(_as_json(old), prefix)), dict(_flatten(_as_json(new), prefix))
    after = {key: value for key, value in after.items() if value is not None or key in before}
    return [
        Change(key, before.get(key, _ABSENT), after.get(key, _ABSENT))
        for key in sorted(before.keys() | after.keys())
        if before.get(key, _ABSENT) != after.get(key, _ABSENT)
    ]


def _as_json(values: Mapping[str, Any]) -> Any:
    """The values after a JSON round trip, so that a tuple equals the list read back."""
    return orjson.loads(orjson.dumps(dict(values)))


def _flatten(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, dict) and value:
            yield from _flatten(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def _json_text(value: Any) -> str:
    return "absent" if value is _ABSENT else orjson.dumps(value).decode()
