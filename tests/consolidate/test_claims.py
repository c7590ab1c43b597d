import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from streamlearn.adapters.usable import MARGIN
from streamlearn.consolidate.claims import as_bias, claim, claimed

H, K = 8, 4


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def zeros() -> Tensor:
    return torch.zeros(H, K)


def test_unclaimed_experts_come_first() -> None:
    """A head claims an unclaimed expert as long as it has one, however similar the others are."""
    claims = torch.zeros(H, K, dtype=torch.long)
    similarity = torch.full((H, K), 0.99)
    for regime in range(K):
        taken = claim(claims, similarity, 1, generator(regime))
        assert not (taken & (claims > 0)).any()
        assert taken.sum(1).tolist() == [1] * H
        claims += taken
    assert (claims == 1).all()


def test_the_most_similar_of_equally_used_experts_is_shared() -> None:
    """Eq. (1) with equal n."""
    similarity = torch.rand(H, K, generator=generator(1))
    taken = claim(torch.ones(H, K, dtype=torch.long), similarity, 1, generator())
    assert torch.equal(taken.long().argmax(1), similarity.argmax(1))


def test_similarity_outweighs_the_number_of_claims() -> None:
    """An expert shared by three regimes is claimed by a fourth if it is similar, and not if it is not."""
    claims = torch.tensor([[3, 1]])
    for similarity, expected in ((0.9, 0), (0.1, 1)):
        taken = claim(claims, torch.tensor([[similarity, 0.2]]), 1, generator())
        assert taken[0, expected]


def test_without_similarity_regimes_share_with_different_ones_in_each_head() -> None:
    """After K regimes claims are spread at random: no regime shares all its experts with one earlier regime."""
    claims, codes = torch.zeros(H, K, dtype=torch.long), []
    for regime in range(12):
        taken = claim(claims, zeros(), 1, generator(regime))
        claims += taken
        codes.append(taken.long().argmax(1))
    overlaps = [int((a == b).sum()) for i, a in enumerate(codes) for b in codes[:i]]
    assert max(overlaps) < H // 2 + 2
    assert claims.max() <= 4  # 12 regimes on 4 experts: 3 each if uniform


@given(st.integers(1, 6), st.integers(0, 1000))
def test_claims_are_recovered_from_the_bias(num: int, seed: int) -> None:
    """`claimed` inverts `as_bias`; a slot without claims has none."""
    taken = claim(
        torch.zeros(H, K, dtype=torch.long), torch.rand(H, K, generator=generator(seed)), num, generator(seed)
    )
    assert taken.sum(1).tolist() == [min(num, K)] * H
    bias = torch.zeros(H, K, 3)
    bias[:, :, 1] = as_bias(taken)
    found = claimed(bias)
    expected = taken if num < K else torch.zeros_like(taken)  # claiming all of them is no restriction
    assert torch.equal(found[:, :, 1], expected)
    assert not found[:, :, [0, 2]].any()


def test_a_claim_outweighs_any_native_logit() -> None:
    """Top-k with the bias selects claimed experts only."""
    logits = 10 * torch.randn(H, K, 50, generator=generator())
    taken = claim(torch.zeros(H, K, dtype=torch.long), zeros(), 2, generator(3))
    best = (logits + as_bias(taken)[:, :, None]).argmax(1)
    assert taken.gather(1, best).all()
    assert 2 * logits.abs().max() < MARGIN
