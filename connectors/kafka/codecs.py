"""Decompression of batches with a size limit: kafka-python has none, and 6 kB of zstd can expand to 200 MiB.

kafka-python has no hook for a limit either. `limit_decompression` therefore replaces the functions that its record
readers call, in the modules in `PATCHED_FUNCTIONS` and nowhere else in this project; a test checks that the installed
release has them.
"""

import struct
from collections.abc import Callable, Iterator
from functools import partial
from gzip import GzipFile
from io import BytesIO
from typing import Any

from kafka import codec
from kafka.errors import KafkaError, UnsupportedCodecError
from kafka.record import default_records, legacy_records

_CHUNK_BYTES = 1 << 20
_XERIAL_MAGIC, _XERIAL_HEADER_BYTES = b"\x82SNAPPY\x00", 16
_VARINT_MAX_BYTES = 5  # of 7 bits each: snappy states a block's size in 32

Payload = bytes | memoryview


class DecompressedTooLargeError(KafkaError):  # type: ignore[misc]  # kafka-python ships no types
    """A batch expands beyond the limit. Reading it again has the same result."""


class _BoundedOutput(bytearray):
    """The output so far."""

    def __init__(self, name: str, max_bytes: int) -> None:
        super().__init__()
        self._name = name
        self._max_bytes = max_bytes

    def reserve(self, size: int) -> None:
        """Check that `size` more bytes fit, before they are produced.

        Raises:
            DecompressedTooLargeError: they would exceed the limit.
        """
        if len(self) + size > self._max_bytes:
            raise DecompressedTooLargeError(
                f"a {self._name} batch must expand to at most {self._max_bytes} bytes (max.decompressed.bytes), found "
                "more: raise the setting if its producer is meant to write such batches"
            )

    def drain(self, read: Callable[[int], bytes]) -> None:
        """Append everything that `read` returns, a chunk at a time."""
        while chunk := read(_CHUNK_BYTES):
            self.reserve(len(chunk))
            self += chunk


def gzip_decode(payload: Payload, *, max_bytes: int) -> bytearray:
    """Decompress every member of a gzip file."""
    out = _BoundedOutput("gzip", max_bytes)
    with GzipFile(fileobj=BytesIO(payload), mode="rb") as file:
        out.drain(file.read)
    return out


def snappy_decode(payload: bytes, *, max_bytes: int) -> bytearray:
    """Decompress raw snappy, or the blocks that Java's producers write. A block never exceeds the size it states."""
    snappy = _library("snappy", codec.snappy)
    out = _BoundedOutput("snappy", max_bytes)
    for block in _xerial_blocks(payload) if payload.startswith(_XERIAL_MAGIC) else [payload]:
        out.reserve(_snappy_size(block))
        out += snappy.decompress(block)
    return out


def lz4_decode(payload: bytes, *, max_bytes: int) -> bytearray:
    out = _BoundedOutput("lz4", max_bytes)
    frame = _library("lz4", codec.lz4).LZ4FrameDecompressor()
    unread = payload
    while not frame.eof:
        chunk = frame.decompress(unread, _CHUNK_BYTES)
        if not chunk and not frame.eof:
            raise ValueError(f"expected a complete lz4 frame, found only its first {len(payload)} bytes")
        out.reserve(len(chunk))
        out += chunk
        unread = b""
    return out


def zstd_decode(payload: bytes, *, max_bytes: int) -> bytearray:
    """Decompress consecutive zstd frames."""
    out = _BoundedOutput("zstd", max_bytes)
    decompressor = _library("zstd", codec.zstd).ZstdDecompressor()
    with decompressor.stream_reader(BytesIO(payload), read_across_frames=True) as frames:
        out.drain(frames.read)
    return out


DECODERS = {decode.__name__: decode for decode in (gzip_decode, snappy_decode, lz4_decode, zstd_decode)}
PATCHED_FUNCTIONS = {codec: tuple(DECODERS), default_records: tuple(DECODERS), legacy_records: tuple(DECODERS)[:3]}
"""The names that kafka-python 3.0 looks up, by module; the legacy formats have no zstd."""


def limit_decompression(max_bytes: int) -> None:
    """Limit the decompressed size of a batch for every consumer of this process; the last call wins."""
    for module, names in PATCHED_FUNCTIONS.items():
        for name in names:
            assert hasattr(module, name), f"kafka-python moved {name} out of {module.__name__}"
            setattr(module, name, partial(DECODERS[name], max_bytes=max_bytes))


def _library(name: str, found: Any) -> Any:
    if found is None:
        raise UnsupportedCodecError(f"Libraries for {name} compression codec not found")
    return found


def _xerial_blocks(payload: bytes) -> Iterator[bytes]:
    start = _XERIAL_HEADER_BYTES
    while start < len(payload):
        (size,) = struct.unpack_from(">i", payload, start)
        start += 4
        if not 0 < size <= len(payload) - start:  # kafka-python loops forever on a negative size
            raise ValueError(f"a snappy block must have 1 to {len(payload) - start} bytes, found the size {size}")
        yield payload[start : start + size]
        start += size


def _snappy_size(block: bytes) -> int:
    """The decompressed size at the start of a block: a varint, lowest bits first."""
    size = 0
    for index, byte in enumerate(block[:_VARINT_MAX_BYTES]):
        size |= (byte & 0x7F) << 7 * index
        if byte < 0x80:
            return size
    raise ValueError("a snappy block must begin with its size")
