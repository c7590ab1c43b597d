"""One run of `bench quantization`, in a process of its own: learn some records, then score others.

    python -m streamlearn.bench.quantized_run '{"kind": "nf4", "seed": 0, "records": 200, "backbone": null}'

The seed draws records, their order and the experts. The records that are scored are always the same.
"""

import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import orjson
import torch

from benchmarks.measuring import SAMPLE, peak_mib
from connectors.jsonl import JsonlSource
from streamlearn.adapters.presets import PRESETS, resolve
from streamlearn.adapters.tuner import attach
from streamlearn.backbone.load import Backbone, load, outline
from streamlearn.daemon.process import return_freed_memory
from streamlearn.learner.learner import Learner
from streamlearn.settings import (
    AdapterSettings,
    BackboneSettings,
    JsonlSettings,
    LearnerSettings,
    PresetName,
    Quantization,
    StreamSettings,
)
from streamlearn.settings.settings import LEARNING_RATES
from streamlearn.stream.decode import Decoder
from streamlearn.stream.record import Example, Position

SCORED = SAMPLE.with_name("superni.test.jsonl.gz")
NUM_SCORED = 32
BATCH_RECORDS = 8
PRESET: PresetName = "streamlearn"


def read_examples(file: Path, backbone: Backbone) -> list[Example]:
    """Decode all records of a file."""
    decoder = Decoder(backbone.tokenizer, StreamSettings(), backbone.vocab_size)
    source = JsonlSource(JsonlSettings(path=file))
    source.seek(Position())
    examples = []
    while records := source.poll(max_records=64, timeout_s=0.0):
        examples += [decoder.decode(record) for record in records]
    source.close()
    return examples


def stored_bytes(model: torch.nn.Module) -> int:
    """Bytes of all weights; shared ones count once."""
    return sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))


def run(kind: Quantization, seed: int, records: int, backbone: str | None) -> dict[str, Any]:
    """Make the run and return its figures."""
    settings = BackboneSettings(model=backbone or "builtin:nano", quantization=kind)
    loaded = load(settings, outline(settings))
    return_freed_memory()
    backbone_bytes = stored_bytes(loaded.model)
    examples = random.Random(seed).sample(read_examples(SAMPLE, loaded), records)
    scored = random.Random(0).sample(read_examples(SCORED, loaded), NUM_SCORED)
    learner = Learner(
        attach(loaded.model, resolve(AdapterSettings(preset=PRESET)), seed),
        LearnerSettings(lr=LEARNING_RATES[True]),
        loaded.device,
        router_lr=PRESETS[PRESET].objective.router_lr,
    )
    learner.add_regime(0, seed)
    before = _score(learner, scored)
    peak_mib(restart=True)
    losses, seconds = [], []
    for start in range(0, records, BATCH_RECORDS):
        batch = examples[start : start + BATCH_RECORDS]
        began = time.perf_counter()
        step = learner.step(batch, [0] * len(batch))
        seconds.append(time.perf_counter() - began)
        losses.append((step.loss, step.learned_tokens))
    total = sum(tokens for _, tokens in losses)
    return {
        "kind": kind,
        "seed": seed,
        "dtype": loaded.arithmetic.name,
        "backbone_mib": round(backbone_bytes / 2**20, 1),
        "peak_mib": round(peak_mib(), 1),
        "step_s": round(median(seconds), 3),
        "prequential_loss": round(sum(loss * tokens for loss, tokens in losses) / total, 4),
        "scored_before": round(before, 4),
        "scored_after": round(_score(learner, scored), 4),
        "losses": [round(loss, 4) for loss, _ in losses],
    }


def _score(learner: Learner, examples: Sequence[Example]) -> float:
    """Mean loss over the learned tokens of all examples, nats per token."""
    batches = [examples[start : start + BATCH_RECORDS] for start in range(0, len(examples), BATCH_RECORDS)]
    losses = [loss for batch in batches for loss in learner.measure(batch, [0] * len(batch))]
    learned = [example.num_learned for example in examples]
    return sum(loss * tokens for loss, tokens in zip(losses, learned, strict=True)) / sum(learned)


if __name__ == "__main__":
    sys.stdout.buffer.write(orjson.dumps(run(**orjson.loads(sys.argv[1])), option=orjson.OPT_APPEND_NEWLINE))
