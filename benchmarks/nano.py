"""Loss of the bundled nano backbone on tasks outside its pretraining data.

    python -m streamlearn.bench.nano --data ../shared/data/superni

Prints each task's mean loss on the completions of its development records, in nats per token, for the bundled weights
and for the same architecture with random weights.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.learn.splits import Draw
from benchmarks.learn.task_records import read_text_task
from streamlearn.adapters.presets import resolve
from streamlearn.adapters.tuner import attach
from streamlearn.backbone.load import load, outline
from streamlearn.learner.evaluate import ExampleScore, run_to_end, score
from streamlearn.settings import AdapterSettings, BackboneSettings, StreamSettings
from streamlearn.stream.decode import Decoder

PACK_TOKENS = 2048


def task_loss(model: Any, decoder: Decoder, records: Sequence[dict[str, Any]]) -> float:
    """Return the mean loss over the task's answer tokens, nats per token."""
    examples = [decoder.decode_value(record) for record in records]
    scores: list[ExampleScore] = run_to_end(score(model, examples, torch.device("cpu"), pack_tokens=PACK_TOKENS))
    return sum(s.loss_sum for s in scores) / sum(s.tokens for s in scores)


def compare(folder: Path) -> list[tuple[str, int, float, float]]:
    """Return name, number of records, loss of random weights and loss of the bundled weights of each task."""
    settings = BackboneSettings()
    backbone = load(settings, outline(settings))
    decoder = Decoder(backbone.tokenizer, StreamSettings(), backbone.vocab_size)
    torch.manual_seed(0)
    random_weights = adapted(type(backbone.model)(backbone.model.config).to(backbone.arithmetic.dtype))
    bundled = adapted(backbone.model)
    rows = []
    draw = Draw([folder], records=0, split="development")
    for file in sorted(folder.glob("*.train.jsonl.gz")):
        task = file.name.split(".")[0]
        records = read_text_task(draw, task).scored
        rows.append(
            (
                task,
                len(records),
                task_loss(random_weights, decoder, records),
                task_loss(bundled, decoder, records),
            )
        )
    return rows


def adapted(model: Any) -> Any:
    """Attach an untrained LoRA, which evaluation requires and which changes no output: B is zero."""
    return attach(model, resolve(AdapterSettings(preset="lora")), seed=0).eval()


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder of task files")
    rows = compare(parser.parse_args().data)
    table = Table("task", "records", "untrained", "nano", box=None, pad_edge=False)
    for task, records, before, after in rows:
        table.add_row(task, str(records), f"{before:.3f}", f"{after:.3f}")
    table.add_row("mean", "", f"{fmean(row[2] for row in rows):.3f}", f"{fmean(row[3] for row in rows):.3f}")
    Console().print(table)


if __name__ == "__main__":
    main()
