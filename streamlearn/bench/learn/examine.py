"""What a learner knows of each task's test records."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import torch

from streamlearn.adaptation.expert_evidence import ExpertEvidence
from streamlearn.bench.learn.suites import Suite
from streamlearn.jobs.experts import experts
from streamlearn.jobs.queue import ExpertsJob
from streamlearn.learner.evaluation import decode_greedily, prompt_of, reference_of, run_to_end, score
from streamlearn.learner.learner import Learner
from streamlearn.learner.text_metrics import exact_match, rouge_l
from streamlearn.stream.decode import Decoder, Example

ROW_TOKENS = 4096
FEW_ANSWERS = 12
"""A task with at most so many different answers, and three test records for each, asks for one of them: exact match.
Any other asks for a text: ROUGE-L."""
MAX_NEW_TOKENS = 40
GENERATED = 25
"""Test records of each task that are answered freely; decoding is slow."""

SlotsOf = Callable[[str, Sequence[Example]], list[int] | None]
"""The regimes of a task's test records."""


@dataclass(frozen=True)
class Known:
    """Teacher-forced figures of one task."""

    accuracy: float
    """Share of the answers' tokens that are the most probable ones."""
    loss: float
    """Nats per token of the answers."""


class Examiner:
    """Holds a suite's test records, decoded once."""

    def __init__(self, suite: Suite, decoder: Decoder) -> None:
        self._decoder = decoder
        self.tests: Mapping[str, Sequence[Example]] = {
            task: [decoder.decode_value(record) for record in records] for task, records in suite.tests.items()
        }

    def examine(self, learner: Learner, tasks: Iterable[str], slots_of: SlotsOf) -> dict[str, Known]:
        """Score the tasks under the weights as they are."""
        found = {}
        for task in tasks:
            examples = self.tests[task]
            slots = slots_of(task, examples)
            scores = run_to_end(score(learner.model, examples, learner.device, pack_tokens=ROW_TOKENS, slots=slots))
            tokens = sum(each.tokens for each in scores)
            found[task] = Known(
                sum(each.correct for each in scores) / tokens, sum(each.loss_sum for each in scores) / tokens
            )
        return found

    def generate(self, learner: Learner, tasks: Iterable[str], slots_of: SlotsOf) -> dict[str, dict[str, float]]:
        """Answer freely: {"exact_match": ...} or {"rouge_l": ...} by task, whichever it asks for."""
        figures = {}
        for task in tasks:
            examples = list(self.tests[task][:GENERATED])
            references = [self._decoder.text(reference_of(example)) for example in examples]
            answers = {self._decoder.text(reference_of(example)) for example in self.tests[task]}
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
            if len(answers) <= min(FEW_ANSWERS, len(self.tests[task]) // 3):
                figures[task] = {"exact_match": fmean(exact_match(*pair) for pair in pairs)}
            else:
                figures[task] = {"rouge_l": fmean(rouge_l(*pair) for pair in pairs)}
        return figures

    def use_of_experts(
        self, learner: Learner, similarity: Mapping[str, torch.Tensor], slots_of: SlotsOf
    ) -> dict[str, Any] | None:
        """N_eff, and which experts of the middle layer get each regime's test tokens, as shares; None: no router."""
        routed = {bank.name: bank.load_HK for bank in learner.banks if bank.load_HK is not None}
        if not routed:
            return None
        by_slot: dict[int, list[Example]] = {}
        for task, examples in self.tests.items():
            for slot, example in zip(slots_of(task, examples) or [0] * len(examples), examples, strict=True):
                by_slot.setdefault(slot, []).append(example)
        evidence = ExpertEvidence({slot: slot for slot in by_slot}, routed, similarity, by_slot)
        layers = run_to_end(experts(ExpertsJob(None), learner, evidence, pack_tokens=ROW_TOKENS)).layers
        means = [layer.mean_effective_number for layer in layers if layer.mean_effective_number is not None]
        middle = layers[len(layers) // 2]
        shares = {}
        for regime in middle.regimes:
            tokens_HK = torch.tensor(regime.holdout_tokens, dtype=torch.float)
            share_HK = tokens_HK / tokens_HK.sum(1, keepdim=True).clamp_min(1)
            shares[str(regime.regime)] = share_HK.round(decimals=3).tolist()
        return {"n_eff": fmean(means), "layer": middle.layer, "share": shares}
