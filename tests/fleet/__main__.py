"""Three tasks learned one after another by a daemon, and answered meanwhile by two vLLM servers behind a gateway.

make fleet VLLM=/path/to/vllm BACKBONE=build/smollm2 KAFKA_HOME=/path/to/kafka

1. The untouched backbone answers, since nothing is published.
2. Each task's records are fed; after its last snapshot the gateway's answers are scored for a while.
3. In the middle of a publication of the second task, one server is killed with SIGKILL; later it is started again.
   With --pull the daemon knows no server: each loads a version when it is asked for it, and one is started only then.
4. With --added-at the time that the gateway adds is measured, at that many requests a second.

Until then the official client asks at a steady rate. Prints a table, writes the figures, and exits with 1 if a
request failed, was answered by an adapter that its publication does not name, or by a publication that was replaced
long before.
"""

import argparse
import shutil
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx2
import orjson

from streamlearn.jobs.runner import rouge_l
from tests.broker import kafka_home
from tests.fleet.added import AddedTime
from tests.fleet.client import Clients, Outcome, Question
from tests.fleet.processes import START_S, Fleet, Servers, until
from tests.fleet.publications import Publications
from tests.fleet.task_records import TASKS, read_records

UNKNOWN = ("Übersetze ins Deutsche: the rain in Spain", "SELECT name FROM users WHERE id = 7;")
STALE_S = 5.0
"""A publication may be used this long after it was replaced: gateways look once a second, and load it."""
LEARN_S = 1500.0
AWAY_S = 20.0
QUESTIONS = 12
"""Test prompts of each task, asked again and again."""


def main() -> None:
    """Run the fleet."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm", type=Path, required=True, help="the vllm program")
    parser.add_argument("--backbone", type=Path, required=True, help="folder of the backbone")
    parser.add_argument("--vllm-dtype", default="float32", help="of the servers")
    parser.add_argument("--first-layer", type=int, help="adapter.first_layer of the daemon")
    parser.add_argument("--pull", action="store_true", help="servers find adapters themselves")
    parser.add_argument("--records", type=int, default=120, help="records of each task")
    parser.add_argument("--rate", type=float, default=5.0, help="requests a second")
    parser.add_argument("--scored-s", type=float, default=60.0, help="seconds of requests that each phase is scored on")
    parser.add_argument("--added-at", type=float, help="requests a second while the gateway's own time is measured")
    parser.add_argument("--json", type=Path, help="file for the figures")
    given = parser.parse_args()
    home = kafka_home()
    if home is None:
        parser.error("set KAFKA_HOME to a Kafka")
    folder = Path(tempfile.mkdtemp(prefix="streamlearn-fleet-"))
    try:
        figures = _run(given, folder, home)
    except BaseException:
        print(f"logs: {folder}", file=sys.stderr)
        raise
    shutil.rmtree(folder)
    if given.json is not None:
        given.json.write_bytes(orjson.dumps(figures, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE))
    _print(figures)
    failed = [*figures["failed"], *(figures["added"] or {"failed": ()})["failed"]]
    sys.exit(1 if failed or figures["mixed"] or figures["stale"] else 0)


def _run(given: argparse.Namespace, folder: Path, kafka: Path) -> dict[str, Any]:
    train = {task: read_records(task, "train")[: given.records] for task in TASKS}
    questions = {
        task: [Question(task, row["prompt"], row["completion"]) for row in read_records(task, "test")[:QUESTIONS]]
        for task in TASKS
    }
    questions["unknown"] = [Question("unknown", prompt, "") for prompt in UNKNOWN]
    phases: list[tuple[str, float, float]] = []
    servers = Servers(given.vllm, given.backbone.resolve(), given.vllm_dtype, given.pull)
    with Fleet(folder, servers=servers, kafka=kafka, first_layer=given.first_layer) as fleet:
        publications = Publications(fleet.published, fleet.state / "snapshots")
        clients = Clients(fleet.urls["gateway"], questions, rate=given.rate, seed=0)
        clients.start()
        killer = threading.Thread(target=_kill_in_mid_publication, args=(fleet, publications), daemon=True)
        try:
            phases.append(_scored("nothing learned", given.scored_s))
            for task in TASKS:
                if task == TASKS[1]:
                    killer.start()
                _learn(fleet, publications, train[task])
                phases.append(_scored(f"after {task}", given.scored_s))
            killer.join(START_S)
            phases.append(_scored("with both servers", given.scored_s))
        finally:
            clients.stop()
            publications.stop()
        added = given.added_at and _added(fleet, questions, given)
        loaded = {name: len(_models(fleet, name)) - 1 for name in ("replica 1", "replica 2")}
    settings = {name: getattr(given, name) for name in ("pull", "records", "rate", "vllm_dtype", "first_layer")}
    settings["backbone"] = given.backbone.name
    figures = _figures(clients, publications, phases)
    return {"tasks": TASKS, "settings": settings, "adapters_loaded": loaded, **figures, "added": added}


def _added(fleet: Fleet, questions: Mapping[str, Sequence[Question]], given: argparse.Namespace) -> dict[str, Any]:
    prompts = [question.prompt for task in TASKS for question in questions[task]]
    added = AddedTime(fleet.urls["gateway"], fleet.urls["replica 1"])
    return added.measure(prompts, rate=given.added_at, seconds=given.scored_s)


def _learn(fleet: Fleet, publications: Publications, rows: Sequence[Mapping[str, Any]]) -> None:
    """Feed records, and wait until the last snapshot of them is published."""
    done = _status(fleet)["records_trained"] + _status(fleet)["records_held_out"] + len(rows)
    fleet.feed([orjson.dumps({"prompt": row["prompt"], "completion": row["completion"]}) for row in rows])

    def learned() -> bool:
        status = _status(fleet)
        return bool(status["records_trained"] + status["records_held_out"] >= done)

    until(learned, "all records of a task are learned", seconds=LEARN_S)
    token = (fleet.state / "http.token").read_text().strip()
    headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
    url = f"{fleet.urls['daemon']}/v1/snapshots"
    answer = httpx2.post(url, content=b"", headers=headers, timeout=120, trust_env=False)
    name = answer.raise_for_status().json()["name"]
    until(
        lambda: (newest := publications.newest) is not None and newest.snapshot == name,
        f"snapshot {name} is published",
        seconds=120,
    )


def _kill_in_mid_publication(fleet: Fleet, publications: Publications) -> None:
    """Kill a server between a snapshot and its publication, and start it again later."""
    known = set(publications.snapshot_at)
    until(lambda: bool(set(publications.snapshot_at) - known), "a snapshot is written", seconds=LEARN_S)
    if not fleet.servers.pull:
        fleet.end("replica 2", signal.SIGKILL)
        time.sleep(AWAY_S)
    fleet.start("replica 2")
    fleet.wait("replica 2", "/v1/models")


def _scored(name: str, seconds: float) -> tuple[str, float, float]:
    began = time.time()
    time.sleep(seconds)
    return name, began, time.time()


def _figures(clients: Clients, publications: Publications, phases: list[tuple[str, float, float]]) -> dict[str, Any]:
    outcomes = clients.outcomes
    answered = [outcome for outcome in outcomes if outcome.error is None]
    delays, first = publications.delays_s(), _first_answers_s(answered, publications)
    backbones = {publication.backbone for publication in publications.by_sequence.values()}
    latencies = sorted(outcome.answered_at - outcome.asked_at for outcome in answered)
    return {
        "requests": len(outcomes),
        "failed": [outcome.error for outcome in outcomes if outcome.error is not None],
        "mixed": [outcome.model for outcome in answered if not _is_named(outcome, publications)],
        "stale": [outcome.model for outcome in answered if _age_s(outcome, publications) > STALE_S],
        "oldest_publication_used_s": round(max(_age_s(outcome, publications) for outcome in answered), 2),
        "versions": len({outcome.model for outcome in answered} - backbones),
        "publications": len(publications.by_sequence),
        "snapshot_to_publication_s": _median_and_largest(delays),
        "snapshot_to_first_answer_s": _median_and_largest(first),
        "latency_s": {
            "p50": round(latencies[len(latencies) // 2], 2),
            "p99": round(latencies[len(latencies) * 99 // 100], 2),
        },
        "phases": [
            _phase(name, [outcome for outcome in answered if begin <= outcome.asked_at <= end])
            for name, begin, end in phases
        ],
    }


def _median_and_largest(seconds: Mapping[Any, float]) -> dict[str, float]:
    return {"median": round(statistics.median(seconds.values()), 2), "largest": round(max(seconds.values()), 2)}


def _phase(name: str, outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Mean ROUGE-L of each task's answers, and what answered them."""
    rows: dict[str, Any] = {"phase": name}
    for task in dict.fromkeys(outcome.question.task for outcome in outcomes):
        mine = [outcome for outcome in outcomes if outcome.question.task == task]
        by_adapter = sum("@" in outcome.model for outcome in mine)
        scores = [rouge_l(outcome.text, outcome.question.answer) for outcome in mine]
        rows[task] = {
            "answers": len(mine),
            "by_adapter": by_adapter,
            "rouge_l": round(statistics.fmean(scores), 3) if scores and task != "unknown" else None,
        }
    return rows


