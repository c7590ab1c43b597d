"""The Makefile and .gitignore agree with the files of the repository."""

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def test_the_results_that_the_makefile_names_exist() -> None:
    """Every file under `docs/` that a target says it writes is there from an earlier run."""
    named = set(re.findall(r"docs/[\w./-]+\w", (ROOT / "Makefile").read_text(encoding="utf-8")))
    assert named
    assert [name for name in sorted(named) if not (ROOT / name).exists()] == []


def test_no_tracked_file_is_ignored() -> None:
    """What .gitignore excludes was not committed before the rule, or by force."""
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    command = ["git", "ls-files", "--cached", "--ignored", "--exclude-standard"]
    tracked = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    assert tracked.splitlines() == []
