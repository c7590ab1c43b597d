"""A hundred states of drawn lives in every run of the suite."""

from pathlib import Path

from tests.crash.states import load_states


def test_every_state_of_a_drawn_life_holds_the_old_snapshot_or_the_new_one(tmp_path: Path) -> None:
    """And its journal is the beginning of one that was written."""
    figures, clean = load_states(100, seed=7, folder=tmp_path)
    assert clean, figures
    assert figures["states"] == 100
