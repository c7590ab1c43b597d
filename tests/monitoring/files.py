"""The files of configs/monitoring/, and the expressions in them."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson
import yaml

MONITORING = Path(__file__).parents[2] / "configs" / "monitoring"
ALERTS, ALERTS_TEST = MONITORING / "alerts.yaml", MONITORING / "alerts_test.yaml"
PROMETHEUS, DASHBOARD = MONITORING / "prometheus.yaml", MONITORING / "grafana-dashboard.json"


def rules() -> list[dict[str, Any]]:
    return [rule for group in yaml.safe_load(ALERTS.read_text(encoding="utf-8"))["groups"] for rule in group["rules"]]


def dashboard() -> dict[str, Any]:
    return dict(orjson.loads(DASHBOARD.read_bytes()))


def panels() -> list[dict[str, Any]]:
    """The dashboard's panels; rows, which only group them, are left out."""
    return [panel for panel in dashboard()["panels"] if panel["type"] != "row"]


def expressions(instance: str, rate_interval: str) -> Iterator[tuple[str, str]]:
    """Title and expression of every target of the dashboard, with its variables replaced as Grafana does."""
    for panel in panels():
        for target in panel["targets"]:
            replaced = target["expr"].replace("$instance", instance).replace("$__rate_interval", rate_interval)
            yield panel["title"], replaced


def metric_names(expression: str) -> set[str]:
    """The metrics of an expression that the daemon or its process exports."""
    return set(re.findall(r"\b(?:streamlearn|process)_\w+", re.sub(r"\{[^}]*\}|\"[^\"]*\"", "", expression)))
