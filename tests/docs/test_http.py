"""docs/http.md names every endpoint that the daemon serves."""

import orjson

from tests.docs.markdown import ROOT
from tests.docs.place import Place

TEXT = (ROOT / "docs" / "http.md").read_text(encoding="utf-8")


def test_every_endpoint_is_documented(daemon: Place) -> None:
    """With its method, and no other."""
    paths = orjson.loads(daemon.get("/openapi.json"))["paths"]
    served = {f"| `{method.upper()} {path}` |" for path, methods in paths.items() for method in methods}
    rows = [line for line in TEXT.splitlines() if line.startswith(("| `GET /", "| `POST /"))]
    assert {row[: row.index("` |") + 3] for row in rows} == served
