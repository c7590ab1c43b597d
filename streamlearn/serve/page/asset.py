"""A static file as HTTP sends it: compressed once, and named by its content."""

import gzip
import hashlib
import re
from dataclasses import dataclass
from typing import Self

from starlette.requests import Request
from starlette.responses import Response


@dataclass(frozen=True, slots=True)
class Asset:
    """One file, in memory."""

    media_type: str
    body: bytes
    gzipped: bytes
    etag: str
    """Changes with the content, so that a browser asks whether its copy is current and downloads nothing if it is."""

    @classmethod
    def of(cls, media_type: str, body: bytes) -> Self:
        """Compress and hash the content."""
        digest = hashlib.sha256(body).hexdigest()[:32]
        return cls(media_type, body, gzip.compress(body, mtime=0), f'W/"{digest}"')  # weak: two encodings share it

    def response(self, request: Request, headers: dict[str, str]) -> Response:
        """200 with the content, or 304 where the client has it."""
        both = {**headers, "etag": self.etag, "cache-control": "no-cache"}
        if self.etag in _listed(request.headers.get("if-none-match", "")):
            return Response(status_code=304, headers=both)
        if _accepts_gzip(request.headers.get("accept-encoding", "")):
            return Response(self.gzipped, headers={**both, "content-encoding": "gzip"}, media_type=self.media_type)
        return Response(self.body, headers=both, media_type=self.media_type)


def _accepts_gzip(header: str) -> bool:
    """Whether an Accept-Encoding header names gzip, not with weight 0, which refuses it."""
    for value in header.split(","):
        encoding, *parameters = (part.strip().lower() for part in value.split(";"))
        if encoding == "gzip":
            return not any(re.fullmatch(r"q=0(\.0*)?", each) for each in parameters)
    return False


def _listed(header: str) -> set[str]:
    """The values of a comma-separated header, without their parameters."""
    return {value.partition(";")[0].strip() for value in header.split(",")}
