"""Reading of conversations: messages with the fields that chat templates read, and the tools that may be called."""

import difflib
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args

from streamlearn.errors import Reason, RecordError
from streamlearn.settings import StreamSettings
from streamlearn.settings.records import Role
from streamlearn.stream.parse import json_type, parse_text, read_list, read_string
from streamlearn.stream.template import Message

ROLES = get_args(Role)
MAX_MESSAGES = 256
"""Maximum messages of a record. A template that looks at contents is rendered once for each of them."""
_REASONING_FIELDS = frozenset({"reasoning_content", "reasoning", "thinking"})
_TEXT_FIELDS = ("name", "tool_call_id", *sorted(_REASONING_FIELDS))
FIELDS = ("role", "content", "tool_calls", "weight", *_TEXT_FIELDS)
"""Fields of every message; a template may read others."""


@dataclass(frozen=True)
class Conversation:
    """The messages of a record."""

    messages: list[Message]
    learned: frozenset[int]
    """Indices of the assistant's messages that are learned; the others are context."""
    tools: list[dict[str, Any]] | None = None

    def up_to_last_answer(self) -> "Conversation":
        """Return the messages without those after the last learned one, since nothing there is learned.

        Raises:
            RecordError: no message is learned.
        """
        if not self.learned:
            has_answer = any(message["role"] == "assistant" for message in self.messages)
            found = "only such of weight 0 or in the prompt" if has_answer else "none"
            raise RecordError(Reason.NOTHING_TO_LEARN, f"messages must contain an assistant turn, found {found}")
        return Conversation(self.messages[: max(self.learned) + 1], self.learned, self.tools)


def read_conversation(
    value: Mapping[str, Any], limits: StreamSettings, *, fields: Collection[str], in_parts: bool
) -> Conversation:
    """Read `messages`, or `prompt` and `completion` as lists of messages (a string is one), and `tools`.

    A completion that is the whole conversation, as in preference pairs, repeats the prompt: it is taken once.

    Args:
        value: The record.
        limits: Limits of its strings and lists.
        fields: Names of further fields that the chat template may read.
        in_parts: Whether contents may hold images; otherwise parts are joined to one text.

    Raises:
        RecordError: with the message's index, what must hold and what was found.
    """
    reader = _Reader(limits, fields, in_parts=in_parts)
    if "messages" in value:
        messages = reader.messages(value["messages"], "messages")
        context = 0
    else:
        prompt, completion = value["prompt"], value["completion"]
        if isinstance(prompt, str):
            prompt = [{"role": "user", "content": prompt}]
        if isinstance(completion, str):
            completion = [{"role": "assistant", "content": completion}]
        asked, messages = reader.messages(prompt, "prompt"), reader.messages(completion, "completion")
        start = _repeated(asked, messages)
        context = len(asked) + (start or 0)
        if start is None:
            messages = asked + messages
    if len(messages) > MAX_MESSAGES:
        raise RecordError(Reason.TOO_LARGE, f"a record may hold at most {MAX_MESSAGES} messages, found {len(messages)}")
    weights = [message.pop("weight", 1) for message in messages]
    learned = frozenset(
        i for i, message in enumerate(messages) if i >= context and message["role"] == "assistant" and weights[i]
    )
    return Conversation(messages, learned, reader.tools(value.get("tools")))


