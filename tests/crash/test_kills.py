"""A few kills and stops of a learning daemon."""

import pytest

from tests.broker import Broker
from tests.crash.harness import Harness
from tests.doubles import tiny_backbone
from tests.end_to_end.process import ForkedDaemon

KILLS, STOPS = 5, 3

pytestmark = pytest.mark.broker


@pytest.fixture(scope="module")
def harness(broker: Broker, tmp_path_factory: pytest.TempPathFactory) -> Harness:
    backbone = tiny_backbone(tmp_path_factory.mktemp("backbone"))
    return Harness(broker, backbone, tmp_path_factory.mktemp("runs"), seed=5, process=ForkedDaemon)


def test_kills_at_random_moments_lose_repeat_and_change_nothing(harness: Harness) -> None:
    """During starts, steps and snapshots."""
    tally = harness.kill(KILLS)
    assert tally.kills.total() == KILLS
    assert tally.same, tally


def test_stops_at_random_moments_are_clean_and_nothing_is_repeated(harness: Harness) -> None:
    """The exit code is 0, and the last snapshot covers every journalled batch."""
    tally = harness.stop(STOPS)
    assert tally.stops.by_moment.total() == STOPS
    assert not tally.stops.bad_exits, tally
    assert not tally.stops.replayed, tally
    assert tally.same, tally
