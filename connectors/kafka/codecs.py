"""Compressed batches, unpacked up to a bound: kafka-python has none, and 6 kB of zstd can hold 200 MiB.

It also has no place to put one. So `bound` replaces the functions that its record readers call, in the modules that
`PLACES` names and nowhere else in this project; a test holds them against the installed release.
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
    """A batch holds more than the bound; what was unpacked of it is gone. Reading it again ends the same way."""


class _Output(bytearray):
    """What is unpacked so far."""

    def __init__(self, name: str, max_bytes: int) -> None:
        super().__init__()
        self._name = name
        self._max_bytes = max_bytes

    def reserve(self, size: int) -> None:
        """Refuse so many bytes more, before they exist.

        Raises:
            DecompressedTooLargeError: they would cross the bound.
        """
        if len(self) + size > self._max_bytes:
            raise DecompressedTooLargeError(
                f"a batch must unpack to max.decompressed.bytes at most, {self._max_bytes}, and this one of "
                f"{self._name} holds more: raise the setting if its producer means it"
            )

    def drain(self, read: Callable[[int], bytes]) -> None:
        """Take everything that `read` gives, a chunk at a time."""
        while chunk := read(_CHUNK_BYTES):
            self.reserve(len(chunk))
            self += chunk


def gzip_decode(payload: Payload, *, max_bytes: int) -> bytearray:
    """Every member of a gzip file."""
    out = _Output("gzip", max_bytes)
    with GzipFile(fileobj=BytesIO(payload), mode="rb") as file:
        out.drain(file.read)
    return out


def snappy_decode(payload: bytes, *, max_bytes: int) -> bytearray:
    """Raw snappy, or the blocks that Java's producers write. A block cannot grow beyond the size that it states."""
    snappy = _library("snappy", codec.snappy)
    out = _Output("snappy", max_bytes)
    for block in _xerial_blocks(payload) if payload.startswith(_XERIAL_MAGIC) else [payload]:
        out.reserve(_snappy_size(block))
        out += snappy.decompress(block)
    return out


def lz4_decode(payload: bytes, *, max_bytes: int) -> bytearray:
    """One lz4 frame."""
    out = _Output("lz4", max_bytes)
    frame = _library("lz4", codec.lz4).LZ4FrameDecompressor()
    fed = payload
    while not frame.eof:
        chunk = frame.decompress(fed, _CHUNK_BYTES)
        if not chunk and not frame.eof:
            raise ValueError(f"an lz4 frame must be whole, found its first {len(payload)} bytes")
        out.reserve(len(chunk))
        out += chunk
        fed = b""
    return out


def zstd_decode(payload: bytes, *, max_bytes: int) -> bytearray:
    """Every zstd frame, one after another."""
    out = _Output("zstd", max_bytes)
    decompressor = _library("zstd", codec.zstd).ZstdDecompressor()
    with decompressor.stream_reader(BytesIO(payload), read_across_frames=True) as frames:
        out.drain(frames.read)
    return out


DECODERS = {decode.__name__: decode for decode in (gzip_decode, snappy_decode, lz4_decode, zstd_decode)}
PLACES = {codec: tuple(DECODERS), default_records: tuple(DECODERS), legacy_records: tuple(DECODERS)[:3]}
"""Where kafka-python 3.0 looks the functions up; zstd came after the legacy formats."""


def bound(max_bytes: int) -> None:
    """Let every consumer of this process unpack at most `max_bytes` of a batch; the last call holds."""
    for module, names in PLACES.items():
        for name in names:
            assert hasattr(module, name), f"kafka-python moved {name} out of {module.__name__}"
            setattr(module, name, partial(DECODERS[name], max_bytes=max_bytes))


def _library(name: str, found: Any) -> Any:
    if found is None:
        raise UnsupportedCodecError(f"Libraries for {name} compression codec not found")
    return found


def _xerial_blocks(payload: bytes) -> Iterator[bytes]:
    place = _XERIAL_HEADER_BYTES
    while place < len(payload):
        (size,) = struct.unpack_from(">i", payload, place)
        place += 4
        if not 0 < size <= len(payload) - place:  # kafka-python goes round for ever on a negative one
            raise ValueError(f"a snappy block must have 1 to {len(payload) - place} bytes, states {size}")
        yield payload[place : place + size]
        place += size


def _snappy_size(block: bytes) -> int:
    """The size that a block states in front: a varint, its lowest bits first."""
    size = 0
    for place, byte in enumerate(block[:_VARINT_MAX_BYTES]):
        size |= (byte & 0x7F) << 7 * place
        if byte < 0x80:
            return size
    raise ValueError("a snappy block must state its size in front")
