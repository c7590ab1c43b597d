"""A model server without a model: it answers at once, and fails when it is told to.

python -m tests.gateway.stub_upstream MODEL... serves on a free port, which it prints.

It speaks as much HTTP/1.1 as a client with keep-alive connections needs. `script` decides what happens to the next
completions, one word each:

    refuse        the connection is closed without an answer
    404, 500      this status
    unloadable    400, as from a server that has found an adapter and cannot load it
    break         half of the answer, then the connection is reset
    cut           half of a stream, then the proper end of the body
    slow          the answer after `SLOW_S`
    hang          nothing, until the client leaves
"""

import asyncio
import socket
import sys
import threading
from collections import deque
from collections.abc import Iterable
from concurrent.futures import Future
from typing import Any, Self

import orjson

SLOW_S = 0.3
PIECES = ("one ", "two ", "three")
"""The text of every answer."""


class StubUpstream:
    """One server on a free port of this machine, in a thread of its own."""

    def __init__(self, models: Iterable[str], port: int = 0, host: str = "127.0.0.1") -> None:
        self.models = set(models)
        self.loadable: set[str] = set()
        """Models that it loads when they are asked for."""
        self.host = host
        self.script: deque[str] = deque()
        self.answered: list[dict[str, Any]] = []
        """Bodies of the completion requests that were received."""
        self.heads: list[str] = []
        """Their headers as they came."""
        self.headers = ""
        """Further header lines of every completion."""
        self.num_left = 0
        """Clients that left before their answer was complete."""
        self.port = port
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event | None = None

    @property
    def url(self) -> str:
        """Its base URL."""
        return f"http://{self.host}:{self.port}"

    def start(self) -> Self:
        """Listen; a stopped server takes the same port again."""
        bound: Future[int] = Future()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve(bound)), daemon=True)
        self._thread.start()
        self.port = bound.result(10.0)
        return self

    def kill(self) -> None:
        """Reset all connections at once, as the end of the process would. Safe to call twice."""
        if self._thread is None or self._loop is None or self._stop is None:
            return
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(10.0)
        self._thread = None

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.kill()

    async def _serve(self, bound: "Future[int]") -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        connections: set[asyncio.StreamWriter] = set()

        async def on_connection(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            connections.add(writer)
            try:
                while await self._answer_one(reader, writer):
                    pass
            except (ConnectionError, asyncio.IncompleteReadError):
                self.num_left += 1
            finally:
                connections.discard(writer)
                writer.transport.abort()

        server = await asyncio.start_server(on_connection, self.host, self.port)
        bound.set_result(server.sockets[0].getsockname()[1])
        await self._stop.wait()
        server.close()
        for writer in [*connections]:
            writer.transport.abort()

    async def _answer_one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Answer one request; whether the connection stays open."""
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1") if not reader.at_eof() else ""
        if not head:
            return False
        length = next((int(line[15:]) for line in head.lower().split("\r\n") if line.startswith("content-length:")), 0)
        body = await reader.readexactly(length)
        method, path, _ = head.split(" ", 2)
        if method == "GET":
            rows = [{"id": model, "object": "model"} for model in sorted(self.models)]
            _send(writer, 200, {"object": "list", "data": rows})
            return True
        self.heads.append(head.lower())
        return await self._complete(path, orjson.loads(body), reader, writer)

    async def _complete(
        self, path: str, request: dict[str, Any], reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> bool:
        self.answered.append(request)
        self.models |= self.loadable & {request["model"]}
        action = self.script.popleft() if self.script else ""
        if action == "refuse":
            return False
        if action == "hang":
            await reader.read(1)
            raise ConnectionResetError
        if action == "slow":
            await asyncio.sleep(SLOW_S)
        if action.isdecimal():
            _send(writer, int(action), {"error": {"message": "scripted", "code": int(action)}}, self.headers)
        elif action == "unloadable":
            message = f"LoRA adapter '{request['model']}' was found but could not be loaded."
            _send(writer, 400, {"error": {"message": message, "code": 400}}, self.headers)
        elif request["model"] not in self.models:
            _send(writer, 404, {"error": {"message": "The model does not exist.", "code": 404}})
        elif request.get("stream"):
            await _stream(writer, request["model"], path, action, self.headers)
        elif action == "break":
            writer.write(b'HTTP/1.1 200 OK\r\ncontent-length: 1000\r\n\r\n{"half')
        else:
            _send(writer, 200, _answer(path, request["model"]), self.headers)
        await writer.drain()
        return action != "break"


def _answer(path: str, model: str) -> dict[str, Any]:
    text = "".join(PIECES)
    chat = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
    plain = {"index": 0, "text": text, "finish_reason": "stop", "logprobs": None}
    usage = {"prompt_tokens": 1, "completion_tokens": len(PIECES), "total_tokens": 1 + len(PIECES)}
    kind = "chat.completion" if "chat" in path else "text_completion"
    choices = [chat if "chat" in path else plain]
    return {"id": "stub", "object": kind, "created": 0, "model": model, "choices": choices, "usage": usage}


async def _stream(writer: asyncio.StreamWriter, model: str, path: str, action: str, headers: str) -> None:
    head = f"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n{headers}\r\n"
    writer.write(head.encode())
    kind = "chat.completion.chunk" if "chat" in path else "text_completion"
    for index, piece in enumerate(PIECES):
        if action == "break" and index == 1:
            return
        if action == "cut" and index == 1:
            writer.write(b"0\r\n\r\n")
            return
        finish = "stop" if index == len(PIECES) - 1 else None
        choice: dict[str, Any] = {"index": 0, "finish_reason": finish}
        choice |= {"delta": {"role": "assistant", "content": piece}} if "chat" in path else {"text": piece}
        event = {"id": "stub", "object": kind, "created": 0, "model": model, "choices": [choice]}
        _chunk(writer, b"data: " + orjson.dumps(event) + b"\n\n")
        await writer.drain()
    _chunk(writer, b"data: [DONE]\n\n")
    writer.write(b"0\r\n\r\n")


def _chunk(writer: asyncio.StreamWriter, data: bytes) -> None:
    writer.write(b"%x\r\n%s\r\n" % (len(data), data))


def _send(writer: asyncio.StreamWriter, status: int, value: Any, headers: str = "") -> None:
    body = orjson.dumps(value)
    head = f"HTTP/1.1 {status} -\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n{headers}\r\n"
    writer.write(head.encode() + body)


def free_port() -> int:
    """A port on which nothing listens now."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def main() -> None:
    """Serve until the process is killed."""
    server = StubUpstream(sys.argv[1:]).start()
    print(server.port, flush=True)  # noqa: T201 - the process that started this one reads it
    threading.Event().wait()


if __name__ == "__main__":
    main()
