"""The init command: a starting configuration from a few answers."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Annotated, Any, TypeVar

import orjson
import typer

from streamlearn.cli.options import load_settings, out
from streamlearn.errors import ConfigError, UsageError

SCHEMA = Path(__file__).parents[1] / "settings" / "schema.json"
"""The JSON Schema of the configuration; `python docs/generate.py` writes it."""
Answer = TypeVar("Answer")


class Form(StrEnum):
    """Forms of a record, by their first field."""

    PROMPT = "prompt"
    MESSAGES = "messages"
    TEXT = "text"
    INPUT_IDS = "input_ids"

    @property
    def fields(self) -> tuple[str, ...]:
        return ("prompt", "completion") if self is Form.PROMPT else (self.value,)


class Kind(StrEnum):
    """Where records come from."""

    FILE = "file"
    TOPIC = "topic"


def init(
    config: Annotated[Path, typer.Argument(help="Configuration to write.", metavar="CONFIG", dir_okay=False)] = Path(
        "streamlearn.yaml"
    ),
    model: Annotated[
        str | None, typer.Option(help="builtin:nano, a folder, or a hub id such as Qwen/Qwen3-0.6B.", metavar="MODEL")
    ] = None,
    revision: Annotated[
        str | None, typer.Option(help="Commit of the hub id. By default the newest.", metavar="COMMIT")
    ] = None,
    topic: Annotated[str | None, typer.Option(help="Kafka topic to learn from.", metavar="NAME")] = None,
    bootstrap_servers: Annotated[
        str | None,
        typer.Option(help="Brokers of the topic; those on other machines must have TLS.", metavar="HOST:PORT"),
    ] = None,
    jsonl: Annotated[
        Path | None, typer.Option(help="JSONL file to learn from, instead of a topic.", metavar="FILE")
    ] = None,
    form: Annotated[
        Form | None,
        typer.Option(
            help="prompt (and completion), messages, text or input_ids. By default that of the file's first record.",
            metavar="FORM",
        ),
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Take the defaults without asking.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Overwrite an existing file.")] = False,
) -> None:
    """Write a starting configuration.

    Asks for the model, the topic or file, and the form of the records, unless an option gives it. Editors with a YAML
    language server complete and explain every key of the file, as its first line names the schema.
    """
    if jsonl is not None and (topic is not None or bootstrap_servers is not None):
        raise UsageError("expected either --topic and --bootstrap-servers, or --jsonl, found both")
    if config.exists() and not force and (yes or not typer.confirm(f"{config} exists. Overwrite it?")):
        raise UsageError(f"{config} exists and was not changed; add --force, or name another file")
    ask, folder = _Questions(skipped=yes), config.parent
    question = "Model (builtin:nano, a folder or a hub id)"
    backbone = ask(question, model, "builtin:nano", lambda name: _backbone(name, revision, folder))
    given = None if jsonl is None else Kind.FILE
    if topic is not None or bootstrap_servers is not None:
        given = Kind.TOPIC
    first: dict[str, Any] = {}
    if ask("Records from a file or a topic", given, Kind.FILE, _one_of(Kind)) is Kind.FILE:
        path = ask("JSONL file", jsonl, "records.jsonl", Path)
        source: dict[str, Any] = {"jsonl": {"path": _relative(path, folder)}}
        first = _first_record(path)
    else:
        servers = ask("Brokers (HOST:PORT)", bootstrap_servers, "localhost:9092", str)
        source = {"kafka": _kafka(servers, ask("Topic", topic, "records", str))}
    _write(config, {"state": "state", "source": source, **_records(ask, form, first), "backbone": backbone})
    load_settings(config)
    out.print(f"{config} is written. Next:", markup=False, highlight=False, soft_wrap=True)
    for command in (f"check-config --config {config} --sample 3", f"run --config {config}"):
        out.print(f"  streamlearn {command}", markup=False, highlight=False, soft_wrap=True)


def schema() -> None:
    """Print the JSON Schema of a configuration file, for editors and other tools.

    It has every key with its type, default and meaning. check-config also checks what depends on several keys.
    """
    print(SCHEMA.read_text(encoding="utf-8"), end="")  # noqa: T201 - JSON must not pass through a renderer


@dataclass(frozen=True)
class _Questions:
    skipped: bool
    """Whether defaults are taken instead."""

    def __call__(self, question: str, given: Any, default: Any, read: Callable[[Any], Answer]) -> Answer:
        """What an option gave, or the answer to a question, as `read` returns it. A wrong answer is asked again.

        Raises:
            ConfigError: `read` refuses what an option gave.
        """
        if given is not None or self.skipped:
            return read(default if given is None else given)

        def checked(text: Any) -> Answer:
            try:
                return read(text)
            except ConfigError as error:
                raise typer.BadParameter(str(error)) from error

        answer: Answer = typer.prompt(question, default=str(default), value_proc=checked)
        return answer


Option = TypeVar("Option", bound=StrEnum)


def _one_of(options: type[Option]) -> Callable[[str], Option]:
    def read(text: str) -> Option:
        if text not in list(options):
            raise ConfigError(f"expected {', '.join(options)}, found {text!r}")
        return options(text)

    return read


def _backbone(name: str, revision: str | None, folder: Path) -> dict[str, str]:
    """The section of a model.

    Raises:
        ConfigError: there is no such model, or its newest commit cannot be read from the hub.
    """
    from streamlearn.model_files import locate, pinned  # noqa: PLC0415 - not needed for --help
    from streamlearn.settings import BackboneSettings  # noqa: PLC0415

    commit = pinned(name, revision)
    locate(BackboneSettings(model=name, revision=commit))
    if commit is not None:
        return {"model": name, "revision": commit}
    if not name.startswith("builtin:"):
        name = _relative(Path(name), folder)
        name = name if name.startswith(("/", "../")) else f"./{name}"
    return {"model": name}


def _kafka(servers: str, topic: str) -> dict[str, Any]:
    from streamlearn.settings.section import is_loopback  # noqa: PLC0415 - not needed for --help

    is_local = all(is_loopback(server.rsplit(":", 1)[0].strip()) for server in servers.split(",") if server.strip())
    protocol = "PLAINTEXT" if is_local else "SSL"
    return {"bootstrap.servers": servers, "topics": [topic], "security.protocol": protocol}


def _records(ask: _Questions, form: Form | None, first: dict[str, Any]) -> dict[str, Any]:
    """The section `records`, if it is needed; `first` is the first record, if there is one."""
    from streamlearn.stream.record import COMPANIONS  # noqa: PLC0415 - not needed for --help

    likely = [known for known in Form if first.keys() >= set(known.fields)]
    if first and not likely:
        out.print(f"The first record has the keys {', '.join(first)}.", markup=False, highlight=False)
    chosen = ask(f"Form of the records ({', '.join(Form)})", form, (likely or [Form.PROMPT])[0], _one_of(Form))
    if chosen in likely:
        has_others = first.keys() - {*chosen.fields, *COMPANIONS}
        return {"records": {"unknown_keys": "ignore"}} if has_others else {}
    if chosen is Form.INPUT_IDS:
        return {}
    names = {field: ask(f"Key of the {field}", None, field, partial(_path, field)) for field in chosen.fields}
    return {"records": names} if names != {field: field for field in names} else {}


def _path(field: str, path: str) -> str:
    """A path or template of section `records`.

    Raises:
        ConfigError: it is neither.
    """
    from pydantic import ValidationError  # noqa: PLC0415 - not needed for --help

    from streamlearn.settings import RecordsSettings  # noqa: PLC0415
    from streamlearn.settings.faults import explain  # noqa: PLC0415

    try:
        RecordsSettings.model_validate({field: path})
    except ValidationError as error:
        raise ConfigError("; ".join(explain(error, RecordsSettings, "records"))) from None
    return path


def _first_record(path: Path) -> dict[str, Any]:
    """The first record of a file; empty if there is none."""
    from connectors.jsonl import read_lines  # noqa: PLC0415 - not needed for --help

    if not path.is_file():
        return {}
    try:
        value = orjson.loads(next(read_lines(path), b"{}"))
    except orjson.JSONDecodeError:
        return {}
    return value if isinstance(value, dict) else {}


def _relative(path: Path, folder: Path) -> str:
    """A path as the configuration in `folder` names it."""
    path = path.expanduser()
    return str(path) if path.is_absolute() else os.path.relpath(path, folder)


def _write(file: Path, tree: dict[str, Any]) -> None:
    import yaml  # noqa: PLC0415 - not needed for --help

    text = (
        f"# yaml-language-server: $schema={SCHEMA.as_uri()}\n"
        "# Relative paths start at this file. Every key is explained by the editor, and by `streamlearn schema`.\n"
        + yaml.safe_dump(tree, sort_keys=False, allow_unicode=True, width=1 << 20)
    )
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{file}: cannot be written: {error.strerror}; name another file") from error
