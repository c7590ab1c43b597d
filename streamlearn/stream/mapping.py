"""From a message's value to the canonical record, as the section `records` describes it.

    bytes  --framing-->  JSON object  --unwrap-->  record of the topic  --mapping-->  canonical record

The canonical record has keys of `FORMS` and COMPANIONS only. Deletions leave on the way: a message without a value (a
tombstone), Debezium's `op: d` and `op: t`, the marks that its transformations leave in a flattened row (`__deleted`,
`__op`), and an envelope whose record is null.
"""

import base64
import binascii
import difflib
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple, NoReturn

import orjson

from streamlearn.errors import IGNORABLE, Reason, RecordError
from streamlearn.settings import RecordsSettings, StreamSettings
from streamlearn.settings.records import FORM_FIELDS, WHOLE, Role, is_template, path_keys, template_parts
from streamlearn.stream.conversation import ROLES
from streamlearn.stream.parse import json_type, parse, parse_text, too_large
from streamlearn.stream.record import COMPANIONS, FORMS, Form, kto_label

_ROLE_NAMES: dict[str, Role] = {
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bot": "assistant",
    "model": "assistant",
    "ai": "assistant",
    "observation": "tool",
}
"""Names of roles in published data sets."""
_FIELDS = frozenset(field for form in FORMS for field in form.fields) | frozenset(COMPANIONS)
_MARKS = frozenset({"__deleted", "__op"})
"""What Debezium's ExtractNewRecordState adds to a row that was deleted, or not."""
_DELETING = ("d", "t")
"""Debezium's operations delete and truncate."""
_NEAR = 0.8
"""Similarity from which a key is taken for a misspelled one."""
_ANSWERED = ("completion", "messages")
"""Fields with an answer, so that a label beside them is KTO's."""
_PREFIX_BYTES = 5
_INDEX = re.compile("-?[0-9]{1,18}")

_ENVELOPES = (
    (("schema", "payload"), "an envelope of Kafka Connect", "payload"),
    (("specversion",), "a CloudEvents envelope", "data"),
    (("op", "after"), "a Debezium envelope", "after"),
)
"""Keys by which envelopes are known, what they are, and the path to the record in them."""
_SHAPES = (
    (("conversations",), "a ShareGPT conversation: set records.messages: conversations"),
    (("prompt", "chosen", "rejected"), "a preference pair: set records.completion: chosen"),
    (
        ("chosen", "rejected"),
        "a preference pair: set records.messages: chosen if that is a conversation with its question, otherwise "
        "records.prompt and records.completion: chosen",
    ),
    (
        ("instruction", "input", "output"),
        r"an Alpaca record: set records.prompt: '{instruction}\n\n{input}\n\n' and records.completion: output",
    ),
    (
        ("instruction", "output"),
        r"an Alpaca record: set records.prompt: '{instruction}\n\n' and records.completion: output",
    ),
    (("request", "response"), "a logged request: set records.messages, such as [request.messages, response.message]"),
)
"""Keys by which other records are known, what they are, and what to set."""

_ABSENT: Any = object()


class _Part(NamedTuple):
    """Text of a template, and the path whose value follows it; None after the last."""

    text: str
    path: "_Path | None"


class _Path(NamedTuple):
    """Where a value stands, for look-ups and for messages."""

    setting: str
    text: str
    keys: tuple[str, ...]


