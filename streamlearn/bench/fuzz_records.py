"""Damaged and hostile records through the daemon's decoder: an example or a reason, in little time and memory.

    python -m streamlearn.bench.fuzz_records --count 1000000 [--data ../shared/data/superni]

Records of the bundled sample, and of task files in a folder when one is given, in all four forms that a record may
have, tokenised by the bundled backbone's own tokenizer. The result is one JSON object; `unaccounted` must be 0: what
was neither an `Example` within its bounds nor a `RecordError` that says what must hold.
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

from streamlearn.backbone.load import load, outline
from streamlearn.bench.record_damage import CHARACTERS, DAMAGES, Damage, Row, damage_tree, giant, giants
from streamlearn.bench.resident_memory import peak_mib
from streamlearn.bench.superni import to_record
from streamlearn.errors import RecordError
from streamlearn.settings import BackboneSettings, StreamSettings
from streamlearn.settings.packaged import packaged_folder
from streamlearn.stream.decode import Decoder, Example
from streamlearn.stream.encode import IGNORED
from streamlearn.stream.record import Record, TopicPartition

SAMPLE = packaged_folder("configs") / "sample/superni.train.jsonl.gz"
PER_FILE, LONGEST_BYTES = 20, 1200
"""Originals of a task file, and how long they may be: a million are decoded, and most should be small."""
GIANT_EVERY = 2000
SLOWEST_S, MOST_GROWTH_MIB = 1.0, 64.0
"""Processor time that the slowest record may take, and memory that may have stayed at the end."""
SHOWN = 5
"""Unaccounted records of which the result tells."""


def originals(folder: Path | None, decoder: Decoder) -> list[Row]:
    """Real records in each form."""
    with gzip.open(SAMPLE) as lines:
        rows = [orjson.loads(line) for line in lines]
    files = sorted(folder.glob("*.train.jsonl.gz")) if folder is not None else []
    for file in files:
        with gzip.open(file) as lines:
            short = (row for line in lines if len(line) < LONGEST_BYTES for row in [to_record(orjson.loads(line))])
            rows += islice(short, PER_FILE)
    rows = [row for row in rows if len(orjson.dumps(row)) < LONGEST_BYTES][-400:]
    found: list[Row] = []
    for row in rows:
        prompt, answer = row["prompt"], row["completion"]
        turn = [{"role": "user", "content": prompt[:300]}, {"role": "assistant", "content": answer}]
        system = {"role": "system", "content": "Answer in one word."}
        example = decoder.decode_value(row)
        found += [
            row,
            {"text": prompt + answer},
            {"messages": turn},
            {"messages": [system, *turn, *turn], "meta": row.get("meta")},
            {"input_ids": example.input_ids.tolist(), "labels": example.labels.tolist()},
        ]
    return found


def nano_decoder() -> tuple[Decoder, int]:
    """The decoder as the daemon builds it for the bundled backbone, and the bound on its tokens."""
    settings = BackboneSettings()
    backbone = load(settings, outline(settings))
    made = Decoder(backbone.tokenizer, StreamSettings(), backbone.vocab_size, (), backbone.vision, backbone.template)
    return made, backbone.vocab_size


def outcome(decoder: Decoder, vocab_size: int, value: bytes | None) -> tuple[str, str | None]:
    """What became of a record, and why that is no answer to it, when it is none."""
    try:
        example = decoder.decode(Record(TopicPartition("fuzz", 0), 0, value))
    except RecordError as error:
        spoken = bool(str(error)) and len(str(error)) < 1000
        return str(error.reason), None if spoken else f"a message of {len(str(error))} characters"
    except Exception as error:  # noqa: BLE001  what this file looks for
        return "unaccounted", f"{type(error).__name__}: {str(error)[:200]}"
    return "decoded", _fault(example, vocab_size)


def _fault(example: Example, vocab_size: int) -> str | None:
    ids, labels = example.input_ids, example.labels
    if not 2 <= len(example) <= StreamSettings().max_tokens or len(labels) != len(ids):
        return f"{len(ids)} tokens, {len(labels)} labels"
    if not 0 <= int(ids.min()) <= int(ids.max()) < vocab_size:
        return f"a token out of range: {ids.min()} to {ids.max()}"
    learned = labels != IGNORED
    if learned[0] or not learned.any() or not 0 <= int(labels[learned].min()) <= int(labels.max()) < vocab_size:
        return "labels that cannot be learned"
    return None


@dataclass
class Tally:
    """What became of the records so far."""

    decoder: Decoder
    vocab_size: int
    outcomes: Counter[str] = field(default_factory=Counter)
    unaccounted: list[str] = field(default_factory=list)
    slowest_s: float = 0.0
    """Of processor time: a wall clock would tell of the machine's other work."""
    slowest_wall_s: float = 0.0
    slowest: str = ""

    def decode(self, value: bytes | None, name: str) -> None:
        """One record."""
        began, began_wall = time.process_time(), time.perf_counter()
        what, wrong = outcome(self.decoder, self.vocab_size, value)
        took, took_wall = time.process_time() - began, time.perf_counter() - began_wall
        self.slowest_wall_s = max(self.slowest_wall_s, took_wall)
        if took > self.slowest_s:
            self.slowest_s, self.slowest = took, f"{name}: {value!r:.120}"
        self.outcomes[what if wrong is None else "unaccounted"] += 1
        if wrong is not None and len(self.unaccounted) < SHOWN:
            self.unaccounted.append(f"{name}: {wrong}: {value!r:.300}")


