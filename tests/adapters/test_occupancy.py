from collections import Counter

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from streamlearn.adapters import routing
from streamlearn.jobs import experts as occupancy

# Shape suffixes: T tokens, H heads, K experts a head, C compositions.
T, C = 300, 6


def selected(k: int = 1, heads: int = 2) -> torch.Tensor:
    return routing.select(torch.randn(heads, 4, T, generator=torch.Generator().manual_seed(0)), k)


def compositions() -> torch.Tensor:
    return torch.randint(C, (T,), generator=torch.Generator().manual_seed(1))


def n_eff(counter: Counter[int]) -> float:
    """MH-MoE eq. 8 and 9."""
    total = sum(counter.values())
    return 1 / sum((count / total) ** 2 for count in counter.values())


@pytest.mark.parametrize("k", [1, 2])
def test_mixing_of_an_expert_equals_the_equation(k: int) -> None:
    """A route is one expert of one head; the compositions of its tokens are counted."""
    selected_HKT, composition_T = selected(k), compositions()
    found = occupancy.effective_number(occupancy.per_expert(selected_HKT, composition_T, C))
    for h in range(2):
        for j in range(4):
            expected = n_eff(Counter(composition_T[selected_HKT[h, j]].tolist()))
            assert found[h, j].item() == pytest.approx(expected)


@pytest.mark.parametrize("k", [1, 2])
def test_mixing_of_a_path_equals_the_equation(k: int) -> None:
    """A path is the tuple of all heads' selections, under top-k of their sets; the mean is weighted by mass."""
    selected_HKT, composition_T = selected(k), compositions()
    tokens: dict[tuple[int, ...], Counter[int]] = {}
    for t in range(T):
        path = tuple(selected_HKT[:, :, t].flatten().int().tolist())
        tokens.setdefault(path, Counter())[int(composition_T[t])] += 1
    count_NC = occupancy.per_path(selected_HKT, composition_T, C)
    found = occupancy.effective_number(count_NC)
    assert sorted(found.tolist()) == pytest.approx(sorted(n_eff(counter) for counter in tokens.values()))
    expected = sum(counter.total() / T * n_eff(counter) for counter in tokens.values())
    assert occupancy.mean_effective_number(count_NC).item() == pytest.approx(expected)


def test_counts_of_chunks_add_up() -> None:
    """A stream can be counted batch by batch."""
    selected_HKT, composition_T = selected(), compositions()
    halves = zip(torch.split(selected_HKT, 150, -1), torch.split(composition_T, 150), strict=True)
    added = sum(occupancy.per_expert(chosen, composition, C) for chosen, composition in halves)
    assert isinstance(added, torch.Tensor)
    assert torch.equal(added, occupancy.per_expert(selected_HKT, composition_T, C))


def test_bounds_are_reached() -> None:
    """1 for one composition, the number of compositions if they are uniform, 0 without weight for an unused route."""
    count_NC = torch.tensor([[0.0, 7.0, 0.0], [5.0, 5.0, 5.0], [0.0, 0.0, 0.0]])
    torch.testing.assert_close(occupancy.effective_number(count_NC), torch.tensor([1.0, 3.0, 0.0]).double())
    torch.testing.assert_close(occupancy.mean_effective_number(count_NC), torch.tensor((7 * 1 + 15 * 3) / 22).double())


weights = st.lists(st.integers(0, 1000), min_size=1, max_size=12)


@given(weights, st.data())
def test_lemma_2_1_no_few_compositions_hold_a_mixed_route(counts: list[int], data: st.DataObject) -> None:
    """MH-MoE lemma 2.1: the mass outside any m compositions is at least 1 - sqrt(m / N_eff)."""
    assume(sum(counts) > 0)
    chosen = data.draw(st.sets(st.integers(0, len(counts) - 1)))
    number = occupancy.effective_number(torch.tensor(counts, dtype=torch.float64)).item()
    outside = 1 - sum(counts[c] for c in chosen) / sum(counts)
    assert outside >= 1 - (len(chosen) / number) ** 0.5 - 1e-12


@given(weights, weights)
def test_sharing_a_route_never_mixes_less_than_the_purer_part(first: list[int], second: list[int]) -> None:
    """If two routes are merged, N_eff is at least the smaller of the two."""
    size = min(len(first), len(second))
    count_NC = torch.tensor([first[:size], second[:size]], dtype=torch.float64)
    assume(bool((count_NC.sum(1) > 0).all()))
    together = occupancy.effective_number(count_NC.sum(0)).item()
    assert together >= occupancy.effective_number(count_NC).min().item() - 1e-9


def test_frequency_buckets_hold_equally_many_tokens() -> None:
    """Ids are ranked by frequency; ids that do not occur rank last."""
    bucket_V = occupancy.frequency_buckets(torch.tensor([1, 0, 4, 2, 1]), 2)
    assert bucket_V.tolist() == [1, 1, 0, 1, 1]
    even_V = occupancy.frequency_buckets(torch.full((100,), 3), 4)
    assert torch.bincount(even_V).tolist() == [25, 25, 25, 25]


def test_position_buckets_are_relative() -> None:
    """Buckets are fractions of the sequence, for any length."""
    assert occupancy.position_buckets(6, 3).tolist() == [0, 0, 1, 1, 2, 2]
    assert occupancy.position_buckets(2, 4).tolist() == [0, 2]


def test_a_composition_is_one_number_for_each_tuple() -> None:
    """Tuples map one to one to numbers below the product of the sizes."""
    frequency, position = torch.arange(3).repeat_interleave(4), torch.arange(4).repeat(3)
    assert occupancy.composition([frequency, position], [3, 4]).tolist() == list(range(12))
