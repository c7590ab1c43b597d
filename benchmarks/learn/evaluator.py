"""Evaluation of a learner on each task's scored records: teacher-forced, and by free greedy answers."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

from benchmarks.learn.suite import Metric, Suite
from benchmarks.learn.task_metrics import score_answer
from streamlearn.adapters.context import Slot
from streamlearn.learner.evaluate import prompt_of, reference_of, run_to_end, score
from streamlearn.learner.generate import decode
from streamlearn.learner.learner import Learner
from streamlearn.stream.decode import Decoder
from streamlearn.stream.record import Example

PACK_TOKENS = 4096
MAX_NEW_TOKENS = 96
"""Maximum tokens of a free answer; fewer for a task whose training answers are all shorter."""

CHOICE_TOKENS = 4
"""The same where only the first letter of the answer counts."""


@dataclass(frozen=True)
class AnswerBatch:
    """Maximum size of a batch of prompts that are answered together."""

    prompts: int
    tokens: int
    """Prompts and answers, with padding."""


ANSWER_BATCHES: Mapping[str, AnswerBatch] = {"cpu": AnswerBatch(64, 16384), "cuda": AnswerBatch(512, 65536)}
"""By type of device. The cache of SmolLM2-135M takes 23 kB a token in bfloat16: 1.5 GB for 65536."""

SlotsOf = Callable[[str, Sequence[Example]], Sequence[Slot] | None]
"""Maps a task's scored records to what adapts them; None: no regime bias."""


@dataclass(frozen=True)
class TaskScore:
    """Teacher-forced figures of one task."""

    accuracy: float
    """Share of answer tokens that are the argmax of the model."""
    loss: float
    """Nats per answer token."""


@dataclass(frozen=True)
class TaskAnswers:
    """Free answers to a task's scored records."""

    metric: Metric
    scores: tuple[float, ...]
    """Score of each answer, in [0, 1]."""
    texts: tuple[str, ...]


class Evaluator:
    """A suite's scored records, decoded once, and the ways to score a learner on them."""

    def __init__(self, suite: Suite, decoder: Decoder) -> None:
        self._suite = suite
        self._decoder = decoder
        self.tests: Mapping[str, Sequence[Example]] = {
            task: [decoder.decode_value(record) for record in records] for task, records in suite.tests.items()
        }
        self._limits = {task: self._limit(task) for task in suite.references}

    def evaluate(self, learner: Learner, tasks: Iterable[str], slots_of: SlotsOf) -> dict[str, TaskScore]:
        """Score the tasks under the current weights, teacher-forced."""
        found = {}
        for task in tasks:
            examples = self.tests[task]
            slots = slots_of(task, examples)
            scores = run_to_end(score(learner.model, examples, learner.device, pack_tokens=PACK_TOKENS, slots=slots))
            tokens = sum(each.tokens for each in scores)
            found[task] = TaskScore(
                sum(each.correct for each in scores) / tokens, sum(each.loss_sum for each in scores) / tokens
            )
        return found

    def answer(self, learner: Learner, tasks: Iterable[str], slots_of: SlotsOf) -> dict[str, TaskAnswers]:
        """Decode and score free answers of those tasks that have references, in batches across tasks."""
        chosen = [task for task in tasks if task in self._suite.references]
        examples = [example for task in chosen for example in self.tests[task]]
        slots = [slots_of(task, self.tests[task]) for task in chosen]
        assert all(each is None for each in slots) or None not in slots, "all tasks have slots, or none has"
        size = ANSWER_BATCHES[learner.device.type]
        outputs = run_to_end(
            decode(
                learner.model,
                [prompt_of(example) for example in examples],
                [self._limits[task] for task in chosen for _ in self.tests[task]],
                self._decoder.stop,
                learner.device,
                None if None in slots else [slot for each in slots for slot in each or ()],
                max_prompts=size.prompts,
                max_tokens=size.tokens,
            )
        )
        texts = iter([self._decoder.text(output).strip() for output in outputs])
        return {task: self._scored(task, tuple(islice(texts, len(self.tests[task])))) for task in chosen}

    def _scored(self, task: str, texts: tuple[str, ...]) -> TaskAnswers:
        metric = self._suite.metrics[task]
        pairs = zip(texts, self._suite.references[task], strict=True)
        return TaskAnswers(metric, tuple(score_answer(metric, *pair) for pair in pairs), texts)

    def _limit(self, task: str) -> int:
        """The tokens of the longest training answer with its end, or the maximum for its metric."""
        answers = (len(reference_of(self._decoder.decode_value(record))) for record in self._suite.train[task])
        return min(CHOICE_TOKENS if self._suite.metrics[task] == "choice" else MAX_NEW_TOKENS, max(answers))
