"""What a person sees and does: figures, charts, layouts, accessibility, keyboard and the token."""

from typing import Any

import pytest
from playwright.sync_api import Browser, Page

from tests.page.browser import Watched
from tests.page.conftest import SLOW_MS
from tests.page.watched_run import UNUSABLE, WatchedRun

PAINTED = """(figures) => figures.map((figure) => {
  const canvas = figure.querySelector("canvas");
  if (canvas === null) return [figure.parentElement.id, []];
  const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
  const near = (at, rgb) => rgb.every((value, index) => Math.abs(data[at + index] - value) < 24) && data[at + 3] > 128;
  const lines = [...figure.querySelectorAll(".legend line")];
  const painted = lines.map((line) => {
    const rgb = getComputedStyle(line).stroke.match(/[\\d.]+/g).slice(0, 3).map(Number);
    let number = 0;
    for (let at = 0; at < data.length; at += 4) if (near(at, rgb)) number += 1;
    return number;
  });
  return [figure.parentElement.id, painted];
})"""
"""Pixels of each line of each chart in the color of its legend."""

OUTSIDE = """() => [...document.querySelectorAll("body *")]
  .filter((each) => each.closest(".scroll, .marks, .skip, .hidden") === null && each.getClientRects().length > 0)
  .filter((each) => each.getBoundingClientRect().right > document.documentElement.clientWidth + 0.5)
  .map((each) => each.outerHTML.slice(0, 120))"""
"""Elements that reach beyond the right edge."""

FOCUSED = "() => document.activeElement.innerText || document.activeElement.id"


def text_of(page: Page, selector: str) -> str:
    return " ".join(page.inner_text(selector).split())


def show_all(page: Page) -> None:
    for figure in page.query_selector_all("figure.chart"):
        figure.scroll_into_view_if_needed()
        figure.wait_for_selector("canvas", state="attached")
    page.wait_for_timeout(300)


def test_it_shows_what_the_endpoints_say(watched: Watched, run: WatchedRun) -> None:
    """Progress, each shift with its evidence, each regime, each dead letter, without a complaint of the browser."""
    page, status = watched.page, run.get("v1/status")
    assert f"Records trained {status['records_trained']}" in text_of(page, "#tiles")
    for shift in run.get("v1/shifts")["shifts"][1:]:
        row = text_of(page, f"#shift-table tbody tr:has-text('{shift['declared_at']}')")
        evidence = (
            f"{shift['statistic']:.2f}",
            f"{shift['threshold']:.2f}",
            f"{shift['declared_at'] - shift['onset']}",
        )
        assert all(figure in row.split() for figure in evidence)
        assert f"Came: {', '.join(shift['tokens_came'])}." in row
    regimes = run.get("v1/regimes")["regimes"]
    assert page.locator("#regime-table tbody tr").count() == len(regimes) == 3
    assert all(f"{regime['records']}" in text_of(page, "#regime-table") for regime in regimes)
    assert page.locator("#canary-table tbody tr").count() == len(regimes)
    assert page.locator("#dead-letters > div > .scroll tbody tr").count() == len(UNUSABLE)
    assert [text_of(page, f"#ribbon li:nth-child({n}) [aria-hidden]") for n in (1, 2, 3, 4)] == ["1", "2", "3", "1"]
    assert page.locator("#matrix tbody tr").count() == 4
    assert watched.problems == []
    assert watched.hosts == {"127.0.0.1"}


