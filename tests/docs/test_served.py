"""The documentation describes what a daemon serves: its endpoints and its metrics. Generated blocks are up to date."""

import re

import orjson

from docs.generate import PAGES, PROMETHEUS_RULE, block, prometheus_rule, settings_schema
from streamlearn.cli.init import SCHEMA
from tests.docs.markdown import ROOT
from tests.docs.place import Place

HTTP, METRICS = ((ROOT / "docs" / name).read_text(encoding="utf-8") for name in ("http.md", "metrics.md"))


def test_every_generated_block_is_up_to_date() -> None:
    """`python docs/generate.py` writes them."""
    for name, reference in PAGES.items():
        assert block((ROOT / "docs" / name).read_text(encoding="utf-8")) == reference(), name
    assert SCHEMA.read_text(encoding="utf-8") == settings_schema()
    assert PROMETHEUS_RULE.read_text(encoding="utf-8") == prometheus_rule()


def test_the_endpoints_are_documented(daemon: Place) -> None:
    """Each with its method, and no other."""
    paths = orjson.loads(daemon.get("/openapi.json"))["paths"]
    served = {f"{method.upper()} {path}" for path, methods in paths.items() for method in methods}
    assert set(re.findall(r"^\| `((?:GET|POST) /\S*)` \|", HTTP, re.MULTILINE)) == served


def test_served_metrics_are_documented_with_their_labels(daemon: Place) -> None:
    """By name and type; labels of every sample but a histogram's buckets and the versions of the build."""
    text = daemon.get("/metrics")
    rows = {
        (name, kind): labels for name, kind, labels in re.findall(r"^\| `(\w+)` \| (\w+) \|([^|]*)\|", METRICS, re.M)
    }
    served = re.findall(r"^# TYPE (\w+) (\w+)$", text, re.MULTILINE)
    assert set(served) - rows.keys() == set()
    documented = {name: set(re.findall(r"`(\w+)`", labels)) for (name, _), labels in rows.items()}
    samples = re.findall(r"^(streamlearn_\w+)\{([^}]*)\}", text, re.MULTILINE)
    result = {name: set(re.findall(r"(\w+)=", labels)) for name, labels in samples if "_bucket" not in name}
    result.pop("streamlearn_build_info")
    assert result
    assert {name: labels for name, labels in result.items() if labels != documented[name]} == {}
