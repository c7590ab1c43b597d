"""Both rounds learned by the daemon: the regime of every record, what it cost, and what is left at the end."""

import tempfile
from pathlib import Path
from statistics import fmean
from typing import Any

import orjson

from benchmarks.many_regimes.regime_costs import settings_of
from benchmarks.many_regimes.two_rounds import TwoRounds
from streamlearn.daemon.build import Components
from streamlearn.daemon.loop import Daemon
from streamlearn.jobs.queue import JobQueue
from streamlearn.learner.learner import Step
from streamlearn.settings import Settings
from streamlearn.shift.monitor import AssignedBatch
from streamlearn.status import Board, Clock, Phase, Status


class RecordingDaemon(Daemon):
    """The daemon in this process. It notes the regime of every record, and the losses of those it trains on."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(Components(settings), Board(Status(Phase.STARTING), Clock()), JobQueue(1))
        self.regimes: list[int] = []
        """Number of the regime of each record."""
        self.losses: list[float] = []
        """Prequential, nats per learned token."""

    def learn(self, assigned: AssignedBatch) -> Step | None:
        """Train on a batch, and note its records."""
        step = super().learn(assigned)
        self.regimes += [self.adaptation.numbers[slot] for slot in assigned.slots]
        self.losses += step.record_losses if step is not None else ()
        return step


def learn(drawn: TwoRounds, *, backbone: Path | None, seed: int) -> tuple[list[int], dict[str, Any]]:
    """Run the daemon over both rounds.

    Returns:
        The regime of every record; and figures by name: the mean prequential loss, the number of returns that were
        refused, and forgetting on the hold-out records at the end.
    """
    with tempfile.TemporaryDirectory() as folder:
        settings = settings_of(Path(folder), backbone, len(drawn.segments) // 2, seed)
        settings.source.jsonl.path.write_bytes(  # type: ignore[union-attr]  # it is set by `settings_of`
            b"".join(orjson.dumps(record, option=orjson.OPT_APPEND_NEWLINE) for record in drawn.stream)
        )
        daemon = RecordingDaemon(settings)
        daemon.run()
        daemon.score_all()
        status = daemon.adaptation.status()
        daemon.components.close()
    return daemon.regimes, {
        "refused": sum(shift.refused_return is not None for shift in status.shifts),
        "prequential_loss": round(fmean(daemon.losses), 4),
        "forgetting": None if status.average_forgetting is None else round(status.average_forgetting, 4),
    }
