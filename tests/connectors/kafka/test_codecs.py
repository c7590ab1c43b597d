"""Limited decompression, compared with the installed kafka-python."""

import gzip
import random
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kafka
import pytest
from kafka import codec
from kafka.errors import UnsupportedCodecError
from kafka.record import MemoryRecords
from kafka.record.default_records import DefaultRecordBatchBuilder
from kafka.record.legacy_records import LegacyRecordBatchBuilder

from connectors.kafka import codecs
from connectors.kafka.clients import describe
from connectors.kafka.codecs import DECODERS, PATCHED_FUNCTIONS, DecompressedTooLargeError

ORIGINALS = {module: {name: getattr(module, name) for name in names} for module, names in PATCHED_FUNCTIONS.items()}
NUMBERS = {"gzip": 1, "snappy": 2, "lz4": 3, "zstd": 4}
"""Kafka's numbers for the codecs."""
LIMIT = 4 << 20
BOMB = 64 << 20
TEXT = random.Random(0).randbytes(5_000) + b"a record and another " * 5_000

CHILD = """
import sys
from pathlib import Path
from kafka.errors import KafkaError
from kafka.record import MemoryRecords
from connectors.kafka import codecs

def peak():
    line = next(line for line in open("/proc/self/status") if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024

data = Path(sys.argv[2]).read_bytes()
if sys.argv[1] == "limited":
    codecs.limit_decompression(4 << 20)
before = peak()
try:
    next(iter(MemoryRecords(data).next_batch()))
except codecs.DecompressedTooLargeError as error:
    print(error, file=sys.stderr)
print(peak() - before)
"""


@pytest.fixture(autouse=True)
def _restore_functions() -> Iterator[None]:
    """The limit applies to the whole process, so remove it after each test."""
    before = [(module, name, getattr(module, name)) for module, names in PATCHED_FUNCTIONS.items() for name in names]
    for module, functions in ORIGINALS.items():
        for name, function in functions.items():
            setattr(module, name, function)
    yield
    for module, name, function in before:
        setattr(module, name, function)


def batch(name: str, value: bytes) -> bytes:
    builder = DefaultRecordBatchBuilder(
        magic=2,
        compression_type=NUMBERS[name],
        is_transactional=False,
        producer_id=-1,
        producer_epoch=-1,
        base_sequence=-1,
        batch_size=1 << 30,
    )
    builder.append(0, timestamp=1, key=None, value=value, headers=[])
    return bytes(builder.build())


def old_batch(name: str, value: bytes) -> bytes:
    builder = LegacyRecordBatchBuilder(magic=1, compression_type=NUMBERS[name], batch_size=1 << 30)
    builder.append(0, timestamp=1, key=None, value=value)
    return bytes(builder.build())


def values(data: bytes) -> list[bytes]:
    return [record.value for record in MemoryRecords(data).next_batch()]


def compress(name: str, data: bytes) -> bytes:
    return bytes(getattr(codec, f"{name}_encode")(data))


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize("data", [b"x", TEXT, bytes(LIMIT)], ids=["byte", "text", "zeros"])
def test_data_within_the_limit_is_decompressed_as_before(name: str, data: bytes) -> None:
    """Byte for byte like kafka-python's own function, up to exactly the limit."""
    payload = compress(name, data)
    found = DECODERS[f"{name}_decode"](payload, max_bytes=len(data))
    assert found == data == bytes(ORIGINALS[codec][f"{name}_decode"](payload))


@pytest.mark.parametrize("name", NUMBERS)
def test_one_byte_beyond_the_limit_is_refused(name: str) -> None:
    with pytest.raises(
        DecompressedTooLargeError, match=rf"a {name} batch must expand to at most {len(TEXT) - 1} bytes .* found more"
    ):
        DECODERS[f"{name}_decode"](compress(name, TEXT), max_bytes=len(TEXT) - 1)


def test_formats_of_other_producers_are_decompressed() -> None:
    """Raw snappy, several gzip members, several zstd frames; the limit applies to their sum."""
    raw = codec.snappy_encode(TEXT, xerial_compatible=False)
    assert codecs.snappy_decode(raw, max_bytes=len(TEXT)) == TEXT
    for name, encode in (("gzip", gzip.compress), ("zstd", codec.zstd_encode)):
        twice = encode(TEXT) + encode(TEXT)
        assert DECODERS[f"{name}_decode"](twice, max_bytes=2 * len(TEXT)) == TEXT * 2
        with pytest.raises(DecompressedTooLargeError):
            DECODERS[f"{name}_decode"](twice, max_bytes=2 * len(TEXT) - 1)
    with pytest.raises(DecompressedTooLargeError):
        codecs.snappy_decode(raw, max_bytes=len(TEXT) - 1)


