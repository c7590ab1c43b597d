"""Published folders of the bundled sample, and a gateway in front of stub servers."""

import gzip
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import orjson
from numpy.typing import NDArray

from streamlearn.bench.sample import SAMPLE
from streamlearn.bench.stub_upstream import StubUpstream
from streamlearn.gateway.app import create_app
from streamlearn.gateway.connection import GatewayConnection
from streamlearn.http.server import HttpServer
from streamlearn.publish import routing_state
from streamlearn.publish.publication import Publication, PublishedRegime
from streamlearn.settings import GatewaySettings, ShiftSettings, StreamSettings
from streamlearn.shift.monitor import Monitor
from streamlearn.stream.batch import Batch
from streamlearn.stream.decode import Decoder
from streamlearn.stream.tokenizer_folder import load_tokenizer

NANO = Path(__file__).parents[2] / "streamlearn" / "backbone" / "nano"
BACKBONE = "nano"
UNKNOWN_PROMPTS = (
    "Übersetze den Satz ins Deutsche: the rain in Spain",
    "SELECT name FROM users WHERE id = 7;",
    "7 8 9",
)
STARTED_S = 20.0

Arrays = Mapping[str, NDArray[np.generic]]


@cache
def sample() -> tuple[dict[str, Any], ...]:
    """The bundled records, three tasks one after another."""
    with gzip.open(SAMPLE) as lines:
        return tuple(orjson.loads(line) for line in lines)


@cache
def sample_state() -> Arrays:
    """The routing state after the bundled sample: three regimes."""
    tokenizer = load_tokenizer(NANO)
    decoder = Decoder(tokenizer, StreamSettings(), len(tokenizer))
    monitor = Monitor(ShiftSettings(), len(tokenizer), seed=0)
    for row in sample():
        monitor.update(Batch((), (decoder.decode_value(row),)))
    monitor.flush()
    return monitor.state()


def prompts_of_each_task() -> list[str]:
    """One prompt of each task, in the order of the stream."""
    return [sample()[at]["prompt"] for at in (100, 300, 480)]


def publish(
    folder: Path,
    version: int = 184,
    *,
    sequence: int = 1,
    state: Arrays | None = None,
    held_back: tuple[int, ...] = (),
    **changes: Any,
) -> Publication:
    """Write a publication of the sample's regimes, complete before it is seen."""
    arrays = sample_state() if state is None else state
    numbers = [int(row[_column("number")]) for row in arrays["regimes.scalars"]]
    regimes = tuple(
        PublishedRegime(
            slot=slot,
            number=number,
            label=None,
            adapter=None if number in held_back else f"streamlearn-regime-{number}@{version}",
        )
        for slot, number in enumerate(numbers)
    )
    values: dict[str, Any] = {
        "name": "streamlearn",
        "sequence": sequence,
        "written_at": datetime(2026, 1, 31, 12, tzinfo=UTC),
        "snapshot": f"{version:08}",
        "backbone": BACKBONE,
        "seed": 0,
        "max_known_rejected": 0.01,
        "routing": f"routing/{version}.safetensors",
        "tokenizer": "tokenizer",
        "regimes": regimes,
    }
    publication = Publication.model_validate(values | changes)
    for name in ("routing", "tokenizer"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    (folder / publication.routing).write_bytes(routing_state.to_bytes(arrays))
    if not (folder / "tokenizer" / "tokenizer.json").exists():
        load_tokenizer(NANO).save_pretrained(folder / "tokenizer")
    publication.write(folder)
    return publication


def models_of(*publications: Publication) -> set[str]:
    """What a server must serve for these publications."""
    return {BACKBONE, *(model for each in publications for model in each.adapters)}


@contextmanager
def gateway(published: Path, *upstreams: StubUpstream | str, token: str = "", **options: Any) -> Iterator[httpx.Client]:
    """A client of a gateway in this process; it waits until the gateway is ready, if it is given ready servers."""
    urls = tuple(each if isinstance(each, str) else each.url for each in upstreams)
    settings = GatewaySettings(published=published, upstreams=urls, port=0, require_token=bool(token), **options)
    app = create_app(settings, token=token)
    server = HttpServer(app, settings, connection=GatewayConnection, grace_s=10.0)
    with server, httpx.Client(base_url=f"http://127.0.0.1:{server.port}", timeout=20.0) as client:
        yield client


def wait_until(condition: Callable[[], bool], what: str) -> None:
    """Fail unless the condition comes true in time."""
    deadline = time.monotonic() + STARTED_S
    while not condition():
        assert time.monotonic() < deadline, f"waited in vain for {what}"
        time.sleep(0.02)


def is_ready(client: httpx.Client) -> bool:
    return client.get("/readyz").status_code == 200


def _column(name: str) -> int:
    from streamlearn.shift.regime_profile import SCALARS

    return SCALARS.index(name)
