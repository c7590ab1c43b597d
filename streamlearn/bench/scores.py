"""Figures of continual learning, from the matrix of what was measured when.

    R[s][t]  accuracy on task t after stretch s, for tasks that were seen by then
    AP  = mean_t R[S][t]                                                                       (1)
    AF  = mean_t (max_s R[s][t] - R[S][t]) over tasks that ended before the last stretch       (2)
    BWT = mean_t (R[S][t] - R[e_t][t]) over the same, e_t the stretch in which t ended         (3)

CP-MoE (arXiv 2605.20247) section 4 for (1) and (2); Lopez-Paz and Ranzato 2017 for (3), where positive means that later
tasks helped.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean


@dataclass(frozen=True)
class Scores:
    """Eq. (1) to (3)."""

    AP: float
    AF: float
    BWT: float


def scores(matrix: Sequence[Mapping[str, float]], ended: Mapping[str, int]) -> Scores:
    """`matrix[s]` holds R[s] by task, `ended[t]` the stretch in which t ended."""
    last = matrix[-1]
    past = [task for task in last if ended[task] < len(matrix) - 1]
    drops = [max(row[task] for row in matrix if task in row) - last[task] for task in past]
    gains = [last[task] - matrix[ended[task]][task] for task in past]
    return Scores(fmean(last.values()), fmean(drops) if drops else 0.0, fmean(gains) if gains else 0.0)
