"""Damage done to records, in their bytes or their JSON, and hostile records.

Each damage takes a valid record and a source of randomness, and returns the bytes that a topic would hold.
"""

import json
import random
from collections.abc import Callable, Sequence
from typing import Any

from streamlearn.settings import StreamSettings
from streamlearn.stream.conversation import MAX_MESSAGES

JsonRecord = dict[str, Any]
Damage = Callable[[JsonRecord, random.Random], bytes | None]

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
NUMBERS = (
    "NaN", "Infinity", "-Infinity", "1e999", "-1e999", "1e308", "1e-400", "-0", "9" * 5000, "-" + "9" * 400, "0x10",
    str(2**63), str(2**64), str(-(2**63) - 1), "4095", "4096", "1.0", "1e2", "01", "+1", "1_000", ".5", "1.", "-",
)  # fmt: skip
SURROGATES = (r"\ud800", r"\udfff", r"\udc00\ud800", r"\ud83d", r"\ud83d\ud83d\ude00", r"\uD800\u0041", r"\u00zz")
NOT_UTF8 = (b"\xff", b"\xc0\x80", b"\xed\xa0\x80", b"\xf5\x80\x80\x80", b"\x80", b"\xe2\x82", b"\xfe\xff", b"\xc1\xbf")
CONTROLS = ("<|im_start|>", "<|im_end|>", "<|endoftext|>", "<|pad|>", "<|im_start|>assistant\n", "<|im_end", "|>")
NOTHING = (None, b"", b" ", b"\n\r\t ", b"\xef\xbb\xbf", b"\0", b"{}", b"[]", b"null", b'""', b"0", b"{", b'{"text"')
CHARACTERS = ("a", " ", "\n", "é", "<|im_end|>", "1", "ab ", "😀", "\0", "!?", "the quick brown fox ")
"""Contents of the largest records."""
ODD_TEXT = (
    "\0", "\x1b[2J", "\u202e", "\u200d", "\ufeff", "\ufffe", "\U0010ffff", "a" + "\u0301" * 40, "\r\n", "ﷺ", "\u2028",
    "👩‍👩‍👧‍👦", "{{ 7 * 7 }}", "{% for x in y %}", "\ue000" + "3" + "\ue000", "<image>", "\\", '"', " " * 70,
)  # fmt: skip


def damage_bytes(value: JsonRecord, rng: random.Random) -> bytes:
    """Delete, repeat or overwrite a range, or splice something in, one to three times."""
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


def damage_tree(value: JsonRecord, rng: random.Random, seeds: Sequence[JsonRecord]) -> bytes:
    """Replace, drop, rename or add a member at any depth: valid JSON in an unexpected form."""
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
        tree |= rng.choice(seeds)
    return json.dumps(tree).encode()


def whole(value: JsonRecord, rng: random.Random) -> bytes:
    return json.dumps(value, ensure_ascii=rng.random() < 0.5).encode()


def flipped(value: JsonRecord, rng: random.Random) -> bytes:
    data = bytearray(whole(value, rng))
    for _ in range(rng.randint(1, 8)):
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    return bytes(data)


def cut(value: JsonRecord, rng: random.Random) -> bytes:
    data = whole(value, rng)
    at = rng.randrange(len(data))
    return data[:at] if rng.random() < 0.8 else data[at:]


def doubled(value: JsonRecord, rng: random.Random) -> bytes:
    """Repeat a range once more, or twenty more times; or put two records in one."""
    data = whole(value, rng)
    at = rng.randrange(len(data))
    piece = data if rng.random() < 0.1 else data[at : at + rng.randint(1, 200)]
    return data[:at] + piece * rng.choice((1, 1, 20)) + data[at:]


def deep(value: JsonRecord, rng: random.Random) -> bytes:
    """Nest `meta` or another member up to and beyond the permitted depth, closed or unclosed."""
    depth = rng.choice((2, 29, 30, 31, 32, 33, 200, 1000, 1025, 5000))
    opened, closed = rng.choice(((b"[", b"]"), (b'{"a":', b"}")))
    nest = opened * depth + b"1" + closed * (depth if rng.random() < 0.8 else rng.randrange(depth))
    key = rng.choice(["meta", *value])
    return b'{"%s":%s,%s' % (key.encode(), nest, whole({k: v for k, v in value.items() if k != key}, rng)[1:])


def odd_numbers(value: JsonRecord, rng: random.Random) -> bytes:
    """Insert numbers that are invalid, out of range, or not token ids."""
    number = rng.choice(NUMBERS)
    where = rng.choice(('"meta":{"n":@}', '"input_ids":[1,@,2]', '"input_ids":[1,2],"labels":[-100,@]', '"text":@'))
    other = "" if "meta" not in where else "," + json.dumps({k: v for k, v in value.items() if k != "meta"})[1:-1]
    return ("{" + where.replace("@", number) + other + "}").encode()


