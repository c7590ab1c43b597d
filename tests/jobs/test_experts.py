"""Expert usage, compared with counts taken record by record and token by token."""

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from streamlearn.adapters.context import AdaptedLayer, RoutingDecision
from streamlearn.adapters.presets import resolve
from streamlearn.adapters.tuner import attach
from streamlearn.backbone.load import load, outline
from streamlearn.jobs.experts import BUCKETS, COMPOSITIONS, experts
from streamlearn.jobs.queue import ExpertsJob, LayerError
from streamlearn.jobs.results import ExpertsResult, LayerExperts
from streamlearn.learner.evaluate import run_to_end, score
from streamlearn.learner.learner import Learner
from streamlearn.regimes.regimes import ExpertEvidence
from streamlearn.settings import AdapterSettings, BackboneSettings, LearnerSettings
from streamlearn.stream.record import Example
from tests.doubles import random_examples, tiny_backbone

NUMBERS = {0: 7, 1: 4}  # slot -> number, in another order than the slots
HOLDOUTS = {0: random_examples([9, 14, 6], vocab_size=24), 1: random_examples([11, 8], vocab_size=24, seed=1)}
PACK_TOKENS = 22


@pytest.fixture(scope="module")
def backbone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_backbone(tmp_path_factory.mktemp("backbone"))


def learner_of(backbone: Path, **adapter: Any) -> Learner:
    settings = BackboneSettings(model=str(backbone), dtype="float32", device="cpu")
    loaded = load(settings, outline(settings))
    config = resolve(AdapterSettings(**adapter))
    model = attach(loaded.model, config if config.per_regime else replace(config, regimes=2), seed=0)
    return Learner(model, LearnerSettings(lr=1e-4), loaded.device, clock=lambda: 0.0)


def evidence(
    learner: Learner, holdouts: Any = HOLDOUTS, *, routed: bool = True, importance: Any = None
) -> ExpertEvidence:
    shapes = {bank.name: bank.A.shape[:2] for bank in learner.banks}
    load = {name: torch.arange(shape.numel()).view(shape) for name, shape in shapes.items()}
    similarity = {name: torch.zeros(*shape, 2) for name, shape in shapes.items()}
    for similarity_HKN in similarity.values():
        similarity_HKN[:, :, 1] = 0.25
    return ExpertEvidence(NUMBERS, load if routed else {}, similarity, importance or {}, holdouts)


def described(learner: Learner, layer: str | None = None, **kwargs: Any) -> ExpertsResult:
    return run_to_end(experts(ExpertsJob(layer), learner, evidence(learner, **kwargs), pack_tokens=PACK_TOKENS))


class Decisions:
    """Every layer's routing decision for one record, collected by a routing hook."""

    def __init__(self) -> None:
        self.selected: dict[str, torch.Tensor] = {}

    def __call__(self, layer: AdaptedLayer, decision: RoutingDecision) -> None:
        self.selected[layer.block] = decision.selected_HKT


def decide(learner: Learner, example: Example, slot: int) -> Decisions:
    decisions = Decisions()
    run_to_end(score(learner.model, [example], learner.device, pack_tokens=99, slots=[slot], hooks=(decisions,)))
    return decisions


def frequency_bucket(token: int, counts: Counter[int]) -> int:
    """Bucket of the middle of the token's occurrences, with tokens ordered by frequency and then by id."""
    before = sum(n for other, n in counts.items() if (-n, other) < (-counts[token], token))
    return min(int((before + counts[token] / 2) / counts.total() * BUCKETS), BUCKETS - 1)


def mixing(counter: Counter[tuple[int, int]]) -> float:
    """MH-MoE eq. 9."""
    total = counter.total()
    return 1 / sum((count / total) ** 2 for count in counter.values()) if total else 0.0


