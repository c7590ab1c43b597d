"""The transformer baseline."""

import torch

from benchmarks.mot.compare import HEADS, HIDDEN
from benchmarks.mot.models import Hyperparameters, MultiHeadTransformer, TransformerExperts, draw
from tests.benchmarks.mot.models import NOISY, generator


def test_the_transformer_equals_its_equation() -> None:
    """It is the sum over tokens and heads, then over the hidden units."""
    model = MultiHeadTransformer(3, 4, NOISY.dim, generator=generator())
    x_LD = draw(NOISY, 1, generator(1)).x_KLD[0]
    W_KQ_HDD = model.W_QK_DHD.permute(1, 2, 0)
    expected = torch.zeros(())
    for x_D in x_LD:
        heads = [x_LD.T @ (x_LD @ W_KQ_DD @ x_D).softmax(0) for W_KQ_DD in W_KQ_HDD]
        for j in range(4):
            hidden = torch.stack([model.W_JHD[j, h] @ heads[h] for h in range(3)]).sum()
            expected = expected + model.a_J[j] * hidden.relu()
    torch.testing.assert_close(model.output(x_LD[None])[0], expected)


def test_the_transformer_is_as_large_as_the_experts() -> None:
    """Both have the same number of weights."""
    mot = TransformerExperts(Hyperparameters().num_experts, NOISY.dim, init=1.0, attention=True, generator=generator())
    assert MultiHeadTransformer(HEADS, HIDDEN, NOISY.dim, generator=generator()).num_parameters == mot.num_parameters
