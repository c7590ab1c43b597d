"""Summary by task: the scores of selected methods right after the task's segment and at the end."""

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from benchmarks.learn.bootstrap import Bootstrap
from benchmarks.learn.run_files import BLIND, FROZEN, RunResult
from benchmarks.learn.scores import last_segments

SHOWN = (BLIND, FROZEN, "streamlearn", "lora")
"""Methods that are shown task by task, with the ceiling."""


def summarise_tasks(
    groups: Mapping[str, Sequence[RunResult]], bootstrap: Bootstrap, ceilings: Sequence[str]
) -> dict[str, Any]:
    """Return `{TASK: {"metric", "records", "unseen", "methods": {NAME: {"after", "end", ...}}}}`.

    Scores are means over records and seeds; `end` has its 95 % interval as `low` and `high`. `after` is None for tasks
    that were never trained on, and for methods that are not trained or are trained on shuffled records.
    """
    shown = [name for name in dict.fromkeys((*SHOWN[:2], *ceilings, *SHOWN[2:])) if name in groups]
    first = next(iter(groups.values()))[0]
    return {
        task: {
            "metric": first["answers"][task]["metric"],
            "records": len(first["answers"][task]["end"]),
            "unseen": task in first["unseen"],
            "methods": _scores(task, shown, groups, bootstrap),
        }
        for task in [*last_segments([segment["tasks"] for segment in first["segments"]]), *first["unseen"]]
    }


def _scores(
    task: str, shown: Sequence[str], groups: Mapping[str, Sequence[RunResult]], bootstrap: Bootstrap
) -> dict[str, Any]:
    end = bootstrap.of_task(task, shown)
    return {
        name: {
            "after": None if name in (BLIND, FROZEN) else _after(groups[name], task),
            "end": end[name].value,
            "low": end[name].low,
            "high": end[name].high,
        }
        for name in shown
    }


def _after(group: Sequence[RunResult], task: str) -> float | None:
    after = [run["answers"][task]["after"] for run in group]
    if any(each is None for each in after):
        return None
    return fmean(fmean(each) for each in after)
