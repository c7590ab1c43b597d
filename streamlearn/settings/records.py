"""Settings of the way from a message's value to a record: framing, envelope, mapping, schema registry.

A path names a value in JSON by the keys that lead to it: `response.choices.0.message`. Digits index a list, from its
end if they are negative. A template is text with paths in braces: `{title}: {body}`.
"""

import re
import string
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from streamlearn.settings.section import RequestSeconds, Section, check_token, server_urls

Role = Literal["system", "developer", "user", "assistant", "tool"]
Ignorable = Literal["ignore", "dead_letter"]
PathList = str | tuple[str, ...]
"""One path or several; pydantic's union of both, checked by `_paths`."""

_ESCAPES = {r"\n": "\n", r"\t": "\t", "\\\\": "\\"}
_ESCAPE = re.compile(r"\\[nt\\]")

WHOLE = "."
"""The path of the value itself."""


def path_keys(path: str) -> tuple[str, ...]:
    r"""Return the keys of a path; a dot that belongs to a key is written `\.`.

    >>> path_keys("choices.0.message"), path_keys(r"a\.b.c")
    (('choices', '0', 'message'), ('a.b', 'c'))

    Raises:
        ValueError: a key is empty.
    """
    keys = tuple(key.replace(r"\.", ".") for key in re.split(r"(?<!\\)\.", path))
    if not all(keys):
        raise ValueError(f"expected keys separated by dots, such as data.question, found {path!r}")
    return keys


def is_template(text: str) -> bool:
    return "{" in text or "}" in text


def braced_names(template: str, *, what: str) -> list[tuple[str, str | None]]:
    """Return the texts of a template, each with the name in braces after it, None after the last; `{{` is a brace.

    `what` says in errors what the names are.

    Raises:
        ValueError: a brace is not closed or holds more than a name, or there is no name.
    """
    try:
        parsed = list(string.Formatter().parse(template))
    except ValueError as error:
        raise ValueError(f"{error} in {template!r}; write {{{{ for a brace") from None
    if any(form or conversion for _, _, form, conversion in parsed) or not any(name for _, name, _, _ in parsed):
        raise ValueError(f"expected text with {what} in braces, such as '{{title}}: {{body}}', found {template!r}")
    parts: list[tuple[str, str | None]] = []
    for text, name, _, _ in parsed:
        before = parts.pop()[0] if parts and parts[-1][1] is None else ""  # an escaped brace ends a part
        parts.append((before + text, name))
    return parts


def template_parts(template: str) -> list[tuple[str, tuple[str, ...] | None]]:
    r"""Return the texts of a template, each with the keys of the path after it, None after the last.

    `{{` is a brace, `\n` a line break, `\t` a tab, `\\` a backslash: YAML leaves them between single quotes.

    >>> template_parts(r"{{{a.b}}} c\n")
    [('{', ('a', 'b')), ('} c\n', None)]

    Raises:
        ValueError: see `braced_names` and `path_keys`.
    """
    return [
        (_ESCAPE.sub(lambda match: _ESCAPES[match[0]], text), None if path is None else path_keys(path))
        for text, path in braced_names(template, what="paths")
    ]


class RegistrySettings(Section):
    """A schema registry that speaks Confluent's API, for Avro and Protobuf; needs the extra registry."""

    url: str
    """Its URL, such as https://registry.example.com:8081."""
    username: str | None = None
    """User name of basic authentication."""
    password_file: Path | None = None
    """File with the password in its first line."""
    token_file: Path | None = None
    """File with a bearer token, instead of a user name."""
    cafile: Path | None = None
    """PEM file of the CAs that may sign its certificate; by default the system's CAs."""
    allow_plaintext: bool = False
    """Whether credentials may be sent over plain HTTP to another machine."""
    timeout_s: RequestSeconds = 5.0
    """Maximum time of a request, seconds; it is made three times before the daemon stops."""

    @field_validator("url")
    @classmethod
    def _one_url(cls, url: str) -> str:
        return server_urls([url])[0]

    @model_validator(mode="after")
    def _credentials(self) -> Self:
        if (self.username is None) != (self.password_file is None):
            raise ValueError("username and password_file belong together: set both or neither")
        if self.username is not None and self.token_file is not None:
            raise ValueError("username and token_file exclude each other: set one of them")
        secret = "password_file" if self.password_file is not None else "token_file"
        if getattr(self, secret) is not None and not self.allow_plaintext:
            check_token(secret, [self.url])
        return self


