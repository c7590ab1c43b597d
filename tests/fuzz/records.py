"""Fuzzing of the record decoder: damaged and hostile records become an example or a reason, within time and memory.

    python -m tests.fuzz.records --count 1000000 [--data ../shared/data/superni]

Uses the records of the bundled sample, and of the folder's task files if given, in all four forms that a record may
have, and the tokenizer of the bundled backbone. The result is one JSON object. `unaccounted` counts records that became
neither a valid `Example` nor a `RecordError` with a message, and must be 0.
"""

import argparse
import gzip
import json
import random
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import orjson

from benchmarks.data import to_record
from benchmarks.measuring import SAMPLE, peak_mib
from streamlearn.backbone.load import load, outline
from streamlearn.errors import RecordError
from streamlearn.settings import BackboneSettings, StreamSettings
from streamlearn.stream.decode import Decoder
from streamlearn.stream.position import TopicPartition
from streamlearn.stream.record import IGNORED, Example, Record
from tests.fuzz.record_damage import CHARACTERS, DAMAGES, Damage, JsonRecord, damage_tree, giant, giants

PER_FILE, MAX_ORIGINAL_BYTES = 20, 1200
"""Originals per task file and their maximum size; small, because a million of them are decoded."""
GIANT_EVERY = 2000
MAX_CPU_S, MAX_GROWTH_MIB = 1.0, 64.0
"""Maximum processor time of one record, and maximum memory growth at the end."""
MAX_SHOWN = 5
"""Maximum number of unaccounted records in the result."""


def originals(folder: Path | None, decoder: Decoder) -> list[JsonRecord]:
    with gzip.open(SAMPLE) as lines:
        records = [orjson.loads(line) for line in lines]
    files = sorted(folder.glob("*.train.jsonl.gz")) if folder is not None else []
    for file in files:
        with gzip.open(file) as lines:
            short = (to_record(orjson.loads(line)) for line in lines if len(line) < MAX_ORIGINAL_BYTES)
            records += islice(short, PER_FILE)
    records = [record for record in records if len(orjson.dumps(record)) < MAX_ORIGINAL_BYTES][-400:]
    return [form for record in records for form in _forms(record, decoder)]


def _forms(record: JsonRecord, decoder: Decoder) -> list[JsonRecord]:
    """The record as prompt and completion, text, messages (twice), and tokens."""
    prompt, answer = record["prompt"], record["completion"]
    turn = [{"role": "user", "content": prompt[:300]}, {"role": "assistant", "content": answer}]
    system = {"role": "system", "content": "Answer in one word."}
    example = decoder.decode_value(record)
    return [
        record,
        {"text": prompt + answer},
        {"messages": turn},
        {"messages": [system, *turn, *turn], "meta": record.get("meta")},
        {"input_ids": example.input_ids.tolist(), "labels": example.labels.tolist()},
    ]


def nano_decoder() -> tuple[Decoder, int]:
    """Return the daemon's decoder for the bundled backbone, and the size of its vocabulary."""
    settings = BackboneSettings()
    backbone = load(settings, outline(settings))
    decoder = Decoder(backbone.tokenizer, StreamSettings(), backbone.vocab_size, (), backbone.vision, backbone.template)
    return decoder, backbone.vocab_size


def outcome(decoder: Decoder, vocab_size: int, value: bytes | None) -> tuple[str, str | None]:
    """Decode a value and return the outcome, and the fault in it if it is unaccounted for."""
    try:
        example = decoder.decode(Record(TopicPartition("fuzz", 0), 0, value))
    except RecordError as error:
        has_message = 0 < len(str(error)) < 1000
        return str(error.reason), None if has_message else f"a message of {len(str(error))} characters"
    except Exception as error:  # noqa: BLE001  what the benchmark looks for
        return "unaccounted", f"{type(error).__name__}: {str(error)[:200]}"
    return "decoded", _fault(example, vocab_size)


def _fault(example: Example, vocab_size: int) -> str | None:
    ids, labels = example.input_ids, example.labels
    if not 2 <= len(example) <= StreamSettings().max_tokens or len(labels) != len(ids):
        return f"{len(ids)} tokens, {len(labels)} labels"
    if not 0 <= int(ids.min()) <= int(ids.max()) < vocab_size:
        return f"token ids out of range: {ids.min()} to {ids.max()}"
    learned = labels != IGNORED
    if learned[0] or not learned.any() or not 0 <= int(labels[learned].min()) <= int(labels.max()) < vocab_size:
        return "labels that cannot be trained on"
    return None


