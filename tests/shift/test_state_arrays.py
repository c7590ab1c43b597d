"""The monitor's state as plain arrays: names on disk, and back without loss."""

import numpy as np

from streamlearn.settings import ShiftSettings
from streamlearn.shift.memory import RegimeMemory
from streamlearn.shift.monitor import Monitor, from_arrays, profiles_from_arrays, profiles_to_arrays, to_arrays
from streamlearn.shift.routing import RequestClassifier
from tests.shift.records import features_of, memory_of
from tests.shift.streams import VOCAB_SIZE, batches, stream

NAMES = {
    "integers",
    "reals",
    "usual",
    "shares.records",
    "shares.number",
    "ghosts.sizes",
    "ghosts.slots",
    *(
        f"{records}.{field}"
        for records in ("window", "others")
        for field in ("phi", "log_length", "ordinal", "slot", "log_ratio", "buckets.sizes", "buckets.values")
    ),
    "regimes.counts",
    "regimes.scalars",
    "regimes.references",
    "regimes.shares",
    "regimes.shares.numbers",
    "regimes.exemplars",
    "regimes.sampled",
    "regimes.scalars.added",
    "regimes.exemplars.sizes",
    "regimes.exemplars.values",
}
"""Part of the snapshot format."""


def test_a_monitors_state_survives_its_arrays() -> None:
    """In every bit, under the names of the snapshot format."""
    monitor = Monitor(ShiftSettings(), VOCAB_SIZE, seed=0)
    for batch in batches(stream([0] * 100 + [1] * 100 + [0, 1] * 30)):
        monitor.update(batch)
    arrays = to_arrays(monitor.released)
    assert set(arrays) == NAMES
    assert len(arrays["others.slot"]) > 0
    again = to_arrays(from_arrays(arrays))
    assert list(again) == list(arrays)
    assert all(again[name].dtype == arrays[name].dtype for name in arrays)
    assert all(np.array_equal(again[name], arrays[name]) for name in arrays)


def test_a_memory_survives_its_arrays() -> None:
    """Loaded from plain arrays it scores every record as before, bit for bit."""
    regimes = memory_of((0, 50), (1, 50), (2, 50), max_regimes=4)
    again = RegimeMemory(4)
    again.load(profiles_from_arrays(profiles_to_arrays(regimes.save())), regimes.next_number)
    assert [again[slot].number for slot in range(len(again))] == [1, 2, 3]
    for record in features_of(1, 20, seed=5):
        one, other = regimes.score(record), again.score(record)
        assert np.array_equal(one.scores_R, other.scores_R)
        assert RequestClassifier(regimes).assign(record) == RequestClassifier(again).assign(record)
        assert regimes[1].fit(float(one.log_ratios_R[1]), record) == again[1].fit(float(one.log_ratios_R[1]), record)


def test_arrays_without_document_frequencies_are_read() -> None:
    """Snapshots from before they were kept: the sample stands for all records."""
    arrays = profiles_to_arrays(memory_of((0, 50), max_regimes=4).save())
    old = {name: array for name, array in arrays.items() if not name.startswith("regimes.shares")}
    (profile,) = [each for each in profiles_from_arrays(old) if each is not None]
    assert profile.token_frequency.num_records == len(profile.sample) == 32
    assert profile.token_frequency.records_B.max() <= 32
    assert profile.token_frequency.records_B.max() > 16
    (whole,) = [each for each in profiles_from_arrays(arrays) if each is not None]
    assert whole.token_frequency.num_records == 50