FORM_FIELDS = {"prompt": "prompt", "completion": "prompt", "text": "text", "messages": "messages"}
"""Field that can be mapped -> the form that it belongs to."""


class RecordsSettings(Section):
    """What a record is made of. Without any key, a message's value is the record."""

    framing: Literal["none", "confluent"] = "none"
    """confluent: five bytes precede the content, 0 and the number of a schema. The content is JSON, or what the schema
    of records.registry says."""
    unwrap: PathList = ()
    r"""Path of the record in an envelope, or several that are tried in order: data (CloudEvents), after (Debezium),
    payload (Kafka Connect). `.` is the value itself."""
    prompt: PathList | None = None
    """Path of the prompt, a template such as '{title}: {body}', or a list of paths whose messages are joined."""
    completion: PathList | None = None
    """The same for the completion."""
    text: PathList | None = None
    """Path or template of plain text."""
    messages: PathList | None = None
    """Path of the chat messages, or a list of paths that are joined: [request.messages,
    response.choices.0.message]."""
    image: PathList | None = None
    """Path of an image or of a list of images, or several paths; beside prompt and completion, or messages."""
    tools: str | None = None
    """Path of the tools that the messages may call."""
    roles: dict[str, Role] = Field(default={})
    """Further names of roles, such as {customer: user}. human, gpt and other usual names are known."""
    unknown_keys: Ignorable = "dead_letter"
    """What happens to a record with other keys than a record has, where nothing is mapped: dead_letter, or ignore the
    keys."""
    label_false: Literal["ignore", "dead_letter", "learn"] = "dead_letter"
    """What happens to a completion or messages with `label: false` (CSV: its text), which KTO learns to avoid. Other
    labels are keys like any other; learn: so is this one."""
    deletions: Ignorable = "ignore"
    """What happens to tombstones and deletions of change data capture: ignore counts them by themselves."""
    registry: RegistrySettings | None = None
    """Schema registry; only with framing: confluent."""

    @field_validator("unwrap", "prompt", "completion", "text", "messages", "image", mode="before")
    @classmethod
    def _paths(cls, value: Any) -> Any:
        paths = [value] if isinstance(value, str) else value
        if value is not None and (not isinstance(paths, list | tuple) or not all(isinstance(p, str) for p in paths)):
            raise ValueError("expected a path or a list of paths")
        return value

    @model_validator(mode="after")
    def _parsable(self) -> Self:
        for name in ("unwrap", *FORM_FIELDS, "image", "tools"):
            value = getattr(self, name)
            for path in [value] if isinstance(value, str) else value or ():
                if not is_template(path):
                    _ = path == WHOLE or path_keys(path)
                elif name not in ("prompt", "completion", "text"):
                    raise ValueError(f"{name} must be a path without braces, found {path!r}")
                elif not isinstance(value, str):
                    raise ValueError(f"{name}: a list holds paths of messages; join texts in one template")
                else:
                    template_parts(path)
        return self

    @model_validator(mode="after")
    def _one_form(self) -> Self:
        forms = {form for name, form in FORM_FIELDS.items() if getattr(self, name) is not None}
        if len(forms) > 1:
            raise ValueError(
                "a record is made of prompt and completion, of messages, or of text; found "
                + " and ".join(name for name in FORM_FIELDS if getattr(self, name) is not None)
            )
        if forms <= {"text"} and (self.image is not None or self.tools is not None):
            raise ValueError("image and tools go with a prompt or messages: map those too")
        if self.registry is not None and self.framing != "confluent":
            raise ValueError("registry needs framing: confluent, which says where the number of the schema stands")
        return self

    @property
    def mapped(self) -> dict[str, tuple[str, ...]]:
        """The fields that are mapped, and their paths or template; empty if the value is the record."""
        fields = {name: getattr(self, name) for name in (*FORM_FIELDS, "image", "tools")}
        return {
            name: (value,) if isinstance(value, str) else value for name, value in fields.items() if value is not None
        }
