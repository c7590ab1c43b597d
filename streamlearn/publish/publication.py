"""One publication: which adapter version answers each regime, and where the state is that routes requests to it.

A published folder holds

    publication.json                      this, replaced atomically by every publication
    adapters/NAME-regime-3@184-5d3c1f/    a PEFT folder per adapter version
    routing/184.safetensors               arrays of the monitor's state by name
    tokenizer-3f2a9c01/                   the backbone's tokenizer and its tokens' vectors, named by their content
    history.jsonl                         every version ever written, appended to

Everything that a publication names is complete before the publication is written, and never changes.
"""

import re
import secrets
from collections.abc import Iterable, Mapping
from datetime import datetime, timedelta
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Final, Literal, Self

import numpy as np
import orjson
from numpy.typing import NDArray
from pydantic import (
    AfterValidator,
    AwareDatetime,
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeInt,
    PlainSerializer,
    PositiveInt,
    StringConstraints,
    ValidationError,
    model_validator,
)
from safetensors import SafetensorError
from safetensors.numpy import load, save

from streamlearn.codec import from_arrays
from streamlearn.errors import PublicationError
from streamlearn.settings.faults import in_words
from streamlearn.shift.monitor import MonitorState
from streamlearn.snapshot.files import Files, SharedFiles

FILE = "publication.json"
ADAPTERS, ROUTING, TOKENIZER = "adapters", "routing", "tokenizer-"
"""Folders of versions and routing states, and how the names of tokenizers begin."""
FORMAT: Final = 1
RUN_LETTERS = 6
"""Letters of a run's identity (32 hex digits) in the names of its versions."""
MAX_BYTES = 4 << 20
"""Maximum size of the file in bytes: some 20,000 regimes."""


def _utc(value: datetime) -> datetime:
    if value.utcoffset() != timedelta(0):
        raise ValueError("expected a time in UTC, such as 2026-01-31T12:00:00+00:00")
    return value


def _inside(value: str) -> str:
    path = PurePosixPath(value)
    if str(path) != value or path.is_absolute() or {"..", "."} & {*path.parts, value} or "\0" in value:
        raise ValueError("expected a relative path that stays inside the published folder")
    return value


Time = Annotated[AwareDatetime, AfterValidator(_utc), PlainSerializer(datetime.isoformat, when_used="json")]
RelativePath = Annotated[str, StringConstraints(min_length=1, max_length=4096), AfterValidator(_inside)]
ModelName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$")]
Named = Annotated[str, StringConstraints(min_length=1, max_length=4096)]


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, strict=True)


class PublishedRegime(_Model):
    """A regime of the routing state, and the adapter version that answers it."""

    slot: NonNegativeInt
    """Its slot in the routing state."""
    number: PositiveInt
    """Its number, which never changes."""
    label: str | None
    """The operator's name for it."""
    adapter: str | None
    """Name of its adapter version, NAME-regime-NUMBER@STEP-RUN; None while no version of it is published."""


