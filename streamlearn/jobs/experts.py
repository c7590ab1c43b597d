"""Usage of each expert: its training load, similarity and importance, and how mixed its tokens are.

Mixing is MH-MoE's N_eff (arXiv 2602.12587, eq. 9; `adapters/occupancy`), measured on the hold-out records of every
regime with the current weights. A token's composition combines its frequency among those records (in quarters of all
occurrences, so a token's bucket can change between requests) and its position in its record (in quarters of the
length). N_eff is 1 for an expert whose tokens are all of one composition, and 16 when all compositions are equally
frequent.
"""

import time
from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from streamlearn.adapters.context import AdaptedLayer, RoutingDecision
from streamlearn.adapters.presets import slot_of
from streamlearn.adapters.tuner import SHARED, Bank
from streamlearn.jobs.queue import ExpertsJob, LayerError
from streamlearn.jobs.results import ExpertsOfRegime, ExpertsResult, LayerExperts
from streamlearn.learner.evaluate import score
from streamlearn.learner.learner import Learner
from streamlearn.regimes.regimes import ExpertEvidence
from streamlearn.stream.record import Example

# Shape suffixes: T tokens, H heads, K experts a head, N regime slots, G remembered regimes, C compositions.


BUCKETS = 4
"""Buckets of frequency, and buckets of position."""
COMPOSITIONS = BUCKETS * BUCKETS


def experts(
    job: ExpertsJob,
    learner: Learner,
    evidence: ExpertEvidence,
    *,
    pack_tokens: int,
    clock: Callable[[], float] = time.monotonic,
) -> Generator[None, None, ExpertsResult]:
    """Describe the experts of the requested layers.

    Raises:
        LayerError: no adapted layer has the requested name.
    """
    started, step = clock(), learner.number
    chosen = [bank for bank in learner.banks if job.layer is None or job.layer in bank.linear]
    if not chosen:
        raise LayerError(
            f"layer: expected part of the name of an adapted layer, found {job.layer!r}; the {len(learner.banks)} "
            f"adapted layers are {learner.banks[0].linear} to {learner.banks[-1].linear}"
        )
    layers = [_from_training(bank, evidence) for bank in chosen]  # before the first yield: all of one step
    slots = [slot for slot in sorted(evidence.numbers, key=evidence.numbers.__getitem__) if evidence.holdouts[slot]]
    examples = [example for slot in slots for example in evidence.holdouts[slot]]
    unmeasured = _reason_unmeasured(examples, routed=bool(evidence.load))
    if unmeasured is None:
        regimes = [index for index, slot in enumerate(slots) for _ in evidence.holdouts[slot]]
        counts = ExpertTokenCounts(examples, regimes, {bank.info for bank in chosen}, learner.device)
        slot_by_example = [slots[index] for index in regimes]
        work = score(
            learner.model, examples, learner.device, pack_tokens=pack_tokens, slots=slot_by_example, hooks=(counts,)
        )
        for _ in work:
            counts.advance()
            yield
        numbers = [evidence.numbers[slot] for slot in slots]
        layers = [
            layer if count is None else _with_counts(layer, count, numbers)
            for layer, count in zip(layers, map(counts.of, chosen), strict=True)
        ]
    return ExpertsResult(
        step=step,
        layers=tuple(layers),
        holdout_records=len(examples),
        holdout_tokens=sum(map(len, examples)),
        compositions=COMPOSITIONS,
        unmeasured=unmeasured,
        seconds=clock() - started,
    )


def _reason_unmeasured(examples: Sequence[Example], *, routed: bool) -> str | None:
    if not routed:
        return "no token is routed by choice: an expert processes every token of its regime"
    if not examples:
        return "no record was held out yet; holdout.every_records sets how often one is"
    return None


