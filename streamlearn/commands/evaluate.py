"""The eval command: the same figures from the running daemon or from a snapshot on disk."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import orjson
from rich.table import Table

from connectors.lines import read_lines
from streamlearn.adapters.check import check
from streamlearn.backbone.load import identity, outline
from streamlearn.commands.client import ask
from streamlearn.errors import ConfigError, SnapshotError, UsageError
from streamlearn.jobs.evaluate import evaluate
from streamlearn.jobs.queue import EvalJob
from streamlearn.jobs.results import EvalResult
from streamlearn.learner.evaluation import run_to_end
from streamlearn.runtime.model import Model, adapter_of, adapter_shape
from streamlearn.settings import Settings, fingerprint, with_backbone_defaults
from streamlearn.snapshot import compatibility
from streamlearn.snapshot.snapshot import Snapshot
from streamlearn.snapshot.store import SnapshotStore

Examples = list[Mapping[str, Any]]


def read_examples(file: Path) -> Examples:
    """The records of a JSONL file, gzip when it ends in .gz.

    Raises:
        UsageError: a line is not a JSON object; names which.
    """
    examples: Examples = []
    for number, line in enumerate(read_lines(file), start=1):
        try:
            value = orjson.loads(line)
        except orjson.JSONDecodeError as error:
            raise UsageError(f"{file}: record {number} is not JSON: {error}") from error
        if not isinstance(value, dict):
            raise UsageError(f"{file}: record {number} must be a JSON object, found {type(value).__name__}")
        examples.append(value)
    if not examples:
        raise UsageError(f"{file}: holds no record")
    return examples


def ask_daemon(settings: Settings, examples: Examples, *, generate: bool, max_new_tokens: int) -> EvalResult:
    """POST /v1/eval to the daemon that runs under this configuration.

    Raises:
        SourceError: it does not answer.
        UsageError: it refuses the request; carries its message.
    """
    body = orjson.dumps({"examples": examples, "generate": generate, "max_new_tokens": max_new_tokens})
    otherwise = "start it, or evaluate a snapshot with --snapshot"
    return EvalResult.model_validate_json(ask(settings, "/v1/eval", body, otherwise=otherwise))


def from_snapshot(
    settings: Settings, name: str, examples: Examples, *, generate: bool, max_new_tokens: int
) -> EvalResult:
    """Load the backbone and one snapshot and evaluate it; safe beside a running daemon.

    Raises:
        SnapshotError: there is no such snapshot, or it is damaged.
        ConfigError: it belongs to another setup.
    """
    snapshot = _find(settings, name)
    config, shape = adapter_of(settings), outline(settings.backbone)
    settings = with_backbone_defaults(settings, is_vision=shape.is_vision)
    check(config, shape.linears, shape.tower_linears)
    compatibility.check(
        snapshot.manifest,
        fingerprint(settings),
        identity(settings.backbone, shape),
        adapter_shape(config),
        accept=True,
    )
    model = Model(settings, shape, config, snapshot.manifest.dtype)
    model.restore(snapshot)
    job = EvalJob(tuple(examples), generate=generate, max_new_tokens=max_new_tokens)
    work = evaluate(
        job, model.learner, model.decoder, model.adaptation.slots_of, pack_tokens=settings.stream.batch_tokens
    )
    return run_to_end(work)


def _find(settings: Settings, name: str) -> Snapshot:
    store = SnapshotStore(settings.state / "snapshots", keep=settings.snapshot.keep)
    names = store.names()
    if not names:
        raise SnapshotError(f"{store.folder} holds no snapshot: run the daemon first")
    wanted = names[-1] if name == "newest" else name
    if wanted not in names:
        raise ConfigError(f"--snapshot {name}: not in {store.folder}, which holds {', '.join(names)}")
    return store.load(wanted)


def table(result: EvalResult) -> Table:
    """The figures, one a line."""
    shown = Table(box=None, show_header=False, pad_edge=False)
    rows = {
        "step": f"{result.step}",
        "examples": f"{result.examples}",
        "scored tokens": f"{result.tokens}",
        "loss, nats per token": f"{result.loss:.6f}",
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
