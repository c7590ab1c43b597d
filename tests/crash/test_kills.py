"""A few kills in every run of the suite."""

from pathlib import Path

import pytest

from tests.broker import Broker
from tests.crash.harness import Harness
from tests.doubles import tiny_backbone

KILLS = 5

pytestmark = pytest.mark.broker


def test_killed_anywhere_nothing_is_lost_repeated_or_changed(broker: Broker, tmp_path: Path) -> None:
    """In starts, in steps and in snapshots."""
    (tmp_path / "backbone").mkdir()
    harness = Harness(broker, tiny_backbone(tmp_path / "backbone"), tmp_path, seed=5)
    tally = harness.kill(KILLS)
    assert tally.kills.total() == KILLS
    assert tally.clean, tally
