"""The configuration reference, generated from the settings' docstrings.

python -m streamlearn.settings.reference
"""

import re
import sys
from collections.abc import Iterator
from typing import Annotated, Any, get_args, get_origin

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from streamlearn.settings.section import section_type
from streamlearn.settings.settings import Settings


def reference() -> str:
    """Every setting, as one Markdown table per section."""
    parts = []
    for title, model in _sections(Settings, ""):
        rows = [
            f"| `{title}{name}` | {_type(field.annotation)} | {_default(field)} | {_meaning(field)} |"
            for name, field in model.model_fields.items()
            if section_type(field.annotation) is None
        ]
        if rows:
            head = f"**{title.rstrip('.')}**: {_first_line(model)}" if title else "**top level**"
            parts.append("\n".join([head, "", "| key | value | default | meaning |", "|---|---|---|---|", *rows]))
    return "\n\n".join(parts) + "\n"


def _sections(model: type[BaseModel], prefix: str) -> Iterator[tuple[str, type[BaseModel]]]:
    yield prefix, model
    for name, field in model.model_fields.items():
        inner = section_type(field.annotation)
        if inner is not None:
            yield from _sections(inner, f"{prefix}{name}.")


def _first_line(model: type[BaseModel]) -> str:
    return (model.__doc__ or "").strip().splitlines()[0]


def _type(annotation: Any) -> str:
    if get_origin(annotation) is not None and type(None) in get_args(annotation):
        annotation = next(arg for arg in get_args(annotation) if arg is not type(None))
    if get_origin(annotation) is Annotated:
        annotation = get_args(annotation)[0]
    if str(get_origin(annotation)) == "typing.Literal":
        return ", ".join(f"`{value}`" for value in get_args(annotation))
    name = re.sub(r"[\w.]+\.", "", str(annotation) if get_origin(annotation) else annotation.__name__)
    words = {"str": "text", "int": "integer", "float": "number", "bool": "true or false", "Path": "path"}
    return words.get(name, "list" if name.startswith("tuple") else "secret" if name == "SecretStr" else name)


def _default(field: Any) -> str:
    if field.default is PydanticUndefined:
        return "required"
    if field.default is None:
        return "-"
    if isinstance(field.default, bool):
        return f"`{str(field.default).lower()}`"  # as YAML has it
    return f"`{list(field.default) if isinstance(field.default, tuple) else field.default}`"


def _meaning(field: Any) -> str:
    return " ".join(field.description.split())  # a Markdown row must be one line


if __name__ == "__main__":
    sys.stdout.write(reference())
