"""The alert rules: valid, tested, complete, and about metrics that exist."""

import re

import pytest
import yaml

from streamlearn.cli.metrics_reference import daemon_registry, families
from streamlearn.serve.metrics import exposition
from tests.docs.markdown import ROOT
from tests.monitoring.faults import FAULTS
from tests.monitoring.files import ALERTS, ALERTS_TEST, PROMETHEUS, metric_names, rules
from tests.monitoring.promtool import promtool
from tests.monitoring.shortened import shortened

RULES = {rule["alert"]: rule for rule in rules()}
OPERATIONS = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")


def test_prometheus_accepts_the_rules() -> None:
    assert "SUCCESS" in promtool("check", "rules", ALERTS)


def test_prometheus_accepts_the_configuration() -> None:
    assert "SUCCESS" in promtool("check", "config", PROMETHEUS)


def test_the_rules_pass_their_unit_tests() -> None:
    assert "SUCCESS" in promtool("test", "rules", ALERTS_TEST)


def test_prometheus_has_nothing_to_say_about_the_metrics() -> None:
    """Names, types and help texts, from an exposition of every family."""
    assert promtool("check", "metrics", stdin=exposition(daemon_registry()).decode()) == ""


@pytest.mark.parametrize("alert", RULES)
def test_a_unit_test_fires_every_alert(alert: str) -> None:
    """And one expects silence before it."""
    tests = yaml.safe_load(ALERTS_TEST.read_text(encoding="utf-8"))["tests"]
    firing = [test for test in tests if f'alertname="{alert}"' in str(test["promql_expr_test"])]
    assert firing
    assert any("exp_samples" not in expected for test in firing for expected in test["promql_expr_test"]) or alert in {
        "StreamlearnNotLearning"
    }


@pytest.mark.parametrize("alert", RULES)
def test_an_alert_says_how_bad_what_and_where_to_read_on(alert: str) -> None:
    """Its runbook is a section of docs/operations.md with its name."""
    rule = RULES[alert]
    assert rule["for"]
    assert rule["labels"]["severity"] in ("critical", "warning", "info")
    assert rule["annotations"].keys() == {"summary", "description", "runbook_url"}
    assert rule["annotations"]["runbook_url"] == f"docs/operations.md#{alert.lower()}"
    section = OPERATIONS.split(f"### {alert}\n")[1].split("\n#")[0]
    assert all(f"**{part}.**" in section for part in ("Meaning", "How to see", "What to do"))


@pytest.mark.parametrize("alert", RULES)
def test_a_rule_reads_metrics_that_exist(alert: str) -> None:
    known = {name for name, *_ in families(daemon_registry())}
    assert metric_names(RULES[alert]["expr"]) <= known


def test_every_alert_has_a_fault() -> None:
    """Which `make alerts` makes."""
    assert sorted(alert for fault in FAULTS for alert in fault.alerts) == sorted(RULES)


def test_shortened_rules_differ_in_time_only() -> None:
    """Nothing but durations becomes shorter, and every one does."""
    quick = shortened(ALERTS.read_text(encoding="utf-8"))
    assert re.findall(r"(?:for: |\[)(?:\d+[a-z])", quick) != []
    for rule, original in zip(yaml.safe_load(quick)["groups"][0]["rules"], RULES.values(), strict=True):
        assert rule["annotations"] == original["annotations"]
        assert rule["for"] == original["for"].replace("m", "s")
        assert "* 60" not in rule["expr"]
