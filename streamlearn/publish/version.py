"""One published version of a regime: what it is, and what it was tested on. Kept beside its weights."""

from pathlib import Path
from typing import Literal, Self

import orjson
from pydantic import BaseModel, ConfigDict, NonNegativeInt, PositiveInt, ValidationError

from streamlearn.errors import PublicationError

FILE = "version.json"


class Version(BaseModel):
    """A version. Immutable; its name is never used again."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    format: Literal[1] = 1
    """Version of this format."""
    name: str
    """NAME-regime-NUMBER@STEP."""
    run: str
    """The daemon's run: numbers of regimes mean something within one."""
    regime: PositiveInt
    """Number of the regime."""
    step: NonNegativeInt
    """Optimizer updates in its snapshot."""
    weights_sha256: str
    """Of the snapshot's file that it was made from."""
    holdout: tuple[str, ...]
    """Digests of the hold-out records that it was tested on."""
    loss: float
    """Mean over those records, nats per token."""
    backbone_loss: float
    """That of the untouched backbone."""

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Read the version in a folder.

        Raises:
            PublicationError: there is none, or it is damaged.
        """
        path = folder / FILE
        try:
            return cls.model_validate(orjson.loads(path.read_bytes()))
        except (OSError, orjson.JSONDecodeError, ValidationError) as error:
            raise PublicationError(f"{path}: expected a published version, found: {error!s:.200}") from error

    def to_bytes(self) -> bytes:
        """The content of `version.json`."""
        return orjson.dumps(self.model_dump(mode="json"), option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE)
