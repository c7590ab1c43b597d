"""Continual-learning scores of one run, from the JSON object that `single_run` writes.

    e[t], a[t]  mean score of the free answers to task t at the end, and right after its last segment
    R[s][t]     token accuracy on task t after segment s, teacher-forced

    AP  = mean_t e[t] over the tasks of the stream                                                  (1)
    LA  = mean_t a[t] over the same: learning accuracy                                              (2)
    AF  = mean_t max(0, a[t] - e[t]) over tasks that ended before the last segment                  (3)
    BWT = mean_t (e[t] - a[t]) over the same                                                        (4)
    ZST = mean_t e[t] over the tasks that were never trained on                                     (5)
    FWT = mean_t (R[b_t - 1][t] - F[t]) over tasks that began after the first segment               (6)
    skill = (AP - blind AP) / (ceiling AP - blind AP)                                               (7)

(1), (3) and (5) are from CP-MoE (arXiv 2605.20247) section 4, (4) and (6) from Lopez-Paz and Ranzato 2017, with the
frozen backbone F instead of a random initialisation; b_t is the segment in which t began. In (3) the best earlier score
is that right after the task's last segment: free answers are decoded then and at the end only. (4) and (6) are positive
when other tasks helped. `token_AP` and `token_loss` are the means over the stream's tasks of accuracy and loss per
answer token at the end. `prequential_loss` is the mean over records of the loss before training on them, and
`first_50_loss` the mean over segments of the mean over a segment's first 50 records, nats per token.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from statistics import fmean
from typing import Any

FIRST = 50
"""Records of `first_50_loss`."""


@dataclass(frozen=True)
class Scores:
    """Eq. (1) to (6) and losses; None where a run has nothing to compute it from."""

    AP: float | None
    LA: float | None
    AF: float | None
    BWT: float | None
    ZST: float | None
    FWT: float | None
    token_AP: float
    token_loss: float | None
    prequential_loss: float | None
    first_50_loss: float | None


def scores(run: Mapping[str, Any], frozen: Mapping[str, Any] | None = None) -> Scores:
    """Compute the scores of a run, given the run of `frozen` on the same suite for FWT."""
    segments: list[list[str]] = [segment["tasks"] for segment in run["segments"]]
    answers: Mapping[str, Mapping[str, Any]] = run["answers"]
    end = {task: fmean(each["end"]) for task, each in answers.items()}
    after = {task: fmean(each["after"]) for task, each in answers.items() if each["after"] is not None}
    ended = last_segments(segments)
    past = [task for task in after if ended[task] < len(segments) - 1]
    last = [run["teacher"][-1][task] for task in ended]
    return Scores(
        AP=mean([end[task] for task in ended if task in end]),
        LA=mean(list(after.values())),
        AF=mean([max(0.0, after[task] - end[task]) for task in past]),
        BWT=mean([end[task] - after[task] for task in past]),
        ZST=mean([end[task] for task in run["unseen"] if task in end]),
        FWT=None if frozen is None or run["shuffled"] else forward_transfer(run, frozen),
        token_AP=fmean(each["accuracy"] for each in last),
        token_loss=mean([each["loss"] for each in last if each["loss"] is not None]),
        prequential_loss=mean(run["record_losses"]),
        first_50_loss=first_loss(run),
    )


def skill(ap: float, blind: float, ceiling: float) -> float | None:
    """Compute eq. (7); None unless the ceiling is above the blind score."""
    return (ap - blind) / (ceiling - blind) if ceiling > blind else None


def forward_transfer(run: Mapping[str, Any], frozen: Mapping[str, Any]) -> float | None:
    """Compute eq. (6); None with one segment."""
    base = {task: known["accuracy"] for row in frozen["teacher"] for task, known in row.items()}
    began: dict[str, int] = {}
    for number, segment in enumerate(run["segments"]):
        for task in segment["tasks"]:
            began.setdefault(task, number)
    later = [task for task in began if began[task] > 0]
    return mean([run["teacher"][began[task] - 1][task]["accuracy"] - base[task] for task in later])


def first_loss(run: Mapping[str, Any]) -> float | None:
    """Return the mean loss of the segments' first records; None for a run without segments or without training."""
    losses: Sequence[float] = run["record_losses"]
    if run["shuffled"] or not losses:
        return None
    lengths = [segment["records"] for segment in run["segments"]]
    starts = [0, *accumulate(lengths)]
    return fmean(
        fmean(losses[start : start + min(FIRST, length)]) for start, length in zip(starts, lengths, strict=False)
    )


def last_segments(segments: Sequence[Sequence[str]]) -> dict[str, int]:
    """Return the last segment of each task, in stream order of the tasks."""
    return {task: number for number, tasks in enumerate(segments) for task in tasks}


def mean(values: Sequence[float]) -> float | None:
    """Return the mean; None without values."""
    return fmean(values) if values else None
