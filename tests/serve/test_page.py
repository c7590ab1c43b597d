"""The page's files: to whom, with which headers, and how little is sent twice."""

import re
from importlib.resources import files
from pathlib import PurePath

import httpx2
import pytest
from starlette.datastructures import URL
from starlette.requests import Request

from streamlearn.serve import app as library
from streamlearn.serve.app import PREFIX, is_page_request
from tests.serve.doubles import AUTHORIZED, SETTINGS, Daemon

STATIC = files("streamlearn.serve") / "static"
OWN = sorted(file.name for file in STATIC.iterdir())
SERVED = [name for name in OWN if name != "index.html"] + list(library.FILES)
BROWSER = {"accept": "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8"}
EXTERNAL = re.compile(r"""(?:https?:)?//[\w.-]+\.\w+""")


def directives(policy: str) -> dict[str, str]:
    return {name: value for name, _, value in (part.strip().partition(" ") for part in policy.split(";"))}


def test_a_browser_gets_the_page_and_a_program_the_list_of_endpoints(client: httpx2.Client) -> None:
    """Both at /, and a cache is told that the answer depends on who asks."""
    page, listed = client.get("/", headers=BROWSER), client.get("/")
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    assert "<title>streamlearn</title>" in page.text
    assert listed.headers["content-type"] == "text/plain; charset=utf-8"
    assert "GET  /v1/status" in listed.text
    assert "Accept" in page.headers["vary"]
    assert "Accept" in listed.headers["vary"]


@pytest.mark.parametrize("path", ["/", *(PREFIX + name for name in SERVED)])
def test_every_file_has_the_headers_that_keep_foreign_code_out(client: httpx2.Client, path: str) -> None:
    """Scripts, styles and requests of this host only, no inline code, no frame around it."""
    headers = client.get(path, headers=BROWSER).raise_for_status().headers
    policy = directives(headers["content-security-policy"])
    assert policy["default-src"] == policy["base-uri"] == policy["form-action"] == policy["frame-ancestors"] == "'none'"
    assert {policy[f"{kind}-src"] for kind in ("script", "style", "connect", "img")} == {"'self'"}
    assert "unsafe" not in headers["content-security-policy"]
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["referrer-policy"] == "no-referrer"
    assert headers["x-frame-options"] == "DENY"
    assert headers["cross-origin-opener-policy"] == headers["cross-origin-resource-policy"] == "same-origin"
    types = {".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml", "": "text/html"}
    assert headers["content-type"].partition(";")[0] == types[PurePath(path).suffix]


@pytest.mark.parametrize("path", ["/", f"{PREFIX}main.js"])
def test_what_a_browser_has_is_not_sent_again(client: httpx2.Client, path: str) -> None:
    """It asks with the ETag, and the answer has no body; a copy of another content is replaced."""
    first = client.get(path, headers=BROWSER)
    assert first.headers["cache-control"] == "no-cache"
    again = client.get(path, headers={**BROWSER, "if-none-match": f'"another", {first.headers["etag"]}'})
    assert (again.status_code, again.content) == (304, b"")
    assert again.headers["etag"] == first.headers["etag"]
    assert client.get(path, headers={**BROWSER, "if-none-match": '"another"'}).content == first.content


@pytest.mark.parametrize("name", ["nowhere.js", "index.html", "..%2fapp.py"])
def test_nothing_else_is_served(client: httpx2.Client, name: str) -> None:
    """Neither a file beside the folder nor one that does not exist."""
    answer = client.get(PREFIX + name)
    assert answer.status_code == 404
    assert answer.json()["error"]["code"] == "not_found"


def test_the_page_needs_no_token_and_its_figures_do() -> None:
    """A browser cannot send one while it opens a page; the page asks for it."""
    daemon = Daemon(SETTINGS.model_copy(update={"require_token": True}))
    with httpx2.Client(base_url=f"http://127.0.0.1:{daemon.server.port}") as anonymous:
        opened = [anonymous.get(path, headers=BROWSER).status_code for path in ("/", f"{PREFIX}main.js")]
        refused = [
            anonymous.get("/").status_code,
            anonymous.get("/v1/status", headers=BROWSER).status_code,
            anonymous.post("/", headers=BROWSER).status_code,
            anonymous.post(f"{PREFIX}main.js", headers=BROWSER).status_code,
        ]
        allowed = anonymous.get("/v1/status", headers=AUTHORIZED).status_code
    daemon.stop()
    assert opened == [200, 200]
    assert refused == [401, 401, 401, 401]
    assert allowed == 200


def test_what_counts_as_the_page_does_not_depend_on_the_host_header(monkeypatch: pytest.MonkeyPatch) -> None:
    """Older releases of Starlette build the URL from it, and `/?` at its end turns every path into the query."""
    monkeypatch.setattr(Request, "url", URL("http://localhost/?/v1/status"))
    asked = {"type": "http", "method": "GET", "path": "/v1/status", "headers": [(b"accept", b"text/html")]}
    assert not is_page_request(Request(asked))
    assert is_page_request(Request({**asked, "path": "/"}))


@pytest.mark.parametrize("name", [name for name in OWN if not name.endswith(".svg")])
def test_no_file_names_another_host(name: str) -> None:
    """Nothing is fetched from elsewhere."""
    assert EXTERNAL.findall((STATIC / name).read_text(encoding="utf-8").replace("http://www.w3.org/2000/svg", "")) == []


def test_every_module_that_is_imported_is_there() -> None:
    """And the page asks for no file that is not served."""
    text = "\n".join((STATIC / name).read_text(encoding="utf-8") for name in OWN)
    named = set(re.findall(r'from "\./([\w.]+)"', text)) | set(re.findall(r'"/page/([\w.]+)"', text))
    assert named <= set(SERVED)
    assert {name for name in OWN if name.endswith((".js", ".css", ".svg"))} <= named


def test_without_the_chart_library_the_page_still_opens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its files are empty then, so that the page can say what to install."""
    monkeypatch.setattr(library, "DISTRIBUTION", "a-distribution-that-nobody-has")
    daemon = Daemon()
    with httpx2.Client(base_url=f"http://127.0.0.1:{daemon.server.port}") as client:
        found = [client.get(PREFIX + name) for name in library.FILES]
    daemon.stop()
    assert [(response.status_code, response.content) for response in found] == [(200, b""), (200, b"")]
