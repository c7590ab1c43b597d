"""What a request's prompt may be, and what is refused."""

from typing import Any

import pytest

from streamlearn.gateway.app import completion_prompts, messages_prompt
from streamlearn.http.responses import ApiError


@pytest.mark.parametrize(
    ("value", "prompts"),
    [
        ("a", ["a"]),
        (["a"], ["a"]),
        (["a", "b"], ["a", "b"]),
        ([1, 2], [(1, 2)]),
        ([[1, 2], [3]], [(1, 2), (3,)]),
    ],
)
def test_every_form_of_openai_is_a_list_of_prompts(value: Any, prompts: list[Any]) -> None:
    assert completion_prompts(value) == prompts


@pytest.mark.parametrize("value", [None, 1, [], [[]], ["a", 1], [1, "a"], [-1], [1 << 31], [True], [[1], "a"], {}])
def test_any_other_prompt_is_refused_by_name(value: Any) -> None:
    with pytest.raises(ApiError) as caught:
        completion_prompts(value)
    assert (caught.value.status, caught.value.param) == (400, "prompt")


def test_only_role_and_content_of_a_message_decide() -> None:
    """Parts of text are joined; a call of a tool has no text."""
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "name": "x"},
        {"role": "assistant", "content": None, "tool_calls": []},
    ]
    assert messages_prompt(messages) == ({"role": "user", "content": "a\nb"}, {"role": "assistant", "content": ""})


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        (None, "messages"),
        ([], "messages"),
        (["a"], "messages[0]"),
        ([{"content": "a"}], "messages[0]"),
        ([{"role": "user", "content": 1}], "messages[0].content"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "messages[0].content[0]"),
    ],
)
def test_any_other_conversation_is_refused_by_name(messages: Any, param: str) -> None:
    with pytest.raises(ApiError) as caught:
        messages_prompt(messages)
    assert (caught.value.status, caught.value.param) == (400, param)
