"""Which part of a conversation is learned, with templates of many shapes."""

from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamlearn.settings import StreamSettings
from streamlearn.stream.decode import Decoder
from streamlearn.stream.encode import Encoder
from streamlearn.stream.record import IGNORED
from tests.stream.chat_templates import SHAPES, tokenizer_of

USER, ANSWER = ({"role": role} for role in ("user", "assistant"))
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}


def turns(*contents: str, first: str = "user") -> list[dict[str, Any]]:
    roles = ("user", "assistant") if first == "user" else ("assistant", "user")
    return [{"role": roles[i % 2], "content": content} for i, content in enumerate(contents)]


@cache
def encoder_of(name: str) -> Encoder:
    return Encoder(tokenizer_of(name))


@cache
def decoder(name: str) -> Decoder:
    tokenizer = tokenizer_of(name)
    return Decoder(tokenizer, StreamSettings(max_tokens=4096, batch_tokens=4096), len(tokenizer))


def learned(name: str, value: dict[str, Any]) -> str:
    """Everything that is learned of a record, as text."""
    labels = decoder(name).decode_value(value).labels
    return str(tokenizer_of(name).decode(labels[labels != IGNORED]))


TEXT = st.text(max_size=12) | st.lists(
    st.sampled_from(
        ["\n", " ", "the fox", "é", "\ue000", "<|im_end|>", "</s>", "USER: ", "ASSISTANT:", "42", '"', "[/INST]"]
    ),
    min_size=1,
    max_size=5,
).map("".join)


@pytest.mark.parametrize("name", SHAPES)
@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(TEXT, TEXT), min_size=1, max_size=4), TEXT, st.booleans())
def test_every_answer_is_learned_with_its_end_and_nothing_else(
    name: str, exchanges: list[tuple[str, str]], system: str, has_system: bool
) -> None:
    """Labels decode to the answers, as the template writes them, each with its end."""
    shape = SHAPES[name]
    messages = turns(*(text for exchange in exchanges for text in exchange))
    if has_system and shape.system:
        messages = [{"role": "system", "content": system}, *messages]
    answers = [answer for _, answer in exchanges]
    expected = "".join(shape.turn(answer, is_last=i == len(answers) - 1) for i, answer in enumerate(answers))
    assert learned(name, {"messages": messages}) == expected


@pytest.mark.parametrize("name", sorted(SHAPES.keys() - {"deepseek"}))  # whose prompts begin a reasoning
@settings(max_examples=20, deadline=None)
@given(st.lists(st.tuples(TEXT, TEXT), min_size=1, max_size=3))
def test_generation_sees_the_tokens_that_training_saw(name: str, exchanges: list[tuple[str, str]]) -> None:
    """The prompt of the last answer is encoded alike, also where a token could span its end."""
    encoder = encoder_of(name)
    messages = turns(*(text for exchange in exchanges for text in exchange))
    ids, labels = encoder.chat(messages, learned={len(messages) - 1})
    prompt = encoder.generation_prompt(messages[:-1])
    first = next(i for i, label in enumerate(labels) if label != IGNORED)
    assert prompt == ids[:first]
