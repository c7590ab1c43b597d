"""A schema registry that speaks Confluent's API: the content of framed messages as JSON, by the number of its schema.

    byte 0, number of the schema (4 bytes), content: JSON as it is, Avro, or Protobuf after the indexes of its message

Schemas never change under their number, so each is requested once. fastavro reads Avro. Protobuf is read without
generated classes: the registry returns the compiled schema (`format=serialized`), the messages are built from it.
"""

import base64
import datetime
import importlib
import importlib.util
import io
import json
import math
import ssl
import time
from collections.abc import Callable, Mapping
from decimal import Decimal
from typing import Any
from uuid import UUID

import httpx2

from streamlearn.errors import ConfigError, CredentialsError, Reason, RecordError, SourceError
from streamlearn.http.guards import read_token
from streamlearn.secret_files import read_secret
from streamlearn.settings import RegistrySettings, StreamSettings
from streamlearn.stream.parse import check_tree, parse

ATTEMPTS, PAUSE_S = 3, 1.0
"""Requests for one schema before the daemon stops, and the pause between them."""
_MODULES = {"AVRO": "fastavro", "PROTOBUF": "google.protobuf"}

Read = Callable[[bytes], Any]


class SchemaRegistry:
    """The schemas of one registry, each requested when its first message comes."""

    def __init__(self, settings: RegistrySettings, limits: StreamSettings) -> None:
        """Read the credentials; the registry is not asked yet.

        Raises:
            ConfigError: a file with credentials or certificates cannot be used, or a package is missing.
        """
        missing = [name for name in _MODULES.values() if not _is_installed(name)]
        if missing:
            raise ConfigError(f"records.registry needs {', '.join(missing)}: pip install 'streamlearn[registry]'")
        self._settings = settings
        self._limits = limits
        self._readers: dict[int, Read] = {}
        self._headers = {"Accept": "application/vnd.schemaregistry.v1+json"}
        self._auth: tuple[str, str] | None = None
        if settings.token_file is not None:
            self._headers["Authorization"] = f"Bearer {read_token(settings.token_file, min_chars=1)}"
        elif settings.username is not None and settings.password_file is not None:
            self._auth = (settings.username, read_secret(settings.password_file, what="password"))
        try:
            self._verify = ssl.create_default_context(cafile=settings.cafile)
        except OSError as error:
            raise ConfigError(f"records.registry.cafile {settings.cafile} must be PEM certificates: {error}") from error

    def decode(self, number: int, content: bytes) -> Mapping[str, Any]:
        """Return the record in a message's content, JSON-ready and within the limits of a record.

        Raises:
            RecordError: the registry has no such schema, or the content does not follow it.
            SourceError: the registry does not answer, or refuses the credentials.
        """
        if number not in self._readers:
            self._readers[number] = self._reader(number)
        try:
            found = _json_ready(self._readers[number](content))
        except RecordError:
            raise
        except Exception as error:  # noqa: BLE001  whatever fastavro and protobuf raise for damaged bytes
            raise RecordError(
                Reason.BAD_FRAMING,
                f"the content must follow schema {number} of the registry: {type(error).__name__}: {str(error)[:200]}",
            ) from None
        if not isinstance(found, dict):
            raise RecordError(Reason.BAD_FORM, f"schema {number} must describe a record with named fields")
        check_tree(found, self._limits)
        return found

    def _reader(self, number: int) -> Read:
        schema = self._get(f"/schemas/ids/{number}", f"schema {number}")
        kind = schema.get("schemaType", "AVRO")
        try:
            if kind == "AVRO":
                return self._avro(schema)
            if kind == "PROTOBUF":
                return self._protobuf(self._get(f"/schemas/ids/{number}?format=serialized", f"schema {number}"))
        except (RecordError, SourceError):
            raise
        except Exception as error:  # noqa: BLE001  whatever fastavro and protobuf raise for a schema
            raise RecordError(
                Reason.BAD_FRAMING,
                f"schema {number} of the registry cannot be used: {type(error).__name__}: {str(error)[:200]}",
            ) from None
        if kind == "JSON":
            return lambda content: parse(content, self._limits)
        raise RecordError(
            Reason.BAD_FRAMING, f"schema {number} must be AVRO, PROTOBUF or JSON, found {str(kind)[:80]!r}"
        )

    def _avro(self, schema: Mapping[str, Any]) -> Read:
        import fastavro  # noqa: PLC0415  an optional dependency

        named: dict[str, Any] = {}
        for reference in self._references(schema, ""):
            fastavro.parse_schema(json.loads(reference["schema"]), named)
        parsed = fastavro.parse_schema(json.loads(schema["schema"]), named)

        def read(content: bytes) -> Any:
            stream = io.BytesIO(content)
            value = fastavro.schemaless_reader(stream, parsed, None)
            if stream.tell() != len(content):
                raise ValueError(f"{len(content) - stream.tell()} bytes are left over")
            return value

        return read

    def _protobuf(self, schema: Mapping[str, Any]) -> Read:
        from google.protobuf import descriptor_pb2, descriptor_pool, json_format, message_factory  # noqa: PLC0415

        files = [(schema, "record.proto")]
        files += [(reference, reference["name"]) for reference in self._references(schema, "?format=serialized")]
        pool, known = descriptor_pool.DescriptorPool(), descriptor_pool.Default()
        protos = {}
        for file, name in reversed(files):
            proto = descriptor_pb2.FileDescriptorProto.FromString(base64.b64decode(file["schema"]))
            proto.name = name
            protos[name] = proto
        for path in sorted({path for proto in protos.values() for path in proto.dependency} - protos.keys()):
            if path.startswith("google/protobuf/"):  # its own types, which registries leave out
                importlib.import_module(path.removesuffix(".proto").replace("/", ".") + "_pb2")
            pool.AddSerializedFile(known.FindFileByName(path).serialized_pb)
        for proto in protos.values():
            pool.Add(proto)
        root = pool.FindFileByName("record.proto")

        def read(content: bytes) -> Any:
            indexes, start = _message_indexes(content)
            message = list(root.message_types_by_name.values())[indexes[0]]
            for index in indexes[1:]:
                message = message.nested_types[index]
            value = message_factory.GetMessageClass(message).FromString(content[start:])
            return json_format.MessageToDict(value, preserving_proto_field_name=True)

        return read

    def _references(self, schema: Mapping[str, Any], query: str) -> list[Mapping[str, Any]]:
        """The schemas that a schema names, after those that they name themselves."""
        found: dict[str, Mapping[str, Any]] = {}

        def collect(schema: Mapping[str, Any]) -> None:
            for reference in schema.get("references") or ():
                if reference["name"] not in found:
                    path = f"/subjects/{reference['subject']}/versions/{reference['version']}{query}"
                    inner = self._get(path, f"schema {reference['subject']}")
                    collect(inner)
                    found[reference["name"]] = {**inner, "name": reference["name"]}

        collect(schema)
        return list(found.values())

    def _get(self, path: str, what: str) -> dict[str, Any]:
        url = self._settings.url + path
        for attempt in range(ATTEMPTS):
            if attempt:
                time.sleep(PAUSE_S)
            try:
                response = httpx2.get(
                    url,
                    headers=self._headers,
                    auth=self._auth,
                    verify=self._verify,
                    timeout=self._settings.timeout_s,
                    trust_env=False,
                )
            except httpx2.HTTPError as error:
                fault = str(error) or type(error).__name__
                continue
            if response.status_code == httpx2.codes.NOT_FOUND:
                raise RecordError(Reason.BAD_FRAMING, f"{what} must be in {self._settings.url}, which has none")
            if response.status_code in (httpx2.codes.UNAUTHORIZED, httpx2.codes.FORBIDDEN):
                raise CredentialsError(
                    f"{self._settings.url} refused the credentials (status {response.status_code}): set "
                    "records.registry.token_file, or username and password_file"
                )
            if response.is_success:
                try:
                    found = response.json()
                    found["schema"]
                except (ValueError, KeyError, TypeError):
                    raise SourceError(f"{url} must return a schema as JSON: is records.registry.url right?") from None
                return dict(found)
            fault = f"status {response.status_code}"
        raise SourceError(
            f"{self._settings.url} must return {what}, found in {ATTEMPTS} attempts: {fault}. No record is lost: a "
            "restart goes on from the last snapshot"
        )


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def _message_indexes(content: bytes) -> tuple[list[int], int]:
    """The path to a message in its file, and where the message begins: zigzag numbers, their count first."""
    start = 0

    def number() -> int:
        nonlocal start
        result = shift = 0
        while True:
            byte = content[start]
            start += 1
            result |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return (result >> 1) ^ -(result & 1)

    count = number()
    return [number() for _ in range(count)] or [0], start


def _json_ready(value: Any) -> Any:
    """A value as JSON has it: bytes in base64, moments in ISO form, decimals as their digits."""
    if isinstance(value, dict):
        return {str(key): _json_ready(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_json_ready(item) for item in value]
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    if isinstance(value, datetime.datetime | datetime.date | datetime.time):
        return value.isoformat()
    if isinstance(value, Decimal | UUID):
        return str(value)
    if isinstance(value, float) and not math.isfinite(value):
        raise RecordError(Reason.NOT_FINITE, f"numbers must be finite, found {value}")
    return value