class RecordMapping:
    """The settings of `records`, ready to be applied to each message."""

    def __init__(self, settings: RecordsSettings, limits: StreamSettings) -> None:
        self._settings = settings
        self._limits = limits
        self._registry = None
        if settings.registry is not None:
            from streamlearn.stream.registry import SchemaRegistry  # noqa: PLC0415  what is not configured is not imported

            self._registry = SchemaRegistry(settings.registry, limits)
        self._roles: Mapping[str, str] = _ROLE_NAMES | settings.roles
        unwrap = [settings.unwrap] if isinstance(settings.unwrap, str) else settings.unwrap
        self._unwrap = [_path("unwrap", path) for path in unwrap]
        self._fields: dict[str, list[_Path] | list[_Part]] = {}
        mapped = settings.mapped
        for name in mapped and _form_of(mapped).required:
            mapped.setdefault(name, (name,))
        for name, paths in mapped.items():
            if is_template(paths[0]):
                parts = template_parts(paths[0])
                self._fields[name] = [
                    _Part(text, None if keys is None else _Path(name, ".".join(keys), keys)) for text, keys in parts
                ]
            else:
                self._fields[name] = [_path(name, path) for path in paths]
        self.labels = [] if settings.label_false == "learn" else self._label_paths()
        """Where KTO's label may stand: in the record, and beside its answer; nowhere if it is not read."""
        self.ignored: frozenset[Reason] = frozenset(
            reason
            for reason, setting in zip(IGNORABLE, (settings.deletions, settings.label_false), strict=True)
            if setting == "ignore"
        )
        """Reasons of records that are counted by themselves instead of becoming dead letters."""

    def parse(self, value: bytes | None) -> Mapping[str, Any]:
        """Return the JSON object in a message's value.

        Raises:
            RecordError: it is a deletion (DELETION), is not framed as set, or holds no JSON object.
            SourceError: the schema registry does not answer.
        """
        if value is None:
            raise RecordError(Reason.DELETION, "a message without a value deletes its key (a tombstone)")
        if self._settings.framing == "confluent":
            return self._parse_framed(value)
        try:
            return parse(value, self._limits)
        except RecordError as error:
            if value[:1] == b"\0" and len(value) > _PREFIX_BYTES:
                needs = "" if value[_PREFIX_BYTES:].lstrip().startswith(b"{") else " and records.registry"
                raise RecordError(
                    error.reason,
                    "a record must be JSON, found byte 0 and the number of a schema before it: set records.framing: "
                    f"confluent{needs}",
                ) from None
            raise

    def canonical(self, value: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the canonical record in a parsed value.

        Raises:
            RecordError: it is a deletion or one of KTO's bad answers, the envelope lacks the record, a path leads
                nowhere, or a key is unknown; names what was found and the nearest that was expected.
        """
        if self._unwrap or not value.keys() <= _FIELDS:
            value = self._unwrapped(value)
        if self._fields or value.keys() & {*_ANSWERED}:
            for path in self.labels:
                self._check_label(path, value)
        fields = self._mapped(value) if self._fields else self._named(value)
        return self._with_roles(fields)

    def _parse_framed(self, value: bytes) -> Mapping[str, Any]:
        if value[:1] != b"\0" or len(value) < _PREFIX_BYTES:
            is_json = value.lstrip().startswith(b"{")
            found = "JSON: set records.framing: none" if is_json else f"{len(value)} bytes, {value[:1].hex()!r} first"
            raise RecordError(
                Reason.BAD_FRAMING,
                "records.framing: confluent needs byte 0 and four bytes with the number of a schema first, found "
                + found,
            )
        content, number = value[_PREFIX_BYTES:], int.from_bytes(value[1:_PREFIX_BYTES], "big")
        if self._registry is not None:
            if len(value) > self._limits.max_record_bytes:
                raise too_large(value, self._limits)
            return self._registry.decode(number, content)
        if content and not content.lstrip().startswith(b"{"):
            raise RecordError(
                Reason.BAD_FRAMING,
                f"the content after schema number {number} must be a JSON object: Avro and Protobuf need "
                "records.registry.url",
            )
        return parse(content, self._limits)

    def _label_paths(self) -> list[_Path]:
        """The paths of labels; a label that a path or template reads is what it reads, and none of KTO's."""
        if "text" in self._fields:
            return []
        paths = [
            path
            for parts in self._fields.values()
            for part in parts
            if (path := part.path if isinstance(part, _Part) else part) is not None
        ]
        beside = {(): "prompt"} | {path.keys[:-1]: path.setting for path in paths if path.setting in _ANSWERED}
        labels = [_Path(setting, ".".join((*keys, "label")), (*keys, "label")) for keys, setting in beside.items()]
        return [label for label in labels if label.keys not in {path.keys for path in paths}]

    def _check_label(self, path: _Path, value: Mapping[str, Any]) -> None:
        if kto_label(self._find(path, value)) is False:
            raise RecordError(
                Reason.LABEL_FALSE,
                f"{path.text} is false: an answer to avoid, which is not learned; records.label_false: ignore leaves "
                "such records out, learn does not read the label",
            )

    def _unwrapped(self, value: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the record in its envelope, or the value itself if no envelope is set."""
        for body in _bodies(value):
            _refuse_deletion(body)
        for path in self._unwrap:
            for body in _bodies(value):
                found = self._find(path, body)
                if found is None:
                    raise RecordError(Reason.DELETION, f"records.unwrap: {path.text} is null: a deletion")
                if found is not _ABSENT:
                    record = self._parsed(found, f"records.unwrap: {path.text}")
                    if not isinstance(record, dict):
                        raise RecordError(
                            Reason.BAD_FORM,
                            f"records.unwrap: {path.text} must be an object or its JSON text, "
                            f"found {json_type(record)}",
                        )
                    _refuse_deletion(record)
                    return record
        if self._unwrap:
            tried = ", ".join(path.text for path in self._unwrap)
            self._refuse_shape(value, unwrapped=False)
            raise RecordError(
                Reason.BAD_FORM, f"records.unwrap: a value must have {tried}, found {_listed(value)}; `.` is the value"
            )
        return value

    def _refuse_shape(self, value: Mapping[str, Any], *, unwrapped: bool = True) -> None:
        """Raise the error of a record that is known by its keys, with what to set that is not set."""
        tried = [path.text for path in self._unwrap]
        outer = f"{tried[0]}." if unwrapped and tried and "." not in tried else ""
        envelopes = (
            (keys, f"{shape}: set records.unwrap: {outer}{path}")
            for keys, shape, path in _ENVELOPES
            if outer + path not in tried
        )
        for keys, shape in (*envelopes, *(() if self._fields else _SHAPES)):
            if all(key in value for key in keys):
                raise RecordError(Reason.BAD_FORM, f"{' and '.join(map(repr, keys))}: the value looks like {shape}")

    def _find(self, path: _Path, value: Any) -> Any:
        """Return the value at a path, or _ABSENT. JSON text on the way to it is parsed."""
        for key in path.keys:
            if isinstance(value, str) and value.lstrip()[:1] in ("{", "["):
                value = parse_text(value, f"records.{path.setting}: the text before {key[:80]!r}", self._limits)
            if isinstance(value, Mapping):
                encoded = f"{key}_base64"
                if key in value:
                    value = value[key]
                elif "specversion" in value and isinstance(value.get(encoded), str):  # CloudEvents
                    value = _decoded(value[encoded], path)
                else:
                    return _ABSENT
            elif isinstance(value, list) and _INDEX.fullmatch(key) and -len(value) <= int(key) < len(value):
                value = value[int(key)]
            else:
                return _ABSENT
        return value

    def _parsed(self, found: Any, where: str) -> Any:
        return parse_text(found, where, self._limits) if isinstance(found, str) else found

    def _mapped(self, value: Mapping[str, Any]) -> dict[str, Any]:
        """Return the record that the paths and templates make."""
        record = {name: value[name] for name in ("meta", "sample_type") if value.get(name) is not None}
        for name, parts in self._fields.items():
            if isinstance(parts[0], _Part):
                record[name] = "".join(self._filled(part, value) for part in parts)
            else:
                found = self._collected(name, parts, value)
                if found is not None:
                    record[name] = found
        return record

    def _filled(self, part: _Part, value: Mapping[str, Any]) -> str:
        if part.path is None:
            return part.text
        found = self._find(part.path, value)
        if found is _ABSENT or found is None:
            self._refuse_absent(part.path, value)
        return part.text + _as_text(found, part.path)

    def _collected(self, name: str, paths: list[_Path], value: Mapping[str, Any]) -> Any:
        """Return what stands at the paths: one value, or the messages or images of all; None without any optional."""
        joined: list[Any] = []
        for path in paths:
            found = self._find(path, value)
            if found is _ABSENT or found is None:
                if name in COMPANIONS:
                    continue
                self._refuse_absent(path, value)
            if name == "tools":
                return found
            if name == "messages" and isinstance(found, str):
                found = self._parsed(found, f"records.messages: {path.text}")
            if name in ("prompt", "completion", "text") and not isinstance(found, dict | list):
                if len(paths) > 1:
                    raise RecordError(
                        Reason.BAD_TYPE,
                        f"records.{name}: a list of paths joins messages, found {json_type(found)} at {path.text}; "
                        f"join texts in a template: '{{{path.text}}}...'",
                    )
                return _as_text(found, path)
            if name == "text":
                _as_text(found, path)
            joined += found if isinstance(found, list) else [found]
        return joined or None

    def _refuse_absent(self, path: _Path, value: Mapping[str, Any]) -> NoReturn:
        """Raise the error of a path that leads nowhere, with the key where it ends and the nearest one there is."""
        must = f"records.{path.setting}: {path.text} must"
        places: list[Any] = [
            self._find(path._replace(keys=path.keys[:end]), value) for end in range(len(path.keys) + 1)
        ]
        if _ABSENT not in places:
            raise RecordError(Reason.BAD_FORM, f"{must} have a value, found null")
        depth = places.index(_ABSENT) - 1
        place, key = places[depth], path.keys[depth]
        at = f" in {'.'.join(path.keys[:depth])}" if depth else ""
        if not isinstance(place, Mapping):
            size = f"{len(place)} items" if isinstance(place, list) else json_type(place)
            raise RecordError(Reason.BAD_FORM, f"{must} exist, found no {key!r}{at}, which is {size}")
        near = difflib.get_close_matches(key, list(map(str, place)), n=1, cutoff=0.6)
        if not depth and not near:
            self._refuse_shape(value)
        hint = f", did you mean {near[0][:80]!r}?" if near else ";"
        advice = self._whole_conversation(value) if path.setting == "prompt" else ""
        raise RecordError(Reason.BAD_FORM, f"{must} exist, found no {key!r}{at}{hint} {_listed(place)}{advice}")

    def _whole_conversation(self, value: Mapping[str, Any]) -> str:
        """What to set where the completion holds the question too; empty if it does not."""
        path = self._fields["completion"][0]
        turns = self._find(path, value) if isinstance(path, _Path) else None
        if isinstance(turns, list) and any(
            isinstance(turn, dict) and turn.get("role") == "user" for turn in self._turns(turns)
        ):
            return f"; {path.text} is a conversation with its question: set records.messages: {path.text} instead"
        return ""

    def _named(self, value: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return a record whose keys are the canonical ones; others are refused or left out."""
        if "images" in value or None in value.values():
            value = _without_nulls(value)
        if value.keys() <= _FIELDS:
            return value
        is_labeled = self.labels and value.keys() & {*_ANSWERED} and kto_label(value.get("label")) is not None
        read = {*_MARKS, "label"} if is_labeled else _MARKS
        unknown = [str(key) for key in value if key not in _FIELDS and key not in read]
        known = {key: value[key] for key in value if key in _FIELDS}
        if self._settings.unknown_keys == "dead_letter":
            if not unknown:
                return known
            self._refuse_shape(value)
            near = difflib.get_close_matches(unknown[0][:80], sorted(_FIELDS), n=1, cutoff=0.0)
            raise RecordError(
                Reason.BAD_FORM,
                f"{unknown[0][:80]!r}: unknown key, did you mean {near[0]}? If not, map the record's fields or set "
                "records.unknown_keys: ignore",
            )
        return self._with_known(value, known, unknown)

    def _with_known(self, value: Mapping[str, Any], known: dict[str, Any], unknown: list[str]) -> Mapping[str, Any]:
        """Return the one form that is complete. A key that looks like a missing one of it is refused."""
        complete = [form for form in FORMS if set(form.required) <= known.keys()]
        begun = [form for form in FORMS if known.keys() & set(form.fields)]
        missing = {name for form in complete or begun or FORMS for name in form.fields} - known.keys()
        if complete and complete[0].takes_images:
            missing |= {"image", "tools"} - known.keys()
        for key in unknown:
            near = difflib.get_close_matches(key.casefold()[:80], sorted(missing), n=1, cutoff=_NEAR)
            if near:
                raise RecordError(
                    Reason.BAD_FORM, f"{key[:80]!r}: unknown key, did you mean {near[0]}? Rename it, or map the fields"
                )
        if not complete:
            self._refuse_shape(value)
        if len(complete) != 1:
            return known  # what is wrong with it is for the decoder to say
        form = complete[0]
        return {key: found for key, found in known.items() if key in form.fields or key in COMPANIONS}

    def _with_roles(self, record: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the record with the usual names of roles, and `from` and `value` as role and content."""
        for name in ("messages", "prompt", "completion"):
            turns = record.get(name)
            if turns is None or (isinstance(turns, str) and name != "messages"):
                continue
            if isinstance(turns, str) and turns.lstrip().startswith("["):  # a column of JSON in a database
                turns = parse_text(turns, name, self._limits)
            if isinstance(turns, dict) and name != "messages":  # one message
                turns = [turns]
            if isinstance(turns, list):
                turns = self._turns(turns)
            if turns is not record[name]:
                record = {**record, name: turns}
        return record

    def _turns(self, turns: list[Any]) -> list[Any]:
        if all(isinstance(turn, dict) and turn.get("role") in ROLES for turn in turns):
            return turns
        return [self._turn(turn) for turn in turns]

    def _turn(self, turn: Any) -> Any:
        if not isinstance(turn, dict):
            return turn
        if "from" in turn and turn.get("role") is None:
            names = {"from": "role", "value": "content"}
            turn = {names.get(key, key): found for key, found in turn.items() if found is not None}
        role = turn.get("role")
        return {**turn, "role": self._roles[role]} if isinstance(role, str) and role in self._roles else turn


def _form_of(mapped: Iterable[str]) -> Form:
    """The form that mapped fields belong to."""
    field = next(name for name in mapped if name in FORM_FIELDS)
    return next(form for form in FORMS if field in form.required)


def _path(setting: str, text: str) -> _Path:
    return _Path(setting, text, () if text == WHOLE else path_keys(text))


def _bodies(value: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """The value, and what Kafka Connect put beside its schema."""
    yield value
    if value.keys() == {"schema", "payload"}:
        payload = value["payload"]
        if payload is None:
            raise RecordError(Reason.DELETION, "payload is null: a deletion")
        if isinstance(payload, dict):
            yield payload


def _refuse_deletion(value: Mapping[str, Any]) -> None:
    op = value.get("op")
    is_change = op in _DELETING and not {"before", "after", "source"}.isdisjoint(value)
    if is_change or value.get("__deleted") in (True, "true") or value.get("__op") in _DELETING:
        raise RecordError(Reason.DELETION, "the row was deleted (change data capture)")


def _without_nulls(value: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the record without fields that are null, as tables fill them, and with `images` as `image`."""
    given = {key for key, found in value.items() if found is not None}
    form = next((form for form in FORMS if set(form.required) <= given), None)
    kept = {key: found for key, found in value.items() if key in given or form is None or key in form.fields}
    if "images" in kept:
        if "image" in kept:
            raise RecordError(Reason.BAD_FORM, "image and images must not come together, found both")
        kept["image"] = kept.pop("images")
    return kept


def _decoded(text: str, path: _Path) -> str:
    try:
        return base64.b64decode(text, validate=True).decode()
    except (binascii.Error, ValueError) as error:
        raise RecordError(Reason.NOT_UTF8, f"records.{path.setting}: {path.text} must be base64: {error}") from None


def _as_text(found: Any, path: _Path) -> str:
    """Text as it stands, booleans as true and false, numbers in their shortest form: 12.50 as 12.5."""
    if isinstance(found, str):
        return found
    if isinstance(found, int | float):
        return orjson.dumps(found).decode()
    raise RecordError(
        Reason.BAD_TYPE, f"records.{path.setting}: {path.text} must be text or a number, found {json_type(found)}"
    )


def _listed(value: Mapping[str, Any]) -> str:
    """The keys of an object, for a message."""
    keys = ", ".join(map(str, value))
    return f"its keys are {keys[:200]}" if keys else "it has no keys"
