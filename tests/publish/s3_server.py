"""A real S3 server on this machine: moto's, which answers the AWS clients' requests from memory."""

from collections.abc import Iterator
from contextlib import contextmanager

import fsspec
import pytest
from moto.server import ThreadedMotoServer

KEY = "secret-key-that-nobody-may-see"


class S3Server:
    """The server; its buckets survive a stop."""

    def __init__(self) -> None:
        self._port = 0
        self._server: ThreadedMotoServer | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def start(self) -> None:
        """Listen, on the same port as before."""
        self._server = ThreadedMotoServer("127.0.0.1", self._port, verbose=False)
        self._server.start()
        self._port = self._server.get_host_and_port()[1]

    def stop(self) -> None:
        """Refuse connections. Safe to call twice."""
        if self._server is not None:
            self._server.stop()
            self._server = None


@contextmanager
def s3_server() -> Iterator[S3Server]:
    """A running server; the environment names it, as it names a company's own."""
    server = S3Server()
    server.start()
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {
            "AWS_ENDPOINT_URL": server.url,
            "AWS_ACCESS_KEY_ID": "me",
            "AWS_SECRET_ACCESS_KEY": KEY,
            "AWS_DEFAULT_REGION": "us-east-1",
        }.items():
            patch.setenv(name, value)
        client = fsspec.get_filesystem_class("s3")
        client.clear_instance_cache()
        try:
            # A worker may begin a module twice, and the buckets are of its process.
            fsspec.filesystem("s3", use_listings_cache=False).makedirs("bucket", exist_ok=True)
            yield server
        finally:
            client.clear_instance_cache()
            server.stop()
