"""The controls that change the state folder, whether a daemon runs or not."""

from collections.abc import Collection, Sequence
from dataclasses import replace

from streamlearn.controls.control_file import ControlFile
from streamlearn.controls.read_ahead import read_ahead
from streamlearn.errors import SnapshotDamagedError, UsageError
from streamlearn.snapshot.journal import Journal
from streamlearn.snapshot.snapshot import Snapshot
from streamlearn.snapshot.store import SnapshotStore
from streamlearn.stream.offset_range import OffsetRange
from streamlearn.stream.record import Position, TopicPartition


class StateControls:
    """Pause, pins and rollbacks of one state folder, whose lock the process holds.

    Each is durable when its method returns, and leaves either the old state or the new one when the process dies.

    A rollback:

      1. The snapshot is verified, and that no skipped record can have had an influence on it.
      2. Snapshot and skipped records are durable in the control file. Before this the run is the old one; from here on
         it is the rolled-back one: whoever takes the lock next repeats 3 to 5.
      3. Newer snapshots are moved aside, newest first.
      4. The journal is cut at the snapshot's step.
      5. The rollback is noted as finished. The skipped records stay in the control file.
      6. The run is restored from its newest snapshot, which is now that of the rollback; its reader leaves out the
         skipped records. A daemon does that next, or the next start.
    """

    def __init__(self, file: ControlFile, store: SnapshotStore, journal: Journal) -> None:
        self._file = file
        self._store = store
        self._journal = journal

    @property
    def paused(self) -> bool:
        """Whether no step is taken and no record is read."""
        return self._file.state.paused

    @property
    def pins(self) -> Collection[str]:
        """Names of the pinned snapshots."""
        return self._file.state.pins

    @property
    def skipped(self) -> Sequence[OffsetRange]:
        """Records that are never trained on."""
        return self._file.state.skipped

    def pause(self, paused: bool) -> bool:
        """Pause or resume; return whether that changes anything.

        Raises:
            SnapshotError: it cannot be made durable.
        """
        changed = paused != self.paused
        self._file.write(replace(self._file.state, paused=paused))
        return changed

    def pin(self, name: str) -> bool:
        """Keep a snapshot from being pruned; return whether that changes anything.

        Raises:
            UsageError: there is no such snapshot.
            SnapshotError: it cannot be made durable.
        """
        self._require(name, self._store.names())
        return self._set_pins(self._file.state.pins | {name})

    def unpin(self, name: str) -> bool:
        """Let a snapshot be pruned again. Raises and returns like `pin`."""
        self._require(name, [*self._store.names(), *self.pins])
        return self._set_pins(self._file.state.pins - {name})

    def check_rollback(self, name: str, skip_records: Sequence[str]) -> tuple[Snapshot, tuple[OffsetRange, ...]]:
        """Return the snapshot and the offsets that a rollback means; step 1.

        Raises:
            UsageError: there is no such snapshot, it is damaged, an offset range is not usable, or the snapshot may
                depend on records in it.
            SnapshotError: the snapshot cannot be read.
        """
        self._require(name, self._store.names())
        try:
            snapshot = self._store.load(name)
        except SnapshotDamagedError as error:
            raise UsageError(f"snapshot {name} must be intact, found: {error}; roll back to another one") from error
        position, examined = snapshot.manifest.position, read_ahead(snapshot.manifest)
        ranges = tuple(OffsetRange.parse(text, position.keys()) for text in skip_records)
        for skipped in ranges:
            _require_topic(skipped, position)
            self._require_unread(skipped, name, position, examined)
        return snapshot, ranges

    def roll_back(self, name: str, skipped: Sequence[OffsetRange]) -> list[str]:
        """Carry out a rollback that was checked, steps 2 to 5; return the snapshots that were moved aside.

        Raises:
            SnapshotError: it could not be completed. If `rolling_back` is true then, the next start completes it, and
                this process must not go on.
        """
        state = self._file.state
        union = tuple(sorted({*state.skipped, *skipped}))
        self._file.write(replace(state, skipped=union, rolling_back_to=name))  # 2.
        return self.finish_rollback()

    @property
    def rolling_back(self) -> bool:
        """Whether a rollback is decided and not finished."""
        return self._file.state.rolling_back_to is not None

    def finish_rollback(self) -> list[str]:
        """Repeat steps 3 to 5 of a rollback that is under way, if any; raises and returns like `roll_back`."""
        name = self._file.state.rolling_back_to
        if name is None:
            return []
        moved = self._store.move_newer_aside(name)  # 3.
        self._journal.rewind(to_step=int(name))  # 4.
        pins = frozenset(pin for pin in self.pins if int(pin) <= int(name))  # later ones will be other snapshots
        self._file.write(replace(self._file.state, pins=pins, rolling_back_to=None))  # 5.
        return moved

    def forget_run(self) -> None:
        """Forget what belongs to a run that is being set aside: pins, skipped records, a rollback. A pause stays.

        Raises:
            SnapshotError: it cannot be made durable.
        """
        self._file.write(replace(self._file.state, pins=frozenset(), skipped=(), rolling_back_to=None))

    def _set_pins(self, pins: frozenset[str]) -> bool:
        changed = pins != self.pins
        self._file.write(replace(self._file.state, pins=pins))
        return changed

    def _require(self, name: str, names: Sequence[str]) -> None:
        if name not in names:
            listed = ", ".join(names) or "none"
            raise UsageError(f"expected the name of a snapshot in {self._store.folder}, found {name!r:.40}: {listed}")

    def _require_unread(self, skipped: OffsetRange, name: str, position: Position, examined: Position) -> None:
        origin = skipped.origin
        if skipped.first < position.get(origin, 0):
            reason = f"it was trained up to offset {position[origin] - 1} of {origin}"
        elif skipped.first < examined.get(origin, 0):
            reason = (
                f"it was written when offsets up to {examined[origin] - 1} of {origin} had been examined for shifts"
            )
        else:
            return
        raise UsageError(
            f"snapshot {name} must not depend on skipped records, and it may depend on offset {skipped.first}: "
            f"{reason}; {self._advice(skipped, name)}"
        )

    def _advice(self, skipped: OffsetRange, name: str) -> str:
        for info in reversed(self._store.infos()):
            reached = read_ahead(self._store.manifest(info.name))
            if int(info.name) < int(name) and reached.get(skipped.origin, 0) <= skipped.first:
                return f"roll back to {info.name}"
        return "no earlier snapshot does not, so that these records can no longer be skipped exactly"


def _require_topic(skipped: OffsetRange, position: Position) -> None:
    topics = sorted({origin.topic for origin in position})
    if skipped.origin.topic not in topics:
        raise UsageError(
            f"skipped records must be of a topic of this stream ({', '.join(topics) or 'none yet'}), found "
            f"{TopicPartition(skipped.origin.topic, skipped.origin.partition)}"
        )
