"""The part of a request that decides its regime.

A prompt is text, token ids or a conversation, each as a record of the stream would hold it.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from streamlearn.http.replies import ApiError

Prompt = str | tuple[int, ...] | tuple[Mapping[str, Any], ...]
"""Text, token ids, or messages with exactly the keys role and content."""
MAX_TOKEN = (1 << 31) - 1
MAX_PROMPTS = 128
"""Prompts of a request that is routed; routing takes about 1 ms each, however short they are."""


def completion_prompts(value: Any) -> list[Prompt]:
    """The prompts of a request to /v1/completions: one string, one list of token ids, or a list of either.

    Raises:
        ApiError: 400, it is neither, or holds more than `MAX_PROMPTS`.
    """
    if isinstance(value, str):
        return [value]
    if isinstance(value, list) and value:
        if _is_tokens(value):
            return [tuple(value)]
        _require_few(value)
        if all(isinstance(each, str) for each in value):
            return list(value)
        if all(isinstance(each, list) and each and _is_tokens(each) for each in value):
            return [tuple(each) for each in value]
    raise invalid("prompt", "prompt must be a string, a list of token ids, or a list of either, and not be empty")


def messages_prompt(value: Any) -> Prompt:
    """The conversation of a request to /v1/chat/completions; fields other than role and content decide nothing.

    Raises:
        ApiError: 400, it is no conversation, or not one of text.
    """
    if not isinstance(value, list) or not value:
        raise invalid("messages", "messages must be a list of at least one message")
    return tuple(_message(each, f"messages[{index}]") for index, each in enumerate(value))


def invalid(param: str, message: str) -> ApiError:
    """400 that names the field."""
    return ApiError(400, "invalid", message, param=param)


def _message(value: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(value, dict) or not isinstance(value.get("role"), str):
        raise invalid(where, f"{where} must be an object with a role and a content")
    return {"role": value["role"], "content": _text(value.get("content"), f"{where}.content")}


def _text(content: Any, where: str) -> str:
    """The text of a content. Parts are joined by line breaks, as vLLM joins them."""
    if content is None:  # an assistant's turn that only calls tools
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        return "\n".join(_part(each, f"{where}[{index}]") for index, each in enumerate(content))
    raise invalid(where, f"{where} must be a string or a list of parts")


def _part(part: Any, where: str) -> str:
    if isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    raise ApiError(
        400,
        "not_text",
        f"{where} must be a part of type text: only text can be routed",
        hint="name the model of a regime, or the backbone, to send it unrouted",
        param=where,
    )


def _require_few(prompts: Sequence[Any]) -> None:
    if len(prompts) > MAX_PROMPTS:
        raise ApiError(
            400,
            "invalid",
            f"prompt must hold at most {MAX_PROMPTS} prompts to be routed, found {len(prompts)}",
            hint="send several requests, or name the model of a regime, or the backbone, to send it unrouted",
            param="prompt",
        )


def _is_tokens(value: Sequence[Any]) -> bool:
    return all(type(each) is int and 0 <= each <= MAX_TOKEN for each in value)