class Publication(_Model):
    """What a fleet serves, until the next publication. Immutable."""

    format: Literal[1] = FORMAT
    """Version of this format."""
    name: ModelName
    """Name of the model whose requests are routed; names of adapters begin with it."""
    run: Named
    """The daemon's run that wrote it."""
    sequence: NonNegativeInt
    """Sequence number, increasing by one."""
    written_at: Annotated[Time, Field(strict=False)]
    """When it was written, UTC."""
    snapshot: Named
    """Snapshot that the routing state is from."""
    backbone: Named
    """Name under which the model servers serve the untouched backbone."""
    seed: NonNegativeInt
    """Seed of the features of a request."""
    max_known_rejected: Annotated[float, Field(gt=0.0, lt=1.0)]
    """Minimum p-value of a request that a regime explains; below it the backbone answers."""
    routing: RelativePath
    """File with the routing state."""
    tokenizer: RelativePath
    """Folder with the tokenizer and `token_vectors.safetensors`."""
    regimes: Annotated[tuple[PublishedRegime, ...], Field(strict=False)]
    """The regimes of the routing state."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        for field in ("slot", "number"):
            values = [getattr(regime, field) for regime in self.regimes]
            if len(set(values)) < len(values):
                raise ValueError(f"every regime must have its own {field}, found {sorted(values)}")
        for regime in self.regimes:
            self._require_own_adapter(regime)
        names = {self.name, *map(self.model_of, self.regimes), *self.adapters}
        if self.backbone in names:
            raise ValueError(f"backbone must differ from the names of the regimes' models, found {self.backbone!r}")
        return self

    @property
    def adapters(self) -> tuple[str, ...]:
        """Names of the published adapter versions, in the order of the regimes."""
        return tuple(regime.adapter for regime in self.regimes if regime.adapter is not None)

    def model_of(self, regime: PublishedRegime) -> str:
        """Name of a regime's model, whichever version answers it."""
        return f"{self.name}-regime-{regime.number}"

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Read the publication of a folder.

        Raises:
            PublicationError: there is none, or it is damaged or of another format.
        """
        path = folder / FILE
        try:
            with path.open("rb") as file:
                data = file.read(MAX_BYTES + 1)
        except OSError as error:
            raise PublicationError(f"{path}: the publication cannot be read: {error.strerror}") from error
        if len(data) > MAX_BYTES:
            raise PublicationError(f"{path}: expected at most {MAX_BYTES} bytes, found more")
        return cls.from_bytes(data, where=str(path))

    @classmethod
    def from_bytes(cls, data: bytes, *, where: str) -> Self:
        """The inverse of `to_bytes`; `where` names the file in messages.

        Raises:
            PublicationError: damaged, inconsistent or of another format.
        """
        try:
            value = orjson.loads(data)
        except orjson.JSONDecodeError as error:
            raise PublicationError(f"{where}: expected JSON, found {len(data)} bytes: {error}") from error
        found = value.get("format") if isinstance(value, dict) else None
        if found != FORMAT:
            raise PublicationError(
                f"{where}: expected format {FORMAT}, found {found!r:.40}; publish and serve with the same release"
            )
        try:
            return cls.model_validate(value)
        except ValidationError as error:
            fault = error.errors()[0]
            at = ".".join(map(str, fault["loc"])) or "the publication"
            raise PublicationError(f"{where}: {at}: {in_words(fault)}") from error

    def to_bytes(self) -> bytes:
        """The content of `publication.json`."""
        return orjson.dumps(self.model_dump(mode="json"), option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE)

    def write(self, folder: Path, files: Files | None = None) -> None:
        """Replace the folder's publication, durably and atomically: a reader finds the old one or this one.

        1. Write and fsync a new file beside it.
        2. Rename it over the old one.
        3. fsync the folder.

        Raises:
            PublicationError: the disk is full or broken; after step 2 this publication may still be in use.
        """
        files = files or SharedFiles()
        new = folder / f".{FILE}.{secrets.token_hex(8)}"
        try:
            try:
                files.write(new, self.to_bytes())  # 1.
                files.sync(new)
                files.rename(new, folder / FILE)  # 2.
            except OSError:
                new.unlink(missing_ok=True)
                raise
            files.sync(folder)  # 3.
        except OSError as error:
            raise PublicationError(
                f"{folder / FILE}: the publication cannot be written: {error.strerror or error}; check the disk and "
                "the permissions"
            ) from error

    def _require_own_adapter(self, regime: PublishedRegime) -> None:
        """An adapter's name says whose it is, so a request is never answered under another regime's name."""
        if regime.adapter is None:
            return
        model, _, version = regime.adapter.partition("@")
        if model != self.model_of(regime) or not re.fullmatch(r"[0-9A-Za-z]+(-[0-9A-Za-z]+)*", version):
            raise ValueError(
                f"adapter of regime {regime.number} must be named {self.model_of(regime)}@STEP-RUN, found "
                f"{regime.adapter!r:.100}"
            )


VERSION_FILE = "version.json"


def version_pattern(name: str, runs: Iterable[str]) -> re.Pattern[str]:
    """What the names of all versions of these runs match; `name` is the first part.

    >>> version_pattern("streamlearn", ["5d3c1f66"]).fullmatch("streamlearn-regime-3@184-5d3c1fr2") is not None
    True
    """
    letters = "|".join(re.escape(run[:RUN_LETTERS]) for run in runs)
    return re.compile(rf"{re.escape(name)}-regime-[0-9]+@[0-9]+-({letters})(r[0-9]+)?")


class Version(BaseModel):
    """A version of one regime's adapter. Immutable; its name is never used again."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    format: Literal[1] = 1
    """Version of this format."""
    name: str
    """NAME-regime-NUMBER@STEP-RUN, with the first letters of the run."""
    run: str
    """The daemon's run: numbers of regimes mean something within one."""
    regime: PositiveInt
    """Number of the regime."""
    step: NonNegativeInt
    """Optimizer updates in its snapshot."""
    weights_sha256: str
    """Hash of the snapshot's file that it was made from."""
    holdout: tuple[str, ...]
    """Digests of the hold-out records that it was tested on."""
    loss: float
    """Mean loss on those records, nats per token."""
    backbone_loss: float
    """Mean loss of the untouched backbone on them."""

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Read the version in a folder.

        Raises:
            PublicationError: there is none, or it is damaged.
        """
        path = folder / VERSION_FILE
        try:
            return cls.model_validate(orjson.loads(path.read_bytes()))
        except (OSError, orjson.JSONDecodeError, ValidationError) as error:
            raise PublicationError(f"{path}: expected a published version, found: {error!s:.200}") from error

    def to_bytes(self) -> bytes:
        """The content of `version.json`."""
        return orjson.dumps(self.model_dump(mode="json"), option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE)


def routing_bytes(arrays: Mapping[str, NDArray[np.generic]]) -> bytes:
    """The content of a routing state's file, from `codec.to_arrays`."""
    return save({name: np.ascontiguousarray(array) for name, array in arrays.items()})


