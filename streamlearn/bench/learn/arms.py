"""Arms: a preset and its changed settings on one line, such as `mh-moe:learner.router_lr=0:adapter.rank=2`."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from streamlearn.errors import UsageError
from streamlearn.settings import Settings

NANO: Mapping[str, Mapping[str, Any]] = {
    "stream": {"max_tokens": 1024, "batch_tokens": 1024, "batch_records": 8},
    "learner": {"lr": 1e-3},
    "probe": {"warmup_tokens": 1024, "similarity_tokens": 512},
    "snapshot": {"every_records": 1_000_000, "every_s": 1e9},
    "log": {"level": "error"},
}
"""Settings for the bundled backbone that differ from the defaults: ten times the learning rate, and fewer tokens."""


def settings_of(arm: str, *, seed: int, state: Path, stream: Path, shared: Mapping[str, Any] | None = None) -> Settings:
    """Return the settings of an arm; `shared` holds changes for all arms, by dotted key.

    Raises:
        UsageError: a change is not `section.key=value`.
    """
    preset, *changes = arm.split(":")
    sections: dict[str, Any] = {name: dict(values) for name, values in NANO.items()}
    sections.setdefault("adapter", {})["preset"] = preset
    for key, value in [*(shared or {}).items(), *(_change(change) for change in changes)]:
        section, _, name = key.partition(".")
        sections.setdefault(section, {})[name] = value
    return Settings(state=state, seed=seed, source={"jsonl": {"path": stream}}, **sections)


def _change(text: str) -> tuple[str, Any]:
    key, equals, value = text.partition("=")
    if not equals or "." not in key:
        raise UsageError(f"arm: expected PRESET:section.key=value:..., found the change {text!r}")
    return key, yaml.safe_load(value)
