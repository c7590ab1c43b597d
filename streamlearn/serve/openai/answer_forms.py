"""The two forms of an answer: a continued text, and a turn of a conversation; whole, or as events of a stream."""

from typing import Any, Protocol

from streamlearn.jobs.results import FinishReason
from streamlearn.serve.openai.responses import (
    AnswerHead,
    ChatAnswer,
    ChatChoice,
    ChatCompletion,
    Completion,
    CompletionChoice,
    Usage,
)


class AnswerForm(Protocol):
    """How an answer is written."""

    prefix: str
    """Of the answer's id."""

    def whole(self, head: AnswerHead, text: str, reason: FinishReason, usage: Usage) -> dict[str, Any]:
        """The answer in one piece."""

    def opening(self, head: AnswerHead) -> list[dict[str, Any]]:
        """Events before the text."""

    def piece(self, head: AnswerHead, text: str) -> dict[str, Any]:
        """The event of a piece of the text."""

    def closing(self, head: AnswerHead, reason: FinishReason) -> dict[str, Any]:
        """The event after the text."""

    def usage(self, head: AnswerHead, usage: Usage) -> dict[str, Any]:
        """The last event, if it was asked for."""


class CompletionForm:
    """Of /v1/completions."""

    prefix = "cmpl"

    def whole(self, head: AnswerHead, text: str, reason: FinishReason, usage: Usage) -> dict[str, Any]:
        """See `AnswerForm`."""
        choice = CompletionChoice(text=text, finish_reason=reason)
        return Completion(**vars(head), choices=(choice,), usage=usage).model_dump()

    def opening(self, _: AnswerHead) -> list[dict[str, Any]]:
        """Nothing."""
        return []

    def piece(self, head: AnswerHead, text: str) -> dict[str, Any]:
        """See `AnswerForm`."""
        return self._event(head, CompletionChoice(text=text, finish_reason=None))

    def closing(self, head: AnswerHead, reason: FinishReason) -> dict[str, Any]:
        """See `AnswerForm`."""
        return self._event(head, CompletionChoice(text="", finish_reason=reason))

    def usage(self, head: AnswerHead, usage: Usage) -> dict[str, Any]:
        """See `AnswerForm`."""
        return Completion(**vars(head), choices=(), usage=usage).model_dump()

    def _event(self, head: AnswerHead, choice: CompletionChoice) -> dict[str, Any]:
        return Completion(**vars(head), choices=(choice,), usage=None).model_dump()


class ChatForm:
    """Of /v1/chat/completions."""

    prefix = "chatcmpl"

    def whole(self, head: AnswerHead, text: str, reason: FinishReason, usage: Usage) -> dict[str, Any]:
        """See `AnswerForm`."""
        choice = ChatChoice(message=ChatAnswer(content=text), finish_reason=reason)
        return ChatCompletion(**vars(head), choices=(choice,), usage=usage).model_dump()

    def opening(self, head: AnswerHead) -> list[dict[str, Any]]:
        """The role."""
        return [self._event(head, {"role": "assistant", "content": ""}, None)]

    def piece(self, head: AnswerHead, text: str) -> dict[str, Any]:
        """See `AnswerForm`."""
        return self._event(head, {"content": text}, None)

    def closing(self, head: AnswerHead, reason: FinishReason) -> dict[str, Any]:
        """See `AnswerForm`."""
        return self._event(head, {}, reason)

    def usage(self, head: AnswerHead, usage: Usage) -> dict[str, Any]:
        """See `AnswerForm`."""
        return {**self._frame(head), "choices": [], "usage": usage.model_dump()}

    def _event(self, head: AnswerHead, delta: dict[str, str], reason: FinishReason | None) -> dict[str, Any]:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": reason}
        return {**self._frame(head), "choices": [choice], "usage": None}

    def _frame(self, head: AnswerHead) -> dict[str, Any]:
        return {**head.model_dump(), "object": "chat.completion.chunk"}
