"""Each task's metric for free answers, in [0, 1].

| metric | tasks | definition |
|---|---|---|
| exact_match | SuperNI's labels (073, 363, 875, 1687) and NumGLUE | equal words, see `jobs.runner.exact_match` |
| choice | C-STANCE, FOMC, ScienceQA | equal first letter, as TRACE scores a choice |
| rouge_l | SuperNI's texts and MeetingBank | ROUGE-L, see `jobs.runner.rouge_l` |
| sari | 20Minuten | SARI, see `sari` |
| edit_similarity | Py150 | 2 M / T, with M matching and T all characters of both (difflib); TRACE's fuzz.ratio |

SuperNI is scored by exact match where the answer is a label and by ROUGE-L elsewhere (Wang et al. 2022), TRACE as in
its paper (Wang et al. 2023, arXiv 2310.06762). Any other task is scored by exact match if its training answers have few
distinct values, see `MAX_LABELS`, else by ROUGE-L. With several references the best counts.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from difflib import SequenceMatcher

from benchmarks.learn.sari import sari
from benchmarks.learn.suite import Metric, Reference
from streamlearn.jobs.runner import exact_match, rouge_l

MAX_LABELS = 12
"""Maximum distinct training answers of an unknown task with labels; it also has three answers per label or more."""
_METRICS: Mapping[str, Metric] = {
    **dict.fromkeys(("task073", "task363", "task875", "task1687", "NumGLUE-cm", "NumGLUE-ds"), "exact_match"),
    **dict.fromkeys(("task002", "task181", "task511", "task591", "task639", "task748"), "rouge_l"),
    **dict.fromkeys(("task1290", "task1510", "task1572", "task1590", "task1729", "MeetingBank"), "rouge_l"),
    **dict.fromkeys(("C-STANCE", "FOMC", "ScienceQA"), "choice"),
    "20Minuten": "sari",
    "Py150": "edit_similarity",
}
_PLACEHOLDERS = re.compile(r"<(?:STR|NUM|CHAR)_LIT(?::(.*?))?>", re.DOTALL)


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


def edit_similarity(output: str, reference: str) -> float:
    """Compute the similarity of two lines of code, with the placeholders of Py150 replaced by their literals.

    >>> round(edit_similarity("x = <NUM_LIT:1>", "y = <NUM_LIT:1>"), 2)
    0.8
    """
    left, right = (_PLACEHOLDERS.sub(lambda match: match[1] or "", text).strip() for text in (output, reference))
    return SequenceMatcher(None, left, right, autojunk=False).ratio()


_FUNCTIONS: Mapping[Metric, Callable[[str, str, str], float]] = {
    "exact_match": lambda output, answer, _: exact_match(output, answer),
    "choice": lambda output, answer, _: choice(output, answer),
    "rouge_l": lambda output, answer, _: rouge_l(output, answer),
    "sari": lambda output, answer, source: sari(source, output, answer),
    "edit_similarity": lambda output, answer, _: edit_similarity(output, answer),
}
"""Metric -> its value for output, correct answer and source."""
