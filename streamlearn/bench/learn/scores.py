"""Continual-learning scores, from the matrix of accuracies by segment and task.

    R[s][t]  accuracy on task t after segment s, where it was evaluated
    AP  = mean_t R[S][t] over the tasks of the stream                                          (1)
    AF  = mean_t (max_s R[s][t] - R[S][t]) over tasks that ended before the last segment       (2)
    BWT = mean_t (R[S][t] - R[e_t][t]) over the same, e_t the segment in which t ended         (3)
    ZST = mean_t R[S][t] over the tasks that were never trained on                             (4)
    FWT = mean_t (R[b_t - 1][t] - F[t]) over tasks that began after the first segment          (5)

(1), (2) and (4) are from CP-MoE (arXiv 2605.20247) section 4. (3) and (5) are from Lopez-Paz and Ranzato 2017, with the
frozen backbone F instead of a random initialisation; b_t is the segment in which t began. The OP of MH-MoE (arXiv
2602.12587) is (1). BWT and FWT are positive when other tasks helped, as in MH-MoE's table but not in its eq. 21. The
maximum in (2) starts at the segment in which t began: accuracy before a task's first record is not knowledge that can
be forgotten.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any


@dataclass(frozen=True)
class Scores:
    """Eq. (1) to (5); None when no task qualifies."""

    AP: float
    AF: float | None
    BWT: float | None
    ZST: float | None = None
    FWT: float | None = None


def scores(
    matrix: Sequence[Mapping[str, float]],
    segments: Sequence[Collection[str]],
    *,
    unseen: Collection[str] = (),
    frozen: Mapping[str, float] | None = None,
) -> Scores:
    """Compute the scores.

    Args:
        matrix: R, one mapping by task per segment.
        segments: The tasks of each segment.
        unseen: Tasks that were never trained on.
        frozen: F by task; None leaves out FWT.
    """
    began: dict[str, int] = {}
    ended: dict[str, int] = {}
    for number, tasks in enumerate(segments):
        for task in tasks:
            began.setdefault(task, number)
            ended[task] = number
    last = matrix[-1]
    past = [task for task in ended if ended[task] < len(matrix) - 1]
    drops = [max(row[task] for row in matrix[began[task] :] if task in row) - last[task] for task in past]
    gains = [last[task] - matrix[ended[task]][task] for task in past]
    later = [task for task in began if began[task] > 0]
    ahead = [matrix[began[task] - 1][task] - frozen[task] for task in later] if frozen else []
    return Scores(
        AP=fmean(last[task] for task in ended),
        AF=_mean(drops),
        BWT=_mean(gains),
        ZST=_mean([last[task] for task in unseen]),
        FWT=_mean(ahead),
    )


FIRST_RECORDS = 50
"""Records of a segment over which the loss at its start is averaged."""


def figures(run: Mapping[str, Any], frozen: Mapping[str, Any] | None) -> dict[str, float | None]:
    """Compute the figures of one run; None where a figure does not apply.

    Methods that are trained on shuffled records have no figure that needs tasks in an order: LA, AF, BWT, FWT and the
    loss over a segment's first records.

    Args:
        run: A run of format 2.
        frozen: The run of the untrained backbone on the same suite; None leaves out FWT.
    """
    answers, end = run["answers"], {task: fmean(each["end"]) for task, each in run["answers"].items()}
    stream, losses = stream_tasks(run), run["record_losses"][: sum(segment["records"] for segment in run["segments"])]
    last = run["teacher"][-1]
    found = {
        "AP": fmean(end[task] for task in stream),
        "ZST": _mean([end[task] for task in run["unseen"]]),
        "token_AP": fmean(last[task]["accuracy"] for task in stream),
        "token_loss": _mean([last[task]["loss"] for task in stream if last[task]["loss"] is not None]),
        "prequential_loss": _mean(losses),
    }
    if run["shuffled"]:
        return {**found, **dict.fromkeys(("LA", "AF", "BWT", "FWT", "first_50_loss"))}
    after = {task: fmean(answers[task]["after"]) for task in stream}
    past = past_tasks(run)
    return {
        **found,
        "LA": fmean(after.values()),
        "AF": _mean([max(0.0, after[task] - end[task]) for task in past]),
        "BWT": _mean([end[task] - after[task] for task in past]),
        "FWT": None if frozen is None else _forward_transfer(run, frozen),
        "first_50_loss": _first_loss(run["segments"], losses),
    }


def stream_tasks(run: Mapping[str, Any]) -> list[str]:
    """Return the tasks of the stream, in the order in which they began."""
    return list(dict.fromkeys(task for segment in run["segments"] for task in segment["tasks"]))


def past_tasks(run: Mapping[str, Any]) -> list[str]:
    """Return the tasks of the stream that ended before the last segment."""
    last = set(run["segments"][-1]["tasks"])
    return [task for task in stream_tasks(run) if task not in last]


def _forward_transfer(run: Mapping[str, Any], frozen: Mapping[str, Any]) -> float | None:
    """Gain in token accuracy over the frozen backbone, just before a task's first record."""
    base = frozen["teacher"][-1]
    seen: set[str] = set(run["segments"][0]["tasks"])
    gains = []
    for number, segment in enumerate(run["segments"][1:]):
        new = [task for task in segment["tasks"] if task not in seen]
        gains += [run["teacher"][number][task]["accuracy"] - base[task]["accuracy"] for task in new]
        seen.update(new)
    return _mean(gains)


def _first_loss(segments: Sequence[Mapping[str, Any]], losses: Sequence[float]) -> float | None:
    means, start = [], 0
    for segment in segments:
        first = losses[start : start + min(FIRST_RECORDS, segment["records"])]
        means += [fmean(first)] if first else []
        start += segment["records"]
    return _mean(means)


def _mean(values: Sequence[float]) -> float | None:
    return fmean(values) if values else None
