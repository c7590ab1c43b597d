"""docs/http.md names every endpoint that the daemon serves."""

import orjson

from tests.docs.markdown import ROOT
from tests.docs.place import Place

TEXT = (ROOT / "docs" / "http.md").read_text(encoding="utf-8")


def test_every_endpoint_is_documented(daemon: Place) -> None:
    """With its method."""
    paths = orjson.loads(daemon.get("/openapi.json"))["paths"]
    wanted = {f"| `{method.upper()} {path}` |" for path, methods in paths.items() for method in methods}
    assert {row for row in wanted if row not in TEXT} == set()
