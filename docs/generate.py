"""Generated files: documentation of settings and metrics, the JSON Schema of settings, the rules for Kubernetes.

python docs/generate.py
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from textwrap import indent
from typing import Annotated, Any, get_args, get_origin

from prometheus_client import CollectorRegistry
from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from streamlearn.board import Board, Clock
from streamlearn.cli.init import SCHEMA
from streamlearn.gateway.upstreams import GatewayMetrics
from streamlearn.jobs.queue import JobQueue
from streamlearn.serve.metrics import registry
from streamlearn.settings.section import section_type
from streamlearn.settings.settings import Settings
from streamlearn.settings.source import KafkaSettings, SourceSettings
from streamlearn.status import Phase, PublicationStatus, Status, TrackerStatus

BEGIN, END = "<!-- reference -->\n", "<!-- /reference -->"
CONFIGS = Path(__file__).parents[1] / "configs"
PROMETHEUS_RULE = CONFIGS / "kubernetes" / "prometheusrule.yaml"
_SUFFIXES = {"counter": "_total", "info": "_info"}


def settings_reference() -> str:
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
    if {str, tuple[str, ...]} <= set(get_args(annotation)):
        return "text or list"
    if {Path, str} <= set(get_args(annotation)):
        return "path or URL"
    if get_origin(annotation) is not None and type(None) in get_args(annotation):
        annotation = next(arg for arg in get_args(annotation) if arg is not type(None))
    if get_origin(annotation) is Annotated:
        annotation = get_args(annotation)[0]
    if str(get_origin(annotation)) == "typing.Literal":
        return ", ".join(f"`{value}`" for value in get_args(annotation))
    name = re.sub(r"[\w.]+\.", "", str(annotation) if get_origin(annotation) else annotation.__name__)
    words = {"str": "text", "int": "integer", "float": "number", "bool": "true or false", "Path": "path"}
    words |= {"SecretStr": "secret", "list": "list", "tuple": "list", "dict": "mapping"}
    return words.get(name.partition("[")[0], name)


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


def settings_schema() -> str:
    """The JSON Schema of a configuration file: draft 7, which editors know best."""
    schema = Settings.model_json_schema()
    sections = schema.pop("$defs")
    for name, section in sections.items():
        _simplify(section, f"#/$defs/{name}/properties", "." if name == KafkaSettings.__name__ else "_")
        if name != SourceSettings.__name__:
            section["type"] = ["object", "null"]  # null: all its keys are commented out
    _simplify(schema, "#/properties", "_")
    schema["patternProperties"]["^x-"] = {"description": "Not read; holds what `<<` merges."}
    head = {"$schema": "http://json-schema.org/draft-07/schema#", "title": "Configuration of streamlearn"}
    return json.dumps({**head, **schema, "$defs": sections}, indent=1) + "\n"


def _simplify(section: dict[str, Any], pointer: str, separator: str) -> None:
    """Leave out what editors do not show, and accept keys with dots and with underscores; complete one of them."""
    properties, spellings = {}, {}
    for key, value in section["properties"].items():
        name = key.replace("_", separator)
        if "$ref" in value:  # a section, whose defaults are at its keys
            value.pop("default", None)
        shown = {word: part for word, part in value.items() if word not in ("title", "format")}
        properties[name] = {word: part for word, part in shown.items() if (word, part) != ("default", None)}
        if "description" in value:
            properties[name]["description"] = " ".join(value["description"].split())
        if "_" in key:
            spellings[f"^{key.replace('_', '[._]')}$"] = {"$ref": f"{pointer}/{name}"}
    section["properties"] = properties
    if spellings:
        section["patternProperties"] = spellings
    if required := [key for key in section.pop("required", ()) if "_" not in key]:
        section["required"] = required
    del section["title"]


def daemon_registry() -> CollectorRegistry:
    """Metrics of a daemon that publishes and is tracked, before it has learned anything: every family, few samples."""
    status = Status(Phase.STARTING, publication=PublicationStatus(), trackers=(TrackerStatus("NAME"),))
    return registry(Board(status, Clock()), JobQueue(1), Clock())


def gateway_registry() -> CollectorRegistry:
    """Metrics of a gateway without model servers."""
    return GatewayMetrics().registry


def families(collectors: CollectorRegistry) -> Iterator[tuple[str, str, tuple[str, ...], str]]:
    """Name as it is queried, type, labels and meaning of every family."""
    for collector in collectors._collector_to_names:  # prometheus_client has no public way to its labels
        for family in collector.collect():
            labels = getattr(family, "_labelnames", ()) or getattr(collector, "_labelnames", ())
            name = family.name + _SUFFIXES.get(family.type, "")
            yield name, "gauge" if family.type == "info" else family.type, tuple(labels), family.documentation


def metrics_reference() -> str:
    """Two Markdown tables: the daemon's metrics, and the gateway's."""
    parts = []
    for title, collectors in (("The daemon", daemon_registry()), ("The gateway", gateway_registry())):
        rows = [
            f"| `{name}` | {kind} | {', '.join(f'`{label}`' for label in labels)} | {meaning} |".replace("|  |", "| |")
            for name, kind, labels, meaning in families(collectors)
        ]
        parts.append("\n".join([f"## {title}", "", "| metric | type | labels | meaning |", "|---|---|---|---|", *rows]))
    return "\n\n".join(parts) + "\n"


def prometheus_rule() -> str:
    """The alert rules, as the resource that the Prometheus operator reads."""
    rules = (CONFIGS / "monitoring" / "alerts.yaml").read_text(encoding="utf-8")
    head = (
        "# Generated from ../monitoring/alerts.yaml by python docs/generate.py\napiVersion: monitoring.coreos.com/v1\n"
    )
    groups = rules[rules.index("groups:\n") :]
    return f"{head}kind: PrometheusRule\nmetadata:\n  name: streamlearn\nspec:\n{indent(groups, '  ')}"


PAGES = {"configuration.md": settings_reference, "metrics.md": metrics_reference}


def block(page: str) -> str:
    """The present text between the markers of a page."""
    return page.partition(BEGIN)[2].partition(END)[0]


if __name__ == "__main__":
    for name, reference in PAGES.items():
        path = Path(__file__).with_name(name)
        text = path.read_text(encoding="utf-8")
        path.write_text(text.replace(BEGIN + block(text) + END, BEGIN + reference() + END), encoding="utf-8")
    SCHEMA.write_text(settings_schema(), encoding="utf-8")
    PROMETHEUS_RULE.write_text(prometheus_rule(), encoding="utf-8")