def read_routing(folder: Path, publication: Publication) -> MonitorState:
    """Read the routing state that a publication names, and check that it has the publication's regimes.

    Raises:
        PublicationError: the file is missing, damaged or has other regimes.
    """
    path = folder / publication.routing
    try:
        arrays: dict[str, NDArray[Any]] = load(path.read_bytes())
        state = from_arrays(MonitorState, arrays)
    except OSError as error:
        raise PublicationError(f"{path}: the routing state cannot be read: {error.strerror}") from error
    except (SafetensorError, KeyError, ValueError, IndexError, TypeError, StopIteration) as error:
        raise PublicationError(
            f"{path}: expected the arrays of a monitor's state, found {type(error).__name__}: {error}"
        ) from error
    profiles = enumerate(state.detector.regimes)
    found = {slot: profile.number for slot, profile in profiles if profile is not None}
    expected = {regime.slot: regime.number for regime in publication.regimes}
    if found != expected:
        raise PublicationError(
            f"{path}: expected the regimes of the publication, by slot {expected}, found {found}; publish again"
        )
    return state


VECTORS_FILE = "token_vectors.safetensors"


def write_vectors(folder: Path, vectors_VD: NDArray[np.float16]) -> None:
    """Write the token vectors of the daemon's features into the tokenizer's folder."""
    (folder / VECTORS_FILE).write_bytes(save({"vectors": vectors_VD}))


def read_vectors(folder: Path) -> NDArray[np.float16]:
    """The inverse of `write_vectors`.

    Raises:
        PublicationError: the file is missing, as in publications of earlier versions, or damaged.
    """
    path = folder / VECTORS_FILE
    try:
        vectors_VD: NDArray[np.float16] = load(path.read_bytes())["vectors"]
    except (OSError, SafetensorError, KeyError) as error:
        raise PublicationError(
            f"{path}: the token vectors cannot be read: {error}; publish and serve with the same release"
        ) from error
    return vectors_VD
