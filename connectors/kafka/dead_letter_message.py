"""The message that a dead letter becomes in its topic."""

from dataclasses import replace
from typing import NamedTuple

from connectors.dead_letter_headers import LEFT_OUT_BYTES, PREFIX, headers_of, own_headers
from streamlearn.stream.source import DeadLetter

NO_VALUE = PREFIX + "value.absent"
"""Marks a record without key and value. kafka-python cannot send such a message, so its value is empty."""
_MAX_CHARACTERS = 200
"""Of the reason's text in a shortened dead letter, which then has less than 2 kB."""


class DeadLetterMessage(NamedTuple):
    """What is sent."""

    value: bytes | None
    key: bytes | None
    headers: list[tuple[str, bytes]]


def message_of(dead_letter: DeadLetter) -> DeadLetterMessage:
    """The record's key, value and headers, and the reason."""
    record = dead_letter.record
    headers = own_headers(record) + _reason(dead_letter)
    if record.value is None and record.key is None:
        return DeadLetterMessage(b"", None, [*headers, (NO_VALUE, b"true")])
    return DeadLetterMessage(record.value, record.key, headers)


def shortened_message_of(dead_letter: DeadLetter) -> DeadLetterMessage:
    """The reason, where the record was read, and the size of its value; any topic accepts that."""
    size = len(dead_letter.record.value or b"")
    headers = _reason(replace(dead_letter, message=dead_letter.message[:_MAX_CHARACTERS]))
    return DeadLetterMessage(b"", None, [*headers, (LEFT_OUT_BYTES, b"%d" % size)])


def _reason(dead_letter: DeadLetter) -> list[tuple[str, bytes]]:
    return [(name, value.encode()) for name, value in headers_of(dead_letter).items()]
