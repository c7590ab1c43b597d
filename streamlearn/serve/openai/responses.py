"""Answers on OpenAI's paths, with the route of the prompt in addition."""

from typing import Literal

from streamlearn.jobs.results import FinishReason
from streamlearn.openai_api.schema import OpenAISchema
from streamlearn.status.answered_by import Route


class Usage(OpenAISchema):
    """Tokens of a request."""

    prompt_tokens: int
    """Of the prompt, with control tokens of the chat template."""
    completion_tokens: int
    """Generated."""
    total_tokens: int
    """Both together."""


class AnswerHead(OpenAISchema):
    """What every answer and every event of a stream begins with."""

    id: str
    """A name of this answer."""
    created: int
    """Unix time, in seconds."""
    model: str
    """What answered: the name of a regime's model or of the backbone."""
    system_fingerprint: str
    """The weights: the optimizer updates made before the request was answered."""
    route: Route
    """The prompt's regime, and what answered."""


class CompletionChoice(OpenAISchema):
    """A text, or a piece of one."""

    index: int = 0
    """There is one choice."""
    text: str
    """The continuation, without the prompt."""
    logprobs: None = None
    """Not supported."""
    finish_reason: FinishReason | None
    """stop: the text ended by itself or with a stop string; length: at its maximum; null: it goes on."""


class Completion(AnswerHead):
    """A continued text, or an event of one."""

    object: Literal["text_completion"] = "text_completion"
    """Type of the object."""
    choices: tuple[CompletionChoice, ...]
    """One; none in the event that holds the usage."""
    usage: Usage | None
    """Null in the events of a stream, but the last with `stream_options.include_usage`."""


class ChatAnswer(OpenAISchema):
    """The assistant's turn."""

    role: Literal["assistant"] = "assistant"
    """Who answers."""
    content: str
    """The answer."""
    refusal: None = None
    """Not supported."""


class ChatChoice(OpenAISchema):
    """An answer to a conversation."""

    index: int = 0
    """There is one choice."""
    message: ChatAnswer
    """The answer."""
    logprobs: None = None
    """Not supported."""
    finish_reason: FinishReason
    """stop: the text ended by itself or with a stop string; length: at its maximum."""


class ChatCompletion(AnswerHead):
    """An answer to a conversation."""

    object: Literal["chat.completion"] = "chat.completion"
    """Type of the object."""
    choices: tuple[ChatChoice, ...]
    """One."""
    usage: Usage
    """Tokens of the request."""
