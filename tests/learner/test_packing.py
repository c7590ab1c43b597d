"""The layout of a packed batch."""

import torch

from streamlearn.learner.loss import pack
from streamlearn.stream.record import IGNORED
from tests.doubles import example, random_examples

CPU = torch.device("cpu")


def test_records_are_concatenated() -> None:
    """Ids, positions, cumulative lengths, and for each learned token its predictor, id and record."""
    packed = pack([example([10, 11, 12, 13], prompt_length=2), example([20, 21])], CPU)
    assert packed.input_ids.tolist() == [[10, 11, 12, 13, 20, 21]]
    assert packed.position_ids.tolist() == [[0, 1, 2, 3, 0, 1]]
    assert packed.records.ends == (0, 4, 6)
    assert packed.predictor_L.tolist() == [1, 2, 4]
    assert packed.target_L.tolist() == [12, 13, 21]
    assert packed.segment_ids_L.tolist() == [0, 0, 1]
    assert packed.sequences.num == 2


def test_a_first_token_is_never_learned() -> None:
    """A record's first token would be predicted from the previous record, so its label does not count."""
    labelled = example([10, 11, 12], prompt_length=0)
    assert labelled.labels[0] != IGNORED
    packed = pack([example([1, 2]), labelled], CPU)
    assert packed.target_L.tolist() == [2, 11, 12]
    assert packed.predictor_L.tolist() == [0, 2, 3]


def test_labels_may_be_anywhere() -> None:
    """Several answers in one record, and labels that differ from the ids, are used as given."""
    record = example([10, 11, 12, 13, 14])
    record.labels[:] = [IGNORED, 7, IGNORED, IGNORED, 9]
    packed = pack([record], CPU)
    assert packed.predictor_L.tolist() == [0, 3]
    assert packed.target_L.tolist() == [7, 9]


def test_packing_loses_nothing() -> None:
    """Split at the cumulative lengths, the batch is the examples again."""
    examples = random_examples([5, 1, 9, 2])
    packed = pack(examples, CPU)
    pieces = torch.tensor_split(packed.input_ids[0], list(packed.records.ends[1:-1]))
    assert [piece.tolist() for piece in pieces] == [e.input_ids.tolist() for e in examples]
    assert packed.input_ids.dtype == torch.long