def _first_answers_s(answered: Sequence[Outcome], publications: Publications) -> dict[int, float]:
    """Seconds from each snapshot to the first answer under its publication, by sequence."""
    first: dict[int, float] = {}
    for outcome in answered:
        first[outcome.publication] = min(outcome.answered_at, first.get(outcome.publication, float("inf")))
    written = {n: publications.snapshot_at.get(own.snapshot) for n, own in publications.by_sequence.items()}
    return {n: at - began for n, at in first.items() if (began := written.get(n)) is not None}


def _is_named(outcome: Outcome, publications: Publications) -> bool:
    """Whether the answer's adapter is one of the publication that the gateway used for it."""
    used = publications.by_sequence[outcome.publication]
    return outcome.model in (*used.adapters, used.backbone)


def _age_s(outcome: Outcome, publications: Publications) -> float:
    """Seconds between the end of the publication that was used and the request."""
    return max(0.0, outcome.asked_at - publications.replaced_at(outcome.publication))


def _status(fleet: Fleet) -> dict[str, Any]:
    status: dict[str, Any] = httpx2.get(f"{fleet.urls['daemon']}/v1/status", timeout=30, trust_env=False).json()
    return status


def _models(fleet: Fleet, name: str) -> list[Any]:
    models: list[Any] = httpx2.get(f"{fleet.urls[name]}/v1/models", timeout=30, trust_env=False).json()["data"]
    return models


def _print(figures: Mapping[str, Any]) -> None:
    for phase in figures["phases"]:
        tasks = "  ".join(
            f"{task} {phase[task]['rouge_l']} ({phase[task]['by_adapter']} of {phase[task]['answers']} by an adapter)"
            for task in sorted(phase.keys() - {"phase"})
        )
        print(f"{phase['phase']:16}  {tasks}")
    print(orjson.dumps({k: v for k, v in figures.items() if k != "phases"}, option=orjson.OPT_INDENT_2).decode())


if __name__ == "__main__":
    main()
