"""Strict and bounded parsing."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamlearn.errors import Reason, RecordError
from streamlearn.settings import StreamSettings
from streamlearn.stream.parse import parse, read_integers, read_list, read_string

LIMITS = StreamSettings(max_record_bytes=20_000, max_string_chars=100, max_depth=8, max_items=50)
WIDE = StreamSettings()

REFUSED: dict[str, tuple[bytes | None, Reason]] = {
    "tombstone": (None, Reason.EMPTY),
    "no bytes": (b"", Reason.EMPTY),
    "only space": (b" \n\t", Reason.EMPTY),
    "a byte too many": (b'{"a":"' + b"x" * 20_000 + b'"}', Reason.TOO_LARGE),
    "a long string": (json.dumps({"a": "x" * 101}).encode(), Reason.TOO_LARGE),
    "a long string in a list": (json.dumps({"a": [0, ["x" * 101]]}).encode(), Reason.TOO_LARGE),
    "a long key": (json.dumps({"x" * 101: 0}).encode(), Reason.TOO_LARGE),
    "a long list": (json.dumps({"a": [0] * 51}).encode(), Reason.TOO_LARGE),
    "many keys": (json.dumps({f"k{i}": i for i in range(51)}).encode(), Reason.TOO_LARGE),
    "not UTF-8": (b'{"a":"\xff"}', Reason.NOT_UTF8),
    "an encoded surrogate": (b'{"a":"\xed\xa0\x80"}', Reason.NOT_UTF8),
    "a lone surrogate": (b'{"a":"\\ud800"}', Reason.NOT_UTF8),
    "a surrogate pair the wrong way round": (b'{"a":"\\udc00\\ud800"}', Reason.NOT_UTF8),
    "UTF-16": ('{"a":1}'.encode("utf-16-le"), Reason.NOT_JSON),
    "a byte order mark": (b"\xef\xbb\xbf{}", Reason.NOT_JSON),
    "cut short": (b'{"a":1', Reason.NOT_JSON),
    "two objects": (b"{}{}", Reason.NOT_JSON),
    "a trailing comma": (b'{"a":1,}', Reason.NOT_JSON),
    "a leading zero": (b'{"a":01}', Reason.NOT_JSON),
    "a raw control character": (b'{"a":"\x01"}', Reason.NOT_JSON),
    "single quotes": (b"{'a':1}", Reason.NOT_JSON),
    "NaN": (b'{"a":NaN}', Reason.NOT_FINITE),
    "infinity": (b'{"a":-Infinity}', Reason.NOT_FINITE),
    "an overflowing float": (b'{"a":1e999}', Reason.NOT_FINITE),
    "5,000 digits": (b'{"a":' + b"9" * 5000 + b"}", Reason.NOT_FINITE),
    "65 bits": (b'{"a":18446744073709551616}', Reason.NOT_FINITE),
    "64 bits below zero": (b'{"a":-9223372036854775809}', Reason.NOT_FINITE),
    "9 deep": (b'{"a":' * 9 + b"1" + b"}" * 9, Reason.TOO_DEEP),
    "9 deep in lists": (b'{"a":' + b"[" * 8 + b"]" * 8 + b"}", Reason.TOO_DEEP),
    "10,000 brackets": (b"[" * 10_000, Reason.TOO_DEEP),
    "a key twice": (b'{"a":1,"a":1}', Reason.DUPLICATE_KEY),
    "a key twice, once escaped": (b'{"a":1,"\\u0061":1}', Reason.DUPLICATE_KEY),
    "a key twice inside": (b'{"b":[{"a":{},"a":[]}]}', Reason.DUPLICATE_KEY),
    "a key twice, its colon offset by an escaped one": (b'{"a":0,"a":"\\u003a"}', Reason.DUPLICATE_KEY),
    "the same in capitals": (b'{"a":0,"a":"\\u003A"}', Reason.DUPLICATE_KEY),
    "a list": (b"[]", Reason.BAD_FORM),
    "a string": (b'"text"', Reason.BAD_FORM),
    "a number": (b"1", Reason.BAD_FORM),
    "null": (b"null", Reason.BAD_FORM),
}


@pytest.mark.parametrize(("value", "reason"), REFUSED.values(), ids=REFUSED.keys())
def test_refuses_with_the_reason(value: bytes | None, reason: Reason) -> None:
    """Each fault has its reason, and a message of bounded length."""
    with pytest.raises(RecordError) as refused:
        parse(value, LIMITS)
    assert refused.value.reason is reason
    assert 10 < len(str(refused.value)) < 400


@pytest.mark.parametrize(
    "text",
    [
        '{"a:b": "c:d\\\\u003a", "e": ["::", ":", {":": null}]}',
        '{"\\u003a": "\\u003a", "b": "\\ud83d\\ude00"}',
        '{"a": 18446744073709551615, "b": -9223372036854775808, "c": 1e300, "d": -0.0, "e": 1e-999}',
        ' {"a" : 1 , "b" :\n{"a": 1}} ',
        '{"a": {"a": {"a": [[[[[]]]]]}}}',
        "{}",
    ],
)
def test_accepts_what_is_strict_json(text: str) -> None:
    """Escapes, colons in strings and keys, and the limits of the number range."""
    assert parse(text.encode(), LIMITS) == json.loads(text)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False, allow_infinity=False)
    # Few characters, so that keys collide and colons and backslashes are frequent.
    | st.text('a:\\"u03é', max_size=6),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text("a:\\", max_size=2), inner, max_size=4),
    max_leaves=12,
)  # fmt: skip


@settings(deadline=None)
@given(st.dictionaries(st.text("a:", max_size=2), JSON, max_size=4), st.booleans(), st.sampled_from([None, 1]))
def test_reads_the_output_of_json(tree: dict[str, Any], ascii_only: bool, indent: int | None) -> None:
    """Every tree without duplicate keys survives a round trip."""
    assert parse(json.dumps(tree, ensure_ascii=ascii_only, indent=indent).encode(), WIDE) == tree


@settings(deadline=None)
@given(st.lists(st.tuples(st.text("a:\\u03", max_size=2), JSON), max_size=4), st.booleans())
def test_finds_every_duplicate_key(pairs: list[tuple[str, Any]], escaped: bool) -> None:
    """A record is accepted exactly when its keys are unique, however they are escaped."""

    def quoted(key: str) -> str:
        return '"' + "".join(f"\\u{ord(c):04x}" for c in key) + '"' if escaped else json.dumps(key)

    value = "{" + ",".join(f"{quoted(key)}:{json.dumps(item)}" for key, item in pairs) + "}"
    if len({key for key, _ in pairs}) == len(pairs):
        assert parse(value.encode(), WIDE) == dict(pairs)
        return
    with pytest.raises(RecordError) as refused:
        parse(value.encode(), WIDE)
    assert refused.value.reason is Reason.DUPLICATE_KEY


@settings(deadline=None)
@given(
    st.binary(max_size=200)
    | st.text(max_size=100).map(str.encode)
    | st.text('{}[]",:1ea\\uN', max_size=30).map(str.encode)
)
def test_raises_only_record_errors(value: bytes) -> None:
    """Any bytes give an object or a RecordError; an object equals that of the standard library."""
    try:
        tree = parse(value, WIDE)
    except RecordError:
        return
    assert tree == json.loads(value)


def test_a_limit_itself_is_allowed() -> None:
    """The max_ settings are inclusive."""
    tree = {"a": "x" * 100, "b": [0] * 50}
    assert parse(json.dumps(tree).encode(), LIMITS) == tree
    exact = b'{"a":1' + b" " * (20_000 - 7) + b"}"
    assert len(exact) == LIMITS.max_record_bytes
    assert parse(exact, LIMITS) == {"a": 1}


def test_fields_of_requests_are_checked_like_records() -> None:
    """A request's JSON was parsed elsewhere: its strings and lists are checked against the same limits."""
    cases: list[tuple[Any, Any, Reason]] = [
        (read_string, 1, Reason.BAD_TYPE),
        (read_string, None, Reason.BAD_TYPE),
        (read_string, "x" * 101, Reason.TOO_LARGE),
        (read_string, "\ud800", Reason.NOT_UTF8),
        (read_list, "ab", Reason.BAD_TYPE),
        (read_list, {}, Reason.BAD_TYPE),
        (read_list, [0] * 51, Reason.TOO_LARGE),
        (read_integers, [1, True], Reason.BAD_TYPE),
        (read_integers, [1.0], Reason.BAD_TYPE),
        (read_integers, [None], Reason.BAD_TYPE),
    ]
    for read, value, reason in cases:
        with pytest.raises(RecordError, match="field") as refused:
            read(value, "field", LIMITS)
        assert refused.value.reason is reason, value
