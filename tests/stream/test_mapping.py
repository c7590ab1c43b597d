"""From a message's value to the canonical record: framing, envelopes, deletions, paths and templates, unknown keys."""

import base64
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from streamlearn.errors import Reason, RecordError
from streamlearn.settings import RecordsSettings, StreamSettings
from streamlearn.stream.mapping import RecordMapping

PAIR = {"prompt": "Open?", "completion": " No."}
TURNS = [{"role": "user", "content": "Open?"}, {"role": "assistant", "content": "No."}]
ROW = {"id": 4, "question": "Open?", "answer": "No."}
CHANGE = {"before": None, "after": ROW, "op": "c", "source": {}}


def canonical(value: Any, **settings: Any) -> Any:
    """What a decoder gets of a value, from its bytes."""
    mapping = RecordMapping(RecordsSettings(**settings), StreamSettings())
    return mapping.canonical(mapping.parse(value if isinstance(value, bytes) else json.dumps(value).encode()))


def connect(payload: Any) -> dict[str, Any]:
    return {"schema": {"type": "struct"}, "payload": payload}


def event(**data: Any) -> dict[str, Any]:
    return {"specversion": "1.0", "type": "t", "source": "/s", "id": "1", **data}


QUESTION = {"prompt": "question", "completion": "answer"}
MADE: dict[str, tuple[Any, dict[str, Any], Any]] = {
    "a path through lists, from the end": (
        {"a": [{"b": 1}, {"b": "x"}]}, {"text": "a.-1.b"}, {"text": "x"}),
    "a key with a dot": ({"a.b": {"c": "x"}}, {"text": r"a\.b.c"}, {"text": "x"}),
    "digits as a key of an object": ({"0": "x"}, {"text": "0"}, {"text": "x"}),
    "a number and a boolean": (
        {"q": 0.1, "a": True}, {"prompt": "q", "completion": "a"}, {"prompt": "0.1", "completion": "true"}),
    "numbers in their shortest form": (
        b'{"a": 12.50, "b": 1E5}', {"text": "{a} {b}"}, {"text": "12.5 100000.0"}),
    "a template with braces, a path and a line break": (
        {"a": {"b": "x"}, "c": 2}, {"text": r"{{{a.b}}}\n{c}"}, {"text": "{x}\n2"}),
    "a default beside a mapping": (
        {"prompt": TURNS[:1], "chosen": TURNS[1:]}, {"completion": "chosen"},
        {"prompt": TURNS[:1], "completion": TURNS[1:]}),
    "messages of several paths": (
        {"in": {"messages": TURNS[:1]}, "out": [{"message": TURNS[1]}]}, {"messages": ["in.messages", "out.0.message"]},
        {"messages": TURNS}),
    "JSON text on the way": ({"body": json.dumps({"q": "x"})}, {"text": "body.q"}, {"text": "x"}),
    "messages as JSON text": ({"chat": json.dumps(TURNS)}, {"messages": "chat"}, {"messages": TURNS}),
    "messages as JSON text in their own field": ({"messages": json.dumps(TURNS)}, {}, {"messages": TURNS}),
    "images of several paths, one of them absent": (
        {**ROW, "front": "aa", "more": ["bb"]}, {**QUESTION, "image": ["front", "back", "more"]},
        {"prompt": "Open?", "completion": "No.", "image": ["aa", "bb"]}),
    "images under their other name": ({**PAIR, "images": ["aa"]}, {}, {**PAIR, "image": ["aa"]}),
    "fields of other forms that are null": ({**PAIR, "text": None, "messages": None, "image": None}, {}, PAIR),
    "from and value": (
        {"messages": [{"from": "human", "value": "Open?"}, {"from": "gpt", "value": "No."}]}, {}, {"messages": TURNS}),
    "from and value among null fields": (
        {"messages": [{"from": "human", "value": "Open?", "role": None, "content": None}, TURNS[1]]}, {},
        {"messages": TURNS}),
    "roles with names of their own": (
        {"messages": [{"role": "kunde", "content": "Open?"}, {"role": "model", "content": "No."}]},
        {"roles": {"kunde": "user"}}, {"messages": TURNS}),
    "CloudEvents": (event(data=PAIR), {"unwrap": "data"}, PAIR),
    "CloudEvents with JSON text": (event(data=json.dumps(PAIR)), {"unwrap": "data"}, PAIR),
    "CloudEvents in base64": (
        event(data_base64=base64.b64encode(json.dumps(PAIR).encode()).decode()), {"unwrap": ["data"]}, PAIR),
    "Debezium": (CHANGE, {"unwrap": "after", **QUESTION}, {"prompt": "Open?", "completion": "No."}),
    "Debezium within Connect": (
        connect(CHANGE), {"unwrap": ["after"], **QUESTION}, {"prompt": "Open?", "completion": "No."}),
    "Debezium of MongoDB": (
        {**CHANGE, "after": json.dumps(ROW)}, {"unwrap": "after", **QUESTION},
        {"prompt": "Open?", "completion": "No."}),
    "Debezium's flattened row": (
        {**ROW, "__deleted": "false", "__op": "u"}, QUESTION, {"prompt": "Open?", "completion": "No."}),
    "Connect": (connect(PAIR), {"unwrap": "payload"}, PAIR),
    "the first path that is there": (event(data=PAIR), {"unwrap": ["after", "data"]}, PAIR),
    "bare records among enveloped ones": (PAIR, {"unwrap": ["data", "."]}, PAIR),
    "Confluent's framing": (b"\0\0\0\0\7" + json.dumps(PAIR).encode(), {"framing": "confluent"}, PAIR),
    "unknown keys left out": ({**PAIR, "id": 1, "lang": "en"}, {"unknown_keys": "ignore"}, PAIR),
    "the form that is complete": (
        {"prompt": "Open?", "prompt_id": "x", "messages": TURNS}, {"unknown_keys": "ignore"}, {"messages": TURNS}),
    "a completion that is good": ({**PAIR, "label": True}, {}, PAIR),
    "a completion that is good, among ignored keys": (
        {**PAIR, "label": True, "id": 1}, {"unknown_keys": "ignore"}, PAIR),
    "a class beside an answer": ({**PAIR, "label": 0, "id": 1}, {"unknown_keys": "ignore"}, PAIR),
    "a class beside a mapped answer": (
        {**ROW, "label": "billing"}, QUESTION, {"prompt": "Open?", "completion": "No."}),
    "a class of a text": ({"text": "It rains.", "label": False}, {"unknown_keys": "ignore"}, {"text": "It rains."}),
    "a class of a mapped text": ({"body": "It rains.", "label": False}, {"text": "body"}, {"text": "It rains."}),
    "a good completion of CSV, mapped": ({**ROW, "label": "True"}, QUESTION, {"prompt": "Open?", "completion": "No."}),
    "a label that is learned": (
        {"text": "It rains.", "label": False}, {"prompt": "text", "completion": "label"},
        {"prompt": "It rains.", "completion": "false"}),
    "a label in a template": ({"text": "It rains.", "label": 3}, {"text": "{text} {label}"}, {"text": "It rains. 3"}),
    "a label that is not KTO's": (
        {**ROW, "label": False}, {**QUESTION, "label_false": "learn"}, {"prompt": "Open?", "completion": "No."}),
    "an ignored label that is not KTO's": (
        {**PAIR, "label": False}, {"unknown_keys": "ignore", "label_false": "learn"}, PAIR),
}  # fmt: skip


