"""docs/http.md names every endpoint and every metric that the daemon serves."""

import re

import orjson

from streamlearn.jobs.queue import JobQueue
from streamlearn.serve.metrics import exposition, registry
from streamlearn.status.board import Board, Clock
from streamlearn.status.publication_status import PublicationStatus
from streamlearn.status.status import Phase, Status
from streamlearn.status.tracker_status import TrackerStatus
from tests.docs.markdown import ROOT
from tests.docs.place import Place

TEXT = (ROOT / "docs" / "http.md").read_text(encoding="utf-8")


def test_every_metric_is_documented(daemon: Place) -> None:
    """By its name, its type and its labels."""
    for name, kind in re.findall(r"^# TYPE (streamlearn_\w+) (\w+)$", daemon.get("/metrics"), re.MULTILINE):
        assert f"| `{name}` | {kind} |" in TEXT


def test_every_metric_of_the_table_is_served(daemon: Place) -> None:
    """Except for those that appear with the first past regime, and those of publishing, which is off here."""
    served = set(re.findall(r"^# TYPE (\w+) ", daemon.get("/metrics"), re.MULTILINE))
    later = {"streamlearn_average_forgetting", "streamlearn_backward_transfer"}
    status = Status(Phase.RUNNING, publication=PublicationStatus(sequence=1), trackers=(TrackerStatus("mlflow"),))
    board = Board(status, Clock())
    publishing = exposition(registry(board, JobQueue(1), Clock())).decode()
    served |= set(re.findall(r"^# TYPE (streamlearn_\w+) ", publishing, re.MULTILINE))
    assert set(re.findall(r"^\| `(streamlearn_\w+)` \|", TEXT, re.MULTILINE)) - later <= served


def test_every_endpoint_is_documented(daemon: Place) -> None:
    """With its method."""
    paths = orjson.loads(daemon.get("/openapi.json"))["paths"]
    wanted = {f"| `{method.upper()} {path}` |" for path, methods in paths.items() for method in methods}
    assert {row for row in wanted if row not in TEXT} == set()
