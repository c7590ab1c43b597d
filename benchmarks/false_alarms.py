"""False alarms of shift detection on tasks that it was not tuned on, compared with the configured rate.

The detector was tuned on fifteen tasks of SuperNI. The file of `--others` holds texts of others (`data.read_texts`).

- boundaries: one stream per prompt of `NUM_BOUNDARIES` + 1 random tasks, as the abrupt streams of `streams`.
- level: streams of one task each, by order. Every shift but the first is a false alarm: a `new` regime, a `return` to
  one that a false alarm made, or a `split` of records that are mixed from the beginning, which has no level.
  `exceeds_target`: the 95 % interval by a bootstrap over tasks lies above the configured rate.

Orders of a stationary stream, all of which draw every record equally often in expectation:

- independent: with replacement.
- autoregressive: the records are sorted by the first principal component of x, and the next is the one at the
  quantile Phi(u_t) with u_t = a u_(t-1) + sqrt(1 - a^2) e_t: a Markov chain with a Gaussian copula (Joe 1997, ch. 8).
  Neighbors are alike; the integrated autocorrelation time is (1 + a) / (1 - a) records.
- topics: the same sorted records in `NUM_TOPICS` equal parts; the part is a Markov chain that is redrawn with
  probability 1 / run at every record, and the record is drawn from the part.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtr
from scipy.stats import chi2

from benchmarks.streams import PROMPTS, Stream, StreamMaker, Task, text_featurizer
from streamlearn.settings import ShiftSettings
from streamlearn.shift.detector import InputShiftDetector, Shift
from streamlearn.shift.features import Features, input_of

NUM_BOUNDARIES = 100
NUM_TOPICS = 8
MIN_RECORDS = 40
"""Minimum records of a task: about five a topic."""
AUTOREGRESSIVE = 0.5
TOPIC_RUNS = (4, 8)
"""Mean records of a topic. Half a short window, 8, is the hardest case."""
NUM_RESAMPLES = 2000
KINDS = ("new", "return", "split")
"""Kinds of false alarms."""

Order = Callable[[np.random.Generator, int, NDArray[np.intp]], NDArray[np.intp]]
"""(generator, number of records to draw, the task's records sorted by similarity) -> records"""


def rate(alarms_T: NDArray[np.intp], records_T: NDArray[np.intp], target: float) -> dict[str, Any]:
    """The rate per million, its 95 % intervals, and whether the bootstrap's lies above the target.

    `poisson_95` is exact for independent alarms (Garwood 1936). Alarms of one task come in clusters, so `interval_95`
    is a bootstrap over the tasks (Efron 1979), whose alarms and records are given.
    """
    drawn_BT = np.random.default_rng(0xB0).integers(len(alarms_T), size=(NUM_RESAMPLES, len(alarms_T)))
    rate_B = alarms_T[drawn_BT].sum(axis=1) / records_T[drawn_BT].sum(axis=1)
    alarms, records = int(alarms_T.sum()), int(records_T.sum())
    low = chi2.ppf(0.025, 2 * alarms) / 2 if alarms else 0.0
    high = chi2.ppf(0.975, 2 * alarms + 2) / 2
    interval = [round(1e6 * float(bound), 2) for bound in np.quantile(rate_B, (0.025, 0.975))]
    return {
        "records": records,
        "alarms": alarms,
        "tasks_with_alarms": int((alarms_T > 0).sum()),
        "per_million": round(1e6 * alarms / records, 2),
        "interval_95": interval,
        "poisson_95": [round(1e6 * float(bound) / records, 2) for bound in (low, high)],
        "exceeds_target": interval[0] > target,
    }


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
    kinds: dict[str, Counter[str]] = {name: Counter() for name in ORDERS}
    streams = -(-records // stream_records)
    records_T = np.zeros(min(len(tasks), -(-streams // len(PROMPTS))), dtype=np.intp)
    alarms = {name: np.zeros_like(records_T) for name in ORDERS}
    for number in range(streams):
        index, prompt = number // len(PROMPTS) % len(tasks), PROMPTS[number % len(PROMPTS)]
        features = [text_featurizer().featurize(input_of(example)) for example in tasks[index].examples[prompt]]
        by_similarity = sort_by_similarity(features)
        records_T[index] += stream_records
        for name, order in ORDERS.items():
            drawn = order(np.random.default_rng([number, 0xFA]), stream_records, by_similarity)
            found = false_alarms([features[i] for i in drawn.tolist()], target)
            kinds[name].update(map(kind_of, found))
            alarms[name][index] += len(found)
    return {
        name: {**rate(alarms[name], records_T, target), "kinds": {kind: kinds[name][kind] for kind in KINDS}}
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
    """Indices of records in order of the first principal component of x."""
    x_ND = np.array([record.x_D for record in features], dtype=np.float64)
    centered_ND = x_ND - x_ND.mean(axis=0)
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