@pytest.mark.parametrize(("value", "settings", "record"), MADE.values(), ids=MADE.keys())
def test_a_value_becomes_the_canonical_record(value: Any, settings: dict[str, Any], record: Any) -> None:
    """With the settings beside it."""
    assert canonical(value, **settings) == record


REFUSED: dict[str, tuple[Any, dict[str, Any], Reason, str]] = {
    "a misspelled path": (
        ROW,
        {"text": "qestion"},
        Reason.BAD_FORM,
        "records.text: qestion must exist, found no 'qestion', did you mean 'question'",
    ),
    "a path to null": ({"question": None}, {"text": "question"}, Reason.BAD_FORM, "must have a value, found null"),
    "a path into a list that is too short": (
        {"a": [1]},
        {"text": "a.3"},
        Reason.BAD_FORM,
        "no '3' in a, which is 1 items",
    ),
    "a path that only looks like an index": ({"a": [1]}, {"text": "a.--1"}, Reason.BAD_FORM, "no '--1' in a"),
    "an index beyond any list": ({"a": [1]}, {"text": "a." + "9" * 30}, Reason.BAD_FORM, "in a, which is 1 items"),
    "a path through null": ({"a": None}, {"text": "a.b.c"}, Reason.BAD_FORM, "no 'b' in a, which is null"),
    "one of several paths to null": (
        {"a": TURNS, "b": None},
        {"messages": ["a", "b"]},
        Reason.BAD_FORM,
        "b must have a value, found null",
    ),
    "a path through a string": ({"a": "x"}, {"text": "a.b"}, Reason.BAD_FORM, "no 'b' in a, which is a string"),
    "an object where text is needed": (
        {"a": {}},
        {"text": "a"},
        Reason.BAD_TYPE,
        "a must be text or a number, found an object",
    ),
    "a list of texts": (
        ROW,
        {"prompt": ["question", "answer"], "completion": "answer"},
        Reason.BAD_TYPE,
        "join texts in a template",
    ),
    "no envelope": (
        PAIR,
        {"unwrap": "data"},
        Reason.BAD_FORM,
        "records.unwrap: a value must have data, found its keys are prompt",
    ),
    "an envelope without its record": (
        {"specversion": "1.0", "id": "e1"},
        {"unwrap": "data"},
        Reason.BAD_FORM,
        "records.unwrap: a value must have data, found its keys are specversion",
    ),
    "an envelope in another": (
        event(data={"op": "c", "after": PAIR}),
        {"unwrap": ["data", "after"]},
        Reason.BAD_FORM,
        "a Debezium envelope: set records.unwrap: data.after",
    ),
    "an envelope with other text": (
        event(data="hello"),
        {"unwrap": "data"},
        Reason.NOT_JSON,
        "records.unwrap: data must be JSON",
    ),
    "an envelope with a number": (event(data=7), {"unwrap": "data"}, Reason.BAD_FORM, "found a number"),
    "an envelope with JSON text of null": (event(data="null"), {"unwrap": "data"}, Reason.BAD_FORM, "found null"),
    "an envelope with a list": (event(data=[1]), {"unwrap": "data"}, Reason.BAD_FORM, "found a list"),
    "an envelope with bad base64": (event(data_base64="%"), {"unwrap": "data"}, Reason.NOT_UTF8, "base64"),
    "JSON text with a repeated key": (
        event(data='{"text": "a", "text": "b"}'),
        {"unwrap": "data"},
        Reason.DUPLICATE_KEY,
        "'text' twice",
    ),
    "unframed": (PAIR, {"framing": "confluent"}, Reason.BAD_FRAMING, "found JSON: set records.framing: none"),
    "Avro without a registry": (
        b"\0\0\0\0\7\x06abc",
        {"framing": "confluent"},
        Reason.BAD_FRAMING,
        "schema number 7 .* records.registry.url",
    ),
    "framed, unset": (b'\0\0\0\0\7{"text": "a"}', {}, Reason.NOT_JSON, "set records.framing: confluent$"),
    "framed Avro, unset": (
        b"\0\0\0\0\7\x06abc",
        {},
        Reason.NOT_JSON,
        "records.framing: confluent and records.registry",
    ),
    "Connect, unset": (connect(ROW), {}, Reason.BAD_FORM, "'schema' and 'payload'.* set records.unwrap: payload"),
    "CloudEvents, unset": (event(data=PAIR), {"unknown_keys": "ignore"}, Reason.BAD_FORM, "set records.unwrap: data"),
    "Debezium, unset": (CHANGE, {}, Reason.BAD_FORM, "set records.unwrap: after"),
    "a misspelled field": (
        {"promt": "a", "completion": "b"},
        {},
        Reason.BAD_FORM,
        "'promt': unknown key, did you mean prompt",
    ),
    "a misspelled field among ignored keys": (
        {"id": 1, "Mesages": TURNS},
        {"unknown_keys": "ignore"},
        Reason.BAD_FORM,
        "'Mesages': unknown key, did you mean messages",
    ),
    "a misspelled optional field among ignored keys": (
        {"input_ids": [1, 2], "lables": [-100, 2]},
        {"unknown_keys": "ignore"},
        Reason.BAD_FORM,
        "did you mean labels",
    ),
    "Alpaca, mapped": (
        {"instruction": "Open?", "output": "No."},
        {"prompt": "{instruction} {input}", "completion": "output"},
        Reason.BAD_FORM,
        "^records.prompt: input must exist, found no 'input'; its keys are instruction, output$",
    ),
    "Alpaca without input, unset": (
        {"instruction": "Open?", "output": "No."},
        {},
        Reason.BAD_FORM,
        r"set records.prompt: '{instruction}\\n\\n' and",
    ),
    "a pair of conversations without its prompt, mapped": (
        {"chosen": TURNS, "rejected": TURNS},
        {"completion": "chosen"},
        Reason.BAD_FORM,
        "^records.prompt: prompt must exist, found no 'prompt'; its keys are chosen, rejected; chosen is a "
        "conversation with its question: set records.messages: chosen instead$",
    ),
    "a pair of texts without its prompt, mapped": (
        {"question": "Open?", "chosen": "No.", "rejected": "Yes."},
        {"completion": "chosen"},
        Reason.BAD_FORM,
        "^records.prompt: prompt must exist, found no 'prompt'; its keys are question, chosen, rejected$",
    ),
    "a pair without its prompt, unset": (
        {"chosen": TURNS, "rejected": TURNS},
        {},
        Reason.BAD_FORM,
        "set records.messages: chosen if",
    ),
    "a pair, unset": (
        {"prompt": "Open?", "chosen": "No.", "rejected": "Yes."},
        {},
        Reason.BAD_FORM,
        "set records.completion: chosen$",
    ),
    "a logged request, mapped": (
        {"request": {"messages": TURNS}, "response": {}},
        {"messages": ["input.messages"]},
        Reason.BAD_FORM,
        "^records.messages: input.messages must exist, found no 'input'; its keys are request, response$",
    ),
    "an event without its data among bare records": (
        {"specversion": "1.0", "id": "e1"},
        {"unwrap": ["data", "."], **QUESTION},
        Reason.BAD_FORM,
        "^records.prompt: question must exist, found no 'question'; its keys are specversion, id$",
    ),
    "Debezium, mapped but not unwrapped": (CHANGE, QUESTION, Reason.BAD_FORM, "set records.unwrap: after"),
    "both names of images": ({**PAIR, "image": "a", "images": ["b"]}, {}, Reason.BAD_FORM, "must not come together"),
    "a class where keys are not ignored": ({**PAIR, "label": 2}, {}, Reason.BAD_FORM, "'label': unknown key"),
    "a text's label where keys are not ignored": (
        {"text": "It rains.", "label": False},
        {},
        Reason.BAD_FORM,
        "'label': unknown key",
    ),
    "a label that is a key like any other": (
        {**PAIR, "label": False},
        {"label_false": "learn"},
        Reason.BAD_FORM,
        "'label': unknown key",
    ),
}


