"""Score the stored answers of finished runs again by today's metrics.

Runs of format 2 were scored by streamlearn's own ROUGE-L and do not hold the answers right after a task's last segment.
Those scores, `after`, stay as they are. Beside them stand the scores at the end by the same metric, `end_as_after`, so
that no difference is of two metrics.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import orjson

from benchmarks.learn.jobs import RunConditions, RunJob
from benchmarks.learn.run import FORMAT, blind_answers
from benchmarks.learn.scores import Run, score_answer
from benchmarks.learn.suites import Suite, TaskRecords


def rescore_suite(suite: str, conditions: RunConditions) -> int:
    """Rewrite the files of a suite's runs, which must be made under these conditions; return how many they are."""
    suites: dict[int, Suite] = {}
    files = sorted(RunJob(suite, "blind", 0, conditions).file.parent.glob("*.json"))
    for file in files:
        run = orjson.loads(file.read_bytes())
        if run["seed"] not in suites:
            suites[run["seed"]] = RunJob(suite, run["method"], run["seed"], conditions).make_suite()
        run = {**run, "format": FORMAT, "answers": rescored(run, suites[run["seed"]])}
        file.write_bytes(orjson.dumps(run, option=orjson.OPT_APPEND_NEWLINE))
    return len(files)


def rescored(run: Run, suite: Suite) -> dict[str, Any]:
    """Return the run's answers with new scores; `blind` chooses its answers by the metrics, and does so again."""
    best = blind_answers(suite) if run["method"] == "blind" else {}
    at_end = len(run["segments"]) == 1  # the answers after the last segment are those at the end
    answers = {}
    for task, old in run["answers"].items():
        score = partial(_score, suite.tasks[task])
        texts = [*best[task].texts] if best else old["texts"]
        new = {**old, "end": score(texts), "texts": texts}
        if task not in run["unseen"] and (at_end or "texts_after" in old):
            after = texts if at_end or best else old["texts_after"]
            new |= {"after": old["after"] and score(after), "texts_after": old["after"] and after}
        elif task not in run["unseen"] and old["metric"] == "rouge_l":
            new["end_as_after"] = old.get("end_as_after", old["end"])
        answers[task] = new
    return answers


def _score(task: TaskRecords, texts: Sequence[str]) -> list[float]:
    return [score_answer(task.metric, *pair) for pair in zip(texts, task.references, strict=True)]
