"""The loop's state as one published status, and the log line of a step."""

import time
from collections import deque
from collections.abc import Mapping
from dataclasses import replace

from streamlearn.daemon.build import Components
from streamlearn.daemon.checkpoint import RunState
from streamlearn.events import Event, get_logger
from streamlearn.learner.learner import Step
from streamlearn.status import AnsweredBy, Board, PartitionStatus, Phase, Status

SPEED_WINDOW_S = 30.0  # tokens/s is an average over this time
LOG_INTERVAL_S = 10.0  # one step per interval is logged at level info, every step at level debug

_log = get_logger("daemon")


class Throughput:
    """Tokens per second over the last `SPEED_WINDOW_S`."""

    def __init__(self) -> None:
        self._marks: deque[tuple[float, int]] = deque()

    def update(self, now: float, tokens: int) -> float:
        """The average up to `now`, when `tokens` have been trained on in all; fewer than before after a rollback."""
        if self._marks and tokens < self._marks[-1][1]:
            self._marks.clear()
        self._marks.append((now, tokens))
        while len(self._marks) > 2 and now - self._marks[0][0] > SPEED_WINDOW_S:
            self._marks.popleft()
        then, before = self._marks[0]
        return (tokens - before) / (now - then) if now > then else 0.0


class StatusPublisher:
    """Puts a new status on the board. Only the loop's thread calls it."""

    def __init__(self, board: Board, components: Components) -> None:
        self._board = board
        self._source = components.source
        self._learner = components.learner
        self._adaptation = components.adaptation
        self._history = components.history
        self._versions = components.adapter_publisher
        self._trackers = components.trackers
        self._throughput = Throughput()
        self._counts = False
        self._logged_at = 0.0

    def publish(
        self,
        state: RunState,
        phase: Phase,
        *,
        ready: bool,
        reason: str,
        degraded: str,
        step: Step | None,
        requests: Mapping[tuple[bool, AnsweredBy], int],
    ) -> None:
        """Publish the loop's state; `step` is the one just taken, if any, and `requests` is `JobRunner.requests`."""
        before, now, updates = self._board.read(), time.monotonic(), self._learner.number
        if self._trackers is not None and updates < before.step:
            self._trackers.note_rewind(updates)
        position = state.read_position
        lag = self._source.lag(position)
        adaptation = self._adaptation.status()
        self._history.complete_rows(adaptation.regimes)
        speed = self._throughput.update(now, state.tokens) if step is not None else before.tokens_per_s
        status = replace(
            before,
            phase=phase,
            ready=ready,
            reason=reason,
            degraded=degraded,
            step=updates,
            last_step_at=before.last_step_at if step is None or step.refusal is not None else now,
            records_trained=sum(state.ledger.trained.values()),
            records_held_out=state.ledger.held_out.total(),
            tokens_trained=state.tokens,
            tokens_per_s=0.0 if phase in (Phase.IDLE, Phase.PAUSED) else speed,
            loss=state.loss,
            loss_smoothed=state.loss_smoothed,
            learning_rate=self._learner.learning_rate,
            dead_letters=dict(state.reasons),
            ignored=dict(state.ignored),
            update_refusals=state.refusals,
            adaptation=adaptation,
            history=self._history.status,
            publication=None if self._versions is None else self._versions.status,
            trackers=() if self._trackers is None else self._trackers.status,
            partitions=tuple(
                PartitionStatus(origin.topic, origin.partition, offset, lag.get(origin))
                for origin, offset in position.items()
            ),
            snapshot=state.last_snapshot,
            records_since_snapshot=state.records_since_save,
            step_seconds=before.step_seconds if step is None else step.seconds,
            requests=dict(requests),
        )
        if self._counts:  # the totals that the process began with are not its own
            self._board.counters.update(before, status)
        self._counts = True
        self._board.publish(status)
        if step is not None:
            self._log_step(step, status, now)

    def _log_step(self, step: Step, status: Status, now: float) -> None:
        fields = {
            "step": step.number,
            "loss": round(step.loss, 4),
            "smoothed": round(status.loss_smoothed or step.loss, 4),
            "records": status.records_trained,
            "tokens_per_s": round(status.tokens_per_s),
        }
        if now - self._logged_at >= LOG_INTERVAL_S:
            self._logged_at = now
            _log.info(Event.STEP_TAKEN, **fields)
        else:
            _log.debug(Event.STEP_TAKEN, **fields)
