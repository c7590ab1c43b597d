"""Publications of the bundled sample's regimes, with the bundled tokenizer; their adapters are names only."""

import gzip
from collections.abc import Collection, Mapping
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

from benchmarks.measuring import SAMPLE
from streamlearn.codec import from_arrays, to_arrays
from streamlearn.gateway.publication import read_decoder
from streamlearn.model_files import load_tokenizer
from streamlearn.publish.publication import Publication, PublishedRegime, routing_bytes, write_vectors
from streamlearn.settings import ShiftSettings, StreamSettings
from streamlearn.shift.features import NUM_FEATURES, Featurizer
from streamlearn.shift.monitor import Monitor, MonitorState
from streamlearn.stream.decode import Decoder
from streamlearn.stream.record import Batch

NANO = Path(__file__).parents[2] / "streamlearn/backbone/nano"
BACKBONE = "nano"
RUN = "5d3c1f" + "0" * 26

Arrays = Mapping[str, NDArray[np.generic]]


@cache
def sample_records() -> tuple[dict[str, Any], ...]:
    """The bundled records: three tasks, one after another."""
    with gzip.open(SAMPLE) as lines:
        return tuple(orjson.loads(line) for line in lines)


@cache
def nano_tokenizer() -> Any:
    """The bundled tokenizer, which takes half a second to read."""
    return load_tokenizer(NANO)


@cache
def nano_decoder() -> Decoder:
    """The gateway's, with the bundled tokenizer."""
    return read_decoder(NANO)


@cache
def sample_state() -> Arrays:
    """The routing state after the bundled records; takes a second."""
    decoder = Decoder(nano_tokenizer(), StreamSettings(), len(nano_tokenizer()))
    monitor = Monitor(ShiftSettings(), Featurizer(0))
    for record in sample_records():
        monitor.update(Batch((), (decoder.decode_value(record),)))
    monitor.flush()
    *_, last = iter(monitor.take, None)
    return to_arrays(last.after)


def publish_sample(
    folder: Path,
    version: int = 184,
    *,
    state: Arrays | None = None,
    vectors_VD: NDArray[np.float16] | None = None,
    held_back: Collection[int] = (),
    **changes: Any,
) -> Publication:
    """Write a publication, by default of the sample's state; everything that it names is complete before it is.

    Args:
        folder: The published folder.
        version: Step of the snapshot that it claims to be from.
        state: Another routing state.
        vectors_VD: Its token vectors; by default tokens have random ones.
        held_back: Numbers of regimes without a published version.
        changes: Other values of fields.
    """
    arrays = sample_state() if state is None else state
    regimes = tuple(
        PublishedRegime(
            slot=slot,
            number=profile.number,
            label=None,
            adapter=None if profile.number in held_back else f"streamlearn-regime-{profile.number}@{version}-{RUN[:6]}",
        )
        for slot, profile in enumerate(from_arrays(MonitorState, arrays).detector.regimes)
        if profile is not None
    )
    values: dict[str, Any] = {
        "name": "streamlearn",
        "run": RUN,
        "sequence": 1,
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
    (folder / publication.routing).parent.mkdir(parents=True, exist_ok=True)
    (folder / publication.routing).write_bytes(routing_bytes(arrays))
    if not (folder / publication.tokenizer / "tokenizer.json").exists():
        nano_tokenizer().save_pretrained(folder / publication.tokenizer)
    no_vectors = np.zeros((0, NUM_FEATURES), np.float16)
    write_vectors(folder / publication.tokenizer, no_vectors if vectors_VD is None else vectors_VD)
    publication.write(folder)
    return publication


def served_models(*publications: Publication) -> set[str]:
    """What a model server must serve for these publications."""
    return {model for each in publications for model in (each.backbone, *each.adapters)}
