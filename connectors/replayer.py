"""Putting dead letters back into their stream, each once: the protocols, and the way by a ledger.

A dead-letter topic holds the marks of what was put back, and each mark is written in one Kafka transaction with its
record: see `connectors.kafka.topic_replayer`. A dead-letter file has no transactions. There a ledger makes it exact:

1. The ledger names the dead letters that are about to be put back, and what is needed to find them there.
2. They are put back, all or none, durably.
3. The ledger says that it is done.

A process that is killed between 1. and 3. leaves an entry that is not done. The next replay looks at the target after
the place in the entry and finds out whether 2. took effect.
"""

from collections.abc import Sequence
from typing import Any, Protocol

from connectors.replay_ledger import ReplayLedger
from connectors.stored_dead_letter import DeadLetterId, Repair


class Replayer(Protocol):
    """Puts dead letters back and knows which were."""

    def replayed(self) -> frozenset[DeadLetterId]:
        """Those that were put back, by this or any earlier process."""

    def put_back(self, repairs: Sequence[Repair]) -> None:
        """Put back all or none, durably.

        Raises:
            DeadLetterError: it is not known to be done; the next process finds out.
        """

    def close(self) -> None:
        """Release everything. Safe to call twice."""


class ReplayTarget(Protocol):
    """Where records are put back."""

    def plan(self, repairs: Sequence[Repair]) -> dict[str, Any]:
        """What is needed to find them there later, JSON-ready, without their content. Raises DeadLetterError."""

    def put(self, repairs: Sequence[Repair]) -> None:
        """Append all or none, durably. Raises DeadLetterError."""

    def arrived(self, plan: dict[str, Any]) -> bool:
        """Whether what an earlier process planned was put. Raises DeadLetterError if that cannot be known."""

    def close(self) -> None:
        """Release the target. Safe to call twice."""


class LedgerReplayer:
    """The three steps."""

    def __init__(self, ledger: ReplayLedger, target: ReplayTarget) -> None:
        """Find out what became of an entry that is not done.

        Raises:
            DeadLetterError: that cannot be known, or the ledger cannot be written.
        """
        self._ledger = ledger
        self._target = target
        if ledger.pending is not None:
            ledger.finish(arrived=target.arrived(ledger.pending.plan))

    def replayed(self) -> frozenset[DeadLetterId]:
        """Those that the ledger calls done."""
        return self._ledger.done

    def put_back(self, repairs: Sequence[Repair]) -> None:
        """Put back all or none, durably; see `Replayer`."""
        self._ledger.begin([repair.dead_letter.id for repair in repairs], self._target.plan(repairs))  # 1.
        self._target.put(repairs)  # 2.
        self._ledger.finish(arrived=True)  # 3.

    def close(self) -> None:
        """Release ledger and target. Safe to call twice."""
        self._target.close()
        self._ledger.close()