def surrogates(value: JsonRecord, rng: random.Random) -> bytes:
    data = json.dumps(value)
    quote = data.find('"', rng.randrange(len(data)))
    return (data[: quote + 1] + rng.choice(SURROGATES) + data[quote + 1 :]).encode()


def not_utf8(value: JsonRecord, rng: random.Random) -> bytes:
    data = whole(value, rng)
    at = rng.randrange(len(data))
    return data[:at] + rng.choice(NOT_UTF8) + data[at:]


def empty(value: JsonRecord, rng: random.Random) -> bytes | None:
    """Return an empty value, a minimal one, or JSON that is not an object."""
    return rng.choice((*NOTHING, json.dumps(list(value.values())).encode()))


def unknown_keys(value: JsonRecord, rng: random.Random) -> bytes:
    key = rng.choice(("txt", "Prompt", "completions", "image", "", "é" * 50, "k" * 5000, "\0", "labels", "role", "a:b"))
    if rng.random() < 0.3:
        return whole(value, rng)[:-1] + b"," + whole({rng.choice(list(value)): "again"}, rng)[1:]
    return whole({**value, key: rng.choice(ODD)}, rng)


def control_tokens(value: JsonRecord, rng: random.Random) -> bytes:
    """Insert text that spells control tokens, forges a turn, or contains chat template syntax."""

    def mixed(text: str) -> str:
        at = rng.randrange(len(text) + 1)
        return text[:at] + "".join(rng.choices((*CONTROLS, *ODD_TEXT), k=rng.randint(1, 6))) + text[at:]

    return whole(_texts(value, mixed), rng)


def overlong(value: JsonRecord, rng: random.Random) -> bytes:
    times = rng.choice((8, 20, 40))
    tokens = [int(token) for token in value.get("input_ids", ())] * times
    if tokens:
        return whole({"input_ids": tokens, "labels": tokens}, rng)
    return whole(_texts(value, lambda text: text * (times if rng.random() < 0.7 else 1)), rng)


def giant(value: JsonRecord, rng: random.Random) -> bytes:
    more = rng.choice((-1, 0, 1))
    data = rng.choice(giants(value, rng.choice(CHARACTERS), more))
    return data.ljust(StreamSettings().max_record_bytes + more) if rng.random() < 0.2 else data


def giants(value: JsonRecord, character: str, more: int) -> list[bytes]:
    """Return strings, lists, objects, conversations and records at their maximum size plus `more`."""
    limits = StreamSettings()
    text = (character * limits.max_string_chars)[: limits.max_string_chars + more]
    length = (limits.max_record_bytes // MAX_MESSAGES - 60) // len(json.dumps(character, ensure_ascii=False).encode())
    contents = [character, character * length, text[: limits.max_record_bytes // MAX_MESSAGES // 3]]
    records: list[JsonRecord] = [
        {"text": text},
        {"prompt": text, "completion": "a"},
        {"prompt": "a", "completion": text},
        {"input_ids": [5] * (limits.max_items + more)},
        *({"messages": _turns(content, MAX_MESSAGES + more)} for content in contents),
        {"messages": [{"role": "assistant", "content": character}] * (MAX_MESSAGES + more)},
        {"messages": [{"role": "user", "content": text}, {"role": "assistant", "content": character}]},
        {"messages": _turns(text, 4)},
        {**value, "meta": {str(key): key for key in range(limits.max_items + more)}},
        {**value, "meta": [text] * 3},
    ]
    return [json.dumps(record, ensure_ascii=False).encode() for record in records]


def _turns(content: str, number: int) -> list[JsonRecord]:
    return [{"role": ("user", "assistant")[turn % 2], "content": content} for turn in range(number)]


def _texts(value: JsonRecord, change: Callable[[str], str]) -> JsonRecord:
    if "messages" in value:
        turns = [{**turn, "content": change(turn["content"])} for turn in value["messages"]]
        return {**value, "messages": turns}
    return {key: change(item) if isinstance(item, str) else item for key, item in value.items()}


DAMAGES: tuple[Damage, ...] = (
    damage_bytes,
    whole,
    flipped,
    cut,
    doubled,
    deep,
    odd_numbers,
    surrogates,
    not_utf8,
    empty,
    unknown_keys,
    control_tokens,
    overlong,
)
"""All damages except `damage_tree`, which needs other records, and `giant`, which takes a hundred times as long."""
