"""A few kills and stops in every run of the suite."""

import pytest

from tests.broker import Broker
from tests.crash.harness import Harness
from tests.doubles import tiny_backbone

KILLS, STOPS = 5, 3

pytestmark = pytest.mark.broker


@pytest.fixture(scope="module")
def harness(broker: Broker, tmp_path_factory: pytest.TempPathFactory) -> Harness:
    backbone = tiny_backbone(tmp_path_factory.mktemp("backbone"))
    return Harness(broker, backbone, tmp_path_factory.mktemp("lives"), seed=5)


def test_killed_anywhere_nothing_is_lost_repeated_or_changed(harness: Harness) -> None:
    """In starts, in steps and in snapshots."""
    tally = harness.kill(KILLS)
    assert tally.kills.total() == KILLS
    assert tally.same, tally


def test_stopped_anywhere_it_ends_cleanly_and_nothing_is_done_again(harness: Harness) -> None:
    """Exit code 0, and the last snapshot covers all that was journalled."""
    tally = harness.stop(STOPS)
    assert tally.stops.by_moment.total() == STOPS
    assert not tally.stops.bad_exits, tally
    assert not tally.stops.replayed, tally
    assert tally.same, tally
