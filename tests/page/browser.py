"""Debian's Chromium, driven by Playwright: a fresh profile each, and what it reported."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from playwright.sync_api import Browser, ConsoleMessage, Page, Playwright, Request

PROGRAMS = ("chromium", "chromium-browser", "google-chrome")
FLAGS = (
    "--headless=new",
    "--no-sandbox",  # a container has no user namespaces
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


def chromium() -> str | None:
    return next((path for path in map(shutil.which, PROGRAMS) if path is not None), None)


@contextmanager
def launched(playwright: Playwright) -> Iterator[Browser]:
    browser = playwright.chromium.launch(executable_path=chromium(), args=FLAGS, timeout=120_000)
    try:
        yield browser
    finally:
        browser.close()


@dataclass
class Watched:
    """A page and everything that it complained about or asked for."""

    page: Page
    problems: list[str] = field(default_factory=list)
    """Console errors and warnings, and exceptions."""
    requests: list[str] = field(default_factory=list)
    """Addresses."""

    @classmethod
    def of(cls, page: Page) -> "Watched":
        watched = cls(page)
        page.on("console", watched._on_console)
        page.on("pageerror", lambda error: watched.problems.append(f"exception: {error}"))
        page.on("request", watched._on_request)
        return watched

    @property
    def hosts(self) -> set[str | None]:
        return {urlsplit(url).hostname for url in self.requests}

    def _on_console(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            self.problems.append(f"{message.type}: {message.text}")

    def _on_request(self, request: Request) -> None:
        self.requests.append(request.url)
