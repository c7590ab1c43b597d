"""Batches as another producer may write them, read with kafka-python's own reader and the replaced classes."""

import struct
from collections.abc import Iterable
from typing import Any

import kafka.record.memory_records
import pytest
from kafka.errors import CorruptRecordError, UnsupportedCodecError
from kafka.record import MemoryRecords
from kafka.record.util import calc_crc32c

from connectors.kafka.batches import REPLACED, LenientBatch, NullHeader, NullHeaderBuilder, UnreadableRecord, install
from tests.connectors.kafka.doubles import HeaderName

_ATTRIBUTES, _CRC = 21, 17
"""Where they are in a batch."""


def batch(headers: Iterable[list[tuple[str, bytes | None]]], codec: int = 0) -> bytearray:
    builder = NullHeaderBuilder(2, codec, False, -1, -1, -1, 1 << 20)
    for offset, pairs in enumerate(headers):
        builder.append(offset, 17, b"key", b"value %d" % offset, pairs)
    return bytearray(builder.build())


def sealed(content: bytearray) -> bytearray:
    """The batch with the checksum of what it holds now."""
    struct.pack_into(">I", content, _CRC, calc_crc32c(bytes(content[_ATTRIBUTES:])))
    return content


def read(content: bytearray) -> list[Any]:
    install()
    found = MemoryRecords(bytes(content)).next_batch()
    assert isinstance(found, LenientBatch)
    found.validate_crc()
    return list(found)


@pytest.mark.parametrize("codec", [0, 1, 2, 3, 4])
def test_a_header_name_that_is_not_utf8_concerns_its_record_only(codec: int) -> None:
    """The name is decoded with replacement; everything else is read, in compressed batches too."""
    odd = [(HeaderName("Größe".encode("latin-1")), b"1"), ("trace", b"\xff"), (HeaderName(b"\xc3"), None)]
    first, second, third = read(batch([[("h", b"1")], odd, []], codec))
    assert [type(record) is UnreadableRecord for record in (first, second, third)] == [False, True, False]
    assert second.checksum.startswith("header names must be UTF-8: 'utf-8' codec can't decode byte 0xf6")
    assert (second.offset, second.key, second.value, second.timestamp) == (1, b"key", b"value 1", 17)
    assert second.headers == [("Gr\ufffd\ufffde", b"1"), ("trace", b"\xff"), ("\ufffd", None)]
    assert first.checksum is None


def test_a_record_that_cannot_be_parsed_ends_what_is_readable_of_its_batch() -> None:
    """With a right checksum the producer wrote it so: the rest of the batch is offsets without content."""
    content = batch([[], [], []])
    content[content.index(b"value 1") - 1] = 0x7E  # the value's length
    first, *rest = read(sealed(content))
    assert first.value == b"value 0"
    assert [(record.offset, record.key, record.value) for record in rest] == [(1, None, None), (2, None, None)]
    assert all("the batch of offsets 0 to 2 cannot be parsed from offset 1 on" in record.checksum for record in rest)


@pytest.mark.parametrize("codec", [1, 2, 3, 4])
def test_a_batch_that_cannot_be_decompressed_is_offsets_without_content(codec: int) -> None:
    content = batch([[]] * 50, codec)
    content[61:71] = b"x" * 10
    records = read(sealed(content))
    assert [record.offset for record in records] == list(range(50))
    assert all("the batch of offsets 0 to 49 cannot be decompressed" in record.checksum for record in records)


def test_what_another_attempt_may_read_is_an_error_that_names_the_offsets() -> None:
    """A wrong checksum: perhaps of this replica only. A codec that does not exist: perhaps in a newer client."""
    damaged, unknown = batch([[], []]), batch([[], []])
    damaged[-1] ^= 1
    with pytest.raises(CorruptRecordError, match="the batch of offsets 0 to 1 must have the checksum"):
        read(damaged)
    unknown[_ATTRIBUTES + 1] |= 7
    with pytest.raises(UnsupportedCodecError, match=r"the batch of offsets 0 to 1: .*Unrecognized compression type: 7"):
        read(sealed(unknown))


def test_a_header_without_a_value_is_written_as_one() -> None:
    (record,) = read(batch([[("a", NullHeader()), ("b", b"")]]))
    assert record.headers == [("a", None), ("b", b"")]


def test_the_client_looks_both_classes_up_where_they_are_replaced() -> None:
    install()
    assert {name: getattr(kafka.record.memory_records, name) for name in REPLACED} == REPLACED
