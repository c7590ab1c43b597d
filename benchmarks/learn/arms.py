"""Arms: a preset and its changed settings on one line, such as `mh-moe:learner.router_lr=0:adapter.rank=2`.

Changes in the section `baseline` are options of the baseline that trains the arm; all others are settings.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from benchmarks.learn.profile import Profile
from streamlearn.errors import UsageError
from streamlearn.settings import Settings

COMMON: Mapping[str, Any] = {
    "snapshot.every_records": 1_000_000,
    "snapshot.every_s": 1e9,
    "log.level": "error",
}
"""Settings of every run: snapshots and log lines would only cost time."""
OPTIONS = "baseline"
"""The section whose values are options of the baseline."""


@dataclass(frozen=True)
class Arm:
    """An arm, read."""

    settings: Settings
    options: Mapping[str, float]
    """Options of the baseline, by name."""


def read_arm(
    arm: str,
    profile: Profile,
    *,
    seed: int,
    state: Path,
    stream: Path,
    shared: Mapping[str, Any] | None = None,
    own: Mapping[str, Any] | None = None,
) -> Arm:
    """Return settings and options of an arm; later ones override: profile, `shared`, the arm's changes, `own`.

    Args:
        arm: `PRESET:section.key=value:...`.
        profile: Gives the settings for all methods.
        seed: Seed of the run.
        state: The daemon's state folder.
        stream: File of the records.
        shared: Changes for all arms, by dotted key.
        own: The method's changes that the profile or a search adds, by dotted key.

    Raises:
        UsageError: a change is not `section.key=value`.
    """
    preset, *changes = arm.split(":")
    sections: dict[str, Any] = {"adapter": {"preset": preset}}
    changed = dict(map(_change, changes))
    for section, values in by_section(COMMON, profile.settings, shared or {}, changed, own or {}).items():
        sections.setdefault(section, {}).update(values)
    options = sections.pop(OPTIONS, {})
    settings = Settings(state=state, seed=seed, source={"jsonl": {"path": stream}}, **sections)
    return Arm(settings, options)


def own_values(name: str, arm: str, profile: Profile) -> dict[str, Any]:
    """Return the values that a profile has for a method, by dotted key; they override the method's arm.

    An ablation has none of its own: it takes those of its preset, except for what its arm changes.
    """
    preset, *changes = arm.split(":")
    if name in profile.methods:
        return dict(profile.methods[name])
    changed = dict(map(_change, changes))
    return {key: value for key, value in profile.methods.get(preset, {}).items() if key not in changed}


def by_section(*layers: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Group values by the section of their dotted key; later layers override earlier ones."""
    sections: dict[str, dict[str, Any]] = {}
    for key, value in (item for layer in layers for item in layer.items()):
        section, _, name = key.partition(".")
        sections.setdefault(section, {})[name] = value
    return sections


def _change(text: str) -> tuple[str, Any]:
    key, equals, value = text.partition("=")
    if not equals or "." not in key:
        raise UsageError(f"arm: expected PRESET:section.key=value:..., found the change {text!r}")
    return key, yaml.safe_load(value)