def _from_training(bank: Bank, evidence: ExpertEvidence) -> LayerExperts:
    """What needs no forward pass."""
    load_HK, similarity_HKN = evidence.load.get(bank.name), evidence.similarity.get(bank.name)
    owner = None if bank.adapter == SHARED else evidence.numbers.get(slot_of(bank.adapter))
    return LayerExperts(
        layer=bank.linear,
        owner=owner,
        load=None if load_HK is None else load_HK.tolist(),
        share=None if load_HK is None else (load_HK / load_HK.sum(1, keepdim=True).clamp_min(1)).tolist(),
        importance=_mean_importance(bank, evidence.importance),
        regimes=tuple(
            ExpertsOfRegime(
                regime=number, similarity=None if similarity_HKN is None else _if_any(similarity_HKN[:, :, slot])
            )
            for slot, number in sorted(evidence.numbers.items(), key=lambda pair: pair[1])
            if owner in (None, number)
        ),
    )


def _if_any(similarity_HK: Tensor) -> list[list[float]] | None:
    return similarity_HK.tolist() if similarity_HK.any() else None


def _mean_importance(bank: Bank, importance: Mapping[str, Tensor]) -> list[list[float]] | None:
    omegas = [
        importance[f"{bank.name}.{part}"].flatten(2) for part in ("A", "B") if f"{bank.name}.{part}" in importance
    ]
    if not omegas:
        return None
    means: list[list[float]] = torch.cat(omegas, dim=2).mean(2).tolist()
    return means


def _with_counts(layer: LayerExperts, count: Tensor, numbers: Sequence[int]) -> LayerExperts:
    """The layer with the counts on the hold-out records, (H, K, G * C); `numbers` are the regimes of G."""
    count_HKGC = count.view(*count.shape[:2], len(numbers), COMPOSITIONS)
    count_HKC, tokens_HKG = count_HKGC.sum(2), count_HKGC.sum(3).long()
    tokens = {number: tokens_HKG[:, :, index].tolist() for index, number in enumerate(numbers)}
    return layer.model_copy(
        update={
            "effective_number": effective_number(count_HKC).tolist(),
            "mean_effective_number": float(mean_effective_number(count_HKC)),
            "regimes": tuple(
                regime.model_copy(update={"holdout_tokens": tokens.get(regime.regime)}) for regime in layer.regimes
            ),
        }
    )


class ExpertTokenCounts:
    """Tokens of every regime and composition per expert, counted by a `RoutingHook` over consecutive packed batches."""

    def __init__(
        self, examples: Sequence[Example], regimes: Sequence[int], layers: set[AdaptedLayer], device: torch.device
    ) -> None:
        self._by_router: dict[tuple[str, str], Tensor] = {}  # by adapter and block, the layers that share a router
        self._layers = {(layer.adapter, layer.block) for layer in layers}
        lengths = torch.tensor([len(example) for example in examples])
        tokens_T = torch.from_numpy(np.concatenate([example.input_ids for example in examples]))
        _, index_T, count = torch.unique(tokens_T, return_inverse=True, return_counts=True)
        features = [
            torch.tensor(regimes).repeat_interleave(lengths),
            frequency_buckets(count, BUCKETS)[index_T],
            torch.cat([position_buckets(int(length), BUCKETS) for length in lengths]),
        ]
        self._num_kinds = (max(regimes) + 1) * COMPOSITIONS
        self._composition_T = composition(features, [max(regimes) + 1, BUCKETS, BUCKETS]).to(device)
        self._lengths_B = lengths.to(device)
        self._token = self._record = 0
        self._records = 0
        self._tokens_by_layer: Counter[str] = Counter()

    def __call__(self, layer: AdaptedLayer, decision: RoutingDecision) -> None:
        """Count one layer's tokens of the current packed batch."""
        selected_HKT, router = decision.selected_HKT, (layer.adapter, layer.block)
        if layer.routes == "sequences":
            self._records = selected_HKT.shape[-1]
            lengths_B = self._lengths_B[self._record : self._record + self._records]
            selected_HKT = selected_HKT.repeat_interleave(lengths_B, dim=-1)
        self._tokens_by_layer[layer.name] += selected_HKT.shape[-1]
        if router not in self._layers:
            return
        if decision.tokens_T is None:
            composition_T = self._composition_T[self._token : self._token + selected_HKT.shape[-1]]
        else:
            composition_T = self._composition_T[self._token + decision.tokens_T]
        count = per_expert(selected_HKT, composition_T, self._num_kinds)
        self._by_router[router] = self._by_router[router] + count if router in self._by_router else count

    def of(self, bank: Bank) -> Tensor | None:
        """Return a bank's counts, (H, K, G * C); None without a token."""
        return self._by_router.get((bank.info.adapter, bank.info.block))

    def advance(self) -> None:
        """Move on to the next packed batch."""
        self._token += max(self._tokens_by_layer.values(), default=0)
        self._record += self._records
        self._tokens_by_layer.clear()


