"""The files of configs/monitoring/, the expressions in them, and the alert rules with a minute as a second."""

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


_DURATION = re.compile(r"(?<=\[|\s)(\d+)([mh])(?=\]|\n)")
_SECONDS = re.compile(r"(\d+) \* 60\b")


def shortened(rules: str) -> str:
    r"""The rules with every window, `for` and age divided by 60.

    >>> shortened("expr: time() - x > 30 * 60 and rate(y[15m]) > 60\nfor: 1h\n")
    'expr: time() - x > 30 * 1 and rate(y[15s]) > 60\nfor: 1m\n'
    """
    quick = _DURATION.sub(lambda found: found[1] + {"m": "s", "h": "m"}[found[2]], rules)
    return _SECONDS.sub(r"\1 * 1", quick)
