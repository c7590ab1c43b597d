"""Measure the page, or take its screenshots: `make page`, and `python -m tests.page --screenshots FOLDER --url URL`."""

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from playwright.sync_api import sync_playwright

from tests.page import figures
from tests.page.browser import PROGRAMS, chromium, launched
from tests.page.watched_run import WatchedRun

IDLE_S = 30.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=12, help="turns with three browsers, each between two quiet ones")
    parser.add_argument("--seconds", type=float, default=15.0, help="duration of a turn")
    parser.add_argument("--json", type=Path, help="file for the figures")
    parser.add_argument("--screenshots", type=Path, help="only take screenshots, into this folder")
    parser.add_argument("--url", help="of the running daemon that the screenshots show")
    options = parser.parse_args()
    if chromium() is None:
        print(f"expected one of {', '.join(PROGRAMS)}, found none; on Debian: apt-get install chromium")
        return 2
    if options.screenshots is not None:
        with sync_playwright() as playwright, launched(playwright) as browser:
            print(*figures.screenshots(browser, options.url, options.screenshots), sep="\n")
        return 0
    with tempfile.TemporaryDirectory(prefix="streamlearn-page-") as folder:
        delays, share = _delays_and_share(Path(folder) / "shifts")
        turns = _turns(Path(folder) / "turns", options.rounds, options.seconds)
    speed = turns["speed_ratio"]["median"]
    print(
        f"a shift is on the page after {', '.join(f'{delay:.2f}' for delay in delays)} s (aim: {figures.MAX_DELAY_S})"
    )
    print(f"three pages take {share:.2%} of a processor from a daemon that has nothing else to do")
    print(f"speed with three browsers: {turns['speed_ratio']} of quiet (aim: {figures.MIN_SPEED})")
    print(f"speed of a quiet turn: {turns['speed_ratio_of_quiet_turns']} of another quiet one")
    print(f"processor time of the daemon per token: {turns['cpu_per_token_ratio']} of quiet")
    if options.json is not None:
        options.json.write_text(
            json.dumps({"shift_delays_s": delays, "idle_share": round(share, 5), **turns}, indent=1) + "\n",
            encoding="utf-8",
        )
    return int(max(delays) > figures.MAX_DELAY_S or speed < figures.MIN_SPEED)


def _delays_and_share(folder: Path) -> tuple[list[float], float]:
    run = WatchedRun(folder)
    try:
        run.start()
        with sync_playwright() as playwright, launched(playwright) as browser:
            delays = figures.shift_delays(run, browser.new_page())
        return delays, figures.idle_share(run, IDLE_S)
    finally:
        run.daemon.end()


def _turns(folder: Path, rounds: int, seconds: float) -> dict[str, Any]:
    evenly: dict[str, Any] = {"holdout": {}, "snapshot": {"every_records": 2000}}  # few interruptions of training
    run = WatchedRun(folder, backbone="builtin:nano", **evenly)
    try:
        run.feed_endlessly()
        run.start()
        with figures.apart(run.daemon.pid):
            return figures.summary(figures.paired_turns(run, rounds=rounds, seconds=seconds))
    finally:
        run.daemon.end()


if __name__ == "__main__":
    sys.exit(main())
