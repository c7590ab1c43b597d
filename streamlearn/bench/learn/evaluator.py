"""Evaluation of a learner on each task's test records."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import torch

from streamlearn.adaptation.expert_evidence import ExpertEvidence
from streamlearn.bench.learn.suite import Suite
from streamlearn.jobs.experts import experts
from streamlearn.jobs.queue import ExpertsJob
from streamlearn.jobs.results import ExpertsOfRegime
from streamlearn.learner.evaluation import decode_greedily, prompt_of, reference_of, run_to_end, score
from streamlearn.learner.learner import Learner
from streamlearn.learner.text_metrics import exact_match, rouge_l
from streamlearn.stream.decode import Decoder, Example

PACK_TOKENS = 4096
MAX_CLASS_ANSWERS = 12
"""Maximum number of distinct answers of a classification task; it also has at least three test records per answer.

Classification tasks are scored by exact match, all others by ROUGE-L.
"""
MAX_NEW_TOKENS = 40
GENERATED = 25
"""Number of test records per task for which text is generated; decoding is slow."""

SlotsOf = Callable[[str, Sequence[Example]], list[int] | None]
"""Maps a task's test records to the regime slots that they are routed with; None: no regime bias."""


@dataclass(frozen=True)
class TaskScore:
    """Teacher-forced figures of one task."""

    accuracy: float
    """Share of answer tokens that are the argmax of the model."""
    loss: float
    """Nats per answer token."""


class Evaluator:
    """A suite's test records, decoded once, and the ways to score a learner on them."""

    def __init__(self, suite: Suite, decoder: Decoder) -> None:
        self._decoder = decoder
        self.tests: Mapping[str, Sequence[Example]] = {
            task: [decoder.decode_value(record) for record in records] for task, records in suite.tests.items()
        }

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

    def generate(self, learner: Learner, tasks: Iterable[str], slots_of: SlotsOf) -> dict[str, dict[str, float]]:
        """Generate answers and score them; each task has either `exact_match` or `rouge_l`."""
        figures = {}
        for task in tasks:
            examples = list(self.tests[task][:GENERATED])
            references = [self._decoder.text(reference_of(example)) for example in examples]
            outputs = run_to_end(
                decode_greedily(
                    learner.model,
                    [prompt_of(example) for example in examples],
                    [MAX_NEW_TOKENS] * len(examples),
                    self._decoder.stop,
                    learner.device,
                    slots_of(task, examples),
                )
            )
            pairs = list(zip(map(self._decoder.text, outputs), references, strict=True))
            if self._is_classification(task):
                figures[task] = {"exact_match": fmean(exact_match(*pair) for pair in pairs)}
            else:
                figures[task] = {"rouge_l": fmean(rouge_l(*pair) for pair in pairs)}
        return figures

    def expert_usage(
        self, learner: Learner, similarity: Mapping[str, torch.Tensor], slots_of: SlotsOf
    ) -> dict[str, Any] | None:
        """Return N_eff and each regime's token shares over the experts of the middle layer; None without a router."""
        load = {bank.name: bank.load_HK for bank in learner.banks if bank.load_HK is not None}
        if not load:
            return None
        by_slot = self._by_slot(slots_of)
        evidence = ExpertEvidence({slot: slot for slot in by_slot}, load, similarity, by_slot)
        layers = run_to_end(experts(ExpertsJob(None), learner, evidence, pack_tokens=PACK_TOKENS)).layers
        means = [layer.mean_effective_number for layer in layers if layer.mean_effective_number is not None]
        middle = layers[len(layers) // 2]
        by_regime = {str(regime.regime): _token_shares(regime) for regime in middle.regimes}
        return {"n_eff": fmean(means), "layer": middle.layer, "share": by_regime}

    def _is_classification(self, task: str) -> bool:
        answers = {self._decoder.text(reference_of(example)) for example in self.tests[task]}
        return len(answers) <= min(MAX_CLASS_ANSWERS, len(self.tests[task]) // 3)

    def _by_slot(self, slots_of: SlotsOf) -> dict[int, list[Example]]:
        by_slot: dict[int, list[Example]] = {}
        for task, examples in self.tests.items():
            for slot, example in zip(slots_of(task, examples) or [0] * len(examples), examples, strict=True):
                by_slot.setdefault(slot, []).append(example)
        return by_slot


def _token_shares(regime: ExpertsOfRegime) -> Any:
    """Share of the regime's tokens that each expert of a head receives, as lists (H, K)."""
    tokens_HK = torch.tensor(regime.holdout_tokens, dtype=torch.float)
    return (tokens_HK / tokens_HK.sum(1, keepdim=True).clamp_min(1)).round(decimals=3).tolist()
