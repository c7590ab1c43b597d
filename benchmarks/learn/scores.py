"""Scores: of a free answer, of a run's continual learning, and of its boundary detection.

Each task has a metric for free answers, in [0, 1]:

| metric | tasks | definition |
|---|---|---|
| exact_match | SuperNI's labels (073, 363, 875, 1687) and NumGLUE | equal words, see `jobs.runner.exact_match` |
| choice | C-STANCE, FOMC, ScienceQA | equal first letter, as TRACE scores a choice |
| rouge_l | SuperNI's texts and MeetingBank | ROUGE-L, see `rouge_l` |
| sari | 20Minuten | SARI, see `sari` |
| edit_similarity | Py150 | 2 M / T, with M matching and T all characters of both (difflib); TRACE's fuzz.ratio |

SuperNI is scored by exact match where the answer is a label and by ROUGE-L elsewhere (Wang et al. 2022), TRACE as in
its paper (Wang et al. 2023, arXiv 2310.06762). Any other task is scored by exact match if its training answers have few
distinct values, see `MAX_LABELS`, else by ROUGE-L. With several references the best counts.

Continual learning, from the JSON object of a run:

    e[t], a[t]  mean score of the free answers to task t at the end, and right after its last segment (see `as_after`)
    R[s][t]     token accuracy on task t after segment s, teacher-forced

    AP  = mean_t e[t] over the tasks of the stream                                                  (1)
    LA  = mean_t a[t] over the same: learning accuracy                                              (2)
    AF  = mean_t max(0, a[t] - e[t]) over tasks that ended before the last segment                  (3)
    BWT = mean_t (e[t] - a[t]) over the same                                                        (4)
    ZST = mean_t e[t] over the tasks that were never trained on                                     (5)
    FWT = mean_t (R[b_t - 1][t] - F[t]) over tasks that began after the first segment               (6)
    skill = (AP - blind AP) / (ceiling AP - blind AP)                                               (7)

    L[s] = sum_t n[t] l[s][t] / sum_t n[t], l[s][t] loss per answer token on task t after segment s (8)
    loss of a stream that nobody cut = L at its end                                                 (9)
    stopped = (9), stopped_lowest = min_s L[s], over tasks without a record in the last quarter    (10)

(1), (3) and (5) are from CP-MoE (arXiv 2605.20247) section 4, (4) and (6) from Lopez-Paz and Ranzato 2017, with the
frozen backbone F instead of a random initialization; b_t is the segment in which t began. In (3) the best earlier score
is that right after the task's last segment: free answers are decoded then and at the end only. (4) and (6) are positive
when other tasks helped. `token_AP` and `token_loss` are the means over the stream's tasks of accuracy and loss per
answer token at the end. `prequential_loss` is the mean over records of the loss before training on them, and
`first_50_loss` the mean over segments of the mean over a segment's first 50 records, nats per token. In (8) n[t] is the
number of answer tokens of task t's scored records.
"""

import re
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from itertools import accumulate, pairwise
from statistics import fmean
from typing import Any, Literal

from rouge_score.rouge_scorer import RougeScorer
from scipy.stats import entropy

from benchmarks.streams import matches
from streamlearn.jobs import runner
from streamlearn.jobs.runner import exact_match, normalize

Run = Mapping[str, Any]
"""The JSON object of one run."""
Metric = Literal["exact_match", "choice", "rouge_l", "sari", "edit_similarity"]
MAX_LABELS = 12
"""Maximum distinct training answers of an unknown task with labels; it also has three answers per label or more."""
FIRST = 50
"""Records of `first_50_loss`."""
STOPPED = 0.75
"""Share of the stream after which a task that stopped has no record."""
WITHIN = 64
"""Maximum records between a boundary and the shift that counts as its detection."""
_METRICS: Mapping[str, Metric] = {
    **dict.fromkeys(("task073", "task363", "task875", "task1687", "NumGLUE-cm", "NumGLUE-ds"), "exact_match"),
    **dict.fromkeys(("task002", "task181", "task511", "task591", "task639", "task748"), "rouge_l"),
    **dict.fromkeys(("task1290", "task1510", "task1572", "task1590", "task1729", "MeetingBank"), "rouge_l"),
    **dict.fromkeys(("C-STANCE", "FOMC", "ScienceQA"), "choice"),
    "20Minuten": "sari",
    "Py150": "edit_similarity",
}
_ROUGE = RougeScorer(["rougeL"], use_stemmer=True)
_PLACEHOLDERS = re.compile(r"<(?:STR|NUM|CHAR)_LIT(?::(.*?))?>", re.DOTALL)


@dataclass(frozen=True)
class Reference:
    """What a free answer is compared with; no learner receives it."""

    answers: tuple[str, ...]
    """All correct answers; the first is the one in the record."""
    source: str = ""
    """The text that is to be rewritten, for SARI; empty for other tasks."""