@pytest.mark.parametrize(("width", "scheme"), [(390, "dark"), (1440, "light")])
def test_it_fits_and_is_accessible(browser: Browser, run: WatchedRun, axe: str, width: int, scheme: Any) -> None:
    """On a phone and on a large screen, by day and by night.

    Every chart draws each line in the color of its legend, nothing is cut off, and axe-core finds no violation.
    """
    context = browser.new_context(viewport={"width": width, "height": 844}, color_scheme=scheme)
    page = context.new_page()
    page.set_default_timeout(SLOW_MS)
    watched = Watched.of(page)
    page.goto(run.url)
    page.wait_for_selector("#shift-table tbody tr:nth-child(4)")
    show_all(page)
    painted = dict(page.eval_on_selector_all("figure.chart", PAINTED))
    assert len(painted) == 7
    assert {name: lines for name, lines in painted.items() if not lines or min(lines) < 20} == {}
    assert page.evaluate(OUTSIDE) == []
    assert page.evaluate("document.documentElement.scrollWidth") == width
    page.evaluate(axe)
    found = page.evaluate("() => axe.run(document, {resultTypes: ['violations']})")
    violations = {rule["id"]: [node["html"][:200] for node in rule["nodes"]] for rule in found["violations"]}
    assert len(found["passes"]) > 20
    assert violations == {}
    assert watched.problems == []
    context.close()


def test_everything_can_be_done_from_the_keyboard(watched: Watched, run: WatchedRun) -> None:
    """Skip to the data, open a question, decline it, and rename a regime with the token."""
    page = watched.page
    press = page.keyboard.press
    press("Tab")
    assert page.evaluate(FOCUSED) == "Skip to the data"
    press("Enter")
    assert page.evaluate(FOCUSED).startswith("NOW") or page.evaluate("() => document.activeElement.id") == "now"
    page.focus("#controls button")
    press("Enter")
    page.wait_for_selector("#confirm-dialog[open]")
    press("Escape")
    page.wait_for_selector("#confirm-dialog:not([open])", state="attached")
    assert page.evaluate(FOCUSED) == "Pause"
    page.click("#regime-table tr:last-child button:has-text('Drop')")
    page.wait_for_selector("text=are deleted")
    page.click("#confirm-no")
    page.wait_for_timeout(200)
    assert [url for url in watched.requests if url.endswith(("/drop", "/pause"))] == []

    page.focus("#regime-table button:has-text('Rename')")
    press("Enter")
    page.wait_for_selector("#confirm-dialog[open]")
    page.focus("#confirm-field")
    page.keyboard.type("animals")
    press("Enter")
    page.wait_for_selector("#token-dialog[open]")
    page.keyboard.type(run.token)
    press("Enter")
    page.wait_for_selector("#regime-table tbody tr:has-text('animals')")
    assert run.get("v1/regimes")["regimes"][0]["name"] == "animals"
    assert watched.problems == []


def test_the_token_is_asked_for_and_kept_in_memory_only(watched: Watched, run: WatchedRun) -> None:
    """A wrong one is refused and asked for again; a reload forgets the right one."""
    page = watched.page
    page.click("text=Write snapshot")
    page.fill("#token-field", "x" * 40)
    page.click("text=Use this token")
    page.wait_for_selector("text=does not accept this token")
    page.fill("#token-field", run.token)
    page.click("text=Use this token")
    page.wait_for_selector("#notice:has-text('snapshot')")
    assert text_of(page, "#notice").endswith("done.")
    kept = page.evaluate("() => JSON.stringify([localStorage, sessionStorage, document.cookie, location.href])")
    assert run.token not in kept
    assert page.context.cookies() == []
    assert all(run.token not in url for url in watched.requests)
    page.reload()
    page.wait_for_selector("button:has-text('Enter token')")
    assert page.locator("button:has-text('Forget token')").count() == 0


def test_what_a_command_changes_is_shown(watched: Watched, run: WatchedRun) -> None:
    """A new name wherever the regime is named, and a pin while no snapshot is written."""
    page = watched.page
    run.post("v1/regimes/2/rename", {"name": "figures"})
    for part in ("#ribbon li", "#regime-table tbody tr", "#shift-table tbody tr"):
        page.wait_for_selector(f"{part}:has-text('figures')", state="attached")
    run.post(f"v1/snapshots/{run.get('v1/snapshots')['snapshots'][-1]['name']}/pin")
    page.wait_for_selector("#snapshots tbody tr:has-text('pinned')")
    assert watched.problems == []
