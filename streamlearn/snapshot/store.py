"""The folder of snapshots: one complete state per step, and the newest valid one found after any crash.

    snapshots/00018204/{manifest.json, state.safetensors, adapter/..., optimizer/...}
    snapshots/.staging-00018300    being written; removed at the next start
    snapshots/.replaced-00018204   replaced by a later one of the same step; removed or put back at the next start
    snapshots/.pruned-00016000     being removed
    snapshots/damaged-00018100     moved aside
    snapshots/rolled-back-00018200 moved aside by a rollback to an earlier one

Parts that have not changed since the snapshot before the newest are not written again: their files get another name (a
hard link). The newest snapshot has its own copy, so that a damaged file never invalidates the two newest snapshots.
Files are linked only from snapshots that this process wrote, so nothing depends on an earlier process.

Only `prune` removes a complete snapshot, and never a pinned one. Snapshots that were moved aside are kept for the
operator to examine and delete; they are never loaded.
"""

import re
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from pathlib import Path

from safetensors import SafetensorError

from streamlearn.errors import SnapshotDamagedError, SnapshotError
from streamlearn.events import Event, get_logger
from streamlearn.snapshot.files import Files, hash_file, list_tree, reading
from streamlearn.snapshot.manifest import MANIFEST, FileEntry, Manifest, ManifestDraft
from streamlearn.snapshot.parts import (
    Snapshot,
    SnapshotInfo,
    SnapshotPart,
    WrittenSnapshot,
    make_parents,
    read_manifest,
    snapshot_name,
    verify,
)

_log = get_logger("snapshot")

_NAME = re.compile(r"[0-9]{8,20}")
_STATE_KEYS = (
    "position",
    "ledger",
    "dead_letter_mark",
    "config",
    "regime_changes",
)  # with the step, they determine the tensors
_STAGING, _REPLACED, _PRUNED = ".staging-", ".replaced-", ".pruned-"
_DAMAGED, _ROLLED_BACK = "damaged-", "rolled-back-"


def _no_pins() -> Collection[str]:
    return ()


