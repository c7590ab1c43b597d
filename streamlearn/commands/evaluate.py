"""The eval command: the same measurements from the running daemon or from a snapshot on disk."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import orjson
from rich.table import Table

from connectors.lines import read_lines
from streamlearn.commands.client import Endpoint, understood
from streamlearn.commands.restored_model import restored_model
from streamlearn.errors import UsageError
from streamlearn.jobs.evaluate import evaluate
from streamlearn.jobs.queue import EvalJob
from streamlearn.jobs.results import EvalResult
from streamlearn.learner.evaluation import run_to_end
from streamlearn.settings import Settings

Examples = list[Mapping[str, Any]]


def read_examples(file: Path) -> Examples:
    """Read the records of a JSONL file, gzip if the name ends in .gz.

    Raises:
        UsageError: a line is not a JSON object, or there is none; names the record.
    """
    examples: Examples = []
    for number, line in enumerate(read_lines(file), start=1):
        try:
            value = orjson.loads(line)
        except orjson.JSONDecodeError as error:
            raise UsageError(f"{file}: record {number} is not valid JSON: {error}") from error
        if not isinstance(value, dict):
            raise UsageError(f"{file}: expected a JSON object in record {number}, found {type(value).__name__}")
        examples.append(value)
    if not examples:
        raise UsageError(f"{file}: expected at least one record, found none")
    return examples


def evaluate_daemon(settings: Settings, examples: Examples, *, generate: bool, max_new_tokens: int) -> EvalResult:
    """Send the examples to the daemon that runs with this configuration (POST /v1/eval).

    Raises:
        SourceError: no daemon answers.
        UsageError: the daemon refuses the request (carries its message), or is none of this release.
    """
    body = orjson.dumps({"examples": examples, "generate": generate, "max_new_tokens": max_new_tokens})
    advice = "start it with `streamlearn run`, or evaluate a snapshot with --snapshot"
    endpoint, path = Endpoint.of(settings), "/v1/eval"
    answer = endpoint.request(path, body, advice=advice)
    with understood(endpoint.url + path):
        return EvalResult.model_validate_json(answer)


def evaluate_snapshot(
    settings: Settings, name: str, examples: Examples, *, generate: bool, max_new_tokens: int
) -> EvalResult:
    """Load the backbone and one snapshot and evaluate them in this process. Safe while a daemon is running.

    Raises:
        SnapshotError: there is no snapshot, or it is damaged.
        ConfigError: there is none of this name, or it belongs to another backbone, adapter or configuration.
    """
    job = EvalJob(tuple(examples), generate=generate, max_new_tokens=max_new_tokens)
    with restored_model(settings, name, same_dtype=True) as restored:
        model, pack_tokens = restored.model, restored.settings.stream.batch_tokens
        return run_to_end(evaluate(job, model.learner, model.decoder, model.adaptation.route, pack_tokens=pack_tokens))


def table(result: EvalResult) -> Table:
    """The measurements, one per line."""
    shown = Table(box=None, show_header=False, pad_edge=False)
    rows = {
        "step": f"{result.step:,}",
        "examples": f"{result.examples:,}",
        "of known regimes": f"{result.num_known:,}",
        **{f"answered by {name}": f"{number:,}" for name, number in sorted(result.answered_by.items())},
        "scored tokens": f"{result.tokens:,}",
        "loss (nats per token)": f"{result.loss:.6f}",
        "perplexity": f"{result.perplexity:.3f}",
        "token accuracy": f"{result.token_accuracy:.4f}",
        "exact match": None if result.exact_match is None else f"{result.exact_match:.4f}",
        "ROUGE-L": None if result.rouge_l is None else f"{result.rouge_l:.4f}",
        "seconds": f"{result.seconds:.2f}",
    }
    for name, value in rows.items():
        if value is not None:
            shown.add_row(name, value)
    return shown
