"""The note of a rollback: there until it is not needed any more, and never guessed."""

import math
from pathlib import Path

import pytest

from streamlearn.errors import PublicationError
from streamlearn.publish.publication import ROLLBACK_FILE_FILE, RollbackFile
from streamlearn.publish.publisher import forget_run


def test_a_step_is_noted_until_it_is_removed(tmp_path: Path) -> None:
    """A new run forgets it: its steps are others."""
    file = RollbackFile(tmp_path)
    assert file.read() == math.inf
    for forget in (file.remove, lambda: forget_run(tmp_path)):
        file.write(20)
        file.write(10)
        assert RollbackFile(tmp_path).read() == 10
        forget()
        assert file.read() == math.inf


def test_a_damaged_note_is_an_error_that_names_the_path(tmp_path: Path) -> None:
    """Versions of an unknown step cannot be withdrawn."""
    (tmp_path / ROLLBACK_FILE_FILE).write_text("ten")
    with pytest.raises(PublicationError, match=ROLLBACK_FILE_FILE):
        RollbackFile(tmp_path).read()
