"""Avro, Protobuf and JSON through a schema registry, served by a small one on this machine."""

import base64
import io
import json
import threading
from collections.abc import Iterator
from datetime import UTC, date, datetime
from decimal import Decimal
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import fastavro
import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, timestamp_pb2

from streamlearn.errors import CredentialsError, Reason, RecordError, SourceError
from streamlearn.settings import RecordsSettings, RegistrySettings, StreamSettings
from streamlearn.stream import registry as registry_module
from streamlearn.stream.mapping import RecordMapping

SHOP = {"type": "record", "name": "shop.Ticket", "fields": [
    {"name": "question", "type": "string"},
    {"name": "answer", "type": ["null", "string"]},
    {"name": "price", "type": {"type": "bytes", "logicalType": "decimal", "precision": 6, "scale": 2}},
    {"name": "day", "type": {"type": "int", "logicalType": "date"}},
    {"name": "at", "type": {"type": "long", "logicalType": "timestamp-millis"}},
    {"name": "photo", "type": "bytes"},
    {"name": "customer", "type": ["null", "shop.Customer"]},
]}  # fmt: skip
CUSTOMER = {"type": "record", "name": "shop.Customer", "fields": [{"name": "name", "type": "string"}]}
TICKET = {
    "question": "Open on Sunday?", "answer": "No.", "price": Decimal("12.50"), "day": date(2026, 1, 31),
    "at": datetime(2026, 1, 31, 12, tzinfo=UTC), "photo": b"\x89PNG", "customer": {"name": "Ada"},
}  # fmt: skip
TOKEN = "a-token-of-the-registry"  # noqa: S105  of the server below


def protobuf_schema() -> descriptor_pb2.FileDescriptorProto:
    """Two messages; the second, in the first, has the fields."""
    file = descriptor_pb2.FileDescriptorProto(name="ticket.proto", package="shop", syntax="proto3")
    file.dependency.append("google/protobuf/timestamp.proto")
    file.message_type.add(name="Other")
    inner = file.message_type.add(name="Ticket").nested_type.add(name="Text")
    for number, name in enumerate(("question", "answer"), start=1):
        kind = descriptor_pb2.FieldDescriptorProto.TYPE_STRING
        inner.field.add(name=name, number=number, type=kind, label=descriptor_pb2.FieldDescriptorProto.LABEL_OPTIONAL)
    inner.field.add(
        name="created_at", number=3, type=descriptor_pb2.FieldDescriptorProto.TYPE_MESSAGE,
        type_name=".google.protobuf.Timestamp", label=descriptor_pb2.FieldDescriptorProto.LABEL_OPTIONAL,
    )  # fmt: skip
    return file


class Registry:
    """The part of the API that readers use; requests are counted by path."""

    def __init__(self) -> None:
        self.requests: list[str] = []
        self.status: int | None = None
        self.needs_token = False
        compiled = base64.b64encode(protobuf_schema().SerializeToString()).decode()
        reference = {"name": "shop.Customer", "subject": "customer", "version": 2}
        self.bodies: dict[str, dict[str, Any]] = {
            "/schemas/ids/1": {"schema": json.dumps(SHOP), "references": [reference]},
            "/subjects/customer/versions/2": {"schema": json.dumps(CUSTOMER), "subject": "customer", "version": 2},
            "/schemas/ids/2": {"schema": "syntax = 'proto3'; ...", "schemaType": "PROTOBUF"},
            "/schemas/ids/2?format=serialized": {"schema": compiled, "schemaType": "PROTOBUF"},
            "/schemas/ids/3": {"schema": "{}", "schemaType": "JSON"},
            "/schemas/ids/4": {"schema": '{"type": "record"}'},
        }

    def answer(self, handler: BaseHTTPRequestHandler) -> None:
        self.requests.append(handler.path)
        body = self.bodies.get(handler.path)
        allowed = not self.needs_token or handler.headers["Authorization"] == f"Bearer {TOKEN}"
        status = self.status or (404 if body is None else 200)
        data = json.dumps(body or {"error_code": 40403, "message": "Schema not found"}).encode()
        handler.send_response(status if allowed else 401)
        handler.send_header("Content-Length", str(len(data)))
        handler.end_headers()
        handler.wfile.write(data)


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Registry, str]]:
    """The server and its URL."""
    monkeypatch.setattr(registry_module, "PAUSE_S", 0.0)
    own = Registry()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            own.answer(self)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield own, f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join()


