"""A stream of many tasks, one after another, that all return once."""

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.superni import read_texts, to_record
from streamlearn.errors import UsageError


@dataclass(frozen=True)
class TwoRounds:
    """The stream: segments of `records` records of one task; the second half are returns, in another order."""

    segments: tuple[str, ...]
    """The task of each."""
    records: int
    stream: tuple[dict[str, Any], ...]

    @classmethod
    def draw(cls, others: Path, *, tasks: int, records: int, seed: int, bare: bool = False) -> "TwoRounds":
        """Draw tasks, and records of each that differ between the rounds; `bare` leaves definitions out.

        Raises:
            UsageError: there is no such file, or too few of its tasks have twice as many records.
        """
        texts = {name: rows for name, rows in read_texts(others).items() if len(rows) >= 2 * records}
        if len(texts) < tasks:
            raise UsageError(
                f"{others}: expected {tasks} tasks with {2 * records} records, found {len(texts)}; lower --tasks"
            )
        names = random.Random(seed).sample(sorted(texts), tasks)
        rows = {name: random.Random(f"{name} {seed}").sample(texts[name], 2 * records) for name in names}
        again = random.Random(f"again {seed}").sample(names, tasks)
        drawn = [row for name in names for row in rows[name][:records]]
        drawn += [row for name in again for row in rows[name][records:]]
        return cls((*names, *again), records, tuple(to_record(row, bare=bare) for row in drawn))

    def returns(self, regimes: Sequence[int]) -> dict[str, float]:
        """Shares of returns that were recognised, of new tasks taken for known ones, and of records in their regime.

        A task's regime is the one that most of its records belonged to in the first round. A return is recognised if
        most of its records belong to that. A new task was taken for a known one if its regime is another task's.

        Args:
            regimes: Of each record of the stream.
        """
        found = [Counter(regimes[i : i + self.records]) for i in range(0, len(regimes), self.records)]
        majority: dict[str, int] = {}
        recognised = taken = own = 0
        for task, counts in zip(self.segments, found, strict=True):
            regime = counts.most_common(1)[0][0]
            recognised += task in majority and majority[task] == regime
            taken += task not in majority and regime in majority.values()
            own += counts[majority.setdefault(task, regime)]
        return {
            "recognised": round(2 * recognised / len(self.segments), 4),
            "taken_for_known": round(2 * taken / len(self.segments), 4),
            "purity": round(own / len(regimes), 4),
        }
