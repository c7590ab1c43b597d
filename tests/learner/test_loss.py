"""The packed loss, against each record's loss computed separately."""

import torch
from torch.nn import functional as F

from streamlearn.learner.loss import arguments, pack, packed_loss
from streamlearn.stream.record import IGNORED
from tests.doubles import random_examples
from tests.learners import MakeLearner

EXAMPLES = random_examples([9, 4, 12], prompt_length=2)


@torch.no_grad()
def test_a_packed_loss_is_the_loss_of_each_record(make_learner: MakeLearner) -> None:
    """Sums, hits and the mean over all learned tokens are those of one pass per record."""
    learner = make_learner()
    packed = pack(EXAMPLES, learner.device)
    found = packed_loss(learner.forward, packed)
    sums, correct = found.per_record(packed)
    token_losses, hits = [], []
    for example in EXAMPLES:
        ids = torch.from_numpy(example.input_ids).long()
        logits = learner.forward(input_ids=ids[None], use_cache=False).logits[0]
        learned = [t for t in range(1, len(ids)) if example.labels[t] != IGNORED]
        token_losses.append(torch.stack([-F.log_softmax(logits[t - 1], -1)[ids[t]] for t in learned]))
        hits += [bool(logits[t - 1].argmax() == ids[t]) for t in learned]
    torch.testing.assert_close(sums, torch.stack([each.sum() for each in token_losses]), rtol=1e-4, atol=1e-4)
    assert packed.learned_B.tolist() == [len(each) for each in token_losses]
    of_records = torch.split(torch.tensor(hits), packed.learned_B.tolist())
    assert correct.tolist() == [each.sum() for each in of_records]
    torch.testing.assert_close(found.token_L, torch.cat(token_losses), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(found.mean, torch.cat(token_losses).mean(), rtol=1e-4, atol=1e-4)
    assert found.correct_L.tolist() == hits


def test_only_floating_point_features_are_cast() -> None:
    """Pixels get the dtype of the backbone; sizes and masks keep theirs."""
    model = torch.nn.Linear(1, 1, dtype=torch.bfloat16)
    model.dtype = torch.bfloat16  # type: ignore[assignment]
    features = {"pixel_values": torch.ones(2, dtype=torch.float32), "image_grid_thw": torch.tensor([[1, 2, 2]])}
    found = arguments(model, features)
    assert {name: x.dtype for name, x in found.items()} == {
        "pixel_values": torch.bfloat16,
        "image_grid_thw": torch.int64,
    }