@pytest.mark.parametrize("preset", ["mh-moe", "mot"])
def test_counts_and_mixing_equal_those_of_single_records(backbone: Path, preset: str) -> None:
    """Packed batches that span regimes give the same result, also where whole sequences are routed."""
    learner = learner_of(backbone, preset=preset, num_heads=4 if preset == "mh-moe" else 1)
    result = described(learner)
    frequencies = Counter(token for kept in HOLDOUTS.values() for example in kept for token in example.input_ids)
    assert len(result.layers) == len(learner.banks)
    for bank, layer in zip(learner.banks, result.layers, strict=True):
        H, K = bank.A.shape[:2]
        kinds: dict[tuple[int, int], Counter[tuple[int, int]]] = {}
        tokens = {number: torch.zeros(H, K, dtype=torch.long) for number in NUMBERS.values()}
        for slot, kept in HOLDOUTS.items():
            for example in kept:
                selected = decide(learner, example, slot).selected[bank.info.block]
                for t, token in enumerate(example.input_ids):
                    kind = (frequency_bucket(token, frequencies), t * BUCKETS // len(example))
                    for h, k in selected[:, :, t if preset == "mh-moe" else 0].nonzero().tolist():
                        kinds.setdefault((h, k), Counter())[kind] += 1
                        tokens[NUMBERS[slot]][h, k] += 1
        expected = [[mixing(kinds.get((h, k), Counter())) for k in range(K)] for h in range(H)]
        assert layer.effective_number is not None
        torch.testing.assert_close(torch.tensor(layer.effective_number), torch.tensor(expected), rtol=1e-5, atol=1e-6)
        assert {regime.regime: regime.holdout_tokens for regime in layer.regimes} == {
            number: count.tolist() for number, count in tokens.items()
        }
        mass = [counter.total() for counter in kinds.values()]
        mean = sum(n * mixing(counter) for n, counter in zip(mass, kinds.values(), strict=True)) / sum(mass)
        assert layer.mean_effective_number == pytest.approx(mean)
    assert (result.holdout_records, result.holdout_tokens, result.compositions) == (5, 48, COMPOSITIONS)
    assert result.unmeasured is None


def first(result: ExpertsResult) -> LayerExperts:
    return result.layers[0]


def test_load_and_similarity_need_no_forward_pass(backbone: Path) -> None:
    """Load and its share per head, CKA of the regime that was probed, no importance."""
    layer = first(described(learner_of(backbone, preset="mh-moe", num_heads=4)))
    assert layer.load == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11], [12, 13, 14, 15]]
    assert layer.share is not None
    assert layer.share[0] == pytest.approx([0, 1 / 6, 2 / 6, 3 / 6])
    assert (layer.importance, layer.owner) == (None, None)
    four, seven = layer.regimes
    assert (four.regime, four.similarity) == (4, [[0.25] * 4] * 4)
    assert (seven.regime, seven.similarity) == (7, None)


def test_experts_of_one_regime_are_listed_with_it(backbone: Path) -> None:
    """Each layer once per regime, with the tokens of that regime only, counted in passes that span both."""
    learner = learner_of(backbone, preset="streamlearn", num_heads=4, num_experts=2)
    learner.add_regime(1, seed=1)
    result = described(learner)
    assert [layer.owner for layer in result.layers] == [7] * (len(result.layers) // 2) + [4] * (len(result.layers) // 2)
    for layer in result.layers:
        (own,) = layer.regimes
        assert own.regime == layer.owner
        slot = {number: slot for slot, number in NUMBERS.items()}[own.regime]
        assert own.holdout_tokens is not None
        assert [sum(row) for row in own.holdout_tokens] == [sum(map(len, HOLDOUTS[slot]))] * 4


def test_importance_is_the_mean_over_an_experts_weights(backbone: Path) -> None:
    """Over A and B together, weighted by their sizes."""
    learner = learner_of(backbone, preset="mh-moe", num_heads=4)
    bank = learner.banks[0]
    importance = {f"{bank.name}.{part}": torch.zeros_like(p) for part, p in (("A", bank.A), ("B", bank.B))}
    importance[f"{bank.name}.A"][2, 1] = 3.0
    importance[f"{bank.name}.B"][2, 1] = 5.0
    layer = first(described(learner, importance=importance))
    size_A, size_B = bank.A[2, 1].numel(), bank.B[2, 1].numel()
    assert layer.importance is not None
    assert layer.importance[2] == pytest.approx([0, (3 * size_A + 5 * size_B) / (size_A + size_B), 0, 0])


def test_a_part_of_a_name_selects_layers(backbone: Path) -> None:
    """The selected layers are the same as in the full result."""
    learner = learner_of(backbone, preset="mh-moe", num_heads=4)
    whole, part = described(learner), described(learner, "layers.1.")
    assert [layer for layer in whole.layers if "layers.1." in layer.layer] == list(part.layers)
    assert 0 < len(part.layers) < len(whole.layers)
    with pytest.raises(LayerError, match=r"expected part of the name of an adapted layer, found 'layers\.9\.'"):
        described(learner, "layers.9.")


def test_what_cannot_be_measured_has_a_reason(backbone: Path) -> None:
    """Without hold-out records or without a router the values are null, with the reason; the rest is reported."""
    learner = learner_of(backbone, preset="mh-moe", num_heads=4)
    result = described(learner, holdouts={0: (), 1: ()})
    assert result.unmeasured is not None
    assert "no record was held out yet" in result.unmeasured
    assert (first(result).effective_number, first(result).mean_effective_number) == (None, None)
    assert first(result).load is not None
    unrouted = described(learner_of(backbone, preset="lora"), routed=False)
    assert unrouted.unmeasured == "no token is routed by choice: an expert processes every token of its regime"
    assert first(unrouted).load is None


def test_a_regime_without_hold_out_records_has_no_tokens(backbone: Path) -> None:
    """The other regimes are measured."""
    learner = learner_of(backbone, preset="mh-moe", num_heads=4)
    result = described(learner, holdouts={0: (), 1: HOLDOUTS[1]})
    assert result.unmeasured is None
    four, seven = first(result).regimes
    assert four.holdout_tokens is not None
    assert sum(four.holdout_tokens[0]) == result.holdout_tokens == 19
    assert seven.holdout_tokens is None
