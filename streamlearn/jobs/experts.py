"""What each expert is used for: what it was trained on, what it holds, and how mixed the tokens are that it gets.

How mixed is MH-MoE's N_eff (arXiv 2602.12587, eq. 9; `adapters/occupancy`), taken over the hold-out records of every
regime under the weights as they are. A token's composition is how frequent it is among those records (quarters of all
occurrences, so a token's bucket can change from one request to the next) and where in its record it stands (quarters of
its length): 1 means an expert of one kind of token, 16 one that gets everything alike.
"""
# Shape suffixes: T tokens, H heads, K experts a head, N regime slots, G remembered regimes, C compositions.

import time
from collections.abc import Callable, Generator, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from streamlearn.adaptation.expert_evidence import ExpertEvidence
from streamlearn.adapters import occupancy
from streamlearn.adapters.model import Bank
from streamlearn.adapters.routing_context import AdaptedLayer, RoutingDecision
from streamlearn.consolidate.claims import claimed
from streamlearn.jobs.queue import ExpertsJob, LayerError
from streamlearn.jobs.results import ExpertsOfRegime, ExpertsResult, LayerExperts
from streamlearn.learner.evaluation import score
from streamlearn.learner.learner import Learner
from streamlearn.stream.decode import Example

BUCKETS = 4
"""Of frequency and of position each."""
COMPOSITIONS = BUCKETS * BUCKETS


def experts(
    job: ExpertsJob,
    learner: Learner,
    evidence: ExpertEvidence,
    *,
    pack_tokens: int,
    clock: Callable[[], float] = time.monotonic,
) -> Generator[None, None, ExpertsResult]:
    """Describe the experts of the layers asked for.

    Raises:
        LayerError: there is no such layer.
    """
    started, step = clock(), learner.number
    chosen = [bank for bank in learner.banks if job.layer is None or job.layer in bank.name]
    if not chosen:
        raise LayerError(
            f"layer: no adapted layer has {job.layer!r} in its name; there are {len(learner.banks)}, "
            f"from {learner.banks[0].name} to {learner.banks[-1].name}"
        )
    layers = [_known(bank, learner, evidence) for bank in chosen]  # before the first pause: all of one step
    slots = [slot for slot in sorted(evidence.numbers, key=evidence.numbers.__getitem__) if evidence.holdouts[slot]]
    examples = [example for slot in slots for example in evidence.holdouts[slot]]
    why_not = _why_not(examples, routed=bool(evidence.load))
    if why_not is None:
        regimes = [index for index, slot in enumerate(slots) for _ in evidence.holdouts[slot]]
        counts = _Counts(examples, regimes, {bank.info.block for bank in chosen}, learner.device)
        asked = [slots[index] for index in regimes]
        work = score(learner.model, examples, learner.device, pack_tokens=pack_tokens, slots=asked, hooks=(counts,))
        for _ in work:
            counts.turn()
            yield
        numbers = [evidence.numbers[slot] for slot in slots]
        layers = [
            _measured(layer, counts.of[bank.info.block], numbers) for layer, bank in zip(layers, chosen, strict=True)
        ]
    return ExpertsResult(
        step=step,
        layers=tuple(layers),
        holdout_records=len(examples),
        holdout_tokens=sum(map(len, examples)),
        compositions=COMPOSITIONS,
        unmeasured=why_not,
        seconds=clock() - started,
    )


def _why_not(examples: Sequence[Example], *, routed: bool) -> str | None:
    if not routed:
        return "the adapter has no router: every expert gets every token"
    if not examples:
        return "no record was kept out yet; holdout.every_records says how often one is"
    return None