@dataclass(frozen=True)
class _Reader:
    limits: StreamSettings
    fields: Collection[str]
    in_parts: bool

    def messages(self, value: object, where: str) -> list[Message]:
        turns = read_list(value, where, self.limits)
        if len(turns) > MAX_MESSAGES:
            raise RecordError(
                Reason.TOO_LARGE, f"a record may hold at most {MAX_MESSAGES} messages, found {len(turns)}"
            )
        return [self._message(turn, f"{where}[{i}]") for i, turn in enumerate(turns)]

    def tools(self, value: object) -> list[dict[str, Any]] | None:
        if isinstance(value, str):  # as Arrow files hold what has no fixed columns
            value = parse_text(value, "tools", self.limits) if value.strip() else None
        if value is None or value == []:
            return None
        tools = read_list(value, "tools", self.limits)
        for number, tool in enumerate(tools):
            if not isinstance(tool, dict):
                raise RecordError(Reason.BAD_TYPE, f"tools[{number}] must be an object, found {json_type(tool)}")
        without: list[dict[str, Any]] = _without_nulls(tools)
        return without

    def _message(self, turn: object, where: str) -> Message:
        if not isinstance(turn, dict):
            raise RecordError(Reason.BAD_TYPE, f"{where} must be an object, found {json_type(turn)}")
        message = self._known(turn, where)
        if "role" not in message:
            raise RecordError(Reason.BAD_FORM, f"{where} must have a role, found none")
        role = read_string(message["role"], f"{where}.role", self.limits)
        if role not in ROLES:
            raise RecordError(
                Reason.BAD_FORM,
                f"{where}.role must be one of {', '.join(ROLES)}, found {role[:80]!r}; see records.roles",
            )
        for name in _TEXT_FIELDS:
            if name in message:
                read_string(message[name], f"{where}.{name}", self.limits)
        calls = read_list(message.pop("tool_calls", []), f"{where}.tool_calls", self.limits)
        if calls and role != "assistant":
            raise RecordError(Reason.BAD_FORM, f"{where}.tool_calls: only a message of the assistant calls tools")
        if calls:
            message["tool_calls"] = [self._call(call, f"{where}.tool_calls[{i}]") for i, call in enumerate(calls)]
        may_be_silent = bool(calls) or not _REASONING_FIELDS.isdisjoint(message)
        message["content"] = self._content(turn, f"{where}.content", may_be_none=may_be_silent)
        self._check_weight(message, f"{where}.weight")
        return message

    def _known(self, turn: Mapping[str, Any], where: str) -> Message:
        """The fields that are not null, which is what Arrow fills in where another row has a field."""
        unknown = [name for name in turn if name not in FIELDS and name not in self.fields]
        for name in unknown:
            if turn[name] not in (None, "", [], {}):
                near = difflib.get_close_matches(str(name), FIELDS, n=1, cutoff=0.0)
                raise RecordError(Reason.BAD_FORM, f"{where}.{str(name)[:80]}: unknown key, did you mean {near[0]}?")
        return {
            name: item for name, item in turn.items() if item is not None and (name in FIELDS or name in self.fields)
        }

    def _check_weight(self, message: Message, where: str) -> None:
        weight = message.get("weight", 0)
        if isinstance(weight, bool) or weight not in (0, 1):
            raise RecordError(
                Reason.BAD_FORM, f"{where} must be 0 (context) or 1 (learned), found {json.dumps(weight)[:80]}"
            )
        if weight == 1 and message["role"] != "assistant":
            raise RecordError(
                Reason.BAD_FORM, f"{where} must be 0 or absent, since only turns of the assistant are learned, found 1"
            )

    def _call(self, call: object, where: str) -> dict[str, Any]:
        if not isinstance(call, dict):
            raise RecordError(Reason.BAD_TYPE, f"{where} must be an object, found {json_type(call)}")
        cleaned: dict[str, Any] = _without_nulls(call)
        function = cleaned.get("function", cleaned)
        if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not function["name"]:
            raise RecordError(Reason.BAD_FORM, f"{where}.function must be an object with a name")
        if isinstance(function.get("arguments"), str):
            self._check_depth(function["arguments"], f"{where}.function.arguments")
        return {"type": "function", **cleaned} if "function" in cleaned else cleaned

    def _check_depth(self, text: str, where: str) -> None:
        """Refuse JSON text that is nested too deeply; whether text must be JSON is for the template to say."""
        try:
            parse_text(text, where, self.limits)
        except RecordError as error:
            if error.reason is Reason.TOO_DEEP:
                raise

    def _content(self, turn: Mapping[str, Any], where: str, *, may_be_none: bool) -> str | list[dict[str, str]] | None:
        content = turn.get("content")
        if content is None or content == []:
            if may_be_none:
                return None
            found = "none" if "content" not in turn else "null" if content is None else "an empty list"
            raise RecordError(
                Reason.BAD_TYPE if "content" in turn else Reason.BAD_FORM,
                f"{where} must be a string or a list of parts, found {found}; only a message with tool_calls or "
                "reasoning_content may have none",
            )
        if not isinstance(content, list):
            return read_string(content, where, self.limits)
        parts = [self._part(part, f"{where}[{i}]") for i, part in enumerate(read_list(content, where, self.limits))]
        return parts if self.in_parts else "".join(part["text"] for part in parts)

    def _part(self, part: object, where: str) -> dict[str, str]:
        known = {key: item for key, item in part.items() if item is not None} if isinstance(part, dict) else part
        match known:
            case {"type": "text", "text": text, **further} if not further:
                return {"type": "text", "text": read_string(text, f"{where}.text", self.limits)}
            case {"type": "image", **further} if not further:
                if not self.in_parts:
                    raise RecordError(
                        Reason.BAD_FORM,
                        f"{where}: this backbone reads only text; set backbone.model to an image-text model",
                    )
                return {"type": "image"}
        raise RecordError(Reason.BAD_FORM, f'{where} must be {{"type": "image"}} or {{"type": "text", "text": ...}}')


def _repeated(prompt: Sequence[Message], completion: Sequence[Message]) -> int | None:
    """Where the completion repeats the prompt: at its start, or after its system messages; None if it does not."""
    turns = [_comparable(message) for message in completion]
    asked = [_comparable(message) for message in prompt]
    is_system = [message["role"] in ("system", "developer") for message in completion]
    starts = (0, [*is_system, False].index(False))
    return next((start for start in starts if asked and turns[start : start + len(asked)] == asked), None)


def _comparable(message: Message) -> Message:
    """A message without its weight, its text as one part."""
    content = message.get("content")
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    return {name: item for name, item in message.items() if name != "weight"} | {"content": parts}


def _without_nulls(value: Any) -> Any:
    """A tree without null fields, which Arrow adds so that all rows have the same ones."""
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_without_nulls(item) for item in value]
    return value
