"""Whether a snapshot may go on under today's configuration."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from streamlearn.errors import SnapshotMismatchError
from streamlearn.snapshot.manifest import Manifest

ACCEPTABLE = ("learner", "stream", "seed")
"""Sections whose change alters what is learned next and nothing that was learned."""

_ABSENT = object()


@dataclass(frozen=True, slots=True)
class Change:
    """One configuration value that differs from the snapshot's."""

    key: str
    old: Any
    new: Any

    def __str__(self) -> str:
        return f"{self.key} is {_shown(self.new)} here and {_shown(self.old)} in the snapshot"

    @property
    def acceptable(self) -> bool:
        """Whether `--accept-config-change` covers it."""
        return self.key.partition(".")[0] in ACCEPTABLE


def check(
    manifest: Manifest,
    fingerprint: Mapping[str, Any],
    backbone: Mapping[str, Any],
    adapter: Mapping[str, Any],
    *,
    accept: bool = False,
) -> list[Change]:
    """Return the changes that were accepted, none when nothing differs.

    A backbone is the digest of its files when both sides know it: a moved folder is the same backbone, and then
    `backbone.model` and `backbone.revision` may differ.

    Raises:
        SnapshotMismatchError: another backbone, another adapter shape, a changed value that can never be accepted, or
            one that can and was not.
    """
    name = f"snapshot {manifest.step:08d}"
    same_files = manifest.backbone.get("digest") is not None and manifest.backbone["digest"] == backbone.get("digest")
    if not same_files:
        _refuse(f"{name} was trained on another backbone", _changes(manifest.backbone, backbone, "backbone."))
    _refuse(f"{name} holds another adapter", _changes(manifest.adapter, adapter, "adapter."))
    changes = _changes(manifest.config, fingerprint)
    if same_files:
        changes = [change for change in changes if change.key not in ("backbone.model", "backbone.revision")]
    _refuse(f"{name} cannot go on with another configuration", [one for one in changes if not one.acceptable])
    if changes and not accept:
        raise SnapshotMismatchError(
            f"{name} was trained with another configuration: {_listed(changes)}; set {_back(changes)}, accept the "
            f"{'change' if len(changes) == 1 else 'changes'} with --accept-config-change, or start anew with --fresh"
        )
    return changes


def _refuse(what: str, changes: list[Change]) -> None:
    if changes:
        raise SnapshotMismatchError(
            f"{what}: {_listed(changes)}; set {_back(changes)}, or start anew with --fresh, which keeps the "
            "snapshots aside"
        )


def _listed(changes: list[Change]) -> str:
    return "; ".join(map(str, changes))


def _back(changes: list[Change]) -> str:
    return ", ".join(f"{change.key} back to {_shown(change.old)}" for change in changes)


def _changes(old: Mapping[str, Any], new: Mapping[str, Any], prefix: str = "") -> list[Change]:
    """What differs; an option that the snapshot's release did not have and that is not set changes nothing."""
    before, after = dict(_flat(_plain(old), prefix)), dict(_flat(_plain(new), prefix))
    after = {key: value for key, value in after.items() if value is not None or key in before}
    return [
        Change(key, before.get(key, _ABSENT), after.get(key, _ABSENT))
        for key in sorted(before.keys() | after.keys())
        if before.get(key, _ABSENT) != after.get(key, _ABSENT)
    ]


def _plain(values: Mapping[str, Any]) -> Any:
    """As JSON gives it back, so that a tuple equals its list."""
    return orjson.loads(orjson.dumps(dict(values)))


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, dict) and value:
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def _shown(value: Any) -> str:
    return "absent" if value is _ABSENT else orjson.dumps(value).decode()