class SnapshotStore:
    """The snapshots of one daemon.

    Other processes may read them at any time; `save`, `newest`, `prune`, `move_newer_aside` and `set_aside` require the
    state lock.

    The store logs its own decisions (SNAPSHOT_DAMAGED, SNAPSHOT_PRUNED, SNAPSHOT_PRUNE_FAILED). Its caller logs what it
    called the store for.
    """

    def __init__(
        self,
        folder: Path,
        *,
        keep: int,
        pins: Callable[[], Collection[str]] = _no_pins,
        files: Files | None = None,
    ) -> None:
        """`pins` returns the names of the snapshots that are never pruned."""
        assert keep >= 1, "the newest snapshot is never pruned"
        self.folder = folder
        self.keep = keep
        self._pins = pins
        self.files = files if files is not None else Files()
        self._written: dict[str, WrittenSnapshot] = {}
        """The existing snapshots that this process wrote, by name."""
        self.new_bytes = 0
        """Bytes that the last `save` wrote, without linked files."""

    def save(self, draft: ManifestDraft, parts: Sequence[SnapshotPart]) -> SnapshotInfo:
        """Make one complete state durable. Every earlier snapshot stays untouched.

        0. If a snapshot of the same state exists (step, position, ledger, configuration, an operator's changes of
           regimes), return it and write nothing.
        1. Write every part into a staging folder beside the target, or link it.
        2. fsync every file that is not linked, then every folder except the staging folder.
        3. Write the manifest, which names and hashes those files; fsync it, then the staging folder.
        4. Rename the staging folder to the step's name. A snapshot of the same step in another state (dead letters
           move the position without a step, an operator drops a regime between two) is first renamed to `.replaced-*`;
           `newest` repairs a crash between the two renames.
        5. fsync the folder of snapshots. From here on `newest` finds the new snapshot after any crash.

        If any step fails, nothing of the new snapshot remains. A failed fsync is never retried.

        Raises:
            SnapshotError: it could not be written; the previous snapshot is still the newest.
        """
        name = snapshot_name(draft.step)
        staging = self.folder / (_STAGING + name)
        self.new_bytes = 0
        try:
            self._make_folder()
            kept = self._same_state(name, draft)  # 0.
            if kept is not None:
                self.files.sync(self.folder)  # the process that wrote it may have crashed between 4. and 5.
                return SnapshotInfo.from_manifest(kept)
            manifest = self._stage(staging, draft, parts)  # 1. to 3.
            self._publish(staging, self.folder / name)  # 4. and 5.
            self._written[name] = WrittenSnapshot(
                self.folder / name, manifest, {part.name: part.revision for part in parts}
            )
        except (OSError, SafetensorError) as error:
            raise SnapshotError(
                f"snapshot {name} could not be written in {self.folder}: {error}; earlier snapshots are untouched. "
                "Check the disk's free space and health"
            ) from error
        finally:
            with suppress(OSError, SnapshotError):  # what cannot be repaired now is repaired at the next start
                self._clean_up()
        return SnapshotInfo.from_manifest(manifest)

    def newest(self) -> Snapshot | None:
        """Find the newest valid snapshot; None if there has never been a snapshot.

        1. Finish or undo what a crashed process left incomplete.
        2. Verify from the newest snapshot down, until one is valid.
        3. Move the newer, damaged ones aside, to `damaged-<name>`.

        Raises:
            SnapshotError: no snapshot is valid (all stay where they are), or none can be read.
            SnapshotMismatchError: the newest intact snapshot has another manifest format.
        """
        with reading(self.folder):
            self._clean_up()  # 1.
        damaged: dict[str, SnapshotDamagedError] = {}
        for name in reversed(self.names()):  # 2.
            try:
                snapshot = self.load(name)
            except SnapshotDamagedError as error:
                damaged[name] = error
                continue
            for newer, fault in damaged.items():  # 3.
                self._move_aside(newer, fault)
            return snapshot
        if damaged or self._leftovers(_DAMAGED):
            raise SnapshotError(
                f"{self.folder} must hold a valid snapshot, found only damaged ones: "
                f"{'; '.join(map(str, damaged.values())) or 'moved aside as damaged-*'}; restore one from a backup, or "
                "start over with --fresh, which keeps these in another folder"
            )
        return None

    def names(self) -> list[str]:
        """Names of the snapshots, oldest first, including damaged ones not yet detected. Raises SnapshotError."""
        with reading(self.folder):
            try:
                names = [path.name for path in self.folder.iterdir() if _NAME.fullmatch(path.name)]
            except FileNotFoundError:
                return []
        return sorted((name for name in names if name == snapshot_name(int(name))), key=int)

    def infos(self) -> list[SnapshotInfo]:
        """Summaries from the manifests, oldest first; snapshots with a damaged manifest are left out."""
        infos = []
        for name in self.names():
            with suppress(SnapshotDamagedError):  # `verify` reports it, or it was pruned meanwhile
                infos.append(SnapshotInfo.from_manifest(read_manifest(self.folder / name)))
        return infos

    def manifest(self, name: str) -> Manifest:
        """Read a snapshot's manifest and compare it with its seal, without the other files. Raises like `verify`."""
        return read_manifest(self._path(name))

    def verify(self, name: str) -> Manifest:
        """Compare a snapshot's manifest with its seal, and every other file with the manifest.

        Raises:
            SnapshotDamagedError: names the file, what was expected and what was found.
            SnapshotError: there is no such snapshot, or this process cannot read it.
            SnapshotMismatchError: it has another manifest format.
        """
        return verify(self._path(name))

    def load(self, name: str) -> Snapshot:
        """Verify a snapshot and return it; its tensors are read on demand. Raises like `verify`."""
        return Snapshot(self.folder / name, self.verify(name))

    def prune(self, keep: int | None = None) -> None:
        """Remove all but the newest `keep` snapshots (default: the store's `keep`) and those that are pinned.

        Failures are logged, not raised.
        """
        keep = self.keep if keep is None else keep
        assert keep >= 1, "the newest snapshot is never pruned"
        try:
            pins = self._pins()
            for name in self.names()[:-keep]:
                if name in pins:
                    continue
                pruned = self.folder / (_PRUNED + name)
                self.files.rename(self.folder / name, pruned)
                self.files.sync(self.folder)  # otherwise a power loss could restore the name without its files
                self.files.remove(pruned)
                _log.info(Event.SNAPSHOT_PRUNED, snapshot=name)
        except (OSError, SnapshotError) as error:
            _log.warning(Event.SNAPSHOT_PRUNE_FAILED, folder=str(self.folder), error=str(error))

    def move_newer_aside(self, name: str) -> list[str]:
        """Rename every snapshot after `name` to `rolled-back-*`, newest first; return their names. Safe to repeat.

        1. Finish or undo what a crashed process left incomplete: it could otherwise come back as a newer snapshot.
        2. Rename them, and fsync the folder.

        Raises:
            SnapshotError: one could not be renamed.
        """
        newer = []
        with reading(self.folder):
            self._clean_up()  # 1.
        try:
            for newest in reversed(self.names()):  # 2.
                if int(newest) <= int(name):
                    break
                self.files.rename(self.folder / newest, _unused(self.folder / (_ROLLED_BACK + newest)))
                newer.append(newest)
                _log.info(Event.SNAPSHOT_MOVED_ASIDE, snapshot=newest, rolled_back_to=name)
            self.files.sync(self.folder)
        except OSError as error:
            raise SnapshotError(
                f"{self.folder}: snapshots after {name} could not be moved aside: {error.strerror}; check the disk and "
                "the permissions"
            ) from error
        return newer

    def set_aside(self) -> Path | None:
        """Rename the whole folder for `--fresh` and return its new path; None if it holds no snapshot.

        Nothing is deleted.

        Raises:
            SnapshotError: it cannot be renamed.
        """
        names = self.names()
        if not names and not self._leftovers(_DAMAGED):
            return None
        target = _unused(self.folder.with_name(f"{self.folder.name}-until-{names[-1] if names else 'damaged'}"))
        try:
            self.files.rename(self.folder, target)
            self.files.sync(self.folder.parent)
        except OSError as error:
            raise SnapshotError(
                f"{self.folder} could not be renamed to {target}: {error.strerror}; check the permissions of "
                f"{self.folder.parent}"
            ) from error
        return target

    def _make_folder(self) -> None:
        if not self.folder.exists():
            self.folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self.files.make_folder(self.folder)
            self.files.sync(self.folder.parent)

    def _same_state(self, name: str, draft: ManifestDraft) -> Manifest | None:
        """The manifest of a valid snapshot of the draft's state, if there is one."""
        if not self._is_valid(name):
            return None
        manifest = read_manifest(self._path(name))
        return manifest if all(getattr(manifest, key) == getattr(draft, key) for key in _STATE_KEYS) else None

    def _is_valid(self, name: str) -> bool:
        """Whether there is a valid snapshot of this name; a damaged one is moved aside."""
        if name not in self.names():
            return False
        try:
            self.verify(name)
        except SnapshotDamagedError as error:
            self._move_aside(name, error)
            return False
        return True

    def _stage(self, staging: Path, draft: ManifestDraft, parts: Sequence[SnapshotPart]) -> Manifest:
        """Steps 1 to 3 of `save`."""
        if staging.exists():
            self.files.remove(staging)
        self.files.make_folder(staging)  # 1.
        linked: dict[str, FileEntry] = {}
        earlier = self._before_newest(staging.name.removeprefix(_STAGING))
        for part in parts:
            same = earlier.link(part, staging, self.files) if earlier is not None else None
            if same is None:
                make_parents(staging / part.name, self.files)
                part.write(staging / part.name)
            else:
                linked |= same
        files, folders = list_tree(staging)
        new = {name: path for name, path in files.items() if name not in linked}
        for path in [*new.values(), *folders[:-1]]:  # 2.
            self.files.sync(path)
        entries = {name: hash_file(path) for name, path in new.items()}  # 3.
        self.new_bytes = sum(entry.bytes for entry in entries.values())
        manifest = Manifest.from_draft(draft, {**linked, **entries})
        self.files.write(staging / MANIFEST, manifest.to_bytes())
        self.files.sync(staging / MANIFEST)
        self.files.sync(staging)
        return manifest

    def _before_newest(self, name: str) -> WrittenSnapshot | None:
        """The snapshot before the newest of those besides `name`, if this process wrote it."""
        names = [other for other in self.names() if other != name]
        self._written = {other: written for other, written in self._written.items() if other in names}
        return self._written.get(names[-2]) if len(names) > 1 else None

    def _publish(self, staging: Path, target: Path) -> None:
        """Steps 4 and 5 of `save`."""
        if target.exists():  # 4.
            self.files.rename(target, self.folder / (_REPLACED + target.name))
        self.files.rename(staging, target)
        try:
            self.files.sync(self.folder)  # 5.
        except OSError:
            self.files.rename(target, staging)  # the name may not survive a power loss, so it must not be relied on
            raise

    def _path(self, name: str) -> Path:
        """The path of a listed snapshot; untrusted text is never joined to a path."""
        if name not in self.names():
            raise SnapshotError(f"no snapshot {name!r:.40} in {self.folder}, found {', '.join(self.names()) or 'none'}")
        return self.folder / name

    def _clean_up(self) -> None:
        """Restore a snapshot whose replacement failed, then remove incomplete and pruned ones. Raises OSError."""
        for replaced in self._leftovers(_REPLACED):
            name = replaced.name.removeprefix(_REPLACED)
            if self._is_valid(name):
                self.files.remove(replaced)
            else:
                self.files.rename(replaced, self.folder / name)
        for leftover in [*self._leftovers(_STAGING), *self._leftovers(_PRUNED)]:
            self.files.remove(leftover)

    def _leftovers(self, prefix: str) -> list[Path]:
        return sorted(self.folder.glob(f"{prefix}*"))

    def _move_aside(self, name: str, fault: SnapshotDamagedError) -> None:
        """Rename a damaged snapshot to `damaged-<name>` and log it; a failed rename is logged too."""
        aside = _unused(self.folder / (_DAMAGED + name))
        try:
            self.files.rename(self.folder / name, aside)
            self.files.sync(self.folder)
        except OSError as error:
            _log.error(Event.SNAPSHOT_DAMAGED, snapshot=name, fault=str(fault), moved_to=None, error=str(error))
        else:
            _log.error(Event.SNAPSHOT_DAMAGED, snapshot=name, fault=str(fault), moved_to=str(aside))


def _unused(path: Path) -> Path:
    """`path`, or the first of `path-2`, `path-3`, ... that does not exist."""
    number, candidate = 1, path
    while candidate.exists():
        number += 1
        candidate = path.with_name(f"{path.name}-{number}")
    return candidate
