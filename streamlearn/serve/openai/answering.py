"""From a request on OpenAI's paths to a job, and from the job to an answer."""

import secrets
import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing

from fastapi import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from streamlearn.adaptation.requested import Requested
from streamlearn.errors import RecordError, StreamlearnError
from streamlearn.http.replies import ApiError, OrjsonResponse
from streamlearn.jobs.generation_stream import GenerationStart
from streamlearn.jobs.queue import GenerateJob, JobQueue, PromptInput
from streamlearn.jobs.results import GenerateResult
from streamlearn.openai_api.answer_headers import answer_headers
from streamlearn.openai_api.named_models import NamedModels
from streamlearn.openai_api.server_sent_events import DONE, MEDIA_TYPE, event
from streamlearn.serve.generation import follow
from streamlearn.serve.health import require_ready
from streamlearn.serve.limits import require_at_most
from streamlearn.serve.openai.answer_forms import AnswerForm
from streamlearn.serve.openai.requests import ChatCompletionRequest, TextCompletionRequest
from streamlearn.serve.openai.responses import AnswerHead, Usage
from streamlearn.serve.openai.unsupported import refuse_unsupported
from streamlearn.serve.wait import wait_for_result
from streamlearn.settings import ServeSettings
from streamlearn.status.answered_by import Route
from streamlearn.status.board import Board, Clock
from streamlearn.status.status import Status


class Answering:
    """Answers requests with the jobs of one daemon."""

    def __init__(
        self, board: Board, jobs: JobQueue, settings: ServeSettings, clock: Clock, name: str, deadline_s: float
    ) -> None:
        self._board = board
        self._jobs = jobs
        self._settings = settings
        self._clock = clock
        self._name = name
        self._deadline_s = deadline_s

    def models(self) -> list[str]:
        """Names of the models that a request may ask for."""
        status = self._board.read()
        return self._names(status).listed(_regimes(status))

    async def answer(
        self,
        request: Request,
        body: TextCompletionRequest | ChatCompletionRequest,
        given: PromptInput,
        form: AnswerForm,
    ) -> Response:
        """Answer in one piece or as a stream.

        Raises:
            ApiError: the request cannot be answered.
            StreamlearnError: the job failed with this error.
        """
        job = self._job(body, given)
        field = "prompt" if given.prompt is not None else "messages"
        try:
            if body.stream:
                return await self._stream(request, job, form, wants_usage=body.wants_usage)
            return await self._whole(request, job, form)
        except RecordError as error:
            raise ApiError(400, error.reason, str(error), param=field) from error

    def _job(self, body: TextCompletionRequest | ChatCompletionRequest, given: PromptInput) -> GenerateJob:
        require_ready(self._board)
        requested = self._requested(body.model)
        refuse_unsupported(body.model_extra or {}, type(body).model_fields)
        return GenerateJob(
            given.prompt,
            given.messages,
            given.image,
            max_new_tokens=self._max_new_tokens(body),
            requested=requested,
            sampling=body.sampling(secrets.randbits(63)),
            stop=body.stop,
        )

    def _max_new_tokens(self, body: TextCompletionRequest | ChatCompletionRequest) -> int:
        limit = self._settings.max_new_tokens
        found = min(limit, body.default_tokens or limit)
        for field, wanted in body.token_limits.items():
            found = require_at_most(limit, wanted, field=field, setting="max_new_tokens")
        return found

    def _requested(self, model: str) -> Requested:
        status = self._board.read()
        requested = self._names(status).requested(model)
        if requested is None or (isinstance(requested, int) and requested not in _regimes(status)):
            message, hint = f"the model {model[:100]!r} does not exist", "GET /v1/models lists the models"
            raise ApiError(404, "model_not_found", message, hint=hint, param="model")
        return requested

    def _names(self, status: Status) -> NamedModels:
        return NamedModels(self._name, status.backbone)

    async def _whole(self, request: Request, job: GenerateJob, form: AnswerForm) -> Response:
        result = await wait_for_result(request.receive, self._jobs.submit(job), self._deadline_s)
        assert isinstance(result, GenerateResult), "generations end with their text"
        head = self._head(form, result.step, result.route)
        content = form.whole(head, result.text, result.finish_reason, _usage(result))
        return OrjsonResponse(content, headers=_headers(head))

    async def _stream(self, request: Request, job: GenerateJob, form: AnswerForm, *, wants_usage: bool) -> Response:
        parts = follow(self._jobs, job, request.receive, self._deadline_s)
        start = await anext(parts)  # or an error, which is no stream yet
        assert isinstance(start, GenerationStart), "a generation begins with its start"
        head = self._head(form, start.step, start.route)
        return _EventStream(_events(parts, head, form, wants_usage=wants_usage), headers=_headers(head))

    def _head(self, form: AnswerForm, step: int, route: Route) -> AnswerHead:
        return AnswerHead(
            id=f"{form.prefix}-{uuid.uuid4().hex}",
            created=int(self._clock.wall()),
            model=self._names(self._board.read()).of_answer(route.answered_by, route.regime),
            system_fingerprint=f"step-{step}",
            route=route,
        )


class _EventStream(StreamingResponse):
    """Server-sent events; the job is cancelled with the response."""

    media_type = MEDIA_TYPE

    def __init__(self, events: AsyncGenerator[bytes], headers: dict[str, str]) -> None:
        super().__init__(events, headers=headers)
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._events):
            await super().__call__(scope, receive, send)


async def _events(
    parts: AsyncGenerator[GenerationStart | str | GenerateResult],
    head: AnswerHead,
    form: AnswerForm,
    *,
    wants_usage: bool,
) -> AsyncGenerator[bytes]:
    """A stream ends with DONE; one without it is incomplete, and its last event is an error."""
    async with aclosing(parts):
        for opening in form.opening(head):
            yield event(opening)
        try:
            async for part in parts:
                if isinstance(part, str):
                    yield event(form.piece(head, part))
                elif isinstance(part, GenerateResult):
                    yield event(form.closing(head, part.finish_reason))
                    if wants_usage:
                        yield event(form.usage(head, _usage(part)))
                    yield DONE
        except ApiError as error:
            yield event({"error": error.openai_form})
        except StreamlearnError as error:
            yield event({"error": ApiError(500, "job_failed", str(error), hint="see the log").openai_form})


def _regimes(status: Status) -> list[int]:
    """Numbers of the regimes that can be asked to answer."""
    return [each.number for each in status.adaptation.regimes] if status.adaptation.routes_by_regime else []


def _usage(result: GenerateResult) -> Usage:
    return Usage(
        prompt_tokens=result.prompt_tokens,
        completion_tokens=result.tokens,
        total_tokens=result.prompt_tokens + result.tokens,
    )


def _headers(head: AnswerHead) -> dict[str, str]:
    return answer_headers(head.model, head.route.regime, head.route.score)
