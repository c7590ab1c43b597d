"""Forgetting of the daemon on eight SuperNI tasks, read from Kafka and evaluated over HTTP after each segment.

`make evidence` runs this test, which takes about half an hour on two cores and writes
docs/evidence/measurements/forgetting_*.json; the default suite skips it. The comparison is the same daemon with one
adapter for all regimes: it still detects the shifts but does not act on them.
"""

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import httpx2
import orjson
import pytest

from benchmarks.learn.methods import COMMON, by_section, read_profile
from benchmarks.learn.report import spread
from benchmarks.learn.scores import scores
from benchmarks.learn.suites import ORDER_1, Draw, Suite, grouped, sequential
from tests.broker import Broker
from tests.end_to_end.process import DaemonProcess

ROOT = Path(__file__).parents[2]
DATA = ROOT.parent / "shared/data/superni"
SEEDS = tuple(int(seed) for seed in os.environ.get("SEEDS", "0 1 2").split())
RECORDS, TESTS = 200, 25
OFF: dict[str, Any] = {"adapter.per_regime": False}
ARMS: dict[str, dict[str, Any]] = {"streamlearn": {}, "switched off": OFF}
SUITES: dict[str, Callable[[Draw], Suite]] = {
    "sequential": lambda draw: sequential("sequential", draw, ORDER_1),
    "interleaved": grouped,
}

pytestmark = [
    pytest.mark.evidence,
    pytest.mark.broker,
    pytest.mark.data,
    pytest.mark.skipif(not DATA.is_dir(), reason="the shared SuperNI data is not next to the repository"),
]


def configuration(broker: Broker, topic: str, seed: int, changes: dict[str, Any]) -> dict[str, Any]:
    """The default preset on the nano backbone, with the changes of an arm."""
    sections = by_section(COMMON, read_profile("nano").settings, changes)
    kafka = {
        "bootstrap.servers": broker.servers,
        "topics": [topic],
        "group.id": f"group-{topic}",
        "security.protocol": "PLAINTEXT",
    }
    logged = {"style": "json", "level": "info"}
    return {**sections, "seed": seed, "source": {"kafka": kafka}, "serve": {"port": 0}, "log": logged}


def client_of(daemon: DaemonProcess) -> httpx2.Client:
    """An HTTP client of the running daemon."""
    ports: list[int] = []

    def has_started() -> bool:
        events = [orjson.loads(line) for line in daemon.log.read_bytes().splitlines() if line.startswith(b"{")]
        ports[:] = [event["port"] for event in events if event["event"] == "http_started"]
        return bool(ports)

    daemon.wait_until(has_started, "the endpoint has started")
    return httpx2.Client(base_url=f"http://127.0.0.1:{ports[0]}", timeout=600)


def wait_until_idle(client: httpx2.Client) -> None:
    """Wait until no record is left to train on; records in the detector's window wait for the next segment."""
    last, since = -1, time.monotonic()
    while time.monotonic() - since < 3.0:
        status = client.get("/v1/status").json()
        if status["step"] != last or status["phase"] != "idle":
            last, since = status["step"], time.monotonic()
        time.sleep(0.2)


def evaluate(client: httpx2.Client, suite: Suite, tasks: Sequence[str]) -> dict[str, float]:
    """Token accuracy of each task's test records, over HTTP; requests do not name the task."""
    found = {}
    for task in tasks:
        response = client.post("/v1/eval", json={"examples": suite.tasks[task].scored})
        assert response.status_code == 200, response.text
        found[task] = response.json()["token_accuracy"]
    return found


def time_spent(client: httpx2.Client) -> tuple[float, float]:
    """Seconds of training steps, probes and hold-out evaluations, and of probes and evaluations only."""
    figures = {}
    for line in client.get("/metrics").text.splitlines():
        name, _, value = line.rpartition(" ")
        if not line.startswith("#"):
            figures[name] = float(value)
    cost = figures["streamlearn_probe_seconds_total"] + figures["streamlearn_holdout_seconds_total"]
    return figures["streamlearn_step_seconds_sum"] + cost, cost


def as_run(suite: Suite, matrix: list[dict[str, float]]) -> dict[str, Any]:
    """The accuracies as answers of a run."""
    return {
        "segments": [{"tasks": segment.tasks, "records": len(segment.records)} for segment in suite.segments],
        "unseen": [],
        "answers": {
            task: {"after": [matrix[end][task]], "end": [matrix[-1][task]]} for task, end in suite.ends.items()
        },
        "teacher": [{task: {"accuracy": known, "loss": None} for task, known in row.items()} for row in matrix],
        "record_losses": [],
        "shuffled": False,
    }


def run_daemon(broker: Broker, folder: Path, suite: Suite, arm: str, seed: int) -> dict[str, Any]:
    """One run: produce a segment, wait until it is learned, evaluate all tasks so far."""
    topic = broker.new_topic()
    daemon = DaemonProcess(folder, configuration(broker, topic, seed, ARMS[arm]))
    daemon.start()
    try:
        client = client_of(daemon)
        matrix: list[dict[str, float]] = []
        seen: list[str] = []
        for segment in suite.segments:
            broker.produce(topic, [orjson.dumps({**r, "meta": {}}) for r in segment.records])
            wait_until_idle(client)
            seen += segment.tasks
            matrix.append(evaluate(client, suite, seen))
        seconds, cost = time_spent(client)
        shifts = client.get("/v1/shifts").json()["shifts"]
        assert daemon.terminate() == 0
    finally:
        daemon.end()
    final = scores(as_run(suite, matrix))
    return {
        "suite": suite.name,
        "arm": arm,
        "seed": seed,
        "AP": final.AP,
        "AF": final.AF,
        "BWT": final.BWT,
        "matrix": matrix,
        "boundaries": suite.boundaries,
        "shifts": shifts,
        "probe_seconds": sum(shift["probe_seconds"] for shift in shifts),
        "learning_seconds": seconds,
        "probe_and_holdout_share": cost / seconds,
    }


def summary(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Mean and standard deviation over the seeds, by arm."""
    return {
        arm: {name: spread([run[name] for run in runs if run["arm"] == arm]) for name in ("AP", "AF", "BWT")}
        for arm in ARMS
    }


@pytest.mark.parametrize("kind", list(SUITES))
def test_it_forgets_less_than_without_its_mechanisms(
    broker: Broker, tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Average forgetting over the seeds is lower, and final performance is not worse by more than 0.02."""
    out = ROOT / f"docs/evidence/measurements/forgetting_{kind}.json"
    out.parent.mkdir(exist_ok=True)
    runs: list[dict[str, Any]] = []
    for seed in SEEDS:
        suite = SUITES[kind](Draw([DATA], RECORDS, TESTS, seed))
        for arm in ARMS:
            run = run_daemon(broker, tmp_path / f"{arm} {seed}", suite, arm, seed)
            runs.append(run)
            with capsys.disabled():
                onsets = [shift["onset"] for shift in run["shifts"]]
                print(f"\n{kind} {arm} seed {seed}: AP {run['AP']:.3f} AF {run['AF']:.3f} shifts at {onsets}")  # noqa: T201
            out.write_bytes(
                orjson.dumps(
                    {
                        "command": "make evidence",
                        "records_per_task": RECORDS,
                        "summary": summary(runs),
                        "runs": runs,
                    },
                    option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE,
                )
            )
    found = summary(runs)
    assert found["streamlearn"]["AF"]["mean"] < found["switched off"]["AF"]["mean"]
    assert found["streamlearn"]["AP"]["mean"] > found["switched off"]["AP"]["mean"] - 0.02
