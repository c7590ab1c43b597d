"""Shift detection by itself: the daemon's decisions, without torch."""

import gzip
import subprocess
import sys
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from streamlearn import DriftMonitor
from streamlearn.backbone.load import load, outline
from streamlearn.errors import ConfigError, RecordError
from streamlearn.model_files import NANO, embedding_rows
from streamlearn.settings import BackboneSettings, ShiftSettings, StreamSettings
from streamlearn.shift.detector import Shift
from streamlearn.shift.drift_monitor import Decision
from streamlearn.shift.features import Featurizer
from streamlearn.shift.monitor import Monitor
from streamlearn.stream.decode import Decoder
from streamlearn.stream.intake import Batcher
from streamlearn.stream.position import TopicPartition
from streamlearn.stream.record import Record

SAMPLE = Path(__file__).parents[2] / "configs/sample/superni.train.jsonl.gz"
FIRST_OF_EACH_TASK = (1, 201, 343)
PROGRAM = f"""
import sys
sys.modules["torch"] = None  # importing it fails
import gzip, orjson
from streamlearn import DriftMonitor

monitor = DriftMonitor("builtin:nano")
decisions = [monitor.update(orjson.loads(line)["prompt"]) for line in gzip.open({str(SAMPLE)!r})]
decisions = [decision for decision in decisions if decision.record] + monitor.flush()
shifts = [(decision.record, decision.regime, list(decision.shifts)) for decision in decisions if decision.shift]
print(orjson.dumps(shifts, option=orjson.OPT_SERIALIZE_NUMPY).decode())
print([decision.record for decision in decisions] == list(range(1, len(decisions) + 1)))
"""


def lines() -> list[bytes]:
    with gzip.open(SAMPLE) as file:
        return [line.strip() for line in file]


def prompts() -> list[str]:
    return [orjson.loads(line)["prompt"] for line in lines()]


def shifts_of_the_daemon() -> Iterator[Shift]:
    """Those that the daemon's decoder, batches and monitor find in the sample."""
    settings = BackboneSettings(dtype="float32", device="cpu")
    backbone = load(settings, outline(settings))
    decoder = Decoder(backbone.tokenizer, StreamSettings(), backbone.vocab_size)
    monitor, batcher = Monitor(ShiftSettings(), Featurizer(0, backbone.token_vectors)), Batcher(StreamSettings())
    for offset, line in enumerate(lines()):
        record = Record(TopicPartition("sample", 0), offset, line)
        for batch in batcher.add(record, decoder.decode(record)):
            monitor.update(batch)
    for batch in batcher.flush():
        monitor.update(batch)
    monitor.flush()
    for assigned in iter(monitor.take, None):
        yield from assigned.shifts


def every(monitor: DriftMonitor, texts: list[str]) -> list[Decision]:
    decisions = [monitor.update(text) for text in texts]
    return [decision for decision in decisions if decision.record is not None] + monitor.flush()


def test_without_torch_it_finds_the_shifts_of_the_daemon() -> None:
    """Every field of each is equal, up to the last bit of the statistics; the daemon's first one is no shift here."""
    ended = subprocess.run([sys.executable, "-c", PROGRAM], check=True, capture_output=True, text=True)
    found, in_order = ended.stdout.splitlines()
    assert in_order == "True"
    shifts = [(record, regime, [Shift(**shift) for shift in shifts]) for record, regime, shifts in orjson.loads(found)]
    first, *others = shifts_of_the_daemon()
    assert first.onset == FIRST_OF_EACH_TASK[0]
    assert shifts == [(shift.onset, shift.regime, [shift]) for shift in others]
    assert [record for record, _, _ in shifts] == [*FIRST_OF_EACH_TASK[1:]]


def test_a_decision_comes_lookahead_records_later() -> None:
    """Until then it is empty; a flush returns the rest, and the stream goes on after it."""
    texts = prompts()[:10]
    monitor = DriftMonitor(NANO, lookahead_records=4)
    assert [monitor.update(text).record for text in texts] == [None] * 4 + [1, 2, 3, 4, 5, 6]
    assert [(decision.record, decision.regime) for decision in monitor.flush()] == [(7, 1), (8, 1), (9, 1), (10, 1)]
    assert monitor.flush() == []
    assert [monitor.update(text).record for text in texts[:5]] == [None] * 4 + [11]
    assert DriftMonitor(NANO, lookahead_records=0).update(texts[0]) == Decision(1, 1)


def test_a_tokenizer_and_an_array_are_as_good_as_the_model() -> None:
    """Of transformers or of `tokenizers`, on texts or ids; without embeddings the sample's shifts are found too."""
    texts = prompts()[:230]
    expected = every(DriftMonitor("builtin:nano"), texts)
    assert [decision.record for decision in expected if decision.shift] == [201]
    fast, bare = AutoTokenizer.from_pretrained(NANO), Tokenizer.from_file(str(NANO / "tokenizer.json"))
    embeddings = np.concatenate(list(embedding_rows(NANO, 4096)))
    assert every(DriftMonitor(fast, embeddings=embeddings), texts) == expected
    monitor = DriftMonitor(bare, embeddings=embeddings)
    assert [monitor.update(bare.encode(text).ids) for text in texts][16:] + monitor.flush() == expected
    regimes = [decision.regime for decision in every(DriftMonitor(bare), texts)]
    assert [(regime, len(list(run))) for regime, run in groupby(regimes)] == [(1, 200), (2, 30)]


def test_settings_are_refused_as_in_a_configuration() -> None:
    with pytest.raises(ConfigError) as caught:
        DriftMonitor("builtin:nano", max_regime=3, false_alarms_per_million=0)
    assert str(caught.value).splitlines() == [
        "shift.false_alarms_per_million: expected more than 0, found 0",
        "shift.max_regime: unknown key, did you mean shift.max_regimes?",
    ]


@pytest.mark.parametrize(
    ("tokenizer", "options", "message"),
    [
        ("builtin:large", {}, "backbone.model builtin:large: no such model"),
        ("/nowhere", {}, "must be a folder, a builtin model or a hub id"),
        (object(), {}, "the backbone must have a fast tokenizer"),
        ("builtin:nano", {"embeddings": [1.0, 2.0]}, r"embeddings must be an array .* found shape \(2,\)"),
    ],
)
def test_a_model_that_cannot_be_used_is_refused(tokenizer: object, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        DriftMonitor(tokenizer, **options)


@pytest.mark.parametrize("text", ["", [], [[1, 2]], [0.5], [-1]])
def test_a_text_without_tokens_is_refused_and_changes_nothing(text: str | list[int]) -> None:
    """Neither is what is no list of token ids."""
    monitor = DriftMonitor(NANO, lookahead_records=0)
    with pytest.raises(RecordError):
        monitor.update(text)
    assert monitor.update("the quick brown fox").record == 1
