"""The files that ship: every configuration loads, and the README's reference is the settings' own."""

from pathlib import Path

import pytest

from streamlearn.configuration import check_backbone, reference
from streamlearn.settings import load

ROOT = Path(__file__).parents[1]
CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))


@pytest.mark.parametrize("config", CONFIGS, ids=lambda path: path.name)
def test_every_configuration_is_complete_and_valid(config: Path) -> None:
    """It loads, and its adapter fits its backbone as far as that is on this machine."""
    assert check_backbone(load(config)).startswith("valid")


def test_there_are_configurations_to_check() -> None:
    """The three that the README speaks of."""
    assert {path.name for path in CONFIGS} >= {"quickstart.yaml", "kafka-local.yaml", "prod.yaml"}


def test_the_quickstart_reads_the_bundled_sample() -> None:
    """Its stream is in the repository and small."""
    source = load(ROOT / "configs/quickstart.yaml").source.jsonl
    assert source is not None
    assert source.path.is_file()
    assert sum(file.stat().st_size for file in source.path.parent.iterdir()) < 2_000_000


def test_the_readme_holds_the_generated_reference() -> None:
    """`python -m streamlearn.configuration` prints what stands between the markers."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    _, _, rest = readme.partition("<!-- reference -->\n")
    shown, _, _ = rest.partition("<!-- /reference -->")
    assert shown.strip() == reference().strip()


def test_every_row_of_the_reference_is_one_line_of_four_cells() -> None:
    """Markdown ends a table at a line that is not one."""
    rows = [line for line in reference().splitlines() if line and not line.startswith("**")]
    assert len(rows) > 50
    assert [row for row in rows if not (row.startswith("|") and row.endswith("|") and row.count("|") == 5)] == []
