"""OpenAI's paths: the models, completions and chat completions."""

from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from streamlearn.http.replies import ApiError, OrjsonResponse
from streamlearn.jobs.queue import JobQueue, PromptInput
from streamlearn.openai_api.conversation import UnreadableMessageError, conversation_of
from streamlearn.openai_api.error_form import OpenAIErrorBody
from streamlearn.openai_api.models import ModelList
from streamlearn.openai_api.server_sent_events import MEDIA_TYPE
from streamlearn.serve.json_route import OrjsonRoute
from streamlearn.serve.openai.answer_forms import ChatForm, CompletionForm
from streamlearn.serve.openai.answering import Answering
from streamlearn.serve.openai.requests import ChatCompletionRequest, TextCompletionRequest
from streamlearn.serve.openai.responses import ChatCompletion, Completion
from streamlearn.settings import ServeSettings
from streamlearn.status.board import Board, Clock

_DESCRIPTIONS = {
    400: "Invalid JSON, a field that is missing, out of range or not supported, or a Host that is not allowed.",
    401: "The bearer token is missing or wrong.",
    403: "The Origin header names a foreign site.",
    404: "No model has this name.",
    413: "The body is larger than serve.max_body_bytes.",
    415: "The content type is not application/json.",
    500: "The job failed inside the daemon.",
    503: "The queue is full or the daemon is not ready; see Retry-After.",
    504: "The job did not finish in time and was cancelled.",
}
_ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": OpenAIErrorBody, "description": description} for status, description in _DESCRIPTIONS.items()
}
_EVENT = {
    "type": "object",
    "properties": {"data": {"type": "string", "description": "JSON with a piece of the text, or [DONE]."}},
    "required": ["data"],
}
_ANSWERS: dict[int | str, dict[str, Any]] = {
    200: {"content": {MEDIA_TYPE: {"itemSchema": _EVENT}}, "description": "The answer, or its events."},
    **_ERRORS,
}


def openai_routes(
    board: Board, jobs: JobQueue, settings: ServeSettings, clock: Clock, name: str, deadline_s: float
) -> APIRouter:
    """The routes of one daemon, whose models have names that begin with `name`."""
    routes = APIRouter(tags=["openai"], route_class=OrjsonRoute)
    answering = Answering(board, jobs, settings, clock, name, deadline_s)

    @routes.get("/v1/models", response_model=ModelList, summary="Models")
    async def list_models() -> Response:
        """What a request may name: what routing finds, the untouched backbone, and each regime."""
        return OrjsonResponse(ModelList.of(answering.models(), int(board.read().started_at)))

    @routes.post("/v1/completions", response_model=Completion, summary="Continue a text", responses=_ANSWERS)
    async def complete(request: Request, body: TextCompletionRequest) -> Response:
        """As OpenAI's path of this name. With `stream` the answer is server-sent events."""
        return await answering.answer(request, body, PromptInput(body.prompt, None), CompletionForm())

    @routes.post(
        "/v1/chat/completions", response_model=ChatCompletion, summary="Answer a conversation", responses=_ANSWERS
    )
    async def chat(request: Request, body: ChatCompletionRequest) -> Response:
        """As OpenAI's path of this name. With `stream` the answer is server-sent events."""
        try:
            conversation = conversation_of(body.messages)
        except UnreadableMessageError as error:
            raise ApiError(400, "unsupported_content", str(error), param=error.field) from error
        given = PromptInput(None, conversation.turns, list(conversation.images) or None)
        return await answering.answer(request, body, given, ChatForm())

    return routes
