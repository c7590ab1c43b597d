"""Applies the operator's controls in the loop, between two steps."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from streamlearn.controls import AuditLog, Control, Scope, StateControls
from streamlearn.errors import SnapshotError, StreamlearnError, UsageError
from streamlearn.jobs.queue import ControlJob, ControlResult
from streamlearn.jobs.runner import control_result
from streamlearn.snapshot.parts import Snapshot


class ControlRunner:
    """Controls with their lines in the audit log. Called only by the thread that owns the model."""

    def __init__(
        self,
        controls: StateControls,
        audit: AuditLog,
        *,
        newest: Callable[[], str | None],
        pause_changed: Callable[[], None],
        change_regimes: Callable[[Control], None],
        check_restorable: Callable[[Snapshot], None],
        restore_newest: Callable[[], None],
    ) -> None:
        """`newest` returns the name of the newest snapshot; the others are the methods of `Daemon` of that name."""
        self._controls = controls
        self._audit = audit
        self._newest = newest
        self._pause_changed = pause_changed
        self._change_regimes = change_regimes
        self._check_restorable = check_restorable
        self._restore_newest = restore_newest
        self.fault: StreamlearnError | None = None
        """Why the process must end: memory may differ from disk."""

    def run(self, job: ControlJob) -> ControlResult:
        """Apply a control; it is durable when this returns.

        Raises:
            UsageError: it is refused; nothing was changed.
            StreamlearnError: it failed.
        """
        moved: list[str] = []
        with self._audit.applying(job.control, job.who) as outcome:
            outcome.unchanged = not self._apply(job.control, moved)
        return control_result(
            job.control, self._controls, changed=not outcome.unchanged, moved=moved, newest=self._newest()
        )

    def _apply(self, control: Control, moved: list[str]) -> bool:
        """Return whether anything changed."""
        if control.scope is Scope.REGIME:
            with self._must_succeed("the change", but=(UsageError, SnapshotError)):
                self._change_regimes(control)
            return True
        if control.verb == "rollback":
            moved += self._roll_back(**control.arguments)
            return True
        changed = self._controls.apply(control)
        if control.scope is Scope.RUN:
            self._pause_changed()
        return changed

    def _roll_back(self, snapshot: str, skip_records: tuple[str, ...]) -> list[str]:
        loaded, skipped = self._controls.check_rollback(snapshot, skip_records)
        self._check_restorable(loaded)
        with self._must_succeed(f"the rollback to {snapshot}"):
            moved = self._controls.roll_back(snapshot, skipped)
            self._restore_newest()
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
                f"{what} must be completed before the run continues, and was not: {error}; restart: a start continues "
                "from the durable state, and finishes a rollback that was decided"
            )
            raise self.fault from error