@pytest.mark.parametrize("name", ["gzip", "snappy", "lz4"])
def test_a_truncated_payload_is_an_error(name: str) -> None:
    """It never waits for the rest. A truncated zstd frame returns its beginning, as before; its records are invalid."""
    with pytest.raises(Exception, match=r"."):
        DECODERS[f"{name}_decode"](compress(name, TEXT)[:-5], max_bytes=LIMIT)


@pytest.mark.parametrize("size", [-4, -1, 0, 1 << 20])
def test_a_snappy_block_of_an_impossible_size_is_an_error(size: int) -> None:
    """kafka-python would go back by a negative size and loop forever."""
    header = compress("snappy", b"x")[:16]
    with pytest.raises(ValueError, match=f"found the size {size}"):
        codecs.snappy_decode(header + struct.pack(">i", size) + bytes(8), max_bytes=LIMIT)


@pytest.mark.parametrize("lie", [b"\xff\xff\xff\xff\x0f", b"\xff" * 8, b""])
def test_a_snappy_block_with_a_false_size_is_an_error(lie: bytes) -> None:
    """Four gigabytes are refused before they are allocated."""
    with pytest.raises((DecompressedTooLargeError, ValueError)):
        codecs.snappy_decode(lie, max_bytes=LIMIT)


@pytest.mark.parametrize("name", NUMBERS)
def test_every_record_reader_is_limited(name: str) -> None:
    """For batches of the current and the previous format; batches within the limit are read."""
    makers = (batch, old_batch) if name != "zstd" else (batch,)
    codecs.limit_decompression(LIMIT)
    for make in makers:
        assert values(make(name, TEXT)) == [TEXT]
        with pytest.raises(DecompressedTooLargeError, match=name):
            values(make(name, bytes(LIMIT)))  # with its frame a few bytes beyond the limit


def test_no_other_module_of_the_client_decompresses() -> None:
    """After `limit_decompression` no module of kafka-python refers to its own functions or calls them elsewhere."""
    codecs.limit_decompression(LIMIT)
    own = {function for functions in ORIGINALS.values() for function in functions.values()}
    modules = [module for name, module in list(sys.modules.items()) if name.partition(".")[0] == "kafka"]
    left = [
        f"{module.__name__}.{name}"
        for module in modules
        for name, value in vars(module).items()
        if callable(value) and not isinstance(value, type) and any(value is one for one in own)
    ]
    assert left == []
    root = Path(kafka.__file__).parent
    codec_names = ("zlib", "gzip", "lz4", "snappy", "zstd")
    users = {path for path in root.rglob("*.py") if any(f"{one}_decode(" in path.read_text() for one in codec_names)}
    assert {str(path.relative_to(root)) for path in users} == {
        "codec.py",
        "record/default_records.py",
        "record/legacy_records.py",
    }


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="peak memory is read from /proc")
@pytest.mark.parametrize("name", NUMBERS)
def test_a_bomb_takes_no_memory(name: str, tmp_path: Path) -> None:
    """64 MiB of zeros against a limit of 4 MiB; without the limit they take more than twice their size."""
    bomb = tmp_path / "batch"
    bomb.write_bytes(batch(name, bytes(BOMB)))

    def growth(how: str) -> int:
        done = subprocess.run([sys.executable, "-c", CHILD, how, bomb], capture_output=True, text=True, check=True)
        assert ("found more" in done.stderr) == (how == "limited"), done.stderr
        return int(done.stdout)

    assert growth("limited") < 4 * LIMIT
    if name == "zstd":  # one codec shows that the measurement works
        assert growth("unlimited") > BOMB


@pytest.mark.parametrize("name", ["snappy", "lz4", "zstd"])
def test_the_error_of_a_missing_library_names_the_package(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both when kafka-python checks first and when we do."""
    data = batch(name, TEXT)
    codecs.limit_decompression(LIMIT)
    monkeypatch.setattr(codec, name, None)
    for read in (lambda: values(data), lambda: DECODERS[f"{name}_decode"](b"", max_bytes=1)):
        with pytest.raises(UnsupportedCodecError) as caught:
            read()
        assert describe(caught.value).endswith(
            f"Libraries for {name} compression codec not found: the topic is compressed; "
            "run pip install 'streamlearn[codecs]'"
        )


def test_the_limit_is_the_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each new consumer sets it."""
    from connectors.kafka import clients as client  # noqa: PLC0415
    from streamlearn.settings import KafkaSettings  # noqa: PLC0415

    limits: list[int] = []
    monkeypatch.setattr(codecs, "limit_decompression", limits.append)

    def built(*_: Any, **__: Any) -> None:
        return None

    monkeypatch.setattr(client, "_new", built)
    values = {"bootstrap_servers": "127.0.0.1:9", "security_protocol": "PLAINTEXT", "topics": ("a",)}
    for settings in (KafkaSettings(**values), KafkaSettings(**values, max_decompressed_bytes=77)):
        client.new_consumer(settings, 1.0)
    assert limits == [256 << 20, 77]
