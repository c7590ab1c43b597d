"""Values of a configuration: plain YAML, and the environment variables that override it.

A variable is named by the path of its setting: STREAMLEARN_SOURCE__KAFKA__TOPICS. Others have the same prefix:
Kubernetes sets STREAMLEARN_PORT=tcp://... in every pod next to a Service `streamlearn`. A variable that cannot be a
misspelt setting is ignored.
"""

import difflib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Self, get_args, get_origin

import yaml
from pydantic import BaseModel, SecretStr

from streamlearn.errors import ConfigError
from streamlearn.settings.section import section_type

ENV_PREFIX = "STREAMLEARN_"
_SERVICE_LINK = re.compile(r"(\w+_)?(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)")
"""What the kubelet sets for each Service of a namespace, besides NAME_PORT."""
_SERVICE_URL = re.compile(r"(tcp|udp|sctp)://")
"""The value of NAME_PORT."""
_NEAR_WORD, _NEAR_PATH, _NEAR_NAME = 0.5, 0.7, 0.8
"""Similarity (difflib) from which a word beside `__`, a whole name with `__` and one without are misspelt."""

Keys = tuple[str, ...]
"""The keys that lead to a setting."""


def read_yaml(text: str) -> Any:
    """Read plain YAML in which dots in keys become underscores and a duplicate key is an error.

    Raises:
        ValueError: it is not; the message has the place and never quotes the text, which may be a secret.
    """
    try:
        return yaml.load(text, Loader=_StrictLoader)  # noqa: S506, TID251 - a SafeLoader
    except yaml.YAMLError as error:
        raise ValueError(_fault(error)) from None  # the error itself quotes the line
    except RecursionError:
        raise ValueError("nested too deeply") from None


@dataclass(frozen=True)
class Environment:
    """The settings in the environment."""

    values: Mapping[str, Any]
    """By section, as in a file."""
    variables: Mapping[Keys, str]
    """The variable of each setting."""

    @classmethod
    def read(cls, environ: Mapping[str, str], model: type[BaseModel]) -> Self:
        """Read the variables of a model's settings.

        Raises:
            ConfigError: a name is a misspelt setting, or a value is not valid YAML; names every such variable.
        """
        values: dict[str, Any] = {}
        variables: dict[Keys, str] = {}
        faults = []
        for name in sorted(filter(lambda name: name.upper().startswith(ENV_PREFIX), environ), key=_depth):
            path = tuple(name[len(ENV_PREFIX) :].lower().split("__"))
            fields = getattr(section_at(model, path[:-1]), "model_fields", {})
            if path[-1] not in fields:
                if fault := _misspelt(path, environ[name], model):
                    faults.append(f"{name}: unknown environment variable, {fault}")
                continue
            try:
                value = _parsed(environ[name], fields[path[-1]].annotation)
            except ValueError as error:
                faults.append(f"environment variable {name}: not valid YAML: {error}")
                continue
            for key in reversed(path):
                value = {key: value}
            values = merged(values, value)
            variables |= dict.fromkeys(_leaves(value), name)
        if faults:
            raise ConfigError("\n".join(faults))
        return cls(values, variables)

    def origin(self, path: Keys, message: str, file: str) -> str:
        """Where a wrong setting comes from: its variable, or `file`, with the variables that `message` is about."""
        own = [name for leaf, name in self.variables.items() if leaf == path[: len(leaf)]]
        if own:
            return f"environment variable {own[-1]}"
        words = {*re.findall(r"\w+", message), *re.findall(r"\w+", message.replace(".", "_"))}
        inside = [name for leaf, name in self.variables.items() if leaf[: len(path)] == path and leaf[-1] in words]
        return " with ".join(filter(None, [file, " and ".join(f"environment variable {name}" for name in inside)]))


