"""What a quantized backbone costs in loss, and what it saves in memory.

    python -m benchmarks.quantization --backbone FOLDER --json > quantization.json

Each run is its own process. It learns the same number of records of the bundled sample with the default preset and then
scores other records, always the same. The seed draws the records, their order and the experts. The unquantized backbone
shows how far runs differ by their seed only. `python -m benchmarks.quantization '{"kind": "nf4", ...}'` makes one run.
"""

import random
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean, median
from typing import Any, get_args

import orjson
import torch

from benchmarks.measuring import SAMPLE, command, grid, in_own_process, parser, peak_mib, positive, show
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
from streamlearn.stream.position import Position
from streamlearn.stream.record import Example

SCORED = SAMPLE.with_name("superni.test.jsonl.gz")
NUM_SCORED = 32
BATCH_RECORDS = 8
PRESET: PresetName = "streamlearn"
LOSSES = ("prequential_loss", "scored_before", "scored_after")
MEMORY = ("backbone_mib", "peak_mib", "step_s")
KINDS: tuple[Quantization, ...] = get_args(Quantization)


def run(kind: Quantization, seed: int, records: int, backbone: str | None) -> dict[str, Any]:
    """Learn and score in this process."""
    settings = BackboneSettings(model=backbone or "builtin:nano", quantization=kind)
    loaded = load(settings, outline(settings))
    return_freed_memory()
    stored_bytes = sum(tensor.nbytes for tensor in (*loaded.model.parameters(), *loaded.model.buffers()))
    examples = random.Random(seed).sample(_read_examples(SAMPLE, loaded), records)
    scored = random.Random(0).sample(_read_examples(SCORED, loaded), NUM_SCORED)
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
        "backbone_mib": round(stored_bytes / 2**20, 1),
        "peak_mib": round(peak_mib(), 1),
        "step_s": round(median(seconds), 3),
        "prequential_loss": round(sum(loss * tokens for loss, tokens in losses) / total, 4),
        "scored_before": round(before, 4),
        "scored_after": round(_score(learner, scored), 4),
        "losses": [round(loss, 4) for loss, _ in losses],
    }


def _read_examples(file: Path, backbone: Backbone) -> list[Example]:
    decoder = Decoder(backbone.tokenizer, StreamSettings(), backbone.vocab_size)
    source = JsonlSource(JsonlSettings(path=file))
    source.seek(Position())
    examples = []
    while records := source.poll(max_records=64, timeout_s=0.0):
        examples += [decoder.decode(record) for record in records]
    source.close()
    return examples


def _score(learner: Learner, examples: Sequence[Example]) -> float:
    """Mean loss over the learned tokens of all examples, nats per token."""
    batches = [examples[start : start + BATCH_RECORDS] for start in range(0, len(examples), BATCH_RECORDS)]
    losses = [loss for batch in batches for loss in learner.measure(batch, [0] * len(batch))]
    learned = [example.num_learned for example in examples]
    return sum(loss * tokens for loss, tokens in zip(losses, learned, strict=True)) / sum(learned)


def measure(backbone: Path | None, records: int, seeds: int) -> dict[str, Any]:
    """Make all runs.

    Raises:
        MeasurementError: a run failed.
    """
    folder = None if backbone is None else str(backbone)
    runs = [
        in_own_process("benchmarks.quantization", {"kind": kind, "seed": seed, "records": records, "backbone": folder})
        for seed in range(seeds)
        for kind in KINDS
    ]
    return {
        "summary": {kind: summary(kind, runs) for kind in KINDS},
        "runs": runs,
        "setting": {
            "backbone": "nano" if backbone is None else backbone.name,
            "records": records,
            "seeds": seeds,
            "threads": torch.get_num_threads(),
            "cpu": torch.backends.cpu.get_cpu_capability(),
            "torch": torch.__version__,
        },
    }


def summary(kind: Quantization, runs: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return means over the seeds and, for losses, how far the seeds lie apart and the mean difference from `none`.

    Differences are between runs of one seed, which learn the same records in the same order from the same experts.
    """
    of_kind = [run for run in runs if run["kind"] == kind]
    unquantized = {run["seed"]: run for run in runs if run["kind"] == "none"}
    results = {name: round(mean(run[name] for run in of_kind), 4) for name in (*LOSSES, *MEMORY)}
    for name in LOSSES:
        values = [run[name] for run in of_kind]
        results[f"{name}_range"] = round(max(values) - min(values), 4)
        results[f"{name}_over_none"] = round(mean(run[name] - unquantized[run["seed"]][name] for run in of_kind), 4)
    return results


def main() -> None:
    if sys.argv[1:] and sys.argv[1].startswith("{"):
        print(orjson.dumps(run(**orjson.loads(sys.argv[1]))).decode())
        return
    options = parser(__doc__)
    options.add_argument("--backbone", type=Path, help="folder of a causal language model; by default nano")
    options.add_argument(
        "--records", type=positive, default=200, help="records of the bundled sample that a run learns"
    )
    options.add_argument("--seeds", type=positive, default=2, help="runs with each way to store the backbone's weights")
    given = options.parse_args()
    result = measure(given.backbone, given.records, given.seeds)
    summaries: Mapping[str, Mapping[str, float]] = result["summary"]
    rows = {name: {kind: means[name] for kind, means in summaries.items()} for name in summaries["none"]}
    show(result, grid(rows, KINDS), as_json=given.json)


if __name__ == "__main__":
    command(main)
