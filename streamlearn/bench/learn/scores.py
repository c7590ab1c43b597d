"""Figures of continual learning, from the matrix of what was measured when.

    R[s][t]  accuracy on task t after stretch s, where it was examined
    AP  = mean_t R[S][t] over the tasks of the stream                                          (1)
    AF  = mean_t (max_s R[s][t] - R[S][t]) over tasks that ended before the last stretch       (2)
    BWT = mean_t (R[S][t] - R[e_t][t]) over the same, e_t the stretch in which t ended         (3)
    ZST = mean_t R[S][t] over the tasks that were never trained on                             (4)
    FWT = mean_t (R[b_t - 1][t] - F[t]) over tasks that began after the first stretch          (5)

CP-MoE (arXiv 2605.20247) section 4 for (1), (2) and (4); Lopez-Paz and Ranzato 2017 for (3) and (5), with the frozen
backbone F in place of a random start, b_t the stretch in which t began. MH-MoE's (arXiv 2602.12587) OP is (1). One sign
convention: BWT and FWT are positive when other tasks helped, so MH-MoE's table, not its eq. 21. In (2) the maximum runs
over stretches in which or after which t was trained on; what a task scored before its first record is no knowledge that
could be forgotten.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean


@dataclass(frozen=True)
class Scores:
    """Eq. (1) to (5); None where there is nothing to average over."""

    AP: float
    AF: float | None
    BWT: float | None
    ZST: float | None = None
    FWT: float | None = None


def scores(
    matrix: Sequence[Mapping[str, float]],
    stretches: Sequence[Collection[str]],
    *,
    unseen: Collection[str] = (),
    frozen: Mapping[str, float] | None = None,
) -> Scores:
    """`matrix[s]` holds R[s] by task, `stretches[s]` the tasks of stretch s, `frozen` F by task."""
    began: dict[str, int] = {}
    ended: dict[str, int] = {}
    for number, tasks in enumerate(stretches):
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
