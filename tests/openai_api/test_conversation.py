"""OpenAI's messages as the decoder of records reads them."""

from typing import Any

import pytest

from streamlearn.openai_api import ChatMessage, Conversation, UnreadableMessageError, conversation_of

TEXT = {"type": "text", "text": "what is this?"}
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,eA==", "detail": "low"}}


def read(*messages: dict[str, Any]) -> Conversation:
    return conversation_of([ChatMessage.model_validate(message) for message in messages])


def test_texts_are_joined_by_line_breaks() -> None:
    """A string stays as it is; a message without an image becomes a string."""
    found = read({"role": "system", "content": "be brief"}, {"role": "user", "content": [TEXT, {**TEXT, "text": "b"}]})
    assert found.turns == (
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "what is this?\nb"},
    )
    assert found.images == ()


def test_images_keep_their_places_and_their_order() -> None:
    """Over all messages together."""
    other = {"type": "image_url", "image_url": {"url": "data:image/webp;base64,eQ=="}}
    found = read({"role": "user", "content": [TEXT, IMAGE]}, {"role": "user", "content": [other]})
    assert found.images == ("eA==", "eQ==")
    assert [turn["content"] for turn in found.turns] == [[TEXT, {"type": "image"}], [{"type": "image"}]]


def test_an_answer_can_be_sent_back() -> None:
    """The fields that an answer leaves empty are accepted in a message."""
    assert read({"role": "assistant", "content": "x", "refusal": None, "tool_calls": []}).turns[0]["content"] == "x"


@pytest.mark.parametrize(
    ("message", "field"),
    [
        ({"role": "user"}, "messages[0].content"),
        ({"role": "user", "content": "x", "name": "me"}, "messages[0].name"),
        ({"role": "user", "content": [TEXT, {"type": "text"}]}, "messages[0].content[1]"),
        ({"role": "user", "content": [{**TEXT, "cache_control": {}}]}, "messages[0].content[0]"),
        ({"role": "user", "content": [{**IMAGE, "text": "x"}]}, "messages[0].content[0]"),
        ({"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}, "messages[0].content[0]"),
        (
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "https://example.com/a.png"}}]},
            "messages[0].content[0].image_url.url",
        ),
    ],
)
def test_what_cannot_be_read_is_named(message: dict[str, Any], field: str) -> None:
    """By its place in the request."""
    with pytest.raises(UnreadableMessageError) as caught:
        read(message)
    assert caught.value.field == field
    assert str(caught.value).startswith(f"{field}: ")
