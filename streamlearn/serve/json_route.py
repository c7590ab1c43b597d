"""Routes whose bodies orjson parses."""

from collections.abc import Callable, Coroutine
from typing import Any

import orjson
from fastapi import Request
from fastapi.routing import APIRoute
from starlette.responses import Response


class _OrjsonRequest(Request):
    """A request whose JSON is parsed by orjson: strict UTF-8, no NaN, bounded depth."""

    async def json(self) -> Any:
        return orjson.loads(await self.body())


class OrjsonRoute(APIRoute):
    """A route that reads its body with orjson."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """The handler, given a request that orjson reads."""
        handle = super().get_route_handler()

        async def handler(request: Request) -> Response:
            return await handle(_OrjsonRequest(request.scope, request.receive))

        return handler
