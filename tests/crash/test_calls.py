"""Kills at every fsync and rename of a save."""

from pathlib import Path

import pytest

from tests.crash.calls import REPLACE, SAVE, CannotTraceError, kill_at_calls


def test_a_kill_at_an_fsync_or_a_rename_leaves_the_old_snapshot_or_the_new_one(tmp_path: Path) -> None:
    """Bit for bit, and the next save works."""
    try:
        tally = kill_at_calls(tmp_path, (SAVE, REPLACE), ("fsync", "rename"))
    except CannotTraceError as error:
        pytest.skip(str(error))
    assert tally.clean, tally
    assert tally.kills["fsync"] >= 12, tally
    assert tally.loaded["old"] >= 10, tally
    assert tally.loaded["new"] >= 2, tally
