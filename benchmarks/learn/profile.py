"""Profiles: what depends on the backbone, chosen on development records and kept as a JSON file.

A profile has the backbone's name, the format of prompts, the number of training records per task, settings for all
methods and settings for single methods, both by dotted key, and `source`: what the values were chosen from.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

import orjson

from streamlearn.errors import UsageError

Prompts = Literal["plain", "chat"]
PACKAGED = ("nano", "smollm2")
"""Names of the profiles that are part of the package."""


@dataclass(frozen=True)
class Profile:
    """What the runs of all methods on one backbone have in common, and what is a single method's own."""

    name: str
    backbone: str
    """Name of the backbone in tables, such as `SmolLM2-135M-Instruct`; for a builtin model its setting; or a folder."""
    prompts: Prompts = "plain"
    """Whether a record is prompt and completion, or two messages in the backbone's chat template."""
    records: int = 100
    """Maximum training records per task."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Dotted key -> value, for all methods."""
    methods: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Method -> dotted key -> value; overrides `settings` and the method's arm, see `arms.own_values`."""
    source: Mapping[str, Any] = field(default_factory=dict)
    """What the values were chosen from; empty for values that were not searched."""

    def backbone_name(self, folder: Path | None) -> str:
        """Return the backbone's name in tables; a folder is the profile's backbone unless that is a builtin model."""
        return self.backbone if folder is None or not self.backbone.startswith("builtin:") else folder.resolve().name

    def model(self, folder: Path | None) -> str:
        """Return the setting `backbone.model`: the given folder, or the profile's backbone.

        Raises:
            UsageError: the folder is none, or none is given and the profile's backbone is neither builtin nor a folder.
        """
        if folder is not None:
            if not folder.is_dir():
                raise UsageError(f"--backbone {folder}: expected the folder of a model")
            return str(folder.resolve())
        if not self.backbone.startswith("builtin:") and not Path(self.backbone).is_dir():
            raise UsageError(f"--backbone: profile {self.name} is for {self.backbone}; name the folder of that model")
        return self.backbone

    def to_json(self) -> bytes:
        """Return the content of the profile's file."""
        values = {key: value for key, value in asdict(self).items() if key != "name"}
        return orjson.dumps(values, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE)


def read_profile(name: str) -> Profile:
    """Read a packaged profile by name, or a profile's file.

    Raises:
        UsageError: there is no such profile, or its file is not a profile.
    """
    file = Path(name)
    if name in PACKAGED:
        text = files(__package__).joinpath("profiles", f"{name}.json").read_bytes()
    elif file.is_file():
        text = file.read_bytes()
    else:
        raise UsageError(f"--profile {name}: expected a file or one of {', '.join(PACKAGED)}")
    try:
        return Profile(name=file.stem, **orjson.loads(text))
    except (orjson.JSONDecodeError, TypeError) as error:
        raise UsageError(f"--profile {name}: not a profile: {error}") from error