def metric_of(task: str, answers: Sequence[str]) -> Metric:
    """Return the metric of a task, given all answers of its training file that may be drawn.

    >>> metric_of("task363_sst2_polarity_classification", [])
    'exact_match'
    >>> metric_of("mine", ["yes", "no", "no", "yes", "no", "yes"])
    'exact_match'
    """
    known = _METRICS.get(task) or _METRICS.get(task.split("_", maxsplit=1)[0])
    if known is not None:
        return known
    return "exact_match" if len(set(answers)) <= min(MAX_LABELS, len(answers) // 3) else "rouge_l"


def score_answer(metric: Metric, output: str, reference: Reference) -> float:
    """Score a free answer: the best over the references, in [0, 1]."""
    return max(_FUNCTIONS[metric](output, answer, reference.source) for answer in reference.answers)


def choice(output: str, reference: str) -> float:
    """Return 1.0 if both begin with the same letter, else 0.0.

    >>> choice(" B. hawkish", "B")
    1.0
    """
    return float(output.lstrip()[:1] == reference.lstrip()[:1] != "")


def rouge_l(output: str, reference: str) -> float:
    """Compute ROUGE-L by the package rouge-score with its stemmer, as SuperNI's own evaluation does, in [0, 1].

    The package drops all but ASCII letters and digits. References mostly of other letters, such as Chinese, are scored
    by the ROUGE-L of `/v1/eval`.

    >>> rouge_l("the cats sat", "the cat sat"), rouge_l("巴黎", "巴黎")
    (1.0, 1.0)
    """
    letters = [letter for letter in reference if letter.isalnum()]
    if 2 * sum(map(str.isascii, letters)) < len(letters):
        return runner.rouge_l(output, reference)
    return float(_ROUGE.score(reference, output)["rougeL"].fmeasure)


def edit_similarity(output: str, reference: str) -> float:
    """Compute the similarity of two lines of code, with the placeholders of Py150 replaced by their literals.

    >>> round(edit_similarity("x = <NUM_LIT:1>", "y = <NUM_LIT:1>"), 2)
    0.8
    """
    left, right = (_PLACEHOLDERS.sub(lambda match: match[1] or "", text).strip() for text in (output, reference))
    return SequenceMatcher(None, left, right, autojunk=False).ratio()


def sari(source: str, output: str, reference: str) -> float:
    """Compute SARI, the metric of text simplification (Xu et al. 2016), in [0, 1].

    With I, O and R the n-grams of input, output and reference, #g their counts and n = 1 to 4:

        p_add(n)  = |O - I & R| / |O - I|,            r_add(n)  = |O - I & R| / |R - I|                      (1)
        p_keep(n) = sum min(#g(I & O), #g(I & R)) / sum #g(I & O),
        r_keep(n) = sum min(#g(I & O), #g(I & R)) / sum #g(I & R)                                            (2)
        p_del(n)  = sum min(#g(I - O), #g(I - R)) / sum #g(I - O)                                            (3)
        SARI = (F_add + F_keep + P_del) / 3,  P and R the means over n,  F = 2 P R / (P + R)                 (4)

    Eq. (1) counts each n-gram once, eq. (2) and (3) as often as it occurs. 0 / 0 is 1: nothing to do was done right.
    These are the formulas for one reference. Other implementations take F of each n and then the mean.
    """
    texts = [normalize(text) for text in (source, output, reference)]
    by_order = [_sari_of_order(*(_ngrams(words, order) for words in texts)) for order in range(1, 5)]
    p_add, r_add, p_keep, r_keep, p_del = (fmean(values) for values in zip(*by_order, strict=True))
    return (_f1(p_add, r_add) + _f1(p_keep, r_keep) + p_del) / 3


def _sari_of_order(source: Counter[str], output: Counter[str], reference: Counter[str]) -> tuple[float, ...]:
    added, missing = set(output) - set(source), set(reference) - set(source)
    good = len(added & missing)
    kept, to_keep, deleted = source & output, source & reference, source - output
    both = (kept & to_keep).total()
    return (
        _share(good, len(added)),
        _share(good, len(missing)),
        _share(both, kept.total()),
        _share(both, to_keep.total()),
        _share((deleted & (source - reference)).total(), deleted.total()),
    )


def _ngrams(words: Sequence[str], order: int) -> Counter[str]:
    return Counter(" ".join(words[i : i + order]) for i in range(len(words) - order + 1))


def _share(part: int, whole: int) -> float:
    return part / whole if whole else 1.0


def _f1(precision: float, recall: float) -> float:
    return 2 * precision * recall / (precision + recall) if precision + recall else 0.0


_FUNCTIONS: Mapping[Metric, Callable[[str, str, str], float]] = {
    "exact_match": lambda output, answer, _: exact_match(output, answer),
    "choice": lambda output, answer, _: choice(output, answer),
    "rouge_l": lambda output, answer, _: rouge_l(output, answer),
    "sari": lambda output, answer, source: sari(source, output, answer),
    "edit_similarity": lambda output, answer, _: edit_similarity(output, answer),
}
"""Metric -> its value for output, correct answer and source."""


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


def scores(run: Run, frozen: Run | None = None) -> Scores:
    """Compute the scores of a run, given the run of `frozen` on the same suite for FWT."""
    segments: list[list[str]] = [segment["tasks"] for segment in run["segments"]]
    answers: Mapping[str, Mapping[str, Any]] = run["answers"]
    end = {task: fmean(answer["end"]) for task, answer in answers.items()}
    after = {task: fmean(answer["after"]) for task, answer in answers.items() if answer["after"] is not None}
    ended = last_segments(segments)
    past = {task: fmean(as_after(answers[task])) for task in after if ended[task] < len(segments) - 1}
    last = [run["teacher"][-1][task] for task in ended]
    return Scores(
        AP=mean([end[task] for task in ended if task in end]),
        LA=mean(list(after.values())),
        AF=mean([max(0.0, after[task] - end) for task, end in past.items()]),
        BWT=mean([end - after[task] for task, end in past.items()]),
        ZST=mean([end[task] for task in run["unseen"] if task in end]),
        FWT=None if frozen is None or run["shuffled"] else _forward_transfer(run, frozen),
        token_AP=fmean(score["accuracy"] for score in last),
        token_loss=mean([score["loss"] for score in last if score["loss"] is not None]),
        prequential_loss=mean(run["record_losses"]),
        first_50_loss=_first_loss(run),
    )


def as_after(answer: Mapping[str, Any]) -> Sequence[float]:
    """Return a task's scores at the end by the metric of its scores after its last segment, see `rescore`."""
    own: Sequence[float] = answer.get("end_as_after", answer["end"])
    return own


def skill(ap: float, blind: float, ceiling: float) -> float | None:
    """Compute eq. (7); None unless the ceiling is above the blind score."""
    return (ap - blind) / (ceiling - blind) if ceiling > blind else None


def _forward_transfer(run: Run, frozen: Run) -> float | None:
    base = {task: known["accuracy"] for row in frozen["teacher"] for task, known in row.items()}
    began: dict[str, int] = {}
    for number, segment in enumerate(run["segments"]):
        for task in segment["tasks"]:
            began.setdefault(task, number)
    later = [task for task in began if began[task] > 0]
    return mean([run["teacher"][began[task] - 1][task]["accuracy"] - base[task] for task in later])


def _first_loss(run: Run) -> float | None:
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


def stream_scores(run: Run) -> dict[str, float | int | None]:
    """Return eq. (9) and (10) of a run on a stream that nobody cut, its prequential loss, and its regimes.

    Those of (10) are None if no task stopped, those of the regimes if the method detects none; see `RegimeRecorder`.
    """
    rows = [row for row in run["teacher"] if row]
    records = sum(segment["records"] for segment in run["segments"])
    stopped = [task for task, number in run["last_records"].items() if number <= STOPPED * records]
    losses = [weighted_loss(row, stopped) for row in rows] if stopped else []
    detection = run["detection"]
    return {
        "loss": weighted_loss(rows[-1], run["last_records"]),
        "prequential_loss": mean(run["record_losses"]),
        "stopped": losses[-1] if losses else None,
        "forgotten": losses[-1] - min(losses) if losses else None,
        "regimes": None if detection is None else len(set(detection["regimes"])),
        "nmi": None if detection is None else detection["nmi"],
    }


def weighted_loss(row: Mapping[str, Mapping[str, float]], tasks: Iterable[str]) -> float:
    """Compute eq. (8) from a row of teacher-forced scores, over some tasks."""
    scores = [row[task] for task in tasks]
    return sum(score["tokens"] * score["loss"] for score in scores) / sum(score["tokens"] for score in scores)


def normalized_mutual_information(left: Sequence[Hashable], right: Sequence[Hashable]) -> float:
    """Compute 2 I(L; R) / (H(L) + H(R)) of two partitions of the same records, in [0, 1]; 0 if both are of one part.

    >>> round(normalized_mutual_information([1, 1, 2, 2], "abcc"), 2)
    0.8
    """
    partitions = (left, right, zip(left, right, strict=True))
    one, other, both = (entropy(list(Counter(parts).values())) for parts in partitions)
    return float(2 * (one + other - both) / (one + other)) if one + other else 0.0


def detection_scores(run: Run) -> dict[str, int | None]:
    """Return boundaries found, false shifts and declared returns; None where boundaries are given or there are none.

    A boundary is found within `WITHIN` records and before the next one. The declaration at record 1 opens the first
    regime and is not a shift. Between segments of the same tasks there is no boundary.
    """
    *ends, records = accumulate(segment["records"] for segment in run["segments"])
    changes = (before["tasks"] != after["tasks"] for before, after in pairwise(run["segments"]))
    boundaries = [end for end, is_boundary in zip(ends, changes, strict=True) if is_boundary]
    if run["detection"] is None or not boundaries:
        return dict.fromkeys(("boundaries_found", "false_shifts", "returns_declared"))
    shifts = [report["shift"] for report in run["detection"]["shifts"]]
    declared = [shift for shift in shifts if shift["kind"] == "inputs" and shift["declared_at"] > 1]
    at = [shift["declared_at"] for shift in declared]
    found = len(matches([before + 1 for before in boundaries], records + 1, at, WITHIN))
    return {
        "boundaries_found": found,
        "false_shifts": len(declared) - found,
        "returns_declared": sum(shift["known"] for shift in declared),
    }
