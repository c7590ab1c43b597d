"""Records that kafka-python refuses to read or to write, although the log may hold them.

kafka-python has no hook for either. Two classes therefore replace its own in `kafka.record.memory_records`, and nowhere
else in this project; a test checks that the installed release looks them up there.

kafka-python's consumer raises at an unreadable record, and so does the next consumer at the same offset. Here:

- A header name that is not UTF-8, which other clients may write, is decoded with replacement, and the record says so.
- Of a batch with the right checksum that cannot be unpacked or parsed, each offset from there on is a record without
  content that says so: the producer wrote it so, and no later attempt can read it.
- A wrong checksum, a codec that is not installed and a batch that expands beyond the limit remain errors: another
  replica, a package or a setting may help.
"""

from typing import Any

from kafka.errors import CorruptRecordError, KafkaError
from kafka.record import memory_records
from kafka.record.default_records import DefaultRecord, DefaultRecordBatch, DefaultRecordBatchBuilder


class NullHeader(bytes):
    """The value of a header that is written without one; the producer accepts bytes only."""


class UnreadableRecord(DefaultRecord):  # type: ignore[misc]  # kafka-python ships no types
    """What could be read of a record. The consumer passes on `checksum`, which is None for other records."""

    __slots__ = ("checksum",)

    def __init__(self, reason: str, *fields: Any) -> None:
        super().__init__(*fields)
        self.checksum = reason


class LenientBatch(DefaultRecordBatch):  # type: ignore[misc]
    """A batch whose unreadable records are returned as `UnreadableRecord`."""

    _buffer: bytearray

    def __init__(self, buffer: Any) -> None:
        super().__init__(buffer)
        self._next_offset = self.base_offset
        self._reason = ""

    def validate_crc(self) -> bool:
        if not super().validate_crc():
            raise CorruptRecordError(
                f"{self._span} must have the checksum that its producer computed: its bytes were changed later"
            )
        return True

    def __iter__(self) -> "LenientBatch":
        try:
            self._maybe_uncompress()
        except KafkaError as error:
            raise type(error)(f"{self._span}: {error}") from error
        except Exception as error:  # noqa: BLE001 - each codec has exceptions of its own
            self._reason = f"{self._span} cannot be decompressed: {error!r}"
        return self

    def __next__(self) -> DefaultRecord:
        if not self._reason:
            try:
                record = super().__next__()
            except CorruptRecordError as error:
                self._reason = f"{self._span} cannot be parsed from offset {self._next_offset} on: {error}"
            else:
                self._next_offset = record.offset + 1
                return record
        offset = self._next_offset
        if offset > self.last_offset:
            raise StopIteration
        self._next_offset += 1
        return UnreadableRecord(self._reason, 0, offset, self.max_timestamp, self.timestamp_type, None, None, [])

    next = __next__

    @property
    def _span(self) -> str:
        return f"the batch of offsets {self.base_offset} to {self.last_offset}"

    def _read_msg(self, *arguments: Any) -> Any:
        try:
            return super()._read_msg(*arguments)
        except UnicodeDecodeError as error:
            strict, self._buffer = self._buffer, _Lenient(self._buffer)
            try:
                record = super()._read_msg(*arguments)
            finally:
                self._buffer = strict
            fields = (record.offset, record.timestamp, record.timestamp_type, record.key, record.value, record.headers)
            return UnreadableRecord(f"header names must be UTF-8: {error}", record.size_in_bytes, *fields)


class _Lenient(bytearray):
    """A buffer whose slices are decoded with replacement."""

    def __getitem__(self, index: Any) -> Any:
        found = super().__getitem__(index)
        return _Lenient(found) if isinstance(index, slice) else found

    def decode(self, encoding: str = "utf-8", errors: str = "replace") -> str:
        return super().decode(encoding, errors)


class NullHeaderBuilder(DefaultRecordBatchBuilder):  # type: ignore[misc]
    """Writes a `NullHeader` as a header without a value."""

    def append(self, offset: int, timestamp: int | None, key: Any, value: Any, headers: Any, **options: Any) -> Any:
        headers = [(name, None if isinstance(content, NullHeader) else content) for name, content in headers]
        return super().append(offset, timestamp, key, value, headers, **options)


REPLACED = {"DefaultRecordBatch": LenientBatch, "DefaultRecordBatchBuilder": NullHeaderBuilder}
"""The names that `kafka.record.memory_records` of kafka-python 3.0 looks up."""


def install() -> None:
    """Use both classes in every client of this process."""
    for name, replacement in REPLACED.items():
        assert hasattr(memory_records, name), f"kafka-python moved {name} out of {memory_records.__name__}"
        setattr(memory_records, name, replacement)
