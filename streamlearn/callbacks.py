"""Callbacks of transformers' `Trainer`, called while a `Learner` learns."""

from collections.abc import Sequence
from typing import Any, Protocol

from streamlearn.learner.learner import Step
from streamlearn.regimes.report import ShiftReport
from streamlearn.snapshot.parts import SnapshotInfo
from streamlearn.status import ShiftStatus, Status
from streamlearn.stream.record import Batch


class Callback(Protocol):
    """What is called while records are learned: any of these, as of a `transformers.TrainerCallback`.

    `args` is None; `state` and `control` are transformers' `TrainerState` and `TrainerControl`; a callback may set
    `control.should_training_stop`.
    """

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any: ...
    def on_log(self, args: Any, state: Any, control: Any, *, logs: Any = None, **kwargs: Any) -> Any: ...
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any: ...
    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any: ...
    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any: ...


class CallbackObserver:
    """Passes what the loop reports on to the callbacks, and keeps the newest shift."""

    def __init__(self, callbacks: Sequence[Any]) -> None:
        self._callbacks = callbacks
        self._state: Any = None
        """transformers' state while `learn` is under way for the first time, and after; None before."""
        self.shift: ShiftStatus | None = None
        """The newest shift since it was set to None."""

    def begin(self, step: int) -> None:
        """A call of `learn` begins."""
        if self._callbacks:
            from transformers import TrainerControl, TrainerState  # noqa: PLC0415 - takes a second to import

            self._state, self._control = TrainerState(global_step=step), TrainerControl()
        self._call("on_train_begin")

    @property
    def stopped(self) -> bool:
        """Whether a callback asked to stop."""
        return bool(self._callbacks) and self._control.should_training_stop

    def updated(self, step: int, **logs: Any) -> None:
        """A batch was learned; `logs`: what `on_log` gets."""
        if self._callbacks:
            self._state.global_step = step
            self._call("on_log", logs=logs)
            self._call("on_step_end")

    def end(self) -> None:
        """A call of `learn` ends."""
        self._call("on_train_end")

    def _call(self, method: str, **values: Any) -> None:
        if self._state is None:
            return
        for callback in self._callbacks:
            if hasattr(callback, method):
                getattr(callback, method)(None, self._state, self._control, **values)

    def on_start(self, status: Status) -> None: ...

    def on_step(self, batch: Batch, step: Step, status: Status) -> None: ...

    def on_shift(self, report: ShiftReport) -> None:
        if report.shift.previous is not None:
            self.shift = report.status

    def on_snapshot(self, info: SnapshotInfo) -> None:
        del info
        self._call("on_save")
