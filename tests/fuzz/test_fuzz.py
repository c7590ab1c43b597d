"""The record fuzzer: its outcomes, and thirty thousand damaged records that become examples or RecordErrors."""

import base64
import json
import random
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from benchmarks.backbones.pretrain import train_tokenizer
from streamlearn.errors import Reason, RecordError
from streamlearn.settings import RecordsSettings, StreamSettings
from streamlearn.stream.decode import Decoder
from streamlearn.stream.position import TopicPartition
from streamlearn.stream.record import IGNORED, Record
from tests.fuzz.record_damage import DAMAGES, damage_bytes, damage_tree
from tests.fuzz.records import MAX_GROWTH_MIB, MAX_SHOWN, FuzzOutcomes, is_clean, outcome

VOCAB = 300
LIMITS = StreamSettings(
    max_record_bytes=600, max_string_chars=240, max_depth=8, max_items=40, max_tokens=48, batch_tokens=64
)
SEEDS: list[dict[str, Any]] = [
    {"text": "the quick brown fox", "meta": {"task": "a:b", "n": [1, 2.5, None]}},
    {"prompt": "hello <|im_end|> é", "completion": " world 😀", "sample_type": "x"},
    {"input_ids": [1, 2, 3, 299], "labels": [-100, 2, -100, 299]},
    {"messages": [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "<|im_start|>the dog"}]},
    {"messages": [{"role": role, "content": "ab"} for role in ("system", "user", "assistant", "user", "assistant")]},
]


ENVELOPES = RecordsSettings(
    unwrap=["data", "after", "."],
    messages=["request.messages", "choices.-1.message"],
    image="photo",
    unknown_keys="ignore",
)
CHANGE = {"before": None, "op": "u"}
CALL: dict[str, Any] = {
    "request": {"messages": [{"from": "human", "value": "hello"}]},
    "choices": [{"message": {"role": "model", "content": "the dog"}}],
}
ENVELOPED: list[dict[str, Any]] = [
    CALL,
    {"specversion": "1.0", "data": CALL},
    {"specversion": "1.0", "data": json.dumps(CALL)},
    {"specversion": "1.0", "data_base64": base64.b64encode(json.dumps(CALL).encode()).decode()},
    {**CHANGE, "after": CALL},
    {"schema": {}, "payload": {**CHANGE, "after": CALL}},
    {**CHANGE, "after": None, "op": "d"},
]


def damage_any(value: dict[str, Any], rng: random.Random) -> bytes | None:
    return rng.choice(DAMAGES)(value, rng)


@pytest.mark.parametrize(("seeds", "records"), [(SEEDS, RecordsSettings()), (ENVELOPED, ENVELOPES)], ids=["", "mapped"])
@pytest.mark.parametrize(
    "damage", [damage_bytes, partial(damage_tree, seeds=SEEDS), damage_any], ids=["bytes", "tree", "any"]
)
def test_ten_thousand_damaged_records(
    damage: Callable[[dict[str, Any], random.Random], bytes | None],
    seeds: list[dict[str, Any]],
    records: RecordsSettings,
) -> None:
    """Each becomes a valid example or a RecordError, and each kind of damage produces many reasons."""
    tokenizer = train_tokenizer(["the quick brown fox", "hello world"] * 10, VOCAB)
    decoder = Decoder(tokenizer, LIMITS, VOCAB, records=records)
    rng = random.Random(20_000)
    seen: Counter[Reason | None] = Counter()
    longest = 0
    for offset in range(10_000):
        value = damage(rng.choice(seeds), rng)
        try:
            example = decoder.decode(Record(TopicPartition("fuzz", 0), offset, value))
        except RecordError as error:
            seen[error.reason] += 1
            longest = max(longest, len(str(error)))
            continue
        seen[None] += 1
        assert 2 <= len(example) <= LIMITS.max_tokens, value
        assert 0 <= example.input_ids.min() <= example.input_ids.max() < VOCAB, value
        assert example.labels[0] == IGNORED, value
        assert (example.labels != IGNORED).any(), value
    assert seen[None] > 250, seen
    assert len(seen) >= 6, seen
    assert longest < 600


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
