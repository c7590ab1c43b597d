"""A streamed answer on its way from a model server to the client."""

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack

import orjson
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from streamlearn.events import Event, get_logger
from streamlearn.gateway.gateway_metrics import Outcome
from streamlearn.gateway.upstream import Answer, Upstream, UpstreamFailedError, UpstreamTimeoutError
from streamlearn.http.replies import unavailable

MEDIA_TYPE = "text/event-stream"
END = b"data: [DONE]"
_KEPT = len(END) + 4  # and line breaks after it

_log = get_logger("gateway")


class EventStream:
    """Server-sent events whose first part has arrived. It must be closed."""

    def __init__(
        self, upstream: Upstream, first: bytes, parts: AsyncIterator[bytes], resources: AsyncExitStack
    ) -> None:
        self._upstream = upstream
        self._first = first
        self._parts = parts
        self._resources = resources
        self.outcome: Outcome = "cancelled"
        """What became of it, once it is closed."""

    @classmethod
    async def begin(cls, upstream: Upstream, path: str, body: bytes) -> "EventStream | Answer":
        """Send a request and wait for the first part of its answer; an answer that is no stream is returned whole.

        Raises:
            UpstreamFailedError: the request failed before its answer began.
            UpstreamTimeoutError: nothing came in time.
        """
        async with AsyncExitStack() as resources:
            response = await resources.enter_async_context(upstream.open(path, body))
            content_type = response.headers.get("content-type", "")
            with upstream.translated():
                if not content_type.startswith(MEDIA_TYPE):
                    return Answer(response.status, content_type, await response.read())
                parts = response.content.iter_any()
                first = await anext(parts, b"")
            if not first:
                raise UpstreamFailedError("the answer ended before it began")
            return cls(upstream, first, parts, resources.pop_all())

    async def parts(self) -> AsyncIterator[bytes]:
        """The stream as it arrives. One that breaks off ends with an error event and without `[DONE]`."""
        last = self._first
        self._note_end(last)
        yield last
        try:
            with self._upstream.translated():
                async for part in self._parts:
                    last = (last + part)[-_KEPT:]
                    self._note_end(last)
                    yield part
            if self.outcome != "answered":
                raise UpstreamFailedError(f"the stream ended without {END.decode()}")
        except (UpstreamFailedError, UpstreamTimeoutError) as error:
            _log.warning(Event.STREAM_BROKEN, upstream=self._upstream.url, reason=str(error))
            self.outcome = "broken"
            yield _error_event()

    def _note_end(self, last: bytes) -> None:
        """Note whether the stream is complete with its newest part: clients may leave at `[DONE]`."""
        self.outcome = "answered" if last.rstrip().endswith(END) else "cancelled"

    async def close(self) -> None:
        """Close the connection to the model server, which then stops generating. Safe to call twice."""
        await self._resources.aclose()


class EventStreamResponse(StreamingResponse):
    """Passes an event stream on to the client, and closes it when it ends or the client leaves."""

    def __init__(self, stream: EventStream, headers: Mapping[str, str], finished: Callable[[Outcome], None]) -> None:
        """`finished` is called once, when the stream has been closed."""
        super().__init__(stream.parts(), headers=headers, media_type=MEDIA_TYPE)
        self._stream = stream
        self._finished = finished

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._stream.close()
            self._finished(self._stream.outcome)


def _error_event() -> bytes:
    """An error event, after the end of whatever line the stream broke off in."""
    error = unavailable("stream_broken", "the model server broke the stream off", hint="send it again", retry_after_s=0)
    return b"\n\ndata: " + orjson.dumps({"error": error.openai_form}) + b"\n\n"
