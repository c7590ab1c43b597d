"""OpenAI's messages as the decoder of records reads them, and the names of models."""

from typing import Any

import pytest

from streamlearn.http.responses import ApiError, answer_headers
from streamlearn.jobs.queue import PromptInput
from streamlearn.serve.openai import ModelNames
from streamlearn.serve.openai_schemas import ChatTurn, OpenAIErrorBody, OpenAIErrorDetail, conversation_of

TEXT = {"type": "text", "text": "what is this?"}
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,eA==", "detail": "low"}}
NAMES = ModelNames("streamlearn", "HuggingFaceTB/SmolLM2-135M-Instruct")


def read(*messages: dict[str, Any]) -> PromptInput:
    return conversation_of([ChatTurn.model_validate(message) for message in messages])


def test_texts_are_joined_by_line_breaks() -> None:
    """A string stays as it is; a message without an image becomes a string."""
    found = read({"role": "system", "content": "be brief"}, {"role": "user", "content": [TEXT, {**TEXT, "text": "b"}]})
    assert found.messages == (
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "what is this?\nb"},
    )
    assert found.image is None
    message: dict[str, Any] = {"role": "assistant", "content": "x", "refusal": None, "tool_calls": []}
    assert read(message).messages == ({"role": "assistant", "content": "x"},), "an answer can be sent back"


def test_images_keep_their_places_and_their_order() -> None:
    """Over all messages together."""
    other = {"type": "image_url", "image_url": {"url": "data:image/webp;base64,eQ=="}}
    found = read({"role": "user", "content": [TEXT, IMAGE]}, {"role": "user", "content": [other]})
    assert found.image == ["eA==", "eQ=="]
    assert [turn["content"] for turn in found.messages or ()] == [[TEXT, {"type": "image"}], [{"type": "image"}]]


@pytest.mark.parametrize(
    ("message", "field"),
    [
        ({"role": "user", "content": "x", "name": "me"}, "messages[0].name"),
        ({"role": "user", "content": [TEXT, {"type": "text"}]}, "messages[0].content[1]"),
        ({"role": "user", "content": [{**IMAGE, "text": "x"}]}, "messages[0].content[0]"),
    ],
)
def test_what_cannot_be_read_is_named(message: dict[str, Any], field: str) -> None:
    """By its place in the request."""
    with pytest.raises(ApiError) as caught:
        read(message)
    assert (caught.value.status, caught.value.param) == (400, field)


def test_an_error_is_described_as_it_is_written() -> None:
    """The description has the fields of `ApiError`, no more and no fewer."""
    form = ApiError(404, "model_not_found", "no x", hint="ask y", param="model").openai_form
    assert OpenAIErrorBody.model_validate({"error": form}).model_dump() == {"error": form}
    assert set(OpenAIErrorDetail.model_fields) == set(form)


def test_headers_hold_any_name() -> None:
    """A folder's name may be outside of Latin-1."""
    headers = answer_headers("/models/größe 模", None, 0.25)
    assert headers == {"x-streamlearn-model": "/models/gr%C3%B6%C3%9Fe %E6%A8%A1", "x-streamlearn-score": "0.25"}
    assert answer_headers("a-regime-3@7", 3, 1.0)["x-streamlearn-regime"] == "3"


@pytest.mark.parametrize(
    "name",
    ["", "gpt-5", "streamlearn-regime-", "streamlearn-regime-0", "streamlearn-regime-01", "streamlearn-regime-1@3",
     "streamlearn-regime-1\n", "xstreamlearn-regime-1", "streamlearn-regime-" + "9" * 5000],
)  # fmt: skip
def test_every_other_name_requests_nothing(name: str) -> None:
    """Numbers are written in one way."""
    assert NAMES.requested(name) is None
