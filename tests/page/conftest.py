"""One run and one browser for all tests of the page; skipped without a Chromium."""

from collections.abc import Iterator
from importlib.resources import files

import pytest
from playwright.sync_api import Browser, sync_playwright

from tests.end_to_end.process import ForkedDaemon
from tests.page.browser import PROGRAMS, Watched, chromium, launched
from tests.page.watched_run import TASKS, WatchedRun

SLOW_MS = 60_000  # a browser beside other tests on two cores


@pytest.fixture(scope="package")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WatchedRun]:
    """A run through all of `TASKS`, with three shifts, some dead letters and some requests; it goes on idle."""
    if chromium() is None:
        pytest.skip(f"no browser: none of {', '.join(PROGRAMS)} is installed (Debian: apt-get install chromium)")
    running = WatchedRun(tmp_path_factory.mktemp("watched"), process=ForkedDaemon)
    try:
        running.start()
        for task in range(len(TASKS)):
            running.feed(task, unusable=task == 1)
            running.wait_until_read()
            running.ask()
        running.wait_until_read()
        yield running
    finally:
        running.daemon.end()


@pytest.fixture(scope="package")
def browser(run: WatchedRun) -> Iterator[Browser]:
    """Started after the run, whose processor it would share."""
    with sync_playwright() as playwright, launched(playwright) as opened:
        yield opened


@pytest.fixture
def watched(run: WatchedRun, browser: Browser) -> Iterator[Watched]:
    """The page, opened and with its figures, in a profile of its own."""
    context = browser.new_context(viewport={"width": 1440, "height": 900})
    page = context.new_page()
    page.set_default_timeout(SLOW_MS)
    opened = Watched.of(page)
    page.goto(run.url)
    page.wait_for_selector("#shift-table tbody tr:nth-child(4)")
    yield opened
    context.close()


@pytest.fixture(scope="package")
def axe() -> str:
    return (files("axe_playwright_python") / "axe.min.js").read_text(encoding="utf-8")
