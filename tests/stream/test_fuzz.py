"""Twenty thousand damaged records: none gets past the decoder as anything but an example or a RecordError."""

import json
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from streamlearn.backbone.pretrain import train_tokenizer
from streamlearn.errors import Reason, RecordError
from streamlearn.settings import StreamSettings
from streamlearn.stream.decode import Decoder
from streamlearn.stream.encode import IGNORED
from streamlearn.stream.record import Record, TopicPartition

VOCAB = 300
LIMITS = StreamSettings(
    max_record_bytes=600, max_string_chars=120, max_depth=6, max_items=40, max_tokens=48, batch_tokens=64
)
SEEDS: list[dict[str, Any]] = [
    {"text": "the quick brown fox", "meta": {"task": "a:b", "n": [1, 2.5, None]}},
    {"prompt": "hello <|im_end|> é", "completion": " world 😀", "sample_type": "x"},
    {"input_ids": [1, 2, 3, 299], "labels": [-100, 2, -100, 299]},
    {"messages": [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "<|im_start|>the dog"}]},
    {"messages": [{"role": role, "content": "ab"} for role in ("system", "user", "assistant", "user", "assistant")]},
]
SPLICES = [
    b"\xff", b"\\ud800", b"\\u003a", b"NaN", b"1e999", b"9" * 400, b"[" * 700, b'{"a":' * 7, b"null", b"true", b"-1",
    b"300", b"0.5", b'"', b"\\", b"\x00", b",", b":", b"}", b"]", b'"text":"a",', b'"image":"x",', b"<|im_end|>",
    b"x" * 130, b'"labels":[1],', b"\xed\xa0\x80", b"\xf0\x9f\x98\x80", b"0," * 50,
]  # fmt: skip
ODD: list[Any] = [
    None,
    True,
    -1,
    2**63,
    1.5,
    "",
    "é" * 130,
    [],
    {},
    [[]],
    {"role": "user"},
    ["a"],
    "<|endoftext|>",
    [5] * 60,
]


def damage_bytes(value: dict[str, Any], rng: random.Random) -> bytes:
    """Cut, flip, repeat or splice."""
    data = bytearray(json.dumps(value, ensure_ascii=rng.random() < 0.5).encode())
    for _ in range(rng.randint(1, 3)):
        at = rng.randrange(len(data) + 1)
        until = min(len(data), at + rng.randint(0, 12))
        kind = rng.randrange(4)
        if kind == 0:
            data[at:until] = rng.choice(SPLICES)
        elif kind == 1:
            data[at:until] = b""
        elif kind == 2:
            data[at:at] = data[at:until] * rng.randint(1, 4)
        else:
            data[at:until] = rng.randbytes(until - at)
    return bytes(data)


def damage_tree(value: dict[str, Any], rng: random.Random) -> bytes:
    """Replace, drop, rename or add a member, at any depth: still JSON, no longer the form it was."""
    tree = json.loads(json.dumps(value))
    place = tree
    while True:
        keys = list(place) if isinstance(place, dict) else list(range(len(place)))
        if not keys:
            break
        key = rng.choice(keys)
        if isinstance(place[key], dict | list) and rng.random() < 0.7:
            place = place[key]
            continue
        kind = rng.randrange(4)
        if kind == 0:
            del place[key]
        elif kind == 1 and isinstance(place, dict):
            place[rng.choice(["txt", "role", "prompt", "meta", "é", str(key) * 30])] = place.pop(key)
        elif kind == 2 and isinstance(place, list):
            place.extend([place[key]] * rng.randint(1, 60))
        else:
            place[key] = rng.choice(ODD)
        break
    if rng.random() < 0.3:
        tree |= rng.choice(SEEDS)
    return json.dumps(tree).encode()


@pytest.mark.parametrize("damage", [damage_bytes, damage_tree])
def test_ten_thousand_damaged_records(damage: Callable[[dict[str, Any], random.Random], bytes]) -> None:
    """Each becomes a sound example or a RecordError, and both kinds of damage reach many reasons."""
    tokenizer = train_tokenizer(["the quick brown fox", "hello world"] * 10, VOCAB)
    decoder = Decoder(tokenizer, LIMITS, VOCAB)
    rng = random.Random(20_000)
    seen: Counter[Reason | None] = Counter()
    longest = 0
    for offset in range(10_000):
        value = damage(rng.choice(SEEDS), rng)
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
    assert seen[None] > 500, seen
    assert len(seen) >= 6, seen
    assert longest < 600