def merged(values: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """The values with those of `over` in their place, section by section."""
    both = dict(values)
    for key, value in over.items():
        before = both.get(key)
        both[key] = merged(before, value) if isinstance(value, dict) and isinstance(before, dict) else value
    return both


def section_at(model: type[BaseModel], path: Keys) -> type[BaseModel] | None:
    """The section that a path leads to, if it leads to one."""
    for name in path:
        field = model.model_fields.get(name)
        inner = section_type(field.annotation) if field else None
        if inner is None:
            return None
        model = inner
    return model


def _depth(name: str) -> tuple[int, str]:
    """A section's own variable comes before those of its keys, which override it."""
    return name.count("__"), name


def _leaves(values: Mapping[str, Any]) -> Iterator[Keys]:
    for key, value in values.items():
        if isinstance(value, dict) and value:
            yield from ((key, *path) for path in _leaves(value))
        else:
            yield (key,)


def _parsed(text: str, annotation: Any) -> Any:
    """The value of a variable: as YAML where it is a section, a mapping or a list, else the text itself.

    `null` is no value, where a setting may have none; a password may be `null`.

    Raises:
        ValueError: not valid YAML.
    """
    kinds = {get_origin(kind) or kind for kind in (annotation, *get_args(annotation))}
    if text == "null" and type(None) in kinds and SecretStr not in kinds:
        return None
    is_list = tuple in kinds and text.lstrip().startswith("[")
    return read_yaml(text) if is_list or dict in kinds or section_type(annotation) is not None else text


def _misspelt(path: Keys, value: str, model: type[BaseModel]) -> str | None:
    """What a variable that is no setting may have meant; None if it is somebody else's."""
    text = "__".join(path)
    if path[0] not in model.model_fields and _is_service_link(text.upper(), value):
        return None
    for depth, word in enumerate(path if len(path) > 1 or not text else ()):
        known = list(getattr(section_at(model, path[:depth]), "model_fields", {}))
        if word in known:
            continue
        near = difflib.get_close_matches(word, known, n=1, cutoff=_NEAR_WORD)
        if near:
            return _meant((*path[:depth], near[0], *path[depth + 1 :]))
        if depth or not text:
            return f"known keys: {', '.join(known) or 'none'}"
        break
    names = {"_".join(known): known for known in _paths(model)}
    single = re.sub("_+", "_", text)
    near = difflib.get_close_matches(single, names, n=1, cutoff=_NEAR_NAME if len(path) == 1 else _NEAR_PATH)
    return _meant(names[near[0]]) if near else None


def _meant(path: Keys) -> str:
    return f"did you mean {ENV_PREFIX}{'__'.join(path).upper()}?"


def _is_service_link(name: str, value: str) -> bool:
    is_port = name == "PORT" or name.endswith("_PORT")
    return _SERVICE_LINK.fullmatch(name) is not None or (is_port and _SERVICE_URL.match(value) is not None)


def _paths(model: type[BaseModel]) -> Iterator[Keys]:
    """Every section and setting."""
    for name, field in model.model_fields.items():
        yield (name,)
        inner = section_type(field.annotation)
        if inner is not None:
            yield from ((name, *path) for path in _paths(inner))


class _StrictLoader(yaml.SafeLoader):
    """Plain YAML in which dots in keys become underscores and a duplicate key is an error. `<<` merges mappings."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        """Compose a mapping, refusing duplicate keys, before other mappings are merged into it."""
        node: yaml.MappingNode = super().compose_mapping_node(anchor)
        seen: dict[str, yaml.Mark] = {}
        for key_node, _ in node.value:
            key = str(key_node.value).replace(".", "_")
            if key in seen:
                raise yaml.MarkedYAMLError(
                    f"first {key}", seen[key], f"duplicate key {key}; keep one", key_node.start_mark
                )
            seen[key] = key_node.start_mark
        return node

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Build a mapping; its own keys come after merged ones, and replace them."""
        values: dict[Any, Any] = super().construct_mapping(node, deep=deep)
        return {str(key).replace(".", "_"): value for key, value in values.items()}


def _fault(error: yaml.YAMLError) -> str:
    """The fault and its place, without quoting the text."""
    if not isinstance(error, yaml.MarkedYAMLError):
        return str(error)
    steps = ((error.context, error.context_mark), (error.problem, error.problem_mark))
    return ", ".join(
        re.sub(r"'.+'|\".+\"", "...", text) + (f" in line {mark.line + 1}, column {mark.column + 1}" if mark else "")
        for text, mark in steps
        if text
    )