@dataclass
class FuzzOutcomes:
    """Outcomes of the records decoded so far."""

    decoder: Decoder
    vocab_size: int
    counts: Counter[str] = field(default_factory=Counter)
    unaccounted: list[str] = field(default_factory=list)
    slowest_s: float = 0.0
    """Processor time; wall-clock time would include other work of the machine."""
    slowest_wall_s: float = 0.0
    slowest: str = ""

    def decode(self, value: bytes | None, name: str) -> None:
        began, began_wall = time.process_time(), time.perf_counter()
        what, fault = outcome(self.decoder, self.vocab_size, value)
        took, took_wall = time.process_time() - began, time.perf_counter() - began_wall
        self.slowest_wall_s = max(self.slowest_wall_s, took_wall)
        if took > self.slowest_s:
            self.slowest_s, self.slowest = took, f"{name}: {value!r:.120}"
        self.counts[what if fault is None else "unaccounted"] += 1
        if fault is not None and len(self.unaccounted) < MAX_SHOWN:
            self.unaccounted.append(f"{name}: {fault}: {value!r:.300}")


def fuzz(count: int, folder: Path | None, seed: int = 0) -> dict[str, Any]:
    """Decode the originals, the largest records of every kind, and `count` damaged ones.

    Both memory figures are relative to the process after the largest records: the peak while records are decoded (a
    megabyte of text briefly becomes a million tokens), and the growth that remains at the end.
    """
    decoder, vocab_size = nano_decoder()
    records, rng, outcomes = originals(folder, decoder), random.Random(seed), FuzzOutcomes(decoder, vocab_size)
    damages: tuple[Damage, ...] = (*DAMAGES, partial(damage_tree, seeds=records))
    for record in records:
        assert outcome(decoder, vocab_size, orjson.dumps(record)) == ("decoded", None), record
    for value in (value for character in CHARACTERS for value in giants(records[0], character, 0)):
        outcomes.decode(value, giants.__name__)
    before, began = peak_mib(restart=True), time.monotonic()
    for number in range(count):
        damage = giant if number % GIANT_EVERY == 0 else damages[number % len(damages)]
        outcomes.decode(damage(rng.choice(records), rng), _name(damage))
    seconds = time.monotonic() - began
    return {
        "records": outcomes.counts.total(),
        "damaged": count,
        "seed": seed,
        "originals": len(records),
        "damages": [_name(damage) for damage in (*damages, giant)],
        "outcomes": dict(outcomes.counts.most_common()),
        "unaccounted": outcomes.counts["unaccounted"],
        "unaccounted_examples": outcomes.unaccounted,
        "slowest_cpu_ms": round(1000 * outcomes.slowest_s, 1),
        "slowest_wall_ms": round(1000 * outcomes.slowest_wall_s, 1),
        "slowest_record": outcomes.slowest,
        "peak_memory_mib": round(peak_mib() - before, 1),
        "memory_growth_mib": round(peak_mib(restart=True) - before, 1),
        "records_per_s": round(count / seconds),
    }


def _name(damage: Damage) -> str:
    function = damage.func if isinstance(damage, partial) else damage
    return str(getattr(function, "__name__", function))


def is_clean(figures: dict[str, Any]) -> bool:
    """Return whether no record is unaccounted for and time and memory are within their limits."""
    quick = figures["slowest_cpu_ms"] <= 1000 * MAX_CPU_S
    return not figures["unaccounted"] and quick and figures["memory_growth_mib"] < MAX_GROWTH_MIB


def main() -> None:
    """Run the command line; exit with 1 if the figures are not clean."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=1_000_000)
    parser.add_argument("--data", type=Path, default=None, help="folder of task files; see benchmarks.superni")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    figures = fuzz(arguments.count, arguments.data, arguments.seed)
    sys.stdout.write(json.dumps(figures, indent=2) + "\n")
    sys.exit(0 if is_clean(figures) else 1)


if __name__ == "__main__":
    main()
