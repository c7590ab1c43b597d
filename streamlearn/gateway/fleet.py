"""All model servers together: which one answers a request, and what happens when it fails."""

import asyncio
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from typing import TypeVar

from streamlearn.events import Event, get_logger
from streamlearn.gateway.gateway_metrics import GatewayMetrics
from streamlearn.gateway.upstream import Upstream, UpstreamFailedError, UpstreamTimeoutError
from streamlearn.http.replies import ApiError, unavailable

ROUNDS = 2
"""Times that each server is tried; the second time is for connections that an idle server has just closed."""
POLL_S = 1.0
PAUSE_S = 0.2
"""Pause between two rounds."""
RETRY_AFTER_S = 2

T = TypeVar("T")
_log = get_logger("gateway")


class Fleet:
    """The model servers of a gateway. Used by one event loop."""

    def __init__(self, upstreams: Sequence[Upstream], metrics: GatewayMetrics) -> None:
        self.upstreams = upstreams
        self._metrics = metrics

    async def run(self) -> None:
        """Ask every server again and again which models it serves, until cancelled."""
        await asyncio.gather(*(_poll_again(each) for each in self.upstreams))

    async def poll(self) -> None:
        """Ask every server once which models it serves."""
        await asyncio.gather(*(each.poll() for each in self.upstreams))

    @property
    def models(self) -> frozenset[str]:
        """Models that at least one server has."""
        return frozenset().union(*(each.models for each in self.upstreams))

    def has_all(self, models: Iterable[str]) -> bool:
        """Whether each of the models is served somewhere."""
        return self.models.issuperset(models)

    async def send(self, model: str, send: Callable[[Upstream], Awaitable[T]]) -> T:
        """Let one server that has the model answer.

        The one with the fewest requests in flight is tried first, then the others. `send` must not fail once a client
        has seen a part of its answer.

        Raises:
            ApiError: 503, none has the model or all failed; 504, one did not answer in time.
        """
        reason = f"no model server has {model}"
        for attempt in range(ROUNDS):
            tried: list[Upstream] = []
            while (upstream := self._least_busy(model, tried)) is not None:
                tried.append(upstream)
                try:
                    return await send(upstream)
                except UpstreamFailedError as error:
                    said = f": {error.words}" if error.words else ""
                    reason = f"every model server that has {model} failed, the last with: {error}{said}"
                    self._metrics.retries.labels(upstream.url).inc()
                    _log.warning(Event.REQUEST_RETRIED, upstream=upstream.url, model=model, reason=str(error))
                except UpstreamTimeoutError as error:
                    _log.warning(Event.UPSTREAM_TIMED_OUT, upstream=upstream.url, model=model, reason=str(error))
                    raise ApiError(504, "upstream_timeout", f"{model} did not answer in time: {error}") from error
            if attempt + 1 < ROUNDS:
                await asyncio.sleep(PAUSE_S)
        raise unavailable(
            "no_upstream", reason, hint="retry after the seconds in Retry-After", retry_after_s=RETRY_AFTER_S
        )

    async def close(self) -> None:
        """Close all connections. Safe to call twice."""
        await asyncio.gather(*(each.close() for each in self.upstreams))

    def _least_busy(self, model: str, tried: Collection[Upstream]) -> Upstream | None:
        able = [each for each in self.upstreams if model in each.models and each not in tried]
        return min(able, key=lambda each: each.in_flight, default=None)


async def _poll_again(upstream: Upstream) -> None:
    while True:
        await upstream.poll()
        await asyncio.sleep(POLL_S)
