"""The check of a snapshot against the current configuration."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from streamlearn.errors import SnapshotMismatchError
from streamlearn.snapshot.manifest import Manifest

ACCEPTABLE = ("learner", "records", "stream", "seed")
"""Sections that affect only what is learned next."""

_MAX_REGIMES = "shift.max_regimes"
"""It may grow: remembered regimes keep their slots."""
_RETURNS_REFUSED = "probe.max_returns_refused"
"""It affects future returns only."""
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


def check(
    manifest: Manifest,
    fingerprint: Mapping[str, Any],
    backbone: Mapping[str, Any],
    adapter: Mapping[str, Any],
    *,
    accept: bool = False,
) -> list[Change]:
    """Return the accepted changes; empty when nothing differs.

    A backbone is identified by the digest of its files if both sides have one. The same files in another folder are the
    same backbone, so `backbone.model` and `backbone.revision` may differ then.

    Raises:
        SnapshotMismatchError: the backbone or the adapter's shape differs, a value differs that can never be accepted,
            or an acceptable change was not accepted.
    """
    name = f"snapshot {manifest.step:08d}"
    same_files = manifest.backbone.get("digest") is not None and manifest.backbone["digest"] == backbone.get("digest")
    if not same_files:
        _refuse(f"{name} was trained on another backbone", _changes(manifest.backbone, backbone, "backbone."))
    _refuse(f"{name} holds another adapter", _changes(manifest.adapter, adapter, "adapter."))
    changes = _changes(manifest.config, fingerprint)
    if same_files:
        changes = [change for change in changes if change.key not in ("backbone.model", "backbone.revision")]
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