def fuzz(count: int, folder: Path | None, seed: int = 0) -> dict[str, Any]:
    """Decode the originals, the largest records of every kind, and `count` damaged ones.

    Memory is told twice, both on top of what the process has after the largest records: the most that was in use while
    one was decoded (a megabyte of text is a million tokens for a while), and what has stayed when all is done.
    """
    decoder, vocab_size = nano_decoder()
    rows, rng, tally = originals(folder, decoder), random.Random(seed), Tally(decoder, vocab_size)
    damages: tuple[Damage, ...] = (*DAMAGES, partial(damage_tree, seeds=rows))
    for row in rows:
        assert outcome(decoder, vocab_size, orjson.dumps(row)) == ("decoded", None), row
    for value in (value for character in CHARACTERS for value in giants(rows[0], character, 0)):
        tally.decode(value, giants.__name__)
    before, began = peak_mib(restart=True), time.monotonic()
    for number in range(count):
        damage = giant if number % GIANT_EVERY == 0 else damages[number % len(damages)]
        tally.decode(damage(rng.choice(rows), rng), _name(damage))
    seconds = time.monotonic() - began
    return {
        "records": tally.outcomes.total(),
        "damaged": count,
        "seed": seed,
        "originals": len(rows),
        "damages": [_name(damage) for damage in (*damages, giant)],
        "outcomes": dict(tally.outcomes.most_common()),
        "unaccounted": tally.outcomes["unaccounted"],
        "unaccounted_examples": tally.unaccounted,
        "slowest_cpu_ms": round(1000 * tally.slowest_s, 1),
        "slowest_wall_ms": round(1000 * tally.slowest_wall_s, 1),
        "slowest_record": tally.slowest,
        "peak_memory_mib": round(peak_mib() - before, 1),
        "memory_growth_mib": round(peak_mib(restart=True) - before, 1),
        "records_per_s": round(count / seconds),
    }


def _name(damage: Damage) -> str:
    function = damage.func if isinstance(damage, partial) else damage
    return str(getattr(function, "__name__", function))


def is_clean(figures: dict[str, Any]) -> bool:
    """Whether every record was answered, soon enough and within the memory that there is."""
    quick = figures["slowest_cpu_ms"] <= 1000 * SLOWEST_S
    return not figures["unaccounted"] and quick and figures["memory_growth_mib"] < MOST_GROWTH_MIB


def main() -> None:
    """Command line; exit 1 when the figures are not what they must be."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=1_000_000)
    parser.add_argument("--data", type=Path, default=None, help="folder of task files, see bench.superni")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    figures = fuzz(arguments.count, arguments.data, arguments.seed)
    sys.stdout.write(json.dumps(figures, indent=2) + "\n")
    sys.exit(0 if is_clean(figures) else 1)


if __name__ == "__main__":
    main()
