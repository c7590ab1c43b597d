"""A hundred crash states of random histories."""

from pathlib import Path

from tests.crash.states import load_states


def test_every_crash_state_of_a_random_history_holds_the_old_snapshot_or_the_new_one(tmp_path: Path) -> None:
    """Its journal consists of the first lines of one that was written."""
    figures, clean = load_states(100, seed=7, folder=tmp_path)
    assert clean, figures
    assert figures["states"] == 100
