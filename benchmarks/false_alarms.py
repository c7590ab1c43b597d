"""False alarms of shift detection on tasks that it was not tuned on, compared with the configured rate.

    python -m benchmarks.detect --others ../shared/data/pretrain/superni_other.jsonl.gz --records 500000 --level 10
    python -m benchmarks.detect --others ... --records 1000000 --length 20000

The detector was tuned on fifteen tasks of SuperNI. The file holds texts of others (`data.read_texts`).

- boundaries: one stream per prompt of `NUM_BOUNDARIES` + 1 random tasks, as the abrupt streams of `streams`.
- level: streams of one task each, by order. Every shift but the first is a false alarm: a `new` regime, a `return` to
  one that a false alarm made, or a `split` of records that are mixed from the beginning, which has no level. Most come
  within the first `YOUNG_RECORDS` of a stream, so longer streams also have a rate `settled` of the records after them.
  `exceeds_target`: the exact 95 % interval of the Poisson rate (Garwood 1936) lies above the configured rate.

Orders of a stationary stream, all of which draw every record equally often in expectation:

- independent: with replacement.
- autoregressive: the records are sorted by the first principal component of phi, and the next is the one at the
  quantile Phi(u_t) with u_t = a u_(t-1) + sqrt(1 - a^2) e_t: a Markov chain with a Gaussian copula (Joe 1997, ch. 8).
  Neighbors are alike; the integrated autocorrelation time is (1 + a) / (1 - a) records.
- topics: the same sorted records in `NUM_TOPICS` equal parts; the part is a Markov chain that is redrawn with
  probability 1 / run at every record, and the record is drawn from the part.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtr
from scipy.stats import chi2

from benchmarks.data import read_texts
from benchmarks.streams import PROMPTS, Stream, StreamMaker, Task, text_decoder, to_task
from streamlearn.errors import UsageError
from streamlearn.settings import ShiftSettings
from streamlearn.shift.detector import InputShiftDetector, Shift
from streamlearn.shift.features import Features, Featurizer, input_of

NUM_BOUNDARIES = 100
YOUNG_RECORDS = 1000
"""Records of a stream in which its regime counts as young."""
NUM_TOPICS = 8
MIN_RECORDS = 40
"""Minimum records of a task: about five a topic."""
AUTOREGRESSIVE = 0.5
TOPIC_RUNS = (4, 8)
"""Mean records of a topic. Half a short window, 8, is the hardest case."""
KINDS = ("new", "return", "split")
"""Kinds of false alarms."""

Order = Callable[[np.random.Generator, int, NDArray[np.intp]], NDArray[np.intp]]
"""(generator, number of records to draw, the task's records sorted by similarity) -> records"""


@dataclass(frozen=True)
class Rate:
    """False alarms of one order of records."""

    records: int
    alarms: int

    def __add__(self, other: "Rate") -> "Rate":
        return Rate(self.records + other.records, self.alarms + other.alarms)

    def to_json(self, target: float) -> dict[str, Any]:
        """The rate per million, its 95 % interval, and whether the interval lies above the target.

        The interval is exact for a Poisson count (Garwood 1936). Alarms of one task come in clusters, so it is too
        narrow where there are many.
        """
        low = chi2.ppf(0.025, 2 * self.alarms) / 2 if self.alarms else 0.0
        high = chi2.ppf(0.975, 2 * self.alarms + 2) / 2
        per_million = [round(1e6 * float(count) / self.records, 2) for count in (self.alarms, low, high)]
        return {
            "records": self.records,
            "alarms": self.alarms,
            "per_million": per_million[0],
            "interval_95": per_million[1:],
            "exceeds_target": per_million[1] > target,
        }


def read_tasks(file: Path) -> tuple[list[Task], int]:
    """Return the tasks of the file with at least `MIN_RECORDS` records, and the size of the vocabulary.

    A task with an empty input is left out: without the definition nothing would be left of the record.

    Raises:
        UsageError: the file does not exist, or holds too few such tasks.
    """
    texts = {
        name: rows
        for name, rows in read_texts(file).items()
        if len(rows) >= MIN_RECORDS and all(row["input"] for row in rows)
    }
    if len(texts) <= NUM_BOUNDARIES:
        raise UsageError(
            f"{file} must hold more than {NUM_BOUNDARIES} tasks of {MIN_RECORDS} records, found {len(texts)}; set "
            "another file with --others"
        )
    decoder, vocab_size = text_decoder()
    return [to_task(name, rows, decoder) for name, rows in texts.items()], vocab_size


def boundary_streams(tasks: Sequence[Task], seeds: int) -> list[tuple[Stream, list[Task]]]:
    """For each seed and prompt a stream of `NUM_BOUNDARIES` boundaries, and the tasks that it is made of."""
    streams = []
    for seed in range(seeds):
        chosen = np.random.default_rng([seed, 0x0E]).permutation(len(tasks))[: NUM_BOUNDARIES + 1]
        subset = [tasks[i] for i in chosen.tolist()]
        maker = StreamMaker(subset, seed)
        streams += [(maker.abrupt(prompt), subset) for prompt in PROMPTS]
    return streams


def measure_level(tasks: Sequence[Task], target: float, records: int, stream_records: int) -> dict[str, Any]:
    """False alarms of every order in `records` records, with `target` false alarms per million configured."""
    young, settled = ({name: Rate(0, 0) for name in ORDERS} for _ in range(2))
    kinds: dict[str, Counter[str]] = {name: Counter() for name in ORDERS}
    featurizer = Featurizer(0)
    streams = -(-records // stream_records)
    for number in range(streams):
        task, prompt = tasks[number // len(PROMPTS) % len(tasks)], PROMPTS[number % len(PROMPTS)]
        features = [featurizer.featurize(input_of(example)) for example in task.examples[prompt]]
        by_similarity = sort_by_similarity(features)
        for name, order in ORDERS.items():
            drawn = order(np.random.default_rng([number, 0xFA]), stream_records, by_similarity)
            alarms = false_alarms([features[i] for i in drawn.tolist()], target)
            early = sum(alarm.declared_at <= YOUNG_RECORDS for alarm in alarms)
            kinds[name].update(map(kind_of, alarms))
            young[name] += Rate(min(YOUNG_RECORDS, stream_records), early)
            settled[name] += Rate(max(stream_records - YOUNG_RECORDS, 0), len(alarms) - early)
    return {
        name: {
            **(young[name] + settled[name]).to_json(target),
            "kinds": {kind: kinds[name][kind] for kind in KINDS},
            **({"settled": settled[name].to_json(target)} if stream_records > YOUNG_RECORDS else {}),
        }
        for name in ORDERS
    }


def false_alarms(stream: Sequence[Features], target: float) -> list[Shift]:
    """The shifts in a stream of one regime, the first record's left out."""
    detector = InputShiftDetector(ShiftSettings(false_alarms_per_million=target))
    return [shift for record in stream for shift in detector.update(record, ()).shifts][1:]


def kind_of(alarm: Shift) -> str:
    if alarm.parent is not None:
        return "split"
    return "return" if alarm.known else "new"


def sort_by_similarity(features: Sequence[Features]) -> NDArray[np.intp]:
    """Indices of records in order of the first principal component of phi."""
    phi_ND = np.array([record.phi_D for record in features], dtype=np.float64)
    centered_ND = phi_ND - phi_ND.mean(axis=0)
    _, axes_DD = np.linalg.eigh(centered_ND.T @ centered_ND)
    return np.argsort(centered_ND @ axes_DD[:, -1], kind="stable")


def independent(rng: np.random.Generator, number: int, by_similarity: NDArray[np.intp]) -> NDArray[np.intp]:
    """Draw with replacement."""
    return by_similarity[rng.integers(len(by_similarity), size=number)]


def autoregressive(rng: np.random.Generator, number: int, by_similarity: NDArray[np.intp]) -> NDArray[np.intp]:
    """Draw by a Gaussian autoregression of order 1."""
    noise = rng.standard_normal(number)
    latent = noise.copy()
    for t in range(1, number):
        latent[t] = AUTOREGRESSIVE * latent[t - 1] + (1 - AUTOREGRESSIVE**2) ** 0.5 * noise[t]
    place: NDArray[np.intp] = (ndtr(latent) * len(by_similarity)).astype(np.intp)
    return by_similarity[np.minimum(place, len(by_similarity) - 1)]


def topics(run: int) -> Order:
    """An order by topics that last `run` records on average."""

    def order(rng: np.random.Generator, number: int, by_similarity: NDArray[np.intp]) -> NDArray[np.intp]:
        parts = np.array_split(by_similarity, NUM_TOPICS)
        starts = rng.random(number) < 1 / run
        starts[0] = True
        chosen = rng.integers(NUM_TOPICS, size=number)[np.maximum.accumulate(np.where(starts, np.arange(number), 0))]
        return np.array([rng.choice(parts[part]) for part in chosen.tolist()])

    return order


ORDERS: dict[str, Order] = {
    "independent": independent,
    "autoregressive": autoregressive,
    **{f"topics_{run}": topics(run) for run in TOPIC_RUNS},
}
