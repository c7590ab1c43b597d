"""The JSON Schema of a configuration: what editors complete, and what they mark as wrong."""

from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest
import yaml

from streamlearn.cli.init import SCHEMA
from streamlearn.settings import load

CONFIGS = sorted((Path(__file__).parents[2] / "configs").glob("*.yaml"))
KAFKA = {"bootstrap.servers": "localhost:9092", "topics": ["t"], "security.protocol": "PLAINTEXT"}


@pytest.fixture(scope="module")
def validator() -> jsonschema_rs.Draft7Validator:
    return jsonschema_rs.Draft7Validator(SCHEMA.read_text(encoding="utf-8"))


def tree(**sections: Any) -> dict[str, Any]:
    return {"source": {"kafka": KAFKA}, **sections}


@pytest.mark.parametrize("config", CONFIGS, ids=lambda path: path.name)
def test_every_configuration_that_ships_is_valid(config: Path, validator: jsonschema_rs.Draft7Validator) -> None:
    validator.validate(yaml.safe_load(config.read_text(encoding="utf-8")))


@pytest.mark.parametrize(
    "valid",
    [
        tree(),
        tree(stream={"max_tokens": 64, "linger_s": None}, shift={"max.regimes": 4}),
        {
            "source": {
                "kafka": {"bootstrap_servers": "localhost:9092", "topics": "a, b", "security.protocol": "PLAINTEXT"}
            }
        },
        tree(publish={"folder": "out"}, records={"prompt": ["a", "b"]}),
        tree(stream=None, publish=None, **{"x-mine": {"a": 1}}),
    ],
)
def test_what_loads_is_valid(valid: dict[str, Any], tmp_path: Path, validator: jsonschema_rs.Draft7Validator) -> None:
    """Keys with dots or underscores, absent values, and a list as one text."""
    validator.validate(valid)
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(valid), encoding="utf-8")
    load(file)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({}, '"source" is a required property'),
        (tree(straem={}), "'straem' was unexpected"),
        (tree(shift={"max_regime": 3}), "'max_regime' was unexpected"),
        (tree(shift={"max.regimes": 1}), "1 is less than the minimum of 2"),
        (tree(backbone={"dtype": "int4"}), '"int4" is not one of'),
    ],
)
def test_what_is_refused_is_marked(
    wrong: dict[str, Any], message: str, validator: jsonschema_rs.Draft7Validator
) -> None:
    with pytest.raises(jsonschema_rs.ValidationError, match=message):
        validator.validate(wrong)


def test_every_key_has_a_meaning(validator: jsonschema_rs.Draft7Validator) -> None:
    """Shown by the editor: its own, or that of its section."""
    del validator
    schema = yaml.safe_load(SCHEMA.read_text(encoding="utf-8"))
    sections = schema["$defs"]
    for section in (schema, *sections.values()):
        for key, value in section["properties"].items():
            name = value.get("$ref", "").rpartition("/")[2]
            assert value.get("description") or sections[name]["description"], key
    assert schema["$defs"]["KafkaSettings"]["properties"].keys() >= {"bootstrap.servers", "topics.pattern"}
