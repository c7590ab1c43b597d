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


def _mean(values: Sequence[float]) -> float | None:
    return fmean(values) if values else None
