"""What the documents' tests share."""

import gzip
import sys
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import orjson
import pytest

from tests.docs.markdown import ROOT
from tests.docs.place import CONFIG, Place, free_port, started

SAMPLE = ROOT / "configs" / "sample" / "superni.train.jsonl.gz"
START_S = 300.0  # a start is 10 s on two idle cores; CI's may be busy
POLL_S = 0.2


@pytest.fixture
def place(tmp_path: Path) -> Place:
    """A state folder and a free port."""
    return Place(tmp_path / "state", free_port())


@pytest.fixture(scope="session")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    """The quickstart's daemon, which has learned some records and waits for more."""
    folder = tmp_path_factory.mktemp("daemon")
    records, log = folder / "records.jsonl", folder / "log.txt"
    with gzip.open(SAMPLE, "rb") as sample:
        records.write_bytes(b"".join(islice(sample, 48)))
    here = Place(folder / "state", free_port())
    source = {"STREAMLEARN_SOURCE__JSONL__PATH": str(records), "STREAMLEARN_SOURCE__JSONL__FOLLOW": "true"}
    command = [sys.executable, "-m", "streamlearn", "run", "--config", CONFIG]
    with started(command, {**here.environment, **source}, log) as process:
        deadline = time.monotonic() + START_S
        while not has_learned(here):
            assert process.poll() is None, log.read_text()[-4000:]
            assert time.monotonic() < deadline, log.read_text()[-4000:]
            time.sleep(POLL_S)
        yield here


def has_learned(place: Place) -> bool:
    """Whether a daemon answers here and has trained on a record."""
    try:
        status = orjson.loads(place.get("/v1/status"))
    except OSError:
        return False
    return bool(status["ready"] and status["records_trained"])
