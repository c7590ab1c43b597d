"""Fires every alert by its own fault, asks every expression of the dashboard, and prints the figures as JSON.

make alerts

A real Kafka, a daemon that learns from it, and a Prometheus with the shipped files, in which a minute is a second.
Exits with 1 if an alert does not fire, fires before its fault, or if an expression returns nothing.
"""

import argparse
import shutil
import sys
import tempfile
from collections.abc import Collection
from functools import partial
from pathlib import Path
from typing import Any

import orjson

from tests.broker import kafka_home
from tests.monitoring.faults import FAULTS, Fault, injected
from tests.monitoring.files import expressions, rules
from tests.monitoring.stage import Stage

ALERTS = {rule["alert"] for rule in rules()}
RATE_INTERVAL = "15s"  # of the dashboard; the scrape interval is a second


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the figures to this file, too")
    parser.add_argument("--only", nargs="+", default=sorted(ALERTS), choices=sorted(ALERTS), help="alerts to fire")
    arguments = parser.parse_args()
    home = kafka_home()
    if home is None or shutil.which("prometheus") is None:
        sys.exit("expected prometheus on PATH and KAFKA_HOME to name an unpacked Apache Kafka; install or set them")
    with tempfile.TemporaryDirectory(prefix="streamlearn-alerts-") as folder, Stage(Path(folder), home) as stage:
        figures = run(stage, arguments.only)
    text = orjson.dumps(figures, option=orjson.OPT_INDENT_2).decode()
    print(text)
    if arguments.json is not None:
        arguments.json.write_text(text + "\n")
    sys.exit(0 if figures["passed"] else 1)


def run(stage: Stage, only: Collection[str]) -> dict[str, Any]:
    """Learn the sample, ask the dashboard's expressions, then make one fault after the other."""
    for task in range(len(stage.tasks)):
        stage.learn(stage.records(task, 120))
    stage.learn(stage.records(0, 40))  # a return: forgetting can be measured
    stage.ask("Answer: what is the capital of France?").raise_for_status()
    empty = _empty_panels(stage)
    _say(f"expressions of the dashboard without data: {empty or 'none'}")
    fired: list[dict[str, Any]] = []
    for fault in (fault for fault in FAULTS if set(only).intersection(fault.alerts)):
        _say(f"{fault.what} ...")
        fired += _fire(stage, fault)
        _say(f"    fired: {', '.join(fault.alerts)}")
    missing = sorted(set(only) - {row["alert"] for row in fired if row["fired_before"] is False})
    count = sum(1 for _ in expressions("", RATE_INTERVAL))
    return {
        "passed": not empty and not missing,
        "dashboard_expressions": count,
        "dashboard_empty": empty,
        "alerts": fired,
        "alerts_missing": missing,
    }


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _empty_panels(stage: Stage) -> list[str]:
    """Expressions of the dashboard that return nothing, although everything was seen once."""
    asked = list(expressions(stage.target, RATE_INTERVAL))
    for metric, what in (
        ("streamlearn_publication_sequence", "something is published"),
        ("streamlearn_average_forgetting_ratio", "a past regime is scored"),
    ):
        stage.wait(lambda metric=metric: stage.value(metric) is not None, what)  # type: ignore[misc]  # the loop's own
    waiting = [(title, expression) for title, expression in asked if not stage.prometheus.query(expression)]
    return [f"{title}: {expression}" for title, expression in waiting if not stage.prometheus.query(expression)]


def _fire(stage: Stage, fault: Fault) -> list[dict[str, Any]]:
    before = stage.prometheus.firing()
    with injected(stage, fault):
        rows = []
        for alert in fault.alerts:
            seconds = stage.wait(partial(_fires, stage, alert), f"{alert} fires")
            rows.append(
                {"alert": alert, "fault": fault.what, "fired_before": alert in before, "seconds": round(seconds, 1)}
            )
    return rows


def _fires(stage: Stage, alert: str) -> bool:
    return alert in stage.prometheus.firing()


if __name__ == "__main__":
    main()