def mapping(url: str, **settings: Any) -> RecordMapping:
    records = RecordsSettings(framing="confluent", registry=RegistrySettings(url=url, **settings))
    return RecordMapping(records, StreamSettings())


def framed(number: int, content: bytes) -> bytes:
    return b"\0" + number.to_bytes(4, "big") + content


def avro() -> bytes:
    named: dict[str, Any] = {}
    fastavro.parse_schema(CUSTOMER, named)
    stream = io.BytesIO()
    fastavro.schemaless_writer(stream, fastavro.parse_schema(SHOP, named), TICKET)
    return stream.getvalue()


def test_avro_is_read_as_json_and_its_schema_requested_once(registry: tuple[Registry, str]) -> None:
    """References are followed; decimals, dates, moments and bytes become text; a hundred records are two requests."""
    server, url = registry
    own = mapping(url)
    for _ in range(100):
        record = own.parse(framed(1, avro()))
    assert record == {
        "question": "Open on Sunday?", "answer": "No.", "price": "12.50", "day": "2026-01-31",
        "at": "2026-01-31T12:00:00+00:00", "photo": "iVBORw==", "customer": {"name": "Ada"},
    }  # fmt: skip
    assert server.requests == ["/schemas/ids/1", "/subjects/customer/versions/2"]


def test_protobuf_is_read_without_generated_classes(registry: tuple[Registry, str]) -> None:
    """A message within another, by the indexes before it, with one of Google's own types."""
    _, url = registry
    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(timestamp_pb2.DESCRIPTOR.serialized_pb)
    pool.Add(protobuf_schema())
    text = message_factory.GetMessageClass(pool.FindMessageTypeByName("shop.Ticket.Text"))
    content = text(question="Open?", answer="No.", created_at={"seconds": 0}).SerializeToString()
    indexes = bytes([4, 2, 0])  # zigzag of 2, 1, 0: the first message in the second
    assert mapping(url).parse(framed(2, indexes + content)) == {
        "question": "Open?", "answer": "No.", "created_at": "1970-01-01T00:00:00Z",
    }  # fmt: skip


def test_json_with_a_schema_is_read_as_it_is(registry: tuple[Registry, str]) -> None:
    """Strictly: a repeated key is refused as anywhere."""
    own = mapping(registry[1])
    assert own.parse(framed(3, b'{"text": "a"}')) == {"text": "a"}
    with pytest.raises(RecordError) as refused:
        own.parse(framed(3, b'{"text": "a", "text": "b"}'))
    assert refused.value.reason is Reason.DUPLICATE_KEY


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (framed(1, avro()[:-3]), "content must follow schema 1"),
        (framed(1, avro() + b"x"), "1 bytes are left over"),
        (framed(2, b"\x04\x02"), "content must follow schema 2"),
        (framed(4, b"x"), "schema 4 of the registry cannot be used"),
        (framed(9, b"x"), "schema 9 must be in http://127.0.0.1:[0-9]+, which has none"),
        (b'{"text": "a"}', "found JSON: set records.framing: none"),
        (b"\0\0", "found 2 bytes"),
    ],
)
def test_what_a_schema_cannot_read_is_a_dead_letter(registry: tuple[Registry, str], value: bytes, message: str) -> None:
    """Damaged content, an unusable or unknown schema, and content that is not framed."""
    with pytest.raises(RecordError, match=message) as refused:
        mapping(registry[1]).parse(value)
    assert refused.value.reason is Reason.BAD_FRAMING


def test_an_outage_of_the_registry_stops_the_daemon_and_loses_nothing(registry: tuple[Registry, str]) -> None:
    """Three attempts, then the error of a source; once it answers, the record is read."""
    server, url = registry
    own = mapping(url)
    server.status = 503
    with pytest.raises(SourceError, match=r"found in 3 attempts: status 503. No record is lost"):
        own.parse(framed(1, avro()))
    assert len(server.requests) == registry_module.ATTEMPTS
    server.status = None
    assert own.parse(framed(1, avro()))["answer"] == "No."


def test_credentials_come_from_files(registry: tuple[Registry, str], tmp_path: Path) -> None:
    """Without them the registry's refusal names the settings."""
    server, url = registry
    server.needs_token = True
    with pytest.raises(CredentialsError, match=r"status 401.*records\.registry\.token_file"):
        mapping(url).parse(framed(3, b"{}"))
    file = tmp_path / "token"
    file.write_text(TOKEN + "\n", encoding="ascii")
    file.chmod(0o600)
    assert mapping(url, token_file=file).parse(framed(3, b"{}")) == {}
