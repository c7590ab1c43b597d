"""Records of other regimes than the segment's."""

from streamlearn.shift.input_shift import SIZE, OtherRecords
from tests.shift.records import features_of, memory_of, recent


def test_keeps_the_newest_and_settles_the_others() -> None:
    """Each in the reference of its own regime."""
    regimes = memory_of((0, 0), (1, 0), max_regimes=2)
    others = OtherRecords()
    records = recent(features_of(0, 20), 0, start=1, regimes=regimes)
    records += recent(features_of(1, 20), 1, start=21, regimes=regimes)
    for each in records:
        others.append(each, regimes)
    assert others.records == records[-SIZE:]
    assert (regimes[0].reference.num_records, regimes[1].reference.num_records) == (40 - SIZE, 0)


def test_an_alarm_takes_the_most_frequent_regime() -> None:
    """Among the records since the run began."""
    regimes = memory_of((0, 0), (1, 0), max_regimes=2)
    records = recent(features_of(0, 9), 0, start=1, regimes=regimes)
    records += recent(features_of(1, 6), 1, start=10, regimes=regimes)
    others = OtherRecords(records)
    assert others.majority_since(1) == records[:9]
    assert others.majority_since(6) == records[9:]
    others.remove(records[9:])
    assert others.records == records[:9]