# How many kinds of tokens share a route, and so the weights of one expert.
#
#     c = (y_1, ..., y_m)                                    a token's composition of features     (1)
#     p(c | r) = fraction of composition c among the tokens on route r                             (2)
#     N_eff(r) = 1 / sum_c p(c | r)^2                        1 if there is one composition, at most |C| (3)
#     mean over routes = sum_r mass(r) N_eff(r),             mass(r) the fraction of tokens on r   (4)
#
# MH-MoE (arXiv 2602.12587) eq. 3, 8, 9 and figure 4. The features used here need no labels: the token's frequency and
# its
# position. A route is one expert of one head (`per_expert`), or the combination that all heads selected (`per_path`).


# Shape suffixes: T tokens, H heads, K experts a head, V vocabulary, C compositions, N paths.


def frequency_buckets(count_V: Tensor, num_buckets: int) -> Tensor:
    """Assign every token id to a bucket, (V,), most frequent first; buckets hold about equally many occurrences."""
    order_V = count_V.argsort(descending=True, stable=True)
    count_V = count_V[order_V].double()
    middle_V = (count_V.cumsum(0) - count_V / 2) / count_V.sum().clamp_min(1.0)
    bucket_V = torch.empty_like(order_V)
    bucket_V[order_V] = (middle_V * num_buckets).long().clamp_max(num_buckets - 1)
    return bucket_V


def position_buckets(length: int, num_buckets: int) -> Tensor:
    """Assign every position of a sequence to a bucket by its relative position, (length,)."""
    return torch.arange(length) * num_buckets // max(length, 1)


def composition(features: Sequence[Tensor], sizes: Sequence[int]) -> Tensor:
    """Encode eq. (1) as one integer in [0, product of `sizes`), where feature i lies in [0, sizes[i])."""
    combined = torch.zeros_like(features[0])
    for feature, size in zip(features, sizes, strict=True):
        combined = combined * size + feature
    return combined


def per_expert(selected_HKT: Tensor, composition_T: Tensor, num_compositions: int) -> Tensor:
    """Count each expert's tokens by composition, (H, K, C) float64; counts of chunks of a stream add up."""
    one_hot_TC = torch.nn.functional.one_hot(composition_T, num_compositions).double()  # float32 is exact to 2^24
    return selected_HKT.double() @ one_hot_TC


def per_path(selected_HKT: Tensor, composition_T: Tensor, num_compositions: int) -> Tensor:
    """Count each path's tokens by composition, (N, C) float64, with a row for each path that occurred."""
    paths_TX, path_T = torch.unique(selected_HKT.flatten(0, 1).T, dim=0, return_inverse=True)
    flat_T = composition([path_T, composition_T], [len(paths_TX), num_compositions])
    return torch.bincount(flat_T, minlength=len(paths_TX) * num_compositions).view(-1, num_compositions).double()


def effective_number(count: Tensor) -> Tensor:
    """Compute eq. (3) over the last dimension, from counts; 0 for a route without tokens."""
    count = count.double()
    total, squares = count.sum(-1), count.square().sum(-1)
    return torch.where(total > 0, total.square() / squares, 0.0)


def mean_effective_number(count: Tensor) -> Tensor:
    """Compute eq. (4) over all routes, a scalar, from counts with C as the last dimension."""
    mass = count.sum(-1)
    return (mass * effective_number(count)).sum() / mass.sum().clamp_min(1.0)
