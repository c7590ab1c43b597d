"""HEAD on every path that answers GET."""

from starlette.types import ASGIApp, Receive, Scope, Send


class HeadAsGet:
    """Middleware that routes HEAD as GET: same status, same headers. The server leaves out the body."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on."""
        if scope["type"] == "http" and scope["method"] == "HEAD":
            scope = {**scope, "method": "GET"}  # a copy: the server's own scope keeps HEAD
        await self.app(scope, receive, send)
