"""The folder of snapshots: one complete state each, named by its step, the newest valid one found again after a crash.

    snapshots/00018204/{manifest.json, state.safetensors, adapter/...}
    snapshots/.staging-00018300    being written; removed at the next start
    snapshots/.replaced-00018204   replaced by a later one of the same step; removed, or put back, at the next start
    snapshots/.pruned-00016000     being removed
    snapshots/damaged-00018100     moved aside

Nothing but `prune` removes a complete snapshot. What was moved aside is the operator's to look at and to delete.
"""

import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

from safetensors import SafetensorError
from torch import Tensor

from streamlearn.errors import SnapshotDamagedError, SnapshotError
from streamlearn.events import Event, get_logger
from streamlearn.snapshot import tensors as tensor_file
from streamlearn.snapshot.contents import ADAPTER, MANIFEST, STATE, entry_of, reading, tree
from streamlearn.snapshot.files import Files
from streamlearn.snapshot.manifest import Manifest, ManifestDraft
from streamlearn.snapshot.snapshot import Snapshot, SnapshotInfo, read_manifest, snapshot_name, verify

log = get_logger("snapshot")

_NAME = re.compile(r"[0-9]{8,20}")
_STATE_KEYS = ("position", "ledger", "dead_letter_mark", "config")  # and the step; the tensors follow from these
_STAGING, _REPLACED, _PRUNED, _DAMAGED = ".staging-", ".replaced-", ".pruned-", "damaged-"


