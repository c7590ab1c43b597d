"""The generated reference: every key once, with its type, its default as YAML has it, and its meaning on one line."""

from typing import Any

from docs.generate import settings_reference as reference
from streamlearn.settings import Settings, section_type

ROWS = {
    cells[1].strip("` "): [cell.strip() for cell in cells[2:-1]]
    for line in reference().splitlines()
    if line.startswith("| `") and (cells := line.split("|"))
}


def keys(model: Any, prefix: str = "") -> list[str]:
    found = list[str]()
    for name, field in model.model_fields.items():
        inner = section_type(field.annotation)
        found += [prefix + name] if inner is None else keys(inner, f"{prefix}{name}.")
    return found


def test_every_key_has_a_row() -> None:
    assert sorted(ROWS) == sorted(keys(Settings))


def test_types_and_defaults_are_those_of_yaml() -> None:
    assert ROWS["seed"][:2] == ["integer", "`0`"]
    assert ROWS["source.jsonl.follow"][:2] == ["true or false", "`false`"]
    assert ROWS["source.kafka.topics"][:2] == ["list", "required"]
    assert ROWS["source.kafka.sasl_plain_password"][:2] == ["secret", "-"]
    assert ROWS["learner.betas"][:2] == ["list", "`[0.9, 0.95]`"]
    assert ROWS["stream.overlong"][:2] == ["`truncate`, `dead_letter`", "`truncate`"]


def test_every_meaning_is_a_sentence() -> None:
    """It starts with a capital, a number or a key's name, and ends with a period."""
    for key, (_, _, meaning) in ROWS.items():
        assert meaning.endswith("."), key
