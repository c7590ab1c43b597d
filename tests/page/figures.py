"""What is measured of the page: how soon a shift is on it, and what it costs training to have it open."""

import os
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any

from PIL import Image
from playwright.sync_api import Browser, Page, sync_playwright

from tests.page.browser import Watched, launched
from tests.page.watched_run import TASKS, WatchedRun

MAX_DELAY_S = 2.0
MIN_SPEED = 0.98
NUM_BROWSERS = 3
SCREENSHOT_COLORS = 64  # a quarter of the bytes, and no difference to the eye
SETTLE_S = 3.0  # a browser loads the page, or leaves it
NOTE_ROWS = """() => {
  window.shown = [];
  const note = () => window.shown.push([document.querySelectorAll("#shift-table tbody tr").length, Date.now()]);
  new MutationObserver(note).observe(document.getElementById("shift-table"), {childList: true, subtree: true});
}"""


def shift_delays(run: WatchedRun, page: Page) -> list[float]:
    """Seconds from the log event of each shift to its row on the page, which is open meanwhile."""
    watched = Watched.of(page)
    page.goto(run.url)
    page.wait_for_selector("#tiles .value")
    page.evaluate(NOTE_ROWS)
    for task in range(len(TASKS)):
        run.feed(task)
        run.wait_until_read()
        page.wait_for_selector(f"#shift-table tbody tr:nth-child({task + 1})")
    assert watched.problems == []
    assert watched.hosts == {"127.0.0.1"}
    shown = page.evaluate("window.shown")
    first = [min(at for rows, at in shown if rows >= number) for number in range(2, len(TASKS) + 1)]
    return [at / 1000 - shift.timestamp() for at, shift in zip(first, run.shifts(), strict=True)]


def idle_share(run: WatchedRun, seconds: float) -> float:
    """Share of a processor that the daemon needs for `NUM_BROWSERS` pages, while it has nothing to train on.

    Far more exact than turns of training, whose speed is never the same twice. The answers are the same but for the few
    points of the history that a second of training adds.
    """
    with sync_playwright() as playwright, ExitStack() as stack:
        pages = [stack.enter_context(launched(playwright)).new_page() for _ in range(NUM_BROWSERS)]
        shares = []
        for url in ("about:blank", run.url):
            for page in pages:
                page.goto(url)
            time.sleep(SETTLE_S)
            before, started = _cpu_s(run), time.monotonic()
            time.sleep(seconds)
            shares.append((_cpu_s(run) - before) / (time.monotonic() - started))
        closed, opened = shares
        return opened - closed


@dataclass(frozen=True)
class Turn:
    """One interval of training."""

    tokens_per_s: float
    cpu_s_per_token: float
    """Processor time of the daemon's process."""


@dataclass(frozen=True)
class Round:
    """A watched turn between two quiet ones, so that a machine that slows down steadily favors neither."""

    before: Turn
    watched: Turn
    after: Turn

    def ratio(self, field_name: str) -> float:
        quiet = (getattr(self.before, field_name) + getattr(self.after, field_name)) / 2
        return float(getattr(self.watched, field_name) / quiet)

    def quiet_ratio(self, field_name: str) -> float:
        """One quiet turn over the other: what the machine does by itself."""
        return float(getattr(self.after, field_name) / getattr(self.before, field_name))


@contextmanager
def apart(pid: int) -> Iterator[None]:
    """One processor for the process, and the others for what is started within: browsers are elsewhere as a rule."""
    allowed = os.sched_getaffinity(0)
    own, *others = sorted(allowed)
    if not others:
        raise RuntimeError("expected two processors, one for the daemon and one for the browsers, found one")
    for thread in Path(f"/proc/{pid}/task").iterdir():
        os.sched_setaffinity(int(thread.name), {own})
    os.sched_setaffinity(0, others)
    try:
        yield
    finally:
        os.sched_setaffinity(0, allowed)


def paired_turns(run: WatchedRun, *, rounds: int, seconds: float) -> list[Round]:
    with sync_playwright() as playwright, ExitStack() as stack:
        browsers = [stack.enter_context(launched(playwright)) for _ in range(NUM_BROWSERS)]
        pages = [browser.new_page(viewport={"width": 1440, "height": 900}) for browser in browsers]
        quiet, watched = (
            partial(_turn, run, pages, "about:blank", seconds),
            partial(_turn, run, pages, run.url, seconds),
        )
        return [Round(quiet(), watched(), quiet()) for _ in range(rounds)]


def summary(rounds: Sequence[Round]) -> dict[str, Any]:
    """Watched over quiet, and quiet over quiet: speed, and processor time per token; median and quartiles."""
    return {
        "rounds": len(rounds),
        "browsers": NUM_BROWSERS,
        "speed_ratio": _spread([turns.ratio("tokens_per_s") for turns in rounds]),
        "speed_ratio_of_quiet_turns": _spread([turns.quiet_ratio("tokens_per_s") for turns in rounds]),
        "cpu_per_token_ratio": _spread([turns.ratio("cpu_s_per_token") for turns in rounds]),
        "cpu_per_token_ratio_of_quiet_turns": _spread([turns.quiet_ratio("cpu_s_per_token") for turns in rounds]),
        "turns": [asdict(turns) for turns in rounds],
    }


def _turn(run: WatchedRun, pages: Sequence[Page], url: str, seconds: float) -> Turn:
    for page in pages:
        page.goto(url)
    time.sleep(SETTLE_S)
    before = _reading(run)
    time.sleep(seconds)
    after = _reading(run)
    elapsed, tokens, cpu = (late - early for early, late in zip(before, after, strict=True))
    assert tokens > 0, "nothing was trained on: the stream is too short for the turns"
    return Turn(tokens / elapsed, cpu / tokens)


def _reading(run: WatchedRun) -> tuple[float, float, float]:
    tokens = run.get("v1/status")["tokens_trained"]
    return time.monotonic(), tokens, _cpu_s(run)


def _cpu_s(run: WatchedRun) -> float:
    fields = Path(f"/proc/{run.daemon.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _spread(values: Sequence[float]) -> dict[str, float]:
    low, median, high = statistics.quantiles(values, n=4)
    return {"median": round(median, 4), "quartile_1": round(low, 4), "quartile_3": round(high, 4)}


def screenshots(browser: Browser, url: str, folder: Path) -> list[Path]:
    """The whole page on a phone and on a large screen, in light and dark."""
    written = []
    for width in (1440, 390):
        for scheme in ("light", "dark"):
            context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
            page = context.new_page()
            page.goto(url)
            page.wait_for_selector("#shift-table tbody tr")
            height = page.evaluate("document.documentElement.scrollHeight")
            page.set_viewport_size({"width": width, "height": height})  # every chart is in view, so it is drawn
            page.wait_for_timeout(3000)
            written.append(folder / f"{width}-{scheme}.png")
            shot = Image.open(BytesIO(page.screenshot(full_page=True)))
            shot.quantize(SCREENSHOT_COLORS, dither=Image.Dither.NONE).save(written[-1], optimize=True)
            context.close()
    return written