class SnapshotStore:
    """Snapshots of one daemon. Reading is safe beside it; `save`, `newest`, `prune` and `set_aside` need its lock.

    It logs what it decides alone (SNAPSHOT_DAMAGED, SNAPSHOT_PRUNED, SNAPSHOT_PRUNE_FAILED); what it was told to do is
    its caller's to log.
    """

    def __init__(self, folder: Path, *, keep: int, files: Files | None = None) -> None:
        assert keep >= 1, "the newest snapshot is never pruned"
        self.folder = folder
        self.keep = keep
        self.files = files if files is not None else Files()

    def save(
        self, draft: ManifestDraft, write_adapter: Callable[[Path], None], tensors: Mapping[str, Tensor]
    ) -> SnapshotInfo:
        """Make one complete state durable. Every earlier snapshot stays untouched.

        0. A snapshot of this very state (step, position, ledger, configuration) is returned as it is, nothing written.
        1. Stage beside the target: `write_adapter` fills `adapter/`, then `state.safetensors`.
        2. fsync every file, then every folder but the staging one.
        3. Write the manifest, which names and hashes those files, fsync it and the staging folder.
        4. Rename the staging folder to its step. One of the same step and another position (dead letters move the
           position without a step) is first renamed away; a crash between the two renames is mended by `newest`.
        5. fsync the snapshots' folder: from here on `newest` finds it, whatever happens.

        Whatever goes wrong, nothing of the new snapshot remains, and no failed fsync is tried again.

        Raises:
            SnapshotError: it could not be written; the newest snapshot is the one before.
        """
        name = snapshot_name(draft.step)
        staging = self.folder / (_STAGING + name)
        try:
            self._make_folder()
            kept = self._same_state(name, draft)  # 0.
            if kept is not None:
                self.files.sync(self.folder)  # its writer may have died between 4. and 5.
                return SnapshotInfo.of(kept)
            manifest = self._stage(staging, draft, write_adapter, tensors)  # 1. to 3.
            self._publish(staging, self.folder / name)  # 4. and 5.
        except (OSError, SafetensorError) as error:
            raise SnapshotError(
                f"snapshot {name} could not be written in {self.folder}: {error}; the snapshots before it are "
                "untouched: see that the disk has room and works"
            ) from error
        finally:
            with suppress(OSError, SnapshotError):  # what cannot be mended now is mended at the next start
                self._sweep()
        return SnapshotInfo.of(manifest)

    def newest(self) -> Snapshot | None:
        """Find the newest valid snapshot; None means that there never was one.

        1. Mend what a dead process left half done.
        2. Verify from the newest down until one is whole.
        3. Move the damaged ones that are newer aside, to `damaged-<name>`.

        Raises:
            SnapshotError: there are snapshots and none is whole (all stay where they are), or none can be read.
            SnapshotMismatchError: the newest whole one has another manifest format.
        """
        with reading(self.folder):
            self._sweep()  # 1.
        damaged: dict[str, SnapshotDamagedError] = {}
        for name in reversed(self.names()):  # 2.
            try:
                snapshot = self.load(name)
            except SnapshotDamagedError as error:
                damaged[name] = error
                continue
            for newer, fault in damaged.items():  # 3.
                self._report_damaged(newer, fault)
            return snapshot
        if damaged or self._leftovers(_DAMAGED):
            raise SnapshotError(
                f"a valid snapshot must be in {self.folder}, found damaged ones alone: "
                f"{'; '.join(map(str, damaged.values())) or 'moved aside as damaged-*'}; put a copy of one back, or "
                "start anew with --fresh, which keeps them aside"
            )
        return None

    def names(self) -> list[str]:
        """Names of the snapshots, oldest first, damaged ones that were not met yet included. Raises SnapshotError."""
        with reading(self.folder):
            try:
                found = [path.name for path in self.folder.iterdir() if _NAME.fullmatch(path.name)]
            except FileNotFoundError:
                return []
        return sorted((name for name in found if name == snapshot_name(int(name))), key=int)

    def infos(self) -> list[SnapshotInfo]:
        """The snapshots at a glance, oldest first, files unread; one whose manifest is damaged is left out."""
        infos = []
        for name in self.names():
            with suppress(SnapshotDamagedError):  # `verify` tells of it
                infos.append(SnapshotInfo.of(read_manifest(self._path(name))))
        return infos

    def verify(self, name: str) -> Manifest:
        """Hold every file of a snapshot against its manifest, and the manifest against its seal.

        Raises:
            SnapshotDamagedError: names the file, what must stand there and what was found.
            SnapshotError: there is no such snapshot, or this process cannot read it.
            SnapshotMismatchError: it has another manifest format.
        """
        return verify(self._path(name))

    def load(self, name: str) -> Snapshot:
        """Verify a snapshot and return it; its tensors are read on demand. Raises as `verify` does."""
        return Snapshot(self.folder / name, self.verify(name))

    def prune(self, keep: int | None = None) -> None:
        """Remove all but the newest `keep` (the store's own number unless told); a failure is logged, not raised."""
        keep = self.keep if keep is None else keep
        assert keep >= 1, "the newest snapshot is never pruned"
        try:
            for name in self.names()[:-keep]:
                pruned = self.folder / (_PRUNED + name)
                self.files.rename(self.folder / name, pruned)
                self.files.sync(self.folder)  # else a power loss could bring the name back without its files
                self.files.remove(pruned)
                log.info(Event.SNAPSHOT_PRUNED, snapshot=name)
        except (OSError, SnapshotError) as error:
            log.warning(Event.SNAPSHOT_PRUNE_FAILED, folder=str(self.folder), error=str(error))

    def set_aside(self) -> Path | None:
        """Make room for `--fresh`: rename the whole folder, delete nothing, and say its new name; None when empty.

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
            raise SnapshotError(f"{self.folder} could not be renamed to {target}: {error.strerror}") from error
        return target

    def _make_folder(self) -> None:
        if not self.folder.exists():
            self.folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self.files.make_folder(self.folder)
            self.files.sync(self.folder.parent)

    def _same_state(self, name: str, draft: ManifestDraft) -> Manifest | None:
        if not self._is_whole(name):
            return None
        found = read_manifest(self._path(name))
        same = all(getattr(found, key) == getattr(draft, key) for key in _STATE_KEYS)
        return found if same else None

    def _is_whole(self, name: str) -> bool:
        """Whether there is a valid snapshot of this name; a damaged one is moved aside."""
        if name not in self.names():
            return False
        try:
            self.verify(name)
        except SnapshotDamagedError as error:
            self._report_damaged(name, error)
            return False
        return True

    def _stage(
        self,
        staging: Path,
        draft: ManifestDraft,
        write_adapter: Callable[[Path], None],
        tensors: Mapping[str, Tensor],
    ) -> Manifest:
        if staging.exists():
            self.files.remove(staging)
        self.files.make_folder(staging)  # 1.
        self.files.make_folder(staging / ADAPTER)
        write_adapter(staging / ADAPTER)
        tensor_file.write(staging / STATE, tensors)
        files, folders = tree(staging)
        for path in [*files.values(), *folders[:-1]]:  # 2.
            self.files.sync(path)
        manifest = Manifest.of(draft, {name: entry_of(path) for name, path in files.items()})  # 3.
        self.files.write(staging / MANIFEST, manifest.to_bytes())
        self.files.sync(staging / MANIFEST)
        self.files.sync(staging)
        return manifest

    def _publish(self, staging: Path, target: Path) -> None:
        if target.exists():  # 4.
            self.files.rename(target, self.folder / (_REPLACED + target.name))
        self.files.rename(staging, target)
        try:
            self.files.sync(self.folder)  # 5.
        except OSError:
            self.files.rename(target, staging)  # whether the name would survive is unknown, so nobody may rely on it
            raise

    def _path(self, name: str) -> Path:
        """Never join a stranger's text to a path: the name is looked up."""
        if name not in self.names():
            raise SnapshotError(f"no snapshot {name!r:.40} in {self.folder}, found {', '.join(self.names()) or 'none'}")
        return self.folder / name

    def _sweep(self) -> None:
        """Put back what was replaced in vain, then remove what was being written or removed. Raises OSError."""
        for replaced in self._leftovers(_REPLACED):
            name = replaced.name.removeprefix(_REPLACED)
            if self._is_whole(name):
                self.files.remove(replaced)
            else:
                self.files.rename(replaced, self.folder / name)
        for leftover in [*self._leftovers(_STAGING), *self._leftovers(_PRUNED)]:
            self.files.remove(leftover)

    def _leftovers(self, prefix: str) -> list[Path]:
        return sorted(self.folder.glob(f"{prefix}*"))

    def _report_damaged(self, name: str, fault: SnapshotDamagedError) -> None:
        aside = _unused(self.folder / (_DAMAGED + name))
        try:
            self.files.rename(self.folder / name, aside)
            self.files.sync(self.folder)
        except OSError as error:
            log.error(Event.SNAPSHOT_DAMAGED, snapshot=name, fault=str(fault), moved_to=None, error=str(error))
        else:
            log.error(Event.SNAPSHOT_DAMAGED, snapshot=name, fault=str(fault), moved_to=str(aside))


def _unused(path: Path) -> Path:
    """`path`, or the first of `path-2`, `path-3`, ... that does not exist."""
    number, candidate = 1, path
    while candidate.exists():
        number += 1
        candidate = path.with_name(f"{path.name}-{number}")
    return candidate