@pytest.mark.parametrize(("value", "settings", "reason", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_a_refusal_names_what_was_found_and_what_to_set(
    value: Any, settings: dict[str, Any], reason: Reason, message: str
) -> None:
    """The nearest key, or the setting that the value needs."""
    with pytest.raises(RecordError, match=message) as refused:
        canonical(value, **settings)
    assert refused.value.reason is reason
    assert len(str(refused.value)) < 600


AVOIDED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "prompt and completion": (PAIR, {}),
    "among ignored keys": ({**PAIR, "id": 1}, {"unknown_keys": "ignore"}),
    "messages": ({"messages": TURNS}, {}),
    "mapped prompt and completion": (ROW, QUESTION),
    "a template": (ROW, {"prompt": "{question} ", "completion": "{answer}."}),
    "mapped messages": ({"conversations": TURNS}, {"messages": "conversations"}),
    "a completion beside its default": ({"prompt": "Open?", "chosen": "No."}, {"completion": "chosen"}),
}


@pytest.mark.parametrize("label", [False, "False", "false"])
@pytest.mark.parametrize(("value", "settings"), AVOIDED.values(), ids=AVOIDED.keys())
def test_an_answer_with_a_false_label_is_one_to_avoid(
    value: dict[str, Any], settings: dict[str, Any], label: object
) -> None:
    """As JSON has it and as CSV does, in the record, in its envelope, and beside what a path leads to."""
    labeled = {**value, "label": label}
    cases: list[tuple[Any, dict[str, Any]]] = [(labeled, settings), ({"data": labeled}, {**settings, "unwrap": "data"})]
    if "{" not in settings.get("completion", "{"):
        nested = {name: f"data.{path}" for name, path in {"prompt": "prompt", **settings}.items()}
        cases.append(({"data": labeled}, nested))
    for record, set_ in cases:
        with pytest.raises(RecordError, match="label_false: ignore leaves such records out") as refused:
            canonical(record, **set_)
        assert refused.value.reason is Reason.LABEL_FALSE
        ignoring = RecordMapping(RecordsSettings(**set_, label_false="ignore"), StreamSettings())
        assert Reason.LABEL_FALSE in ignoring.ignored


DELETIONS = {
    "tombstone": None,
    "delete": {**CHANGE, "after": None, "op": "d"},
    "delete within Connect": connect({**CHANGE, "after": None, "op": "d"}),
    "truncate": {"op": "t", "source": {}, "ts_ms": 1},
    "rewritten row": {**ROW, "__deleted": "true"},
    "row with its operation": {**ROW, "__op": "d"},
    "Connect's tombstone": {"schema": None, "payload": None},
    "rewritten row within Connect": connect({**ROW, "__deleted": "true"}),
}


@pytest.mark.parametrize("settings", [{}, {"unwrap": ["after", "payload", "."], **QUESTION}], ids=["plain", "mapped"])
@pytest.mark.parametrize("value", DELETIONS.values(), ids=DELETIONS.keys())
def test_a_deletion_is_one_with_and_without_a_mapping(value: Any, settings: dict[str, Any]) -> None:
    """Every form of change data capture; by default it is ignored, and `deletions` makes it a dead letter."""
    mapping = RecordMapping(RecordsSettings(**settings), StreamSettings())
    with pytest.raises(RecordError) as deleted:
        mapping.canonical(mapping.parse(None if value is None else json.dumps(value).encode()))
    assert deleted.value.reason is Reason.DELETION
    assert deleted.value.reason in mapping.ignored
    assert not RecordMapping(RecordsSettings(deletions="dead_letter"), StreamSettings()).ignored


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"prompt": "{a"}, "write {{ for a brace"),
        ({"prompt": "{a!r}"}, "text with paths in braces"),
        ({"text": "{{a}}"}, "text with paths in braces"),
        ({"text": "a..b"}, "keys separated by dots"),
        ({"messages": "{a}"}, "messages must be a path without braces"),
        ({"prompt": ["{a}", "b"]}, "join texts in one template"),
        ({"text": "a", "messages": "b"}, "found text and messages"),
        ({"image": "a"}, "map those too"),
        ({"prompt": 3}, "a path or a list of paths"),
        ({"registry": {"url": "http://127.0.0.1:1"}}, "needs framing: confluent"),
        ({"framing": "confluent", "registry": {"url": "http://10.0.0.1:1", "token_file": "t"}}, "token_file is set"),
        ({"framing": "confluent", "registry": {"url": "http://127.0.0.1:1", "username": "u"}}, "belong together"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings: dict[str, Any], message: str) -> None:
    """Before the first record is read."""
    with pytest.raises(ValidationError, match=message):
        RecordsSettings(**settings)


keys = st.text(st.characters(exclude_characters="\\{}", codec="utf-8"), min_size=1, max_size=6).filter(
    lambda key: not key.lstrip("-").isdecimal()
)


@given(st.lists(keys, min_size=1, max_size=5), st.text(max_size=20))
def test_any_key_has_a_path(path: list[str], text: str) -> None:
    """Of dots and quotes, by a path and by a template alike."""
    value: Any = text
    for key in reversed(path):
        value = {key: value}
    spelled = ".".join(key.replace(".", r"\.") for key in path)
    mapping = RecordMapping(RecordsSettings(text=spelled), StreamSettings())
    assert mapping.canonical(value) == {"text": text}
