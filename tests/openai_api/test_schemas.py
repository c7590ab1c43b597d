"""Objects of the API: what is read, what is kept, what is written."""

import subprocess
import sys

import orjson
import pytest
from pydantic import ValidationError

from streamlearn.http.guards import ApiError
from streamlearn.openai_api import (
    ChatRequest,
    ModelList,
    OpenAIErrorBody,
    OpenAIErrorDetail,
    PromptedRequest,
    answer_headers,
    event,
)


def test_unknown_fields_are_kept_unread() -> None:
    """A server that passes requests on must not lose them."""
    request = PromptedRequest.model_validate({"model": "a", "prompt": "b", "top_k": 3, "n": "?"})
    assert request.model_extra == {"top_k": 3, "n": "?"}
    message = {"role": "assistant", "content": None, "tool_calls": [{"id": "x"}]}
    chat = ChatRequest.model_validate({"model": "a", "messages": [message]})
    assert chat.messages[0].model_extra == {"tool_calls": [{"id": "x"}]}


@pytest.mark.parametrize("prompt", ["a", ["a", "b"], [1, 2], [[1], [2, 3]]])
def test_every_form_of_prompt_is_read(prompt: object) -> None:
    """A text, texts, token ids, lists of token ids."""
    read = PromptedRequest.model_validate({"model": "a", "prompt": prompt}).prompt
    assert orjson.loads(orjson.dumps(read)) == prompt


@pytest.mark.parametrize(
    "body", [{"prompt": "a"}, {"model": "", "prompt": "a"}, {"model": "m", "prompt": "a", "stream": "yes"}]
)
def test_a_request_names_its_model_and_how_it_is_answered(body: dict[str, object]) -> None:
    """Without either there is nothing to pass on."""
    with pytest.raises(ValidationError):
        PromptedRequest.model_validate(body)


def test_only_a_stream_that_asks_for_its_usage_gets_it() -> None:
    """By `stream_options.include_usage`."""
    body = {"model": "a", "prompt": "b", "stream": True}
    assert not PromptedRequest.model_validate(body).wants_usage
    assert PromptedRequest.model_validate({**body, "stream_options": {"include_usage": True}}).wants_usage


def test_an_error_is_described_as_it_is_written() -> None:
    """The description has the fields of `ApiError`, no more and no fewer."""
    form = ApiError(404, "model_not_found", "no x", hint="ask y", param="model").openai_form
    assert OpenAIErrorBody.model_validate({"error": form}).model_dump() == {"error": form}
    assert set(OpenAIErrorDetail.model_fields) == set(form)
    server = ApiError(503, "queue_full", "full").openai_form
    assert OpenAIErrorBody.model_validate({"error": server}).error.type == "server_error"


def test_an_event_is_one_line_of_json() -> None:
    """Whatever the text holds."""
    assert event({"text": "a\n\ndata: é"}) == 'data: {"text":"a\\n\\ndata: é"}\n\n'.encode()


def test_the_list_of_models_has_the_form_of_openai() -> None:
    """Each model with its name, type, time and owner."""
    card = {"id": "a", "object": "model", "created": 3, "owned_by": "streamlearn"}
    assert ModelList.of(["a"], 3).model_dump() == {"object": "list", "data": (card,)}


def test_headers_hold_any_name() -> None:
    """A folder's name may be outside of Latin-1."""
    headers = answer_headers("/models/größe 模", None, 0.25)
    assert headers == {"x-streamlearn-model": "/models/gr%C3%B6%C3%9Fe %E6%A8%A1", "x-streamlearn-score": "0.25"}
    assert answer_headers("a-regime-3@7", 3, 1.0)["x-streamlearn-regime"] == "3"


def test_no_module_imports_torch() -> None:
    """A server without a model starts in less time than torch takes."""
    script = """
import importlib, pkgutil, sys
import streamlearn.openai_api as package
for module in pkgutil.iter_modules(package.__path__):
    importlib.import_module(f"{package.__name__}.{module.name}")
print("torch" in sys.modules, "transformers" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "False False\n"
