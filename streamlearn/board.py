"""Where the loop publishes its status for other threads, with a heartbeat and the counters of the process."""

import time
from collections import Counter as Totals
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType

from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics

from streamlearn.errors import IGNORABLE, Reason
from streamlearn.status import SHIFT_KINDS, Phase, Status
from streamlearn.stream.record import FORMS

# The longest iteration of the loop is a step, a snapshot and the job budget, a few seconds each; ten times that.
HEARTBEAT_BOUND_S = 60.0
STARTING_BOUND_S = 600.0  # loading a backbone from a cold disk is one iteration: 16 GB at 30 MB/s


@dataclass(frozen=True, slots=True)
class Clock:
    """Monotonic and wall time, in seconds; tests pass their own."""

    monotonic: Callable[[], float] = time.monotonic
    wall: Callable[[], float] = time.time  # noqa: TID251 - for people


BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
"""Inclusive upper bounds of the buckets of durations, seconds."""


class Counters:
    """Counts and durations of this process, for Prometheus.

    They begin at zero with the process and never fall: Prometheus takes a fall for a reset to zero, and would add all
    that the run ever did. Work that is repeated after a rollback counts again. The totals of the run are in `Status`.
    """

    def __init__(self) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]  # the start of the process says the same
        self.registry = CollectorRegistry()
        counter = partial(Counter, namespace="streamlearn", registry=self.registry)
        duration = partial(Histogram, namespace="streamlearn", buckets=BUCKETS_S, registry=self.registry)
        self.steps = counter("steps", "Optimizer updates.")
        self.step_seconds = duration("step_seconds", "Duration of a training step, from batch to update.")
        self.records_trained = counter("records_trained", "Records that an update was made from.")
        held_out = "Records kept out of training: to measure forgetting, or because their regime is frozen."
        self.records_held_out = counter("records_held_out", held_out)
        self.tokens_trained = counter("tokens_trained", "Tokens of records trained on.")
        refusals = "Updates refused because the loss or a gradient was not finite."
        self.update_refusals = counter("update_refusals", refusals)
        dead_letters = "Records set aside as unusable, by reason."
        self.dead_letters = counter("records_dead_lettered", dead_letters, ["reason"])
        ignored = "Records that there is nothing to learn from by their nature, by reason: deletion or label_false."
        self.ignored = counter("records_ignored", ignored, ["reason"])
        truncated = "Records cut to stream.max_tokens, by form."
        self.truncated_records = counter("records_truncated", truncated, ["form"])
        self.truncated_tokens = counter("tokens_truncated", "Tokens that truncated records lost, by form.", ["form"])
        shifts = "Detected shifts of the stream, by kind: inputs or answers; the first regime is not counted."
        self.shifts = counter("shifts", shifts, ["kind"])
        self.snapshot_write_seconds = duration("snapshot_write_seconds", "Duration of writing a snapshot.")
        pauses = "Duration of pauses of training for requests, between two steps."
        self.job_pause_seconds = duration("job_pause_seconds", pauses)
        for reason in Reason:  # rate() needs a first sample
            self.dead_letters.labels(reason)
        for reason in IGNORABLE:
            self.ignored.labels(reason)
        for form in FORMS:
            self.truncated_records.labels(form.name)
            self.truncated_tokens.labels(form.name)
        for kind in SHIFT_KINDS:
            self.shifts.labels(kind)

    def update(self, before: Status, now: Status) -> None:
        """Add the growth of the run's totals from one status to the next; a rollback takes nothing back."""
        for name in ("records_trained", "records_held_out", "tokens_trained", "update_refusals"):
            getattr(self, name).inc(max(0, getattr(now, name) - getattr(before, name)))
        self.steps.inc(max(0, now.step - before.step))
        for reason, number in (Totals(now.dead_letters) - Totals(before.dead_letters)).items():
            self.dead_letters.labels(reason).inc(number)
        for reason, number in (Totals(now.ignored) - Totals(before.ignored)).items():
            self.ignored.labels(reason).inc(number)
        for name in ("truncated_records", "truncated_tokens"):
            for form, number in (Totals(getattr(now, name)) - Totals(getattr(before, name))).items():
                getattr(self, name).labels(form).inc(number)
        for kind, number in (Totals(now.adaptation.num_shifts) - Totals(before.adaptation.num_shifts)).items():
            self.shifts.labels(kind).inc(number)


class Board:
    """The current status. One writer, any number of readers, no locks: replacing the status is atomic.

    Every publication is also a heartbeat. While it waits or works without a change of status, the loop calls `beat`.
    """

    def __init__(
        self,
        status: Status,
        clock: Clock,
        *,
        bound_s: float = HEARTBEAT_BOUND_S,
        on_publish: Callable[[Status], None] = lambda _: None,
    ) -> None:
        """`on_publish` is called on every publication and heartbeat, in the loop's thread."""
        self.counters = Counters()
        self._ended_threads: tuple[str, ...] = ()
        self._clock = clock
        self._on_publish = on_publish
        self._bound_s = bound_s
        self.publish(status)

    def publish(self, status: Status) -> None:
        """Replace the status. Its values must not change afterwards; its mappings are copied."""
        self._last_beat = self._clock.monotonic()  # first: the new phase may have the tighter bound
        self._status = replace(
            status,
            dead_letters=MappingProxyType(dict(status.dead_letters)),
            ignored=MappingProxyType(dict(status.ignored)),
            truncated_records=MappingProxyType(dict(status.truncated_records)),
            truncated_tokens=MappingProxyType(dict(status.truncated_tokens)),
            versions=MappingProxyType(dict(status.versions)),
            ended_threads=self._ended_threads,
        )
        self._on_publish(self._status)

    def thread_ended(self, name: str, error: str) -> None:
        """Show from now on that an error ended a thread of the process. Called by any thread."""
        self._ended_threads += (f"the thread {name} ended by {error}; restart the daemon",)
        self._status = replace(self._status, ended_threads=self._ended_threads)

    def read(self) -> Status:
        return self._status

    def beat(self) -> None:
        """Record a heartbeat without changing the status."""
        self._last_beat = self._clock.monotonic()
        self._on_publish(self._status)

    @property
    def heartbeat_age_s(self) -> float:
        """Seconds since the last heartbeat."""
        return self._clock.monotonic() - self._last_beat

    @property
    def heartbeat_bound_s(self) -> float:
        """Maximum age of the last heartbeat in the current phase."""
        starting = self._status.phase in (Phase.STARTING, Phase.RESTORING)
        return STARTING_BOUND_S if starting else self._bound_s

    @property
    def alive(self) -> bool:
        """Whether the daemon has not failed and its last heartbeat is recent enough."""
        return self._status.phase is not Phase.FAILED and self.heartbeat_age_s <= self.heartbeat_bound_s

    def why_not_alive(self) -> str | None:
        """The reason for people; None while the loop and all threads are alive."""
        return self._why_loop_is_not_alive() or "; ".join(self._ended_threads) or None

    def _why_loop_is_not_alive(self) -> str | None:
        if self._status.phase is Phase.FAILED:
            return f"the daemon failed: {self._status.reason or 'see the log'}"
        if not self.alive:
            return (
                f"the training loop must report every {self.heartbeat_bound_s:g} s, "
                f"its last report is {self.heartbeat_age_s:.1f} s old"
            )
        return None

    def why_not_ready(self) -> str | None:
        """The reason for people; None while the daemon accepts jobs."""
        status = self._status
        not_alive = self._why_loop_is_not_alive()
        if not_alive is not None:
            return not_alive
        return None if status.ready else status.reason or f"the daemon is {status.phase}"
