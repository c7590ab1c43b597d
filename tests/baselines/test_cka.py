import pytest
import torch
from torch import Tensor

from streamlearn.baselines.transient import GramCka

# Shape suffixes: T tokens, O out features, H heads, K stable experts a head, R rank, N rank of the transient expert.
H, K, R, N = 2, 3, 4, 5
NUM_TOKENS, OUT = 50, 11


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def bottlenecks() -> tuple[Tensor, Tensor]:
    """Not centred, and correlated: each stable expert contains part of the transient one."""
    te_HNT = numbers(H, N, NUM_TOKENS, seed=1) + 3.0
    mix_HKRN = numbers(H, K, R, N, seed=2) * torch.tensor([0.0, 0.5, 5.0]).view(1, K, 1, 1)
    return te_HNT, torch.einsum("hkrn,hnt->hkrt", mix_HKRN, te_HNT) + numbers(H, K, R, NUM_TOKENS, seed=3)


def outs() -> tuple[Tensor, Tensor]:
    return numbers(H, N, OUT, seed=4), numbers(H, K, R, OUT, seed=5)


def dense(te_HNT: Tensor, se_HKRT: Tensor, B_te_HNO: Tensor, B_se_HKRO: Tensor) -> Tensor:
    """CP-MoE eq. 9 on whole centred activation matrices, one head and one expert at a time."""
    score_HK = torch.zeros(len(te_HNT), se_HKRT.shape[1], dtype=torch.float64)
    for h in range(len(te_HNT)):
        Z_te_TO = te_HNT[h].T @ B_te_HNO[h]
        Z_te_TO = Z_te_TO - Z_te_TO.mean(0)
        for k in range(se_HKRT.shape[1]):
            Z_se_TO = se_HKRT[h, k].T @ B_se_HKRO[h, k]
            Z_se_TO = Z_se_TO - Z_se_TO.mean(0)
            norms = torch.linalg.norm(Z_te_TO.T @ Z_te_TO) * torch.linalg.norm(Z_se_TO.T @ Z_se_TO)
            score_HK[h, k] = torch.linalg.norm(Z_se_TO.T @ Z_te_TO) ** 2 / norms
    return score_HK.float()


def score(te_HNT: Tensor, se_HKRT: Tensor, B_te_HNO: Tensor, B_se_HKRO: Tensor) -> Tensor:
    cka = GramCka()
    cka.add(te_HNT, se_HKRT)
    return cka.score(B_te_HNO, B_se_HKRO)


def test_equals_the_equation() -> None:
    """Accumulated moments give the CKA of the full activation matrices."""
    found = score(*bottlenecks(), *outs())
    torch.testing.assert_close(found, dense(*bottlenecks(), *outs()))
    assert found.dtype == torch.float32
    assert found.max() - found.min() > 0.2  # some experts are similar, some are not


def test_chunks_add_up() -> None:
    """Any split of the token stream gives the same score."""
    te_HNT, se_HKRT = bottlenecks()
    cka, cuts = GramCka(), [1, 30, 19]
    for te, se in zip(torch.split(te_HNT, cuts, dim=-1), torch.split(se_HKRT, cuts, dim=-1), strict=True):
        cka.add(te, se)
    assert cka.num_tokens == NUM_TOKENS
    torch.testing.assert_close(cka.score(*outs()), score(te_HNT, se_HKRT, *outs()))


def test_the_order_of_the_tokens_does_not_matter() -> None:
    """Permuting the tokens has no effect; permuting those of one side only does."""
    te_HNT, se_HKRT = bottlenecks()
    order = torch.randperm(NUM_TOKENS, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(score(te_HNT[..., order], se_HKRT[..., order], *outs()), score(te_HNT, se_HKRT, *outs()))
    assert (score(te_HNT[..., order], se_HKRT, *outs()) - score(te_HNT, se_HKRT, *outs())).abs().max() > 0.1


def test_rotating_or_scaling_an_output_changes_nothing() -> None:
    """Linear CKA is invariant to orthogonal maps and scaling of either side."""
    B_te_HNO, B_se_HKRO = outs()
    rotation_OO, _ = torch.linalg.qr(numbers(OUT, OUT, seed=6))
    expected = score(*bottlenecks(), B_te_HNO, B_se_HKRO)
    torch.testing.assert_close(score(*bottlenecks(), B_te_HNO @ rotation_OO, B_se_HKRO), expected)
    torch.testing.assert_close(score(*bottlenecks(), B_te_HNO, 1e-3 * B_se_HKRO @ rotation_OO), expected)


def test_rotating_the_rank_changes_nothing() -> None:
    """Two factorizations of one expert have the same score."""
    te_HNT, se_HKRT = bottlenecks()
    B_te_HNO, B_se_HKRO = outs()
    Q_RR, _ = torch.linalg.qr(numbers(R, R, seed=7))
    found = score(te_HNT, torch.einsum("qr,hkrt->hkqt", Q_RR, se_HKRT), B_te_HNO, Q_RR @ B_se_HKRO)
    torch.testing.assert_close(found, score(te_HNT, se_HKRT, B_te_HNO, B_se_HKRO))


def test_an_expert_is_like_itself() -> None:
    """A stable expert equal to the transient one scores 1."""
    te_HNT, B_te_HNO = bottlenecks()[0], outs()[0]
    torch.testing.assert_close(score(te_HNT, te_HNT[:, None], B_te_HNO, B_te_HNO[:, None]), torch.ones(H, 1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_an_expert_without_activation_scores_zero(dtype: torch.dtype) -> None:
    """The 0 / 0 of a fresh expert, on either side, is 0; the scores of the others do not change."""
    te_HNT, se_HKRT = (x.to(dtype) for x in bottlenecks())
    B_te_HNO, B_se_HKRO = (x.to(dtype) for x in outs())
    fresh_HKRO = B_se_HKRO.clone()
    fresh_HKRO[:, 1] = 0
    expected = score(te_HNT, se_HKRT, B_te_HNO, B_se_HKRO)
    expected[:, 1] = 0
    assert torch.equal(score(te_HNT, se_HKRT, B_te_HNO, fresh_HKRO), expected)
    assert torch.equal(score(te_HNT, se_HKRT, torch.zeros_like(B_te_HNO), B_se_HKRO), torch.zeros(H, K))


def test_a_constant_activation_scores_zero() -> None:
    """Rounding noise after centring does not count as similarity."""
    te_HNT, se_HKRT = bottlenecks()
    se_HKRT[:, 0] = se_HKRT[:, 0, :, :1]
    found = score(te_HNT, se_HKRT, *outs())
    assert (found[:, 0] == 0).all()
    assert (found[:, 1:] > 0).all()


@pytest.mark.parametrize("tokens", [0, 1])
def test_fewer_than_two_tokens_score_zero(tokens: int) -> None:
    """One token has no variance."""
    te_HNT, se_HKRT = bottlenecks()
    assert torch.equal(score(te_HNT[..., :tokens], se_HKRT[..., :tokens], *outs()), torch.zeros(H, K))
    assert torch.equal(GramCka().score(*outs()), torch.zeros(H, K))


def test_memory_depends_on_the_ranks_only() -> None:
    """The size of the state does not depend on the number of tokens or the output size."""
    cka = GramCka()
    for _ in range(3):
        cka.add(*bottlenecks())
    assert cka.moments_HXX is not None
    assert cka.moments_HXX.shape == (H, N + K * R + 1, N + K * R + 1)
    assert cka.moments_HXX.dtype == torch.float64
