"""Outcomes of the record fuzzer."""

from typing import Any

from benchmarks.backbones.pretrain import train_tokenizer
from streamlearn.settings import StreamSettings
from streamlearn.stream.decode import Decoder
from tests.fuzz.records import MAX_GROWTH_MIB, MAX_SHOWN, FuzzOutcomes, is_clean, outcome

VOCAB = 300
CLEAN = {"slowest_cpu_ms": 1000.0, "unaccounted": 0, "memory_growth_mib": 1.0}


def decoder() -> Decoder:
    return Decoder(train_tokenizer(["the quick brown fox"] * 10, VOCAB), StreamSettings(), VOCAB)


def test_a_record_is_decoded_or_has_a_reason() -> None:
    """Neither outcome has a fault."""
    assert outcome(decoder(), VOCAB, b'{"text": "the quick fox"}') == ("decoded", None)
    reason, fault = outcome(decoder(), VOCAB, b"{")
    assert reason not in ("decoded", "unaccounted")
    assert fault is None


def test_anything_else_is_unaccounted_for() -> None:
    """Other exceptions and tokens out of range are counted, and the first of them are shown."""
    broken: Any = object()
    assert outcome(broken, VOCAB, b"{}")[0] == "unaccounted"
    outcomes = FuzzOutcomes(decoder(), vocab_size=2)
    for _ in range(MAX_SHOWN + 1):
        outcomes.decode(b'{"text": "the quick fox"}', "whole")
    assert outcomes.counts == {"unaccounted": MAX_SHOWN + 1}
    assert len(outcomes.unaccounted) == MAX_SHOWN
    assert "whole: token ids out of range" in outcomes.unaccounted[0]


def test_figures_are_clean_within_all_limits() -> None:
    """Unaccounted records, slow ones and memory growth each make them unclean."""
    assert is_clean(CLEAN)
    for change in ({"unaccounted": 1}, {"slowest_cpu_ms": 1001.0}, {"memory_growth_mib": MAX_GROWTH_MIB}):
        assert not is_clean({**CLEAN, **change})
