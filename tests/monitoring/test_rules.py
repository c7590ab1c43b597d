"""Alert rules and the dashboard: promtool accepts them, they are complete, and they read metrics that exist."""

import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from docs.generate import daemon_registry, families, gateway_registry
from streamlearn.serve.metrics import exposition
from tests.docs.markdown import ROOT
from tests.monitoring.faults import FAULTS
from tests.monitoring.files import (
    ALERTS,
    ALERTS_TEST,
    PROMETHEUS,
    expressions,
    metric_names,
    rules,
)

RULES = {rule["alert"]: rule for rule in rules()}
EXPRESSIONS = list(expressions("127.0.0.1:8083", "1m"))
SUFFIXES = ("_bucket", "_sum", "_count")


def promtool(*arguments: str | Path, stdin: str | None = None) -> str:
    """Run promtool, which must succeed, and return what it says; skip the test without it."""
    program = shutil.which("promtool")
    if program is None:
        pytest.skip("no promtool on PATH: install prometheus")
    done = subprocess.run([program, *map(str, arguments)], input=stdin, capture_output=True, text=True, check=False)
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    return said


def test_promtool_accepts_everything(tmp_path: Path) -> None:
    """Rules, their unit tests, the configuration, an exposition of every family, and the dashboard's expressions."""
    assert "SUCCESS" in promtool("check", "rules", ALERTS)
    assert "SUCCESS" in promtool("check", "config", PROMETHEUS)
    assert "SUCCESS" in promtool("test", "rules", ALERTS_TEST)
    assert promtool("check", "metrics", stdin=exposition(daemon_registry()).decode()) == ""
    recorded = [{"record": f"panel:{number}", "expr": text} for number, (_, text) in enumerate(EXPRESSIONS)]
    file = tmp_path / "rules.yaml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "dashboard", "rules": recorded}]}))
    assert f"SUCCESS: {len(EXPRESSIONS)} rules found" in promtool("check", "rules", file)


def test_a_unit_test_fires_every_alert_and_expects_silence_before_it() -> None:
    tests = yaml.safe_load(ALERTS_TEST.read_text(encoding="utf-8"))["tests"]
    for alert in RULES:
        firing = [test for test in tests if f'alertname="{alert}"' in str(test["promql_expr_test"])]
        assert firing, alert
        silent = any("exp_samples" not in expected for test in firing for expected in test["promql_expr_test"])
        assert silent or alert == "StreamlearnNotLearning", alert


def test_an_alert_says_how_bad_what_and_where_to_read_on() -> None:
    """Its runbook is a section of the documentation with its name; `make alerts` makes its fault."""
    for alert, rule in RULES.items():
        assert rule["for"], alert
        assert rule["labels"]["severity"] in ("critical", "warning", "info"), alert
        assert rule["annotations"].keys() == {"summary", "description", "runbook_url"}, alert
        page, _, anchor = rule["annotations"]["runbook_url"].partition("#")
        assert anchor == alert.lower()
        assert f"### {alert}\n" in (ROOT / page).read_text(encoding="utf-8")
    assert sorted(alert for fault in FAULTS for alert in fault.alerts) == sorted(RULES)


def test_rules_and_panels_read_metrics_that_exist() -> None:
    """The series of a histogram have suffixes of their own."""
    both = (daemon_registry(), gateway_registry())
    kinds = {name: kind for own in both for name, kind, *_ in families(own)}
    known = {name for name, kind in kinds.items() if kind != "histogram"}
    known |= {name + suffix for name, kind in kinds.items() if kind == "histogram" for suffix in SUFFIXES}
    for alert, rule in RULES.items():
        assert metric_names(rule["expr"]) <= known, alert
    for title, expression in EXPRESSIONS:
        named = metric_names(expression)
        assert named or "ALERTS" in expression, title
        assert named <= known, title
