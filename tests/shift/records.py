"""Features of synthetic records, and a memory of regimes filled with them."""

from streamlearn.shift.change_tests import RecentRecord
from streamlearn.shift.features import Features, Featurizer, input_of
from streamlearn.shift.memory import RegimeMemory
from tests.shift.streams import stream


def features_of(task: int, number: int, *, seed: int = 0) -> list[Features]:
    """Records of one task."""
    featurizer = Featurizer(0)
    return [featurizer.featurize(input_of(each)) for each in stream([task] * number, seed=seed)]


def fill(regimes: RegimeMemory, slot: int, records: list[Features], start: int) -> None:
    """Add records to a slot and commit them at once."""
    for i, record in enumerate(records):
        regimes.add(slot, record, start + i)
        regimes.commit(RecentRecord(record, start + i, slot, 0.0))


def memory_of(*visits: tuple[int, int], max_regimes: int, seed: int = 0) -> RegimeMemory:
    """A memory of consecutive visits (task, records), each in a slot of its own."""
    regimes, ordinal = RegimeMemory(max_regimes), 1
    for i, (task, number) in enumerate(visits):
        created = regimes.create(ordinal, ())
        assert created is not None
        fill(regimes, created[0], features_of(task, number, seed=1000 * seed + i), ordinal)
        ordinal += number
    regimes.calibrate()
    return regimes


def recent(records: list[Features], slot: int, *, start: int, regimes: RegimeMemory) -> tuple[RecentRecord, ...]:
    """Count records in a slot, as the detector does before it decides about them."""
    made = []
    for ordinal, record in enumerate(records, start=start):
        log_ratio = float(regimes.score(record).log_ratios_R[slot])
        regimes.add(slot, record, ordinal)
        made.append(RecentRecord(record, ordinal, slot, log_ratio))
    return tuple(made)
