"""Carries out the operator's controls in the loop, between two steps."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

from streamlearn.controls import (
    ApproveRegime,
    AuditLog,
    Control,
    DropRegime,
    FreezeRegime,
    Pause,
    Pin,
    RegimeControl,
    RenameRegime,
    Resume,
    RollBack,
    StateControls,
    UnfreezeRegime,
    Unpin,
)
from streamlearn.errors import SnapshotError, StreamlearnError, UsageError
from streamlearn.jobs.queue import ControlJob, ControlResult
from streamlearn.jobs.runner import control_result
from streamlearn.snapshot.parts import Snapshot


class RegimeChanges(Protocol):
    """What an operator may change about regimes. Each method raises UsageError if there is no regime of this number."""

    def freeze(self, number: int) -> None:
        """Train no more on the regime's records."""

    def unfreeze(self, number: int) -> None:
        """Train on the regime's records again."""

    def rename(self, number: int, name: str) -> None:
        """Give the regime a name."""

    def approve(self, number: int) -> None:
        """Publish what the regime learned although its answers changed."""

    def drop(self, number: int) -> None:
        """Forget the regime."""


class ControlledLoop(Protocol):
    """What the loop offers for controls."""

    def pause_changed(self) -> None:
        """The daemon was paused or resumed."""

    def check_restorable(self, snapshot: Snapshot) -> None:
        """Raise SnapshotMismatchError if the run cannot go on from this snapshot."""

    def restore_newest(self) -> None:
        """Go on from the newest snapshot, as the next start would."""

    def change_regimes(self, change: Callable[[RegimeChanges], None]) -> None:
        """Change regimes and write a snapshot.

        Raises:
            UsageError: the change is refused.
            SnapshotError: the snapshot could not be written; the change holds, and the next one will have it.
        """


class ControlRunner:
    """Controls with their lines in the audit log. Called only by the thread that owns the model."""

    def __init__(
        self, controls: StateControls, audit: AuditLog, loop: ControlledLoop, newest: Callable[[], str | None]
    ) -> None:
        """`newest` returns the name of the newest snapshot."""
        self._controls = controls
        self._audit = audit
        self._loop = loop
        self._newest = newest
        self.fault: StreamlearnError | None = None
        """Why the process must end: what is in memory may not be what is on disk."""

    def run(self, job: ControlJob) -> ControlResult:
        """Carry out a control; what it says is durable when this returns.

        Raises:
            UsageError: it is refused; nothing was changed.
            StreamlearnError: it failed.
        """
        moved: list[str] = []
        with self._audit.carrying_out(job.control, job.who) as outcome:
            outcome.unchanged = not self._apply(job.control, moved)
        return control_result(
            job.control, self._controls, changed=not outcome.unchanged, moved=moved, newest=self._newest()
        )

    def _apply(self, control: Control, moved: list[str]) -> bool:
        """Return whether anything changed."""
        match control:
            case Pause() | Resume():
                changed = self._controls.pause(isinstance(control, Pause))
                self._loop.pause_changed()
                return changed
            case Pin(name):
                return self._controls.pin(name)
            case Unpin(name):
                return self._controls.unpin(name)
            case RollBack():
                moved += self._roll_back(control)
            case RegimeControl():
                self._change_regime(control)
        return True

    def _change_regime(self, control: RegimeControl) -> None:
        with self._must_succeed("the change", but=(UsageError, SnapshotError)):
            self._loop.change_regimes(lambda regimes: _change(regimes, control))

    def _roll_back(self, control: RollBack) -> list[str]:
        snapshot, skipped = self._controls.check_rollback(control.snapshot, control.skip_records)
        self._loop.check_restorable(snapshot)
        with self._must_succeed(f"the rollback to {control.snapshot}"):
            moved = self._controls.roll_back(control.snapshot, skipped)
            self._loop.restore_newest()
        return moved

    @contextmanager
    def _must_succeed(self, what: str, *, but: tuple[type[StreamlearnError], ...] = ()) -> Iterator[None]:
        """Note that the process must end if the block fails, except with the errors in `but`."""
        try:
            yield
        except but:
            raise
        except Exception as error:
            self.fault = SnapshotError(
                f"{what} must be completed before the run goes on, and was not: {error}; restart: a start goes on from "
                "what is durable, and finishes a rollback that was decided"
            )
            raise self.fault from error


def _change(regimes: RegimeChanges, control: RegimeControl) -> None:
    match control:
        case FreezeRegime(number):
            regimes.freeze(number)
        case UnfreezeRegime(number):
            regimes.unfreeze(number)
        case RenameRegime(number, name):
            regimes.rename(number, name)
        case ApproveRegime(number):
            regimes.approve(number)
        case DropRegime(number):
            regimes.drop(number)
