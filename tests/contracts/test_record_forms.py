"""Twenty forms of records that topics and fine-tuning files have: each is learned, with the setting beside it."""

import base64
import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from streamlearn.backbone.load import load_tokenizer, outline
from streamlearn.errors import RecordError
from streamlearn.settings import BackboneSettings, RecordsSettings, StreamSettings
from streamlearn.stream.decode import Decoder
from streamlearn.stream.position import TopicPartition
from streamlearn.stream.record import IGNORED, Record
from tests.stream.chat_templates import source

FILE = Path(__file__).with_name("record_forms.jsonl")
FORMS = [json.loads(line) for line in FILE.read_text(encoding="utf-8").splitlines()]


@cache
def tokenizer() -> tuple[Any, int]:
    shape = outline(BackboneSettings())
    return load_tokenizer(shape), shape.config.vocab_size


def decoder(setting: str | None, template: str | None = None) -> Decoder:
    """The daemon's decoder with a setting spelled as in the file: `records.KEY: VALUE` or `records: {...}`."""
    read = yaml.safe_load(setting or "{}")
    values: dict[str, Any] = {}
    for key, value in read.items():
        values |= value if key == "records" else {key.removeprefix("records."): value}
    words, size = tokenizer()
    return Decoder(words, StreamSettings(), size, template=template, records=RecordsSettings(**values))


def record(form: dict[str, Any]) -> Record:
    framed = form.get("value_base64")
    value = base64.b64decode(framed) if framed else json.dumps(form["value"]).encode()
    return Record(TopicPartition("t", 0), 0, value)


def learned(decoder: Decoder, form: dict[str, Any]) -> list[str]:
    """The learned runs of tokens, without control tokens."""
    example = decoder.decode(record(form))
    runs: list[list[int]] = [[]]
    for token in example.labels.tolist():
        if token != IGNORED:
            runs[-1].append(token)
        elif runs[-1]:
            runs.append([])
    return [decoder.text(run).removesuffix("\n") for run in runs if run]


@pytest.mark.parametrize("form", [form for form in FORMS if form["learned"]], ids=lambda form: form["name"])
def test_a_form_is_learned_with_its_setting(form: dict[str, Any]) -> None:
    """What is learned is the text that the file gives, and nothing else; tools need a template that writes them."""
    has_tools = "tools" in form.get("value", {})
    runs = learned(decoder(form.get("setting"), source("qwen2") if has_tools else None), form)
    assert len(runs) == len(form["learned"])
    for run, expected in zip(runs, form["learned"], strict=True):
        if expected == "the rendered call":
            assert json.loads(run.split("\n")[1]) == {"name": "weather", "arguments": {"city": "Bern"}}
        else:
            assert run == expected


def test_tools_that_a_template_does_not_write_are_named() -> None:
    """The bundled backbone's template has none."""
    [form] = [form for form in FORMS if form["name"] == "openai-tools"]
    with pytest.raises(RecordError, match="tools cannot be learned: the chat template does not write them"):
        decoder(None).decode(record(form))


@pytest.mark.parametrize("form", [form for form in FORMS if "setting" in form], ids=lambda form: form["name"])
def test_without_its_setting_a_form_is_a_dead_letter_that_names_it(form: dict[str, Any]) -> None:
    """The message holds the key of `records` that would have it learned."""
    with pytest.raises(RecordError) as refused:
        decoder(None).decode(record(form))
    key = form["setting"].removeprefix("records").lstrip(":. {").partition(":")[0]
    assert key in str(refused.value)


@pytest.mark.parametrize("unknown_keys", ["dead_letter", "ignore"])
def test_a_misspelled_key_is_named_with_the_right_one(unknown_keys: str) -> None:
    """A record without a prompt is never learned, whatever happens to other keys."""
    [form] = [form for form in FORMS if form["name"] == "typo"]
    with pytest.raises(RecordError, match=r"'promt'.* prompt"):
        decoder(f"records.unknown_keys: {unknown_keys}").decode(record(form))
