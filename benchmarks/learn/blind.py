"""The best that can be done without reading the input: a floor under every score.

Free answers: each task gets the one training answer with the highest mean score against the task's other training
answers. For labels this is the most frequent one. Tokens: a table from answer position and previous answer token to the
most frequent next token of the task's training answers; after a token that the table lacks, the most frequent one at
that position. An unseen task is answered from its own training records, which no learner receives.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from statistics import fmean

from benchmarks.learn.evaluator import TaskAnswers
from benchmarks.learn.suite import Metric, Reference, Suite
from benchmarks.learn.task_metrics import score_answer
from streamlearn.learner.evaluate import reference_of
from streamlearn.stream.decode import Decoder


def blind_answers(suite: Suite) -> dict[str, TaskAnswers]:
    """Return the blind answer to all scored records of every task."""
    found = {}
    for task, references in suite.references.items():
        metric = suite.metrics[task]
        best = best_answer(metric, suite.train_references[task])
        scores = tuple(score_answer(metric, best, reference) for reference in references)
        found[task] = TaskAnswers(metric, scores, (best,) * len(references))
    return found


def best_answer(metric: Metric, train: Sequence[Reference]) -> str:
    """Return the training answer with the highest mean score against the other ones; of equal ones the first."""
    if len(train) == 1:
        return train[0].answers[0]

    def mean_score(i: int) -> float:
        return fmean(score_answer(metric, train[i].answers[0], other) for j, other in enumerate(train) if j != i)

    first = {each.answers[0]: i for i, each in reversed(list(enumerate(train)))}
    return train[max(sorted(first.values()), key=mean_score)].answers[0]


def blind_accuracy(suite: Suite, decoder: Decoder, task: str) -> float:
    """Return the share of answer tokens of a task's scored records that the table predicts."""
    table: dict[tuple[int, int | None], Counter[int]] = defaultdict(Counter)
    for record in suite.train[task]:
        for position, previous, token in _steps(reference_of(decoder.decode_value(record))):
            table[position, previous][token] += 1
            table[position, None][token] += 1
    hits = []
    for record in suite.tests[task]:
        for position, previous, token in _steps(reference_of(decoder.decode_value(record))):
            counts = table.get((position, previous)) or table.get((position, None))
            hits.append(counts is not None and counts.most_common(1)[0][0] == token)
    return fmean(hits)


def _steps(ids: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Position, previous token (-1 before the first) and token."""
    return zip(range(len(ids)), [-1, *ids], ids, strict=False)
