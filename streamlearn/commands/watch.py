"""The watch command: the daemon at a glance in a terminal, for as long as one looks."""

import time
from io import TextIOWrapper
from pathlib import Path
from urllib.parse import SplitResult, urlsplit

from rich.console import Console
from rich.live import Live

from streamlearn.commands.client import Endpoint
from streamlearn.commands.options import load_settings
from streamlearn.commands.watch_frame import WatchFrame
from streamlearn.commands.watched import WatchedDaemon
from streamlearn.errors import UsageError

EVERY_S = 1.0
"""Time between two frames."""


def endpoint_of(config: Path | None, url: str | None) -> Endpoint:
    """The daemon of a configuration, or the one at a URL, which must not need a token.

    Raises:
        UsageError: neither or both are given, or the URL cannot be one of a daemon.
    """
    if (config is None) == (url is None):
        raise UsageError("expected either --config FILE or --url URL")
    if config is not None:
        return Endpoint.of(load_settings(config))
    assert url is not None, "one of the two is given"
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname or not _has_valid_port(parts):
        raise UsageError(f"--url must be http://HOST:PORT or https://HOST:PORT, found {url}")
    return Endpoint(f"{parts.scheme}://{parts.netloc}")


def _has_valid_port(parts: SplitResult) -> bool:
    try:
        return parts.port != 0
    except ValueError:
        return False


def watch(endpoint: Endpoint, console: Console, *, once: bool) -> None:
    """Show a frame every second until Ctrl-C; one frame only if `once`, or if the output is no terminal.

    Raises:
        SourceError: no daemon answers, and there is only one frame.
        UsageError: the daemon refuses to answer, or is none of this release.
    """
    if isinstance(console.file, TextIOWrapper):
        console.file.reconfigure(errors="replace")  # a message may hold what the terminal cannot show
    watched = WatchedDaemon(endpoint)
    if once or not console.is_terminal:
        watched.ask()
        console.print(WatchFrame(watched))
        return
    try:
        with Live(console=console, screen=True, auto_refresh=False) as live:
            while True:
                watched.ask_if_there()
                live.update(WatchFrame(watched), refresh=True)
                time.sleep(EVERY_S)
    except KeyboardInterrupt:
        return
