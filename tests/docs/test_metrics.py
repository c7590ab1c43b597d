"""The generated blocks of the documentation are up to date, and the metrics are those that a daemon serves."""

import re

from docs.generate import PAGES, block
from tests.docs.markdown import ROOT
from tests.docs.place import Place

TEXT = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")


def test_every_generated_block_is_up_to_date() -> None:
    """`python docs/generate.py` writes them."""
    for name, reference in PAGES.items():
        assert block((ROOT / "docs" / name).read_text(encoding="utf-8")) == reference(), name


def test_every_served_metric_is_documented(daemon: Place) -> None:
    """By its name and its type."""
    served = re.findall(r"^# TYPE (\w+) (\w+)$", daemon.get("/metrics"), re.MULTILINE)
    assert [name for name, kind in served if f"| `{name}` | {kind} |" not in TEXT] == []


def test_labels_are_documented_as_they_are_served(daemon: Place) -> None:
    """For every sample but a histogram's buckets and the versions of the build."""
    documented = {name: set(re.findall(r"`(\w+)`", labels)) for name, labels in _rows()}
    samples = re.findall(r"^(streamlearn_\w+)\{([^}]*)\}", daemon.get("/metrics"), re.MULTILINE)
    left_out = re.compile(r"_bucket$|_build_info$")
    found = {name: set(re.findall(r"(\w+)=", labels)) for name, labels in samples if not left_out.search(name)}
    assert found
    assert {name: labels for name, labels in found.items() if labels != documented[name]} == {}


def _rows() -> list[tuple[str, str]]:
    return re.findall(r"^\| `(\w+)` \| \w+ \|([^|]*)\|", TEXT, re.MULTILINE)
