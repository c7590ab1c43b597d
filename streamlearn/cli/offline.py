"""The commands eval and export. eval measures the running daemon or a snapshot; export reads a snapshot."""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import orjson
from rich.table import Table

from connectors.jsonl import read_lines
from streamlearn.adapters.presets import check
from streamlearn.backbone.load import Outline, identity, outline
from streamlearn.cli.client import checked_response, daemon_url, request
from streamlearn.cli.options import Cell, render_table
from streamlearn.daemon.model import Model, adapter_of, adapter_shape
from streamlearn.errors import ConfigError, SnapshotError, UsageError
from streamlearn.export.export import Exporter, ExportOptions
from streamlearn.export.formats import BaseModel, ExportedRegime, Format
from streamlearn.jobs.queue import EvalJob, EvalResult
from streamlearn.jobs.runner import evaluate
from streamlearn.learner.evaluate import run_to_end
from streamlearn.settings import Settings, fingerprint, with_defaults
from streamlearn.snapshot.manifest import check_compatible
from streamlearn.snapshot.parts import Snapshot
from streamlearn.snapshot.store import SnapshotStore


@dataclass(frozen=True)
class RestoredModel:
    """A model restored from a snapshot."""

    model: Model
    snapshot: Snapshot
    shape: Outline
    settings: Settings
    """With the defaults that depend on backbone and adapter."""


@contextmanager
def restored_model(settings: Settings, name: str, *, same_dtype: bool) -> Iterator[RestoredModel]:
    """Load the backbone and a snapshot. Safe while a daemon is running.

    Args:
        settings: The configuration.
        name: Name of the snapshot, or `newest`.
        same_dtype: Whether to compute in the dtype of the snapshot; if not, `backbone.dtype: auto` chooses the faster
            one on this machine.

    Raises:
        SnapshotError: there is no snapshot, or it is damaged.
        ConfigError: no snapshot has this name, or it belongs to another backbone, adapter or configuration.
    """
    snapshot = _find(settings, name)
    config, shape = adapter_of(settings), outline(settings.backbone)
    settings = with_defaults(settings, is_vision=shape.is_vision, per_regime=config.per_regime)
    check(config, shape.linears, shape.tower_linears)
    check_compatible(
        snapshot.manifest,
        fingerprint(settings),
        identity(settings.backbone, shape),
        adapter_shape(config),
        accept=True,
    )
    dtype = snapshot.manifest.dtype if same_dtype else None
    with TemporaryDirectory(prefix="streamlearn-") as folder:
        model = Model(settings, shape, config, dtype, Path(folder) / "offloaded")
        model.restore(snapshot)
        yield RestoredModel(model, snapshot, shape, settings)


def _find(settings: Settings, name: str) -> Snapshot:
    store = SnapshotStore(settings.state / "snapshots", keep=settings.snapshot.keep)
    names = store.names()
    if not names:
        raise SnapshotError(f"{store.folder}: expected a snapshot, found none; run the daemon first")
    wanted = names[-1] if name == "newest" else name
    if wanted not in names:
        raise ConfigError(f"--snapshot {name}: no such snapshot in {store.folder}, found {', '.join(names)}")
    return store.load(wanted)


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
        UsageError: the daemon refuses the request (with its message), or is of another release.
    """
    body = orjson.dumps({"examples": examples, "generate": generate, "max_new_tokens": max_new_tokens})
    advice = "start it with `streamlearn run`, or evaluate a snapshot with --snapshot"
    answer = request(settings, "/v1/eval", body, advice=advice)
    with checked_response(f"{daemon_url(settings)}/v1/eval"):
        return EvalResult.model_validate_json(answer)


def evaluate_snapshot(
    settings: Settings, name: str, examples: Examples, *, generate: bool, max_new_tokens: int
) -> EvalResult:
    """Load the backbone and one snapshot and evaluate them in this process. Safe while a daemon is running.

    Raises:
        SnapshotError: there is no snapshot, or it is damaged.
        ConfigError: no snapshot has this name, or it belongs to another backbone, adapter or configuration.
    """
    job = EvalJob(tuple(examples), generate=generate, max_new_tokens=max_new_tokens)
    with restored_model(settings, name, same_dtype=True) as restored:
        model, pack_tokens = restored.model, restored.settings.stream.batch_tokens
        began = time.monotonic()
        work = evaluate(job, model.learner, model.decoder, model.adaptation.route, pack_tokens=pack_tokens)
        return run_to_end(work).model_copy(update={"seconds": time.monotonic() - began})


def evaluation_table(result: EvalResult) -> Table:
    """The measurements, one per line."""
    table = Table(box=None, show_header=False, pad_edge=False)
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
            table.add_row(name, value)
    return table


def export(
    settings: Settings,
    *,
    snapshot: str,
    regimes: Sequence[int],
    out: Path,
    form: Format,
    base: str | None,
    approximate: bool,
) -> list[ExportedRegime]:
    """Write regimes of a snapshot, all if none is named, each into a folder in `out`. Safe while a daemon is running.

    Raises:
        UsageError: there is no such regime, its folder exists, or it cannot be written without loss.
        SnapshotError: there is no snapshot, it is damaged, or a folder cannot be written.
        ConfigError: there is no snapshot of this name, it belongs to another backbone, adapter or configuration, or the
            format does not know the backbone.
    """
    with restored_model(settings, snapshot, same_dtype=False) as restored:
        base_model = BaseModel.from_settings(restored.settings.backbone, restored.shape.folder, name=base)
        options = ExportOptions(out, form, base_model, approximate=approximate)
        exporter = Exporter(
            restored.model.learner,
            restored.model.adaptation,
            restored.snapshot.name,
            restored.snapshot.manifest.created_at,
            restored.shape,
            restored.settings,
            options,
        )
        return [exporter.export(slot) for slot in exporter.slots(regimes)]


def export_table(exported: Sequence[ExportedRegime]) -> Table:
    """One row per folder; losses are on the hold-out records."""
    columns: dict[str, Cell[ExportedRegime]] = {
        "folder": lambda regime: regime.name,
        "records": lambda regime: f"{regime.records:,}",
        "rank": lambda regime: str(regime.rank),
        "hold-out": lambda regime: str(regime.losses.records) if regime.losses else "0",
        "loss": lambda regime: f"{regime.losses.exported:.3f}" if regime.losses else "-",
        "backbone's": lambda regime: f"{regime.losses.backbone:.3f}" if regime.losses else "-",
    }
    return render_table(exported, columns, text=("folder",))
