"""Every notebook of the documentation runs from its first cell to its last, and is stored as it ran."""

import os
import subprocess
import sys
from pathlib import Path

import orjson
import pytest

NOTEBOOKS = sorted((Path(__file__).parents[2] / "docs").glob("*.ipynb"))


def code(notebook: Path) -> list[dict[str, object]]:
    cells = orjson.loads(notebook.read_bytes())["cells"]
    return [cell for cell in cells if cell["cell_type"] == "code"]


def test_there_are_two() -> None:
    assert [notebook.stem for notebook in NOTEBOOKS] == ["compare", "learn"]


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_runs(notebook: Path) -> None:
    """From its own folder, as a reader starts it."""
    program = "\n\n".join("".join(cell["source"]) for cell in code(notebook))  # type: ignore[arg-type]
    environment = {**os.environ, "MPLBACKEND": "agg", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=notebook.parent,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_is_stored_executed(notebook: Path) -> None:
    """In order, without errors or what went to standard error."""
    cells = code(notebook)
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell["outputs"]]  # type: ignore[attr-defined]
    assert {output["output_type"] for output in outputs} <= {"stream", "display_data", "execute_result"}
    assert all(output.get("name") != "stderr" for output in outputs)