def _known(bank: Bank, learner: Learner, evidence: ExpertEvidence) -> LayerExperts:
    """What needs no pass of the model."""
    load_HK = evidence.load.get(bank.name)
    similarity_HKN = evidence.similarity[bank.name]
    claims_HKN = claimed(bank.bias_HKN) if bank.bias_HKN is not None else None
    regimes = []
    for slot, number in sorted(evidence.numbers.items(), key=lambda pair: pair[1]):
        own_HK = None if claims_HKN is None else claims_HKN[:, :, slot]
        regimes.append(
            ExpertsOfRegime(
                regime=number,
                similarity=similarity_HKN[:, :, slot].tolist() if similarity_HKN[:, :, slot].any() else None,
                claimed=None
                if own_HK is None or not own_HK.any()
                else [row.nonzero()[:, 0].tolist() for row in own_HK],
            )
        )
    return LayerExperts(
        layer=bank.name,
        load=None if load_HK is None else load_HK.tolist(),
        share=None if load_HK is None else (load_HK / load_HK.sum(1, keepdim=True).clamp_min(1)).tolist(),
        importance=_mean_importance(bank, learner.anchors.importance()),
        regimes=tuple(regimes),
    )


def _mean_importance(bank: Bank, importance: Mapping[str, Tensor]) -> list[list[float]] | None:
    omegas = [
        importance[f"{bank.name}.{part}"].flatten(2) for part in ("A", "B") if f"{bank.name}.{part}" in importance
    ]
    if not omegas:
        return None
    means: list[list[float]] = torch.cat(omegas, dim=2).mean(2).tolist()
    return means


def _measured(layer: LayerExperts, count: Tensor, numbers: Sequence[int]) -> LayerExperts:
    """The layer with what the hold-out records showed, (H, K, G * C); `numbers` are the regimes of G."""
    count_HKGC = count.view(*count.shape[:2], len(numbers), COMPOSITIONS)
    count_HKC, tokens_HKG = count_HKGC.sum(2), count_HKGC.sum(3).long()
    tokens = {number: tokens_HKG[:, :, index].tolist() for index, number in enumerate(numbers)}
    return layer.model_copy(
        update={
            "effective_number": occupancy.effective_number(count_HKC).tolist(),
            "mean_effective_number": float(occupancy.mean_effective_number(count_HKC)),
            "regimes": tuple(
                regime.model_copy(update={"holdout_tokens": tokens.get(regime.regime)}) for regime in layer.regimes
            ),
        }
    )


class _Counts:
    """Tokens of every regime and composition that each expert got; a `RoutingHook` of one scoring after another."""

    def __init__(
        self, examples: Sequence[Example], regimes: Sequence[int], blocks: set[str], device: torch.device
    ) -> None:
        self.of: dict[str, Tensor] = {}
        """(H, K, G * C) by block: what one router decides for."""
        self._blocks = blocks
        lengths = torch.tensor([len(example) for example in examples])
        tokens_T = torch.from_numpy(np.concatenate([example.input_ids for example in examples]))
        _, index_T, count = torch.unique(tokens_T, return_inverse=True, return_counts=True)
        features = [
            torch.tensor(regimes).repeat_interleave(lengths),
            occupancy.frequency_buckets(count, BUCKETS)[index_T],
            torch.cat([occupancy.position_buckets(int(length), BUCKETS) for length in lengths]),
        ]
        self._num = (max(regimes) + 1) * COMPOSITIONS
        self._composition_T = occupancy.composition(features, [max(regimes) + 1, BUCKETS, BUCKETS]).to(device)
        self._lengths_B = lengths.to(device)
        self._token = self._record = 0
        self._row = (0, 0)

    def __call__(self, layer: AdaptedLayer, decision: RoutingDecision) -> None:
        """Count one layer's tokens of the row under way."""
        selected_HKT, records = decision.selected_HKT, 0
        if layer.routes == "sequences":
            records = selected_HKT.shape[-1]
            lengths_B = self._lengths_B[self._record : self._record + records]
            selected_HKT = selected_HKT.repeat_interleave(lengths_B, dim=-1)
        self._row = (selected_HKT.shape[-1], records)
        if (block := layer.block) not in self._blocks:
            return
        composition_T = self._composition_T[self._token : self._token + selected_HKT.shape[-1]]
        count = occupancy.per_expert(selected_HKT, composition_T, self._num)
        self.of[block] = self.of[block] + count if block in self.of else count

    def turn(self) -> None:
        """The next row follows."""
        tokens, records = self._row
        self._token += tokens
        self._record += records
